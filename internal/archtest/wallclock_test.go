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

// wallClock are the functions of package time that read or make the wall clock's part of a time. All
// other functions use the monotonic part, which does not jump.
var wallClock = map[string]bool{
	"Unix": true, "UnixMilli": true, "UnixMicro": true, "UnixNano": true, "Format": true, "AppendFormat": true, "Parse": true,
	"In": true, "UTC": true, "Local": true, "Date": true, "Clock": true, "AddDate": true, "MarshalJSON": true, "MarshalText": true,
}

// The wall clock of a host may jump. No code of coordinators, members and launchers depends on it, and no
// message has a time.
func TestNoWallClock(t *testing.T) {
	for _, dir := range []string{"cluster", "internal/job", "internal/launch"} {
		files, err := os.ReadDir(filepath.Join(root, dir))
		require.NoError(t, err)
		checked := 0
		for _, f := range files {
			if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
				continue
			}
			checked++
			set := token.NewFileSet()
			tree, err := parser.ParseFile(set, filepath.Join(root, dir, f.Name()), nil, 0)
			require.NoError(t, err)
			for node := range ast.Preorder(tree) {
				if why := readsWallClock(node); why != "" {
					t.Errorf("%s: %s", set.Position(node.Pos()), why)
				}
			}
		}
		require.Greater(t, checked, 5, dir)
	}
}

// readsWallClock returns how a node may depend on the wall clock, or "".
func readsWallClock(node ast.Node) string {
	switch n := node.(type) {
	case *ast.CallExpr:
		s, ok := n.Fun.(*ast.SelectorExpr)
		if !ok {
			return ""
		}
		if wallClock[s.Sel.Name] {
			return s.Sel.Name + " reads the wall clock"
		}
		if len(n.Args) == 1 && s.Sel.Name == "Round" {
			if zero, ok := n.Args[0].(*ast.BasicLit); ok && zero.Value == "0" {
				return "Round(0) removes the monotonic part"
			}
		}
	case *ast.Field:
		of, ok := n.Type.(*ast.SelectorExpr)
		if ok && n.Tag != nil && of.Sel.Name == "Time" {
			return "a message has a time of the wall clock"
		}
	}
	return ""
}

// The check finds what it forbids.
func TestWallClockIsFound(t *testing.T) {
	for _, code := range []string{"time.Now().Unix()", "t.Round(0)", "time.Parse(a, b)", "struct{ At time.Time `json:\"at\"` }{}"} {
		tree, err := parser.ParseExpr(code)
		require.NoError(t, err)
		found := 0
		for node := range ast.Preorder(tree) {
			if readsWallClock(node) != "" {
				found++
			}
		}
		require.Equal(t, 1, found, code)
	}
}
