// Package dltest helps to test packages that call C through package dl: it compiles small
// C libraries, records the words that C receives, and checks prototypes, constants and
// layouts against installed headers. A test that needs a compiler or a header is skipped,
// with a message, if it is missing.
package dltest

import (
	"flag"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

// Compile builds a shared library from C source and returns its path. It skips the test if
// there is no C compiler. args are passed to the compiler.
func Compile(t *testing.T, source, name string, args ...string) string {
	t.Helper()
	cc := compiler(t, "cc", "gcc", "clang")
	dir := t.TempDir()
	src, lib := filepath.Join(dir, "source.c"), filepath.Join(dir, name)
	if err := os.WriteFile(src, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	args = append([]string{"-shared", "-fPIC", "-O1", "-o", lib, src}, args...)
	if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cc, err, out)
	}
	return lib
}

// Load compiles C source and loads it.
func Load(t *testing.T, source string) *dl.Library {
	t.Helper()
	lib, err := dl.Open(&dl.Spec{Name: t.Name(), Sonames: []string{Compile(t, source, "libtest.so")}})
	if err != nil {
		t.Fatal(err)
	}
	return lib
}

// Golden compares text with a golden file, or writes it under -update.
func Golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got == string(want) {
		return
	}
	gotLines, wantLines := strings.Split(got, "\n"), strings.Split(string(want), "\n")
	only := func(lines, other []string) string {
		return strings.Join(slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return slices.Contains(other, l) }), "\n")
	}
	t.Errorf("differs from %s, only in the sequence of its lines if none follows (-update writes it)\ngot:\n%s\nwant:\n%s", path,
		only(gotLines, wantLines), only(wantLines, gotLines))
}

func compiler(t *testing.T, names ...string) string {
	t.Helper()
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skipf("no compiler: none of %q is on PATH", names)
	return ""
}

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

// RequireInstalled skips a test of an installed library if err says that it
// could not be opened, or fails it where CHORUS_REQUIRE_GPU says that this
// machine has GPUs.
func RequireInstalled(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if n, _ := env.RequireGPU.Int(); n > 0 {
		t.Fatalf("%s=%d, but %v", env.RequireGPU.Name, n, err)
	}
	t.Skip(err)
}
