package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const root = "../.."

// docs/TORCH.md has a row for each name, in list order, and each Go
// name in it exists.
func TestTorchTable(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join(root, "docs", "TORCH.md"))
	if os.IsNotExist(err) {
		t.Skip("docs/ is not here: this is not a checkout")
	}
	require.NoError(t, err)
	list, err := os.ReadFile(filepath.Join("testdata", "torch_cuda_names.txt"))
	require.NoError(t, err)
	want := names(string(list))
	require.NotEmpty(t, want)
	var got []string
	open := 0
	for _, line := range strings.Split(string(doc), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || strings.HasPrefix(line, "| ---") || strings.HasPrefix(line, "| area") {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		got = append(got, cells[1]+" "+cells[2])
		switch goName := cells[3]; goName {
		case "open":
			open++
		case "-":
			require.NotEmpty(t, cells[4], "%s: say why Go needs none", cells[2])
		default:
			require.True(t, exists(t, strings.Trim(goName, "`")), "%s: %s does not exist", cells[2], goName)
		}
	}
	require.Equal(t, want, got)
	t.Logf("%d rows, of which %d are open", len(got), open)
}

// names are the lines of the list that are not comments.
func names(list string) (out []string) {
	for _, l := range strings.Split(list, "\n") {
		if l != "" && !strings.HasPrefix(l, "#") {
			out = append(out, l)
		}
	}
	return out
}

// exists reports whether package.Name or package.Type.Method is exported.
func exists(t *testing.T, name string) bool {
	t.Helper()
	dir, symbol, ok := strings.Cut(name, ".")
	require.True(t, ok, name)
	files, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	require.NoError(t, err)
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		tree, err := parser.ParseFile(token.NewFileSet(), f, nil, 0)
		require.NoError(t, err)
		for _, d := range tree.Decls {
			if declares(d, symbol) {
				return true
			}
		}
	}
	return false
}

func declares(d ast.Decl, symbol string) bool {
	switch d := d.(type) {
	case *ast.FuncDecl:
		return symbol == receiver(d)+d.Name.Name
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				if s.Name.Name == symbol {
					return true
				}
			case *ast.ValueSpec:
				for _, n := range s.Names {
					if n.Name == symbol {
						return true
					}
				}
			}
		}
	}
	return false
}

// receiver is "Type." for a method.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	e := d.Recv.List[0].Type
	for {
		switch x := e.(type) {
		case *ast.StarExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.Ident:
			return x.Name + "."
		default:
			return ""
		}
	}
}
