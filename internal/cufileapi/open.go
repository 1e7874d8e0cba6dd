package cufileapi

import (
	"fmt"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// minVersion is the oldest supported cuFile, the version in CUDA 12.2. Every function of
// that version is required.
const (
	minVersion     = 1070
	minVersionText = "1.7"
)

var spec = &dl.Spec{
	Name:    "cuFile",
	Env:     env.LibCUFILE,
	Sonames: []string{"libcufile.so.0", "libcufile.so"},
	Folders: dl.Toolkit,
	Wheels:  []string{"cu13/lib", "cufile/lib"},
}

// Lib is the loaded libcufile.so.0. It implements API.
type Lib struct {
	dl.Table[Func, Result]
	version int32
}

// Open loads cuFile, once per process. The error is a *dl.Error when there is none
// and a *dl.VersionError when it is too old; both match errors.ErrUnsupported.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, missing := dl.NewTable[Func](find, path, dl.Since(symbols[:], minVersion), MissingSymbol)
	l := &Lib{Table: t, version: minVersion} // which could not tell it
	if len(missing) > 0 {
		return nil, &dl.VersionError{Library: "cuFile", Path: path, Needed: minVersionText, Missing: missing}
	}
	if v, r := l.GetVersion(); r == Success {
		l.version = v
	}
	return l, nil
}

// Version returns the version code of the loaded library.
func (l *Lib) Version() int32 { return l.version }

// VersionText writes a version code: 1150 is "1.15".
func VersionText(code int32) string { return fmt.Sprintf("%d.%d", code/1000, code%1000/10) }
