package dl_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
	"github.com/gochorus/chorus/internal/env"
)

var override = &env.Var{Name: "CHORUS_TEST_LIBRARY"}

// fakeSpec describes a library that no system has, so that the loader of the
// system finds none.
var fakeSpec = &dl.Spec{
	Name:    "Fake",
	Env:     override,
	Sonames: []string{"libchorusfake.so.13", "libchorusfake.so.12"},
	Deps:    []string{"libchorusdep.so.13"},
	Folders: append([]string{"/usr/local/nvidia/lib64"}, dl.Toolkit...),
	Wheels:  []string{"cu13/lib", "fake/lib"},
}

// A fakeMachine is a file tree with libraries, each of which says its number.
type fakeMachine struct {
	t    *testing.T
	root string
	env  map[string]string
	so   string
}

func newFakeMachine(t *testing.T) *fakeMachine {
	return &fakeMachine{t: t, root: t.TempDir(), env: map[string]string{},
		so: dltest.Compile(t, "int fake(void) { return 13; }", "libchorusfake.so.13")}
}

// put places a copy of the library at a path of the machine.
func (m *fakeMachine) put(path string) string {
	m.t.Helper()
	b, err := os.ReadFile(m.so)
	require.NoError(m.t, err)
	return m.write(path, string(b))
}

func (m *fakeMachine) write(path, content string) string {
	m.t.Helper()
	path = filepath.Join(m.root, path)
	require.NoError(m.t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(m.t, os.WriteFile(path, []byte(content), 0o755))
	return path
}

func (m *fakeMachine) open(spec *dl.Spec) (*dl.Library, error) {
	return dl.OpenOn(spec, dl.Machine(m.root, func(k string) string { return m.env[k] }, func(name string) (string, error) {
		if p := m.env["PATH"]; p != "" {
			return filepath.Join(p, name), nil
		}
		return "", exec.ErrNotFound
	}))
}

func TestOpenFindsLibrary(t *testing.T) {
	for name, c := range map[string]struct{ path, env, value string }{
		"driver folder":        {path: "/usr/local/nvidia/lib64/libchorusfake.so.12"},
		"toolkit":              {path: "/usr/local/cuda-13.0/lib64/libchorusfake.so.13"},
		"toolkit by variable":  {"/opt/cuda/lib64/libchorusfake.so.13", "CUDA_HOME", "/opt/cuda"},
		"virtual environment":  {"/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libchorusfake.so.13", "VIRTUAL_ENV", "/venv"},
		"odd folder name":      {"/v[1]*/lib/python3.12/site-packages/nvidia/cu13/lib/libchorusfake.so.13", "VIRTUAL_ENV", "/v[1]*"},
		"conda":                {"/conda/lib/python3.11/site-packages/nvidia/fake/lib/libchorusfake.so.12", "CONDA_PREFIX", "/conda"},
		"conda's own package":  {"/conda/lib/libchorusfake.so.12", "CONDA_PREFIX", "/conda"},
		"PYTHONPATH":           {"/site/nvidia/fake/lib/libchorusfake.so.12", "PYTHONPATH", "/elsewhere:/site"},
		"user site":            {"/home/u/.local/lib/python3.9/site-packages/nvidia/fake/lib/libchorusfake.so.12", "HOME", "/home/u"},
		"distribution's wheel": {path: "/usr/local/lib/python3.12/dist-packages/nvidia/fake/lib/libchorusfake.so.12"},
		"beside python3":       {"/py/lib/python3.13/site-packages/nvidia/fake/lib/libchorusfake.so.12", "PATH", "/py/bin"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newFakeMachine(t)
			want := m.put(c.path)
			if c.env != "" {
				var values []string
				for _, v := range filepath.SplitList(c.value) {
					values = append(values, filepath.Join(m.root, v))
				}
				m.env[c.env] = strings.Join(values, string(filepath.ListSeparator))
			}
			lib, err := m.open(fakeSpec)
			require.NoError(t, err)
			require.Equal(t, want, lib.Path())
			fn, ok := lib.Symbol("fake")
			require.True(t, ok)
			require.Equal(t, int32(13), dl.Get().Do(fn))
			_, ok = lib.Symbol("chorus_has_no_such_function")
			require.False(t, ok)
		})
	}
}

