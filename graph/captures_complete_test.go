package graph_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// withoutRow has the functions with a stream among their parameters that have no row of
// their own, and the reason.
var withoutRow = map[string]string{
	"memory.OpenIPC":                "another process exports the memory",
	"memory.OpenCUDAIPC":            "another process exports the memory",
	"memory.Adopt":                  "needs memory of others; its own tests capture",
	"tensor.FromDLPack":             "memory.Adopt",
	"tensor.Tensor.ToDLPack":        "stream.Stream.WaitStream",
	"memory.Slice.RecordStream":     "memory.Buffer.RecordStream",
	"kernel.Func.Launch":            "kernel.Kernel.Launch",
	"kernel.Func.LaunchCooperative": "kernel.Kernel.LaunchCooperative",
	"tensor.MakeLike":               "tensor.Make",
	"tensor.TuneRecorded":           "tensor.TuneMatMul",
	"nccl.Put":                      "needs a window and a second rank",
	"nccl.Signal":                   "needs a second rank",
	"nccl.WaitSignal":               "needs a second rank",
	"checkpoint.SaveOn":             "checkpoint.SaveTensors",
	"checkpoint.Subscribe":          "enqueues nothing",
}

// TestCapturesAreComplete looks for exported functions with streams in their parameters that
// no call of the table makes.
func TestCapturesAreComplete(t *testing.T) {
	if _, err := os.Stat(filepath.Join("..", "go.mod")); err != nil {
		t.Skip("no checkout around the test")
	}
	var names strings.Builder
	for _, c := range calls() {
		names.WriteString(c.name + " ")
	}
	folders, err := filepath.Glob("../*/doc.go")
	require.NoError(t, err)
	found, unused := 0, maps.Clone(withoutRow)
	for _, doc := range folders {
		for _, f := range streamFunctions(t, filepath.Dir(doc)) {
			found++
			delete(unused, f)
			_, excepted := withoutRow[f]
			if hasRow := hasWord(names.String(), f); hasRow == excepted {
				t.Errorf("%s: has a call in the table: %t; listed as without one: %t", f, hasRow, excepted)
			}
		}
	}
	require.Greater(t, found, 100)
	require.Empty(t, unused, "exceptions for functions that do not exist")
}

// hasWord reports whether the list has the name, and not only a longer one.
func hasWord(list, name string) bool {
	for _, word := range strings.FieldsFunc(list, func(r rune) bool { return strings.ContainsRune(" ,:", r) }) {
		if word == name {
			return true
		}
	}
	return false
}

// streamFunctions returns the exported functions and methods of a folder that have streams
// among their parameters, as package.Function and package.Type.Method.
func streamFunctions(t *testing.T, dir string) (names []string) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		require.NoError(t, err)
		for _, d := range f.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Name.IsExported() && takesStream(fn.Type) {
				if name, exported := nameOf(fn); exported {
					names = append(names, f.Name.Name+"."+name)
				}
			}
		}
	}
	return names
}

// takesStream reports whether a parameter is a stream or several.
func takesStream(fn *ast.FuncType) (has bool) {
	for _, p := range fn.Params.List {
		if _, isFunc := p.Type.(*ast.FuncType); isFunc {
			continue
		}
		ast.Inspect(p.Type, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Stream" {
				of, ok := sel.X.(*ast.Ident)
				has = has || ok && of.Name == "stream"
			}
			return true
		})
	}
	return has
}

// nameOf returns the name of a function, with the type of its receiver.
func nameOf(fn *ast.FuncDecl) (name string, exported bool) {
	if fn.Recv == nil {
		return fn.Name.Name, true
	}
	typ := fn.Recv.List[0].Type
	if star, ok := typ.(*ast.StarExpr); ok {
		typ = star.X
	}
	switch x := typ.(type) {
	case *ast.IndexExpr:
		typ = x.X
	case *ast.IndexListExpr:
		typ = x.X
	}
	id := typ.(*ast.Ident)
	return id.Name + "." + fn.Name.Name, id.IsExported()
}
