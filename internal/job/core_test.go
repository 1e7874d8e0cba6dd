package job

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// coreFiles are the decisions of coordinators and of hosts. What else they use of this package must be as pure.
var coreFiles = []string{"coordinator.go", "hosts.go", "epoch.go", "failure.go", "choice.go", "quorum.go", "voter.go", "record.go", "registry.go"}

// Decisions use no goroutines, channels, locks, connections, files or clocks, and nothing of the server.
func TestCoreIsPure(t *testing.T) {
	imports := []string{"cmp", "container/heap", "errors", "fmt", "maps", "slices", "strings", "time", "github.com/gochorus/chorus/internal/safe"}
	// outside is what the decisions use of other files: values, types of errors and functions of names.
	outside := []string{"Departure", "MemberLostError", "CheckName", "checkNames", "naturalCompare", "FirstEpoch", "MaxText", "StatusOK", "statusBad", "StatusStale"}
	durations := []string{"Duration", "Millisecond", "Second", "Minute"}
	texts := []string{"Clip"} // of package safe, which opens files, too
	shell := []string{"Server", "conn", "stream", "Link", "Client", "Agent", "System", "engine", "newUUID", "RandomBytes"}
	set := token.NewFileSet()
	files, known := map[string]*ast.File{}, []string{}
	for _, name := range coreFiles {
		f, err := parser.ParseFile(set, name, nil, 0)
		require.NoError(t, err)
		files[name] = f
		known = append(known, slices.Collect(maps.Keys(f.Scope.Objects))...)
	}
	for _, name := range coreFiles {
		f := files[name]
		for _, id := range f.Unresolved {
			isImport := slices.ContainsFunc(f.Imports, func(i *ast.ImportSpec) bool { return path.Base(strings.Trim(i.Path.Value, `"`)) == id.Name })
			if !isImport && types.Universe.Lookup(id.Name) == nil && !slices.Contains(known, id.Name) && !strings.HasPrefix(strings.ToLower(id.Name), "kind") {
				require.Contains(t, outside, id.Name, "%s uses what the decisions do not declare", set.Position(id.Pos()))
			}
		}
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
				} else if ok && x.Name == "safe" {
					require.Contains(t, texts, n.Sel.Name, at())
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