func TestOpenOrder(t *testing.T) {
	m := newFakeMachine(t)
	m.env["VIRTUAL_ENV"] = filepath.Join(m.root, "venv")
	inWheel := m.put("/venv/lib/python3.12/site-packages/nvidia/fake/lib/libchorusfake.so.13")
	for _, path := range []string{
		"/usr/local/cuda-12/lib64/libchorusfake.so.12",
		"/usr/local/cuda-13/lib64/libchorusfake.so.13",
		"/usr/local/nvidia/lib64/libchorusfake.so.12",
	} {
		want := m.put(path)
		lib, err := m.open(fakeSpec)
		require.NoError(t, err)
		require.Equal(t, want, lib.Path(), "earlier patterns first, within one the newest major version")
	}
	t.Setenv(override.Name, inWheel)
	lib, err := m.open(fakeSpec)
	require.NoError(t, err)
	require.Equal(t, inWheel, lib.Path(), "the override goes before everything")
}

func TestOpenResolvesLinks(t *testing.T) {
	m := newFakeMachine(t)
	file := m.put("/opt/lib/libchorusfake.so.13.2.1")
	link := filepath.Join(m.root, "libchorusfake.so.13")
	require.NoError(t, os.Symlink(file, link))
	t.Setenv(override.Name, link)
	lib, err := m.open(fakeSpec)
	require.NoError(t, err)
	require.Equal(t, file, lib.Path())
}

// What the system's loader finds has a path that only the loader knows.
func TestPathOfSystemLibrary(t *testing.T) {
	lib, err := dl.Open(&dl.Spec{Name: "the mathematics library", Sonames: []string{"libm.so.6"}})
	require.NoError(t, err)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	require.Contains(t, lib.Path(), "libm")
	require.True(t, filepath.IsAbs(lib.Path()))
	require.Contains(t, string(maps), lib.Path()+"\n", "the kernel has mapped the same file")
}

// dependencies counts the names of a library: the loader would find one that the
// process has loaded before.
var dependencies atomic.Int32

func TestOpenLoadsDependencyOfSameFolder(t *testing.T) {
	m := newFakeMachine(t)
	name := fmt.Sprintf("libchorusdep%d.so.13", dependencies.Add(1))
	dep := dltest.Compile(t, "int dep(void) { return 4; }", name, "-Wl,-soname,"+name)
	m.so = dltest.Compile(t, "int dep(void); int fake(void) { return 10 * dep(); }", "libchorusfake.so.13", dep)
	path := m.put("/opt/libchorusfake.so.13")
	t.Setenv(override.Name, path)

	spec := *fakeSpec
	spec.Deps = []string{name}
	_, err := m.open(&spec)
	require.ErrorContains(t, err, name, "the error names what is missing")

	m.so = dep
	m.put("/opt/" + name)
	lib, err := m.open(&spec)
	require.NoError(t, err)
	fn, _ := lib.Symbol("fake")
	require.Equal(t, int32(40), dl.Get().Do(fn))
}

func TestOpenSkipsBrokenLibrary(t *testing.T) {
	m := newFakeMachine(t)
	broken := m.write("/usr/local/cuda/lib64/libchorusfake.so.13", "INPUT(libother.so)")
	good := m.put("/usr/local/lib/python3.12/dist-packages/nvidia/cu13/lib/libchorusfake.so.13")
	lib, err := m.open(fakeSpec)
	require.NoError(t, err)
	require.Equal(t, good, lib.Path())

	require.NoError(t, os.Remove(good))
	_, err = m.open(fakeSpec)
	var e *dl.Error
	require.ErrorAs(t, err, &e)
	require.Contains(t, e.Tried, dl.Try{Path: broken, Reason: "file too short"})
}

