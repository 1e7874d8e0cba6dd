package dltest

import (
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"testing"
)

// Constants returns the constants of a type that a Go file of the package under test
// declares. It skips the test if the source is missing.
func Constants(t *testing.T, file, typ string) map[string]int64 {
	t.Helper()
	if _, err := os.Stat(file); err != nil {
		t.Skipf("no source here: %v", err)
	}
	fset := token.NewFileSet()
	f, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	// Other files and imports are missing, which constants do not need.
	conf := types.Config{Error: func(error) {}}
	info := types.Info{Defs: map[*ast.Ident]types.Object{}}
	_, _ = conf.Check("p", fset, []*ast.File{f}, &info)
	out := map[string]int64{}
	for id, obj := range info.Defs {
		c, ok := obj.(*types.Const)
		if !ok {
			continue
		}
		if named, ok := c.Type().(*types.Named); ok && named.Obj().Name() == typ {
			v, _ := constant.Int64Val(c.Val())
			out[id.Name] = v
		}
	}
	if len(out) == 0 {
		t.Fatalf("%s has no constant of type %s", file, typ)
	}
	return out
}
