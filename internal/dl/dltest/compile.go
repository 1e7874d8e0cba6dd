package dltest

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/gochorus/chorus/internal/dl"
)

var update = flag.Bool("update", false, "write the golden files instead of comparing with them")

// Compile makes a shared library of C source and returns its path. It skips the test if
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
	if got != string(want) {
		t.Errorf("differs from %s (-update writes it)\ngot:\n%s\nwant:\n%s", path, got, want)
	}
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
