package archtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// A checker type-checks packages from their sources, as the go command lists them. It
// leaves out the bodies of functions, which are not needed to check a user of the package.
type checker struct {
	fset    *token.FileSet
	sources map[string]source
	checked map[string]*types.Package
}

type source struct {
	ImportPath, Dir string
	GoFiles         []string
	ImportMap       map[string]string
}

// newChecker returns the checker that all tests share: most of its time goes into the
// packages of the standard library.
func newChecker(t *testing.T) *checker {
	t.Helper()
	needSource(t)
	c, err := listed()
	require.NoError(t, err)
	return c
}

var listed = sync.OnceValues(func() (*checker, error) {
	cmd := exec.Command("go", "list", "-deps", "-json=ImportPath,Dir,GoFiles,ImportMap", "./...")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	c := &checker{fset: token.NewFileSet(), sources: map[string]source{}, checked: map[string]*types.Package{"unsafe": types.Unsafe}}
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var s source
		if err := dec.Decode(&s); errors.Is(err, io.EOF) {
			return c, nil
		} else if err != nil {
			return nil, err
		}
		c.sources[s.ImportPath] = s
	}
})

// Import checks a package and all that it imports.
func (c *checker) Import(path string) (*types.Package, error) {
	if p := c.checked[path]; p != nil {
		return p, nil
	}
	s, ok := c.sources[path]
	if !ok {
		return nil, fmt.Errorf("no package of the module imports %s", path)
	}
	var files []*ast.File
	for _, name := range s.GoFiles {
		f, err := parser.ParseFile(c.fset, filepath.Join(s.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	conf := types.Config{Importer: within{c, s.ImportMap}, IgnoreFuncBodies: true, Error: func(error) {}}
	p, _ := conf.Check(path, c.fset, files, nil) // without cgo and bodies, some errors mean nothing
	c.checked[path] = p
	return p, nil
}

// within is the importer of one package: the standard library has vendored copies.
type within struct {
	c  *checker
	by map[string]string
}

func (w within) Import(path string) (*types.Package, error) {
	if real, ok := w.by[path]; ok {
		path = real
	}
	return w.c.Import(path)
}

// complaints type-checks a file as a user's program and returns its errors. Variables that
// are not used are none: documents show fragments.
func (c *checker) complaints(name, text string) (errs []error) {
	f, err := parser.ParseFile(c.fset, name, text, 0)
	if err != nil {
		return []error{err}
	}
	conf := types.Config{Importer: c, Error: func(err error) {
		var e types.Error
		if errors.As(err, &e) && e.Soft {
			return
		}
		errs = append(errs, err)
	}}
	_, _ = conf.Check("user", c.fset, []*ast.File{f}, nil)
	return errs
}
