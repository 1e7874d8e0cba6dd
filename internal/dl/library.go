package dl

import (
	"os"
	"path/filepath"
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
