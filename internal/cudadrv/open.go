package cudadrv

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// minVersion is the oldest CUDA of the driver that Chorus runs on.
const (
	minVersion     = 12020
	minVersionText = "12.2 (R535)"
)

var spec = &dl.Spec{
	Name:    "the CUDA driver",
	Env:     env.LibCUDA,
	Sonames: []string{"libcuda.so.1"},
	Folders: []string{
		"/usr/local/nvidia/lib64", // containers
		"/usr/lib/wsl/lib",
		"/run/opengl-driver/lib", // NixOS
	},
}

// Lib is the installed driver, libcuda.so.1. It implements Driver.
type Lib struct {
	fn      [numFns]uintptr
	path    string
	version int32
}

// Open loads the driver, once per process. The error is a *dl.Error when there
// is none and a *dl.VersionError when it is too old; both match
// errors.ErrUnsupported. Open does not call cuInit.
func Open() (*Lib, error) { return opened() }

var opened = sync.OnceValues(func() (*Lib, error) {
	so, err := dl.Open(spec)
	if err != nil {
		return nil, err
	}
	return newLib(so.Symbol, so.Path())
})

func newLib(find dl.Resolver, path string) (*Lib, error) {
	l := &Lib{path: path}
	var missing []string
	for i, s := range symbols {
		p, ok := find(s.name)
		if !ok && !s.optional {
			missing = append(missing, s.name)
		}
		l.fn[i] = p
	}
	l.version, _ = l.DriverGetVersion() // 0, so too old, if it fails
	if l.version < minVersion || len(missing) > 0 {
		return nil, &dl.VersionError{Library: "CUDA driver", Path: path, Loaded: versionText(l.version), Needed: minVersionText, Missing: missing}
	}
	return l, nil
}

// Path returns the file that was loaded.
func (l *Lib) Path() string { return l.path }

// versionText writes a version code: 13000 is "13.0".
func versionText(code int32) string { return fmt.Sprintf("%d.%d", code/1000, code%1000/10) }

// call makes a call without out-parameters.
func (l *Lib) call(i fn, f *dl.Frame) Result {
	if l.fn[i] == 0 {
		f.Put()
		return ErrorNotSupported
	}
	return Result(f.Do(l.fn[i]))
}

// call1 makes a call with one out-parameter.
func (l *Lib) call1(i fn, f *dl.Frame) (uint64, Result) {
	if l.fn[i] == 0 {
		f.Put()
		return 0, ErrorNotSupported
	}
	v, r := f.Do1(l.fn[i])
	return v, Result(r)
}

// call2 makes a call with two out-parameters.
func (l *Lib) call2(i fn, f *dl.Frame) (uint64, uint64, Result) {
	if l.fn[i] == 0 {
		f.Put()
		return 0, 0, ErrorNotSupported
	}
	v, w, r := f.Do2(l.fn[i])
	return v, w, Result(r)
}
