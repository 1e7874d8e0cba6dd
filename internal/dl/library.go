package dl

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

// A Spec says what a library is called and where it may be.
type Spec struct {
	Name    string   // for errors, such as "NCCL"
	Env     *env.Var // a path here is the only one tried
	Sonames []string // with the major version, newest first: a bare .so is whatever the toolkit's developer files point at
	Deps    []string // libraries of the same folder that it may need, innermost first
	Folders []string // patterns of folders to search after the system's loader; see Toolkit
	Wheels  []string // folders below site-packages/nvidia, such as "nccl/lib"
}

// A Library is a shared library that was loaded. It is never closed.
type Library struct {
	handle uintptr
	path   string
}

// A Resolver finds C functions by name. Library.Symbol is one; tests have
// others.
type Resolver func(name string) (address uintptr, ok bool)

// Open loads the first library that the Spec's search finds: the path in the
// environment, the system's loader, the folders, the Python wheels. The error
// is an *Error. Callers keep what they get and do not open it again.
func Open(spec *Spec) (*Library, error) { return open(spec, host()) }

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

// try loads the file or soname path, or notes under the given label why not.
func (e *Error) try(spec *Spec, path, label string) (*Library, error) {
	handle, reason := load(path)
	for i := 0; handle == 0 && i < len(spec.Deps); i++ {
		dep := spec.Deps[i]
		beside := filepath.Join(filepath.Dir(path), dep)
		if !filepath.IsAbs(path) || !strings.Contains(reason, dep) {
			continue
		}
		// The loader looks in the folder of the library only if the library's
		// run path says so; one that is loaded already needs no path.
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

// Files lists the files that Open would try after the system's loader. It also
// serves to find the headers that lie beside libraries.
func Files(spec *Spec) []string {
	var out []string
	for _, p := range host().patterns(spec) {
		out = append(out, p.files()...)
	}
	return out
}