func TestOpenListsEveryPlace(t *testing.T) {
	m := newFakeMachine(t)
	m.env["VIRTUAL_ENV"] = "/venv"
	m.env["CUDA_HOME"] = "relative"
	_, err := m.open(fakeSpec)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	var e *dl.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, []dl.Try{
		{"libchorusfake.so.13", "cannot open shared object file: No such file or directory"},
		{"libchorusfake.so.12", "cannot open shared object file: No such file or directory"},
		{m.root + "/usr/local/nvidia/lib64/{libchorusfake.so.13,libchorusfake.so.12}", "no such file"},
	}, e.Tried[:3])
	require.Contains(t, err.Error(), "\n\t/venv/lib/python3.*/site-packages/nvidia/{cu13/lib,fake/lib}/{libchorusfake.so.13,libchorusfake.so.12}: no such file")
	require.Contains(t, err.Error(), "dl: no usable library for Fake (CHORUS_TEST_LIBRARY can name its path); tried:\n\t")
	require.NotContains(t, err.Error(), "relative")
}

func TestOverrideThatFails(t *testing.T) {
	m := newFakeMachine(t)
	m.put("/usr/local/cuda/lib64/libchorusfake.so.13") // must not be fallen back to
	for name, c := range map[string]struct{ path, reason string }{
		"missing": {filepath.Join(m.root, "none.so"), "cannot open shared object file: No such file or directory"},
		"folder":  {m.root, "is a folder, not a library"},
		"text":    {m.write("notes.so", strings.Repeat("not a library\n", 100)), "invalid ELF header"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv(override.Name, c.path)
			_, err := m.open(fakeSpec)
			var e *dl.Error
			require.ErrorAs(t, err, &e)
			require.Equal(t, []dl.Try{{Path: "CHORUS_TEST_LIBRARY=" + c.path, Reason: c.reason}}, e.Tried)
			require.ErrorIs(t, err, errors.ErrUnsupported)
		})
	}
}

func TestEmptyOverrideIsUnset(t *testing.T) {
	m := newFakeMachine(t)
	want := m.put("/usr/local/cuda/lib64/libchorusfake.so.13")
	t.Setenv(override.Name, "")
	lib, err := m.open(fakeSpec)
	require.NoError(t, err)
	require.Equal(t, want, lib.Path())
}

func TestVersionError(t *testing.T) {
	err := error(&dl.VersionError{Library: "NCCL", Path: "/lib/libnccl.so.2", Loaded: "2.19.3", Needed: "2.23"})
	require.EqualError(t, err, "NCCL 2.19.3 at /lib/libnccl.so.2: Chorus needs 2.23 or newer")
	require.ErrorIs(t, err, errors.ErrUnsupported)
	err = &dl.VersionError{Library: "NVRTC", Path: "/a.so", Needed: "12.0", Missing: []string{"f", "g"}}
	require.EqualError(t, err, "NVRTC at /a.so: Chorus needs 12.0 or newer; this one lacks f, g")
}

// The library is opened once, and everybody gets what bind made of it, or its error.
func TestOnce(t *testing.T) {
	calls := 0
	spec := &dl.Spec{Name: "the C library", Sonames: []string{"libc.so.6"}}
	open := dl.Once(spec, func(find dl.Resolver, path string) (*int, error) {
		calls++
		_, ok := find("qsort")
		require.True(t, ok, path)
		return &calls, nil
	})
	for range 2 {
		lib, err := open()
		if err != nil {
			t.Skip(err)
		}
		require.Same(t, &calls, lib)
	}
	require.Equal(t, 1, calls)
	_, err := dl.Once(&dl.Spec{Name: "nothing", Sonames: []string{"libnothing.so.7"}}, func(dl.Resolver, string) (*int, error) {
		t.Error("there is nothing to bind")
		return nil, nil
	})()
	require.ErrorIs(t, err, errors.ErrUnsupported)
}
