package cluster

import (
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// coreFiles are the decisions of coordinators and of hosts. What else they use of this package must be as pure.
var coreFiles = []string{"coordinator.go", "hosts.go", "epoch.go", "failure.go", "choice.go", "quorum.go", "voter.go", "record.go"}

// Decisions use no goroutines, channels, locks, connections, files or clocks, and nothing of the server.
func TestCoreIsPure(t *testing.T) {
	imports := []string{"cmp", "container/heap", "errors", "fmt", "maps", "slices", "strings", "time", "github.com/gochorus/chorus/internal/plain"}
	durations := []string{"Duration", "Millisecond", "Second", "Minute"}
	shell := []string{"server", "conn", "stream", "link", "client", "Agent", "system", "engine", "newUUID", "randomBytes"}
	for _, name := range coreFiles {
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, name, nil, 0)
		require.NoError(t, err)
		for _, i := range f.Imports {
			path, _ := strconv.Unquote(i.Path.Value)
			require.Contains(t, imports, path, name)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			at := func() string { return set.Position(n.Pos()).String() }
			switch n := n.(type) {
			case *ast.GoStmt, *ast.SelectStmt, *ast.ChanType, *ast.SendStmt:
				require.Fail(t, "not pure", at())
			case *ast.SelectorExpr:
				if x, ok := n.X.(*ast.Ident); ok && x.Name == "time" {
					require.Contains(t, durations, n.Sel.Name, at())
				}
			case *ast.Field: // types of fields, parameters and results
				ast.Inspect(n.Type, func(m ast.Node) bool {
					if x, ok := m.(*ast.Ident); ok {
						require.NotContains(t, shell, x.Name, at())
					}
					return true
				})
			case *ast.CallExpr:
				if x, ok := n.Fun.(*ast.Ident); ok {
					require.False(t, slices.Contains(shell, x.Name), at())
				}
			}
			return true
		})
	}
}
