package cudadrv

import (
	"fmt"

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
	dl.Table[fn, Result]
	version int32
}

// Open loads the driver, once per process. The error is a *dl.Error when there
// is none and a *dl.VersionError when it is too old; both match
// errors.ErrUnsupported. Open does not call cuInit.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, missing := dl.NewTable[fn](find, path, symbols[:], ErrorNotSupported)
	l := &Lib{Table: t}
	l.version, _ = l.DriverGetVersion() // 0, so too old, if it fails
	if l.version < minVersion || len(missing) > 0 {
		return nil, &dl.VersionError{Library: "CUDA driver", Path: path, Loaded: versionText(l.version), Needed: minVersionText, Missing: missing}
	}
	return l, nil
}

// versionText writes a version code: 13000 is "13.0".
func versionText(code int32) string { return fmt.Sprintf("%d.%d", code/1000, code%1000/10) }

// Bound returns the driver for calls of threads that have any context or none:
// each call makes c current first, in the same change from Go to C.
func (l *Lib) Bound(c Context) Driver {
	return &Lib{Table: l.After(fnCtxSetCurrent, uintptr(c)), version: l.version}
}
