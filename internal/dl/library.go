// Package dl finds shared libraries and calls their C functions without a C
// compiler and without allocating. It is the only importer of purego.
//
// Open searches for a library as described by its Spec, and reports every path that it
// tried. A call is made through a Frame from a pool:
//
//	f := dl.Get()
//	p, r := f.Out().In(bytes, uintptr(stream)).Do1(fn) // int fn(void **, size_t, stream)
//
// Libraries are never closed: the drivers behind them start threads and
// register exit handlers.
package dl

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/gochorus/chorus/internal/env"
)

// A Spec is the names and locations of a library.
type Spec struct {
	Name    string   // for errors, such as "NCCL"
	Env     *env.Var // if set, only this path is tried
	Sonames []string // with the major version, newest first: the plain .so may link to any version
	Needed  string   // the oldest version that Require accepts
	Deps    []string // libraries in the same directory that it may need, dependencies first
	Folders []string // patterns of directories to search after the system's loader; see Toolkit
	Wheels  []string // directories below site-packages/nvidia, such as "nccl/lib"
}

// A Library is a loaded shared library. It is never closed.
type Library struct {
	handle uintptr
	path   string
}

// A Resolver finds C functions by name. Library.Symbol is one; tests use others.
type Resolver func(name string) (address uintptr, ok bool)

// Open loads the first library that the Spec's search finds, in this order: the path in
// the environment, the system's loader, the directories, the Python wheels. The error is
// an *Error. Callers keep the library and do not open it again.
func Open(spec *Spec) (*Library, error) { return open(spec, host()) }

// Once returns a function that opens the library of the Spec on its first call and passes
// its functions and its file to bind, for example to fill a Table. Later calls return the
// same result or the same error.
func Once[L any](spec *Spec, bind func(find Resolver, path string) (L, error)) func() (L, error) {
	return sync.OnceValues(func() (lib L, err error) {
		so, err := Open(spec)
		if err != nil {
			return lib, err
		}
		return bind(so.Symbol, so.Path())
	})
}

func open(spec *Spec, on *machine) (*Library, error) {
	e := &Error{Library: spec.Name}
	if spec.Env != nil && !on.secure {
		e.Env = spec.Env.Name
		if path := spec.Env.Value(); path != "" {
			// Falling back to a search would hide that the user's choice failed.
			return e.try(spec, path, e.Env+"="+path)
		}
	}
	for _, name := range spec.Sonames {
		if l, err := e.try(spec, name, name); err == nil {
			return l, nil
		}
	}
	for _, p := range on.patterns(spec) {
		found := p.files()
		for _, path := range found {
			if l, err := e.try(spec, path, path); err == nil {
				return l, nil
			}
		}
		if len(found) == 0 {
			e.Tried = append(e.Tried, Try{p.String(), "no such file"})
		}
	}
	return nil, e
}

// try loads the file or soname path, or records the reason of the failure under label.
func (e *Error) try(spec *Spec, path, label string) (*Library, error) {
	handle, reason := load(path)
	for i := 0; handle == 0 && i < len(spec.Deps); i++ {
		dep := spec.Deps[i]
		beside := filepath.Join(filepath.Dir(path), dep)
		if !filepath.IsAbs(path) || !strings.Contains(reason, dep) {
			continue
		}
		// The loader searches the library's directory only if the library's run path says
		// so. A library that is already loaded needs no path.
		if h, _ := load(beside); h != 0 {
			handle, reason = load(path)
		}
	}
	if handle == 0 {
		reason = strings.TrimPrefix(reason, path+": ")
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			reason = "is a folder, not a library"
		}
		e.Tried = append(e.Tried, Try{label, reason})
		return nil, e
	}
	return &Library{handle, realPath(handle, path)}, nil
}

// realPath returns the file behind a handle, with symbolic links resolved.
func realPath(handle uintptr, asked string) string {
	path := loadedFrom(handle)
	if path == "" {
		path = asked
	}
	if p, err := filepath.EvalSymlinks(path); err == nil {
		path = p
	}
	if p, err := filepath.Abs(path); err == nil && strings.Contains(path, "/") {
		path = p
	}
	return path
}

// Path returns the file that was loaded, with symbolic links resolved.
func (l *Library) Path() string { return l.path }

// Symbol returns the address of a C function, or false if the library lacks it.
func (l *Library) Symbol(name string) (uintptr, bool) { return symbol(l.handle, name) }

// Files returns the files that Open would try after the system's loader. It also helps to
// find headers next to libraries.
func Files(spec *Spec) []string {
	var out []string
	for _, p := range host().patterns(spec) {
		out = append(out, p.files()...)
	}
	return out
}

// Toolkit are the directories of an installed CUDA toolkit. A pattern may begin with an
// environment variable, and is skipped if that variable is unset.
var Toolkit = []string{
	"$CUDA_HOME/lib64",
	"$CUDA_PATH/lib64",
	"$CONDA_PREFIX/lib",
	"/usr/local/cuda*/lib64",
	"/usr/local/cuda*/targets/" + toolkitTarget + "/lib",
}

// sitePackages are the directories into which pip and similar tools install wheels.
// PYTHON3 stands for the installation of the python3 in PATH.
var sitePackages = []string{
	"$PYTHONPATH",
	"$VIRTUAL_ENV/lib/python3.*/site-packages",
	"$CONDA_PREFIX/lib/python3.*/site-packages",
	"$PYTHON3/lib/python3.*/site-packages",
	"$HOME/.local/lib/python3.*/site-packages",
	"/usr/local/lib/python3.*/site-packages",
	"/usr/local/lib/python3.*/dist-packages",
	"/usr/lib/python3*/site-packages",
	"/usr/lib/python3*/dist-packages",
	"/usr/lib64/python3.*/site-packages",
}

