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
	"stranger": "unauthenticated peer",
}

// part matches the words of an identifier in mixed caps.
var part = regexp.MustCompile(`[A-Z]?[a-z]+|[A-Z]+`)

// metaphorsIn returns the metaphors in an identifier.
func metaphorsIn(name string) (found []string) {
	for _, w := range part.FindAllString(name, -1) {
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
	require.Empty(t, metaphorsIn("theirWidth"))
	require.Empty(t, metaphorsIn("dashboards"))
}

// TestIdentifiersAreTerms checks that identifiers of the product are the field's words.
// testdata/identifier_exceptions.txt has the folders that may use a metaphor, and why.
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
	list := exec.Command("git", "ls-files", "*.go")
	list.Dir = "../.."
	out, err := list.Output()
	require.NoError(t, err)
	files := strings.Fields(string(out))
	require.Greater(t, len(files), 300)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), "../../"+file, nil, parser.SkipObjectResolution)
		if os.IsNotExist(err) {
			continue // deleted, and not yet committed
		}
		require.NoError(t, err)
		told := map[string]bool{}
		ast.Inspect(parsed, func(n ast.Node) bool {
			id, ok := n.(*ast.Ident)
			if !ok || told[id.Name] {
				return true
			}
			told[id.Name] = true
			for _, w := range metaphorsIn(id.Name) {
				e := exception{path.Dir(file), w}
				if _, ok := allowed[e]; ok {
					allowed[e] = true
					continue
				}
				t.Errorf("%s: %s has the metaphor %q: write %q", file, id.Name, w, metaphors[w])
			}
			return true
		})
	}
	for e, used := range allowed {
		if !used {
			t.Errorf("identifier_exceptions.txt: %s needs no exception for %q", e.folder, e.word)
		}
	}
}
