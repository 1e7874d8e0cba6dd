package archtest

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// metaphors are words that identifiers avoid, each with the term of the field.
var metaphors = map[string]string{
	"pocket": "last freed", "shelf": "free list", "shelve": "insert", "shelved": "in a free list", "ladder": "fallbacks",
	"patience": "timeout", "clique": "local ranks", "board": "table, exchange", "confer": "agree", "mourn": "coordinator lost",
	"heir": "successor", "charter": "epoch record", "electorate": "voters", "lend": "allocate", "lent": "allocated",
	"owe": "pending", "owes": "pending", "tidy": "release", "farewell": "close", "desk": "server", "carrier": "link",
	"stranger": "unauthenticated peer", "lane": "branch, stream, direction", "spare": "free, cached", "spared": "excused",
	"lending": "allocation", "patient": "timeout", "impatient": "timeout", "patiently": "timeout",
}

// part matches the words of an identifier in mixed caps. capital matches one-letter words and
// initialisms together with the word that follows, such as AStranger or OOMSpare.
var (
	part    = regexp.MustCompile(`[A-Z]?[a-z]+|[A-Z]+`)
	capital = regexp.MustCompile(`([A-Z])([A-Z][a-z])`)
)

// metaphorsIn returns the metaphors in an identifier or in the name of a file.
func metaphorsIn(name string) (found []string) {
	for _, w := range part.FindAllString(capital.ReplaceAllString(name, "${1}_${2}"), -1) {
		w = strings.ToLower(w)
		for _, w := range []string{w, strings.TrimSuffix(w, "s")} {
			if metaphors[w] != "" && !slices.Contains(found, w) {
				found = append(found, w)
			}
		}
	}
	return found
}

func TestMetaphorsInIdentifiers(t *testing.T) {
	require.Equal(t, []string{"patience"}, metaphorsIn("openPatience"))
	require.Equal(t, []string{"heir"}, metaphorsIn("Heirs"))
	require.Equal(t, []string{"lend"}, metaphorsIn("MemLend"))
	require.Equal(t, []string{"lane"}, metaphorsIn("endLanes"))
	require.Equal(t, []string{"stranger"}, metaphorsIn("RefusalOfAStranger"))
	require.Equal(t, []string{"spare"}, metaphorsIn("OOMSpare_pools.go"))
	require.Empty(t, metaphorsIn("theirWidth"))
	require.Empty(t, metaphorsIn("dashboards"))
	require.Empty(t, metaphorsIn("planes"))
	require.Empty(t, metaphorsIn("silentPeers"))
}

// TestIdentifiersAreTerms checks that identifiers of the product and its tests, and the names of
// all files of the repository, are the field's words. testdata/identifier_exceptions.txt has the folders that may use a metaphor, and why.
func TestIdentifiersAreTerms(t *testing.T) {
	needSource(t)
	type exception struct{ folder, word string }
	allowed := map[exception]bool{}
	f, err := os.Open("testdata/identifier_exceptions.txt")
	require.NoError(t, err)
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if line := s.Text(); line != "" && !strings.HasPrefix(line, "#") {
			fields := strings.Split(line, "\t")
			require.Len(t, fields, 3, line)
			allowed[exception{fields[0], fields[1]}] = false
		}
	}
	check := func(file, name string) {
		for _, w := range metaphorsIn(name) {
			e := exception{path.Dir(file), w}
			if _, ok := allowed[e]; ok {
				allowed[e] = true
				continue
			}
			t.Errorf("%s: %s has the metaphor %q: write %q", file, name, w, metaphors[w])
		}
	}
	list := exec.Command("git", "ls-files", "-z")
	list.Dir = "../.."
	out, err := list.Output()
	require.NoError(t, err)
	files, tests := 0, 0
	for file := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		check(file, path.Base(file))
		if !strings.HasSuffix(file, ".go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), "../../"+file, nil, parser.SkipObjectResolution)
		if os.IsNotExist(err) {
			continue // deleted, and not yet committed
		}
		require.NoError(t, err)
		if files++; strings.HasSuffix(file, "_test.go") {
			tests++
		}
		told := map[string]bool{}
		ast.Inspect(parsed, func(n ast.Node) bool {
			if id, ok := n.(*ast.Ident); ok && !told[id.Name] {
				told[id.Name] = true
				check(file, id.Name)
			}
			return true
		})
	}
	require.Greater(t, files, 600)
	require.Greater(t, tests, 300)
	for e, used := range allowed {
		if !used {
			t.Errorf("identifier_exceptions.txt: %s needs no exception for %q", e.folder, e.word)
		}
	}
}