var toolkitTarget = map[string]string{"amd64": "x86_64-linux", "arm64": "sbsa-linux"}[runtime.GOARCH]

// A machine is the environment of a search. Tests replace it.
type machine struct {
	root     string // prefix of absolute patterns
	getenv   func(string) string
	lookPath func(string) (string, error)
	secure   bool // the environment must not be trusted
}

func host() *machine {
	if env.IsUntrusted() {
		return secureHost()
	}
	return &machine{getenv: os.Getenv, lookPath: exec.LookPath}
}

// A pattern is a directory pattern with the subdirectories and file names to search.
type pattern struct {
	base    string
	folders []string // relative to base; "" is base itself
	names   []string
}

// patterns returns the patterns for the files of a Spec, best first.
func (m *machine) patterns(spec *Spec) []pattern {
	var list []pattern
	add := func(base string, folders []string) {
		// Two variables may have the same value: CUDA_HOME is often CUDA_PATH.
		if !slices.ContainsFunc(list, func(p pattern) bool { return p.base == base }) {
			list = append(list, pattern{base, folders, spec.Sonames})
		}
	}
	for _, f := range spec.Folders {
		for _, base := range m.expand(f) {
			add(base, []string{""})
		}
	}
	if len(spec.Wheels) > 0 {
		for _, f := range sitePackages {
			for _, base := range m.expand(f) {
				add(base+"/nvidia", spec.Wheels)
			}
		}
	}
	return list
}

// expand replaces the variable at the front of a pattern by each of its values.
func (m *machine) expand(p string) []string {
	if !strings.HasPrefix(p, "$") {
		return []string{m.root + p}
	}
	name, rest, _ := strings.Cut(p[1:], "/")
	if rest != "" {
		rest = "/" + rest
	}
	var out []string
	for _, v := range m.values(name) {
		if filepath.IsAbs(v) { // relative paths are ignored: the working directory must not choose a library
			out = append(out, escapeGlob(filepath.Clean(v))+rest)
		}
	}
	return out
}

// values returns the value of a variable, or all elements if it is a list.
func (m *machine) values(name string) []string {
	switch name {
	case "PYTHONPATH":
		return filepath.SplitList(m.getenv(name))
	case "PYTHON3":
		path, err := m.lookPath("python3")
		if err != nil {
			return nil
		}
		// The link itself belongs to a virtual environment, its target to the Python that
		// the environment was made from.
		prefixes := []string{filepath.Dir(filepath.Dir(path))}
		if real, err := filepath.EvalSymlinks(path); err == nil && real != path {
			prefixes = append(prefixes, filepath.Dir(filepath.Dir(real)))
		}
		return prefixes
	}
	return []string{m.getenv(name)}
}

// files returns the matching files, those with the newest name first.
func (p pattern) files() []string {
	var out []string
	for _, name := range p.names {
		for _, folder := range p.folders {
			found, _ := filepath.Glob(filepath.Join(p.base, folder, name)) // the patterns are well-formed
			out = append(out, found...)
		}
	}
	return out
}

// String formats the pattern in shell syntax.
func (p pattern) String() string {
	return filepath.Join(p.base, braces(p.folders), braces(p.names))
}

func braces(list []string) string {
	if len(list) == 1 {
		return list[0]
	}
	return "{" + strings.Join(list, ",") + "}"
}

func escapeGlob(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(s)
}

// secureHost is the machine of a process that must not trust its environment.
func secureHost() *machine {
	return &machine{
		getenv:   func(string) string { return "" },
		lookPath: func(string) (string, error) { return "", errors.New("the process must not trust PATH") },
		secure:   true,
	}
}

// An Error reports that a library was not found or could not be loaded. It matches
// errors.ErrUnsupported.
type Error struct {
	Library string // such as "NCCL"
	Env     string // the variable that can set the library's path
	Tried   []Try  // in order
}

// A Try is one failed attempt to find a library.
type Try struct {
	Path   string // a file, a soname for the system's loader, or a pattern without matching files
	Reason string
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("dl: no usable library for " + e.Library)
	if e.Env != "" {
		b.WriteString(" (" + e.Env + " can name its path)")
	}
	b.WriteString("; tried:")
	for _, t := range e.Tried {
		b.WriteString("\n\t" + t.Path + ": " + t.Reason)
	}
	return b.String()
}

// Is reports whether target is errors.ErrUnsupported.
func (e *Error) Is(target error) bool { return target == errors.ErrUnsupported }

// A VersionError reports that a loaded library is too old, or lacks functions that its
// version should have. It matches errors.ErrUnsupported.
type VersionError struct {
	Library string // such as "NCCL"
	Path    string
	Loaded  string // such as "2.19.3"; "" if unknown
	Needed  string
	Missing []string // the missing C functions
}

func (e *VersionError) Error() string {
	s := e.Library
	if e.Loaded != "" {
		s += " " + e.Loaded
	}
	s += " at " + e.Path + ": Chorus needs " + e.Needed + " or newer"
	if len(e.Missing) > 0 {
		s += "; this one lacks " + strings.Join(e.Missing, ", ")
	}
	return s
}

// Is reports whether target is errors.ErrUnsupported.
func (e *VersionError) Is(target error) bool { return target == errors.ErrUnsupported }
