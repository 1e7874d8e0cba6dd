package ncclapi

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// minVersion is the oldest NCCL that Chorus runs on. Every function that it
// had is required.
const (
	minVersion     = 22304
	minVersionText = "2.23"
)

var spec = &dl.Spec{
	Name:    "NCCL",
	Env:     env.LibNCCL,
	Sonames: []string{"libnccl.so.2"},
	Folders: dl.Toolkit,
	Wheels:  []string{"nccl/lib"},
}

// Lib is the loaded libnccl.so.2. It implements API.
type Lib struct {
	dl.Table[Func, Result]
	version int32
}

// Open loads NCCL, once per process. The error is a *dl.Error when there is
// none and a *dl.VersionError when it is too old; both match
// errors.ErrUnsupported.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	if err := setHostID(); err != nil {
		return nil, err
	}
	t, missing := dl.NewTable[Func](find, path, dl.Since(symbols[:], minVersion), MissingSymbol)
	l := &Lib{Table: t}
	l.version, _ = l.GetVersion() // 0, so too old, if it fails
	if l.version < minVersion || len(missing) > 0 {
		return nil, &dl.VersionError{Library: "NCCL", Path: path, Loaded: VersionText(l.version), Needed: minVersionText, Missing: missing}
	}
	return l, nil
}

// Version returns the version code of the loaded library.
func (l *Lib) Version() int32 { return l.version }

// ParseVersion reads what VersionText writes, of a version that Chorus runs on.
func ParseVersion(text string) (int32, error) {
	var major, minor, patch int32
	if _, err := fmt.Sscanf(text, "%d.%d.%d", &major, &minor, &patch); err != nil {
		return 0, errors.New("a version such as 2.28.3")
	}
	code := major*10000 + minor*100 + patch
	if code < minVersion {
		return 0, errors.New("a version from " + VersionText(minVersion))
	}
	return code, nil
}

// VersionText writes a version code: 22803 is "2.28.3".
func VersionText(code int32) string {
	if code < 10000 { // the scheme of 2.8 and before
		return fmt.Sprintf("%d.%d.%d", code/1000, code%1000/100, code%100)
	}
	return fmt.Sprintf("%d.%d.%d", code/10000, code%10000/100, code%100)
}
