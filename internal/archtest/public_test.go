package archtest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// exceptions are exported names that TestPublicNamesAreForUsers accepts, each with a reason.
var exceptions = map[string]string{
	"cluster.AuthError":        userAlias,
	"cluster.ConfigError":      userAlias,
	"cluster.Departure":        userAlias,
	"cluster.DuplicateError":   userAlias,
	"cluster.JoinTimeoutError": userAlias,
	"cluster.Member":           userAlias,
	"cluster.MemberLostError":  userAlias,
	"cluster.RefusedError":     userAlias,
	"cluster.StopError":        userAlias,
	"cluster.Timing":           userAlias,
	"comm.Choice":              userAlias,
	"comm.Site":                userAlias,
	"comm.Strategy":            userAlias,
	"comm.Timing":              userAlias,
	"comm.Tuning":              userAlias,
	"device.LibraryError":      userAlias,
	"nccl.Frame":               userAlias,
	"nccl.Operation":           userAlias,
}

const userAlias = "an alias that gives users the name of a type that several packages share"

// forSiblings matches a comment that keeps a name for packages of Chorus.
var forSiblings = regexp.MustCompile(`(?i)for\s+chorus's\s+own\s+packages`)

// TestPublicNamesAreForUsers checks that users can call and name all that public packages
// export: no signature has a type of an internal package, and no comment keeps a name for
// packages of Chorus.
func TestPublicNamesAreForUsers(t *testing.T) {
	c := newChecker(t)
	used, count := map[string]bool{}, 0
	for _, path := range slices.Sorted(maps.Keys(c.sources)) {
		name, ours := strings.CutPrefix(path, module+"/")
		if !ours || !isPublic(name) {
			continue
		}
		p, err := c.Import(path)
		require.NoError(t, err)
		a := newAPI(p, name)
		require.NoError(t, c.comments(path, a))
		count += a.count
		for n, why := range a.wrong {
			if exceptions[n] == "" {
				t.Errorf("%s %s: move it to an internal package", n, why)
			}
			used[n] = true
		}
	}
	for n := range exceptions {
		if !used[n] {
			t.Errorf("%s needs no exception any more", n)
		}
	}
	require.Greater(t, count, 100, "the packages have no names")
	t.Logf("public packages export %d constants, variables, functions, types and methods", count)
}

// isPublic reports whether users import the package.
func isPublic(name string) bool {
	for _, part := range strings.Split(name, "/") {
		if part == "internal" || part == "cmd" || part == "examples" || part == "tools" {
			return false
		}
	}
	return true
}

// An api is what a package exports.
type api struct {
	name    string
	aliases map[types.Object]bool // types of internal packages that the package names for users
	wrong   map[string]string
	count   int
}

func newAPI(p *types.Package, name string) *api {
	a := &api{name: name, aliases: map[types.Object]bool{}, wrong: map[string]string{}}
	var objects []types.Object
	for _, n := range p.Scope().Names() {
		if o := p.Scope().Lookup(n); o.Exported() {
			objects = append(objects, o)
		}
	}
	for _, o := range objects {
		if alias, ok := o.(*types.TypeName); ok && alias.IsAlias() {
			if named, ok := types.Unalias(alias.Type()).(*types.Named); ok && isInternal(named) {
				a.aliases[named.Obj()] = true
				a.wrong[name+"."+o.Name()] = "is an alias of " + named.String()
			}
		}
	}
	for _, o := range objects {
		a.add(o.Name(), o)
	}
	return a
}

// add checks an exported object, and the methods and fields of a type.
func (a *api) add(name string, o types.Object) {
	a.count++
	typeName, ok := o.(*types.TypeName)
	if !ok {
		a.check(name, o.Type())
		return
	}
	named, ok := o.Type().(*types.Named)
	if !ok || typeName.IsAlias() {
		return
	}
	for m := range named.Methods() {
		if m.Exported() {
			a.add(name+"."+m.Name(), m)
		}
	}
	switch u := named.Underlying().(type) {
	case *types.Struct:
		for f := range u.Fields() {
			if f.Exported() {
				a.check(name+"."+f.Name(), f.Type())
			}
		}
	case *types.Interface:
		for m := range u.ExplicitMethods() {
			if m.Exported() {
				a.check(name+"."+m.Name(), m.Type())
			}
		}
	default:
		a.check(name, u)
	}
}

