package archtest

import (
	"go/ast"
	"go/parser"
	"go/types"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// bound lists the interfaces whose methods are functions of NVIDIA's libraries.
var bound = map[string][]string{
	"internal/cudadrv":   {"Driver"},
	"internal/cudacc":    {"NVRTC"},
	"internal/nvml":      {"API", "Device", "Health"},
	"internal/ncclapi":   {"API"},
	"internal/cublasapi": {"API", "LtAPI"},
	"internal/cufileapi": {"API"},
}

// TestBoundFunctionsHaveCallers checks that a product calls each function of a library that
// Chorus binds. The bindings themselves, the virtual devices, the sanitizer and packages for
// tests do not count, nor does a decorator that only forwards the call.
func TestBoundFunctionsHaveCallers(t *testing.T) {
	c := newChecker(t)
	missing := map[types.Object]string{}
	for name, interfaces := range bound {
		p, err := c.Import(module + "/" + name)
		require.NoError(t, err)
		for _, i := range interfaces {
			for m := range p.Scope().Lookup(i).Type().Underlying().(*types.Interface).ExplicitMethods() {
				missing[m] = name + "." + i + "." + m.Name()
			}
		}
	}
	all := len(missing)
	for m, name := range missing {
		if name == "internal/cudadrv.Driver.CtxGetCurrent" || name == "internal/ncclapi.API.CommCuDevice" {
			delete(missing, m) // the sanitizer sees calls without their context
		}
	}
	for _, path := range slices.Sorted(maps.Keys(c.sources)) {
		name, ours := strings.CutPrefix(path, module+"/")
		if !ours || bound[name] != nil || notProduct(name) {
			continue
		}
		require.NoError(t, c.calls(path, func(m *types.Func) { delete(missing, m) }))
	}
	for _, name := range slices.Sorted(maps.Values(missing)) {
		t.Errorf("no product calls %s: delete it, and what imitates it", name)
	}
	require.Greater(t, all, 150, "the bindings have no functions")
}

// notProduct reports whether calls in a package do not justify a bound function.
func notProduct(name string) bool {
	for _, prefix := range []string{"internal/virtual", "internal/sanitizer", "internal/testgpu", "internal/conformance"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// calls type-checks a package with the bodies of its functions, and calls f for each use of a
// method, unless a decorator forwards the call.
func (c *checker) calls(path string, f func(*types.Func)) error {
	s := c.sources[path]
	var files []*ast.File
	for _, name := range s.GoFiles {
		file, err := parser.ParseFile(c.fset, filepath.Join(s.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, file)
	}
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	conf := types.Config{Importer: within{c, s.ImportMap}, Error: func(error) {}}
	_, _ = conf.Check(path, c.fset, files, info) // the build reports errors
	for _, file := range files {
		for _, d := range file.Decls {
			decl, _ := d.(*ast.FuncDecl)
			ast.Inspect(d, func(n ast.Node) bool {
				id, _ := n.(*ast.Ident)
				if m, ok := info.Uses[id].(*types.Func); ok && m.Signature().Recv() != nil && !(decl != nil && forwards(info.Defs[decl.Name], m)) {
					f(m)
				}
				return true
			})
		}
	}
	return nil
}

// forwards reports whether in is the method m of a decorator: of a type that implements the
// interface of m.
func forwards(in types.Object, m *types.Func) bool {
	outer, ok := in.(*types.Func)
	if !ok || outer.Name() != m.Name() || outer.Signature().Recv() == nil {
		return false
	}
	i, ok := m.Signature().Recv().Type().Underlying().(*types.Interface)
	return ok && types.Implements(outer.Signature().Recv().Type(), i)
}