// check notes a type of an internal package that has no alias for users.
func (a *api) check(name string, t types.Type) {
	if bad := a.internalIn(t); bad != nil {
		a.wrong[a.name+"."+name] = fmt.Sprintf("has %s in its signature", bad)
	}
}

// internalIn returns a type in t that users cannot name, or nil.
func (a *api) internalIn(t types.Type) types.Type {
	switch t := types.Unalias(t).(type) {
	case *types.Named:
		if isInternal(t) && !a.aliases[t.Obj()] {
			return t
		}
		for arg := range t.TypeArgs().Types() {
			if bad := a.internalIn(arg); bad != nil {
				return bad
			}
		}
	case *types.Map:
		return a.first(t.Key(), t.Elem())
	case *types.Signature:
		return a.first(t.Params(), t.Results())
	case *types.Tuple:
		for v := range t.Variables() {
			if bad := a.internalIn(v.Type()); bad != nil {
				return bad
			}
		}
	case interface{ Elem() types.Type }: // pointers, slices, arrays and channels
		return a.internalIn(t.Elem())
	}
	return nil
}

func (a *api) first(ts ...types.Type) types.Type {
	for _, t := range ts {
		if bad := a.internalIn(t); bad != nil {
			return bad
		}
	}
	return nil
}

func isInternal(t *types.Named) bool {
	p := t.Obj().Pkg()
	return p != nil && strings.Contains("/"+p.Path()+"/", "/internal/") && strings.HasPrefix(p.Path(), module)
}

// comments notes exported names whose comments keep them for packages of Chorus.
func (c *checker) comments(path string, a *api) error {
	s := c.sources[path]
	for _, file := range s.GoFiles {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(s.Dir, file), nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range f.Decls {
			a.commentOf(d)
		}
	}
	return nil
}

// commentOf looks at the comments of a declaration and of the fields in it.
func (a *api) commentOf(d ast.Decl) {
	note := func(prefix string, id *ast.Ident, groups ...*ast.CommentGroup) {
		for _, g := range groups {
			if id.IsExported() && forSiblings.MatchString(g.Text()) {
				a.wrong[a.name+"."+prefix+id.Name] = "is for Chorus's own packages by its comment"
			}
		}
	}
	if f, ok := d.(*ast.FuncDecl); ok {
		note(receiver(f), f.Name, f.Doc)
		return
	}
	for _, spec := range d.(*ast.GenDecl).Specs {
		switch s := spec.(type) {
		case *ast.ValueSpec:
			for _, n := range s.Names {
				note("", n, s.Doc, s.Comment, d.(*ast.GenDecl).Doc)
			}
		case *ast.TypeSpec:
			note("", s.Name, s.Doc, s.Comment, d.(*ast.GenDecl).Doc)
			if x, ok := s.Type.(*ast.StructType); ok {
				for _, f := range x.Fields.List {
					for _, n := range f.Names {
						note(s.Name.Name+".", n, f.Doc, f.Comment)
					}
				}
			}
		}
	}
}

// The rules must notice names for sibling packages.
func TestPublicRules(t *testing.T) {
	require.True(t, isPublic("gds/safetensors"))
	require.False(t, isPublic("memory/internal/alloc"))
	require.False(t, isPublic("cmd/chorus"))
	require.Regexp(t, forSiblings, "Raw is the handle. For\nChorus's own packages.")

	handle := types.NewNamed(types.NewTypeName(0, types.NewPackage(module+"/internal/gpu", "gpu"), "Handle", nil), types.NewStruct(nil, nil), nil)
	list := types.NewSlice(types.NewPointer(handle))
	a := &api{aliases: map[types.Object]bool{}}
	require.Equal(t, types.Type(handle), a.internalIn(types.NewMap(types.Typ[types.Int], list)))
	a.aliases[handle.Obj()] = true
	require.Nil(t, a.internalIn(list))
}
