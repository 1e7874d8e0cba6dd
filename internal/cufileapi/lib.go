package cufileapi

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// minVersion is the oldest supported cuFile, the version in CUDA 11.7. Every function of
// that version is required.
const (
	minVersion     = 1040
	minVersionText = "1.4"
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

func (l *Lib) GetVersion() (int32, Result) {
	v, r := l.Call1(FuncGetVersion, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) DriverOpen() Result { return l.Call(FuncDriverOpen, dl.Get()) }

func (l *Lib) DriverClose() Result { return l.Call(FuncDriverClose, dl.Get()) }

func (l *Lib) SetParameterString(p StringParam, v string) Result {
	return l.Call(FuncSetParameterString, dl.Get().In(uintptr(p)).String(v))
}

var _ API = (*Lib)(nil)

// The methods of Lib have no comments: each is the C function of its
// name.

func (l *Lib) HandleRegister(d *Descr) (Handle, Result) {
	h, r := l.Call1(FuncHandleRegister, dl.Get().Out().Ptr(unsafe.Pointer(d)))
	return Handle(h), r
}

func (l *Lib) HandleDeregister(h Handle) { l.Call(FuncHandleDeregister, dl.Get().In(uintptr(h))) }

func (l *Lib) BufRegister(p cudadrv.DevicePtr, bytes uintptr, flags int32) Result {
	return l.Call(FuncBufRegister, dl.Get().In(uintptr(p), bytes, uintptr(flags)))
}

func (l *Lib) BufDeregister(p cudadrv.DevicePtr) Result {
	return l.Call(FuncBufDeregister, dl.Get().In(uintptr(p)))
}

func (l *Lib) Read(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	n, errno := l.CallErrno(FuncRead, transfer(h, base, bytes, fileOffset, devOffset))
	return transferred(int64(n), errno)
}

func (l *Lib) Write(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	n, errno := l.CallErrno(FuncWrite, transfer(h, base, bytes, fileOffset, devOffset))
	return transferred(int64(n), errno)
}

func transfer(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) *dl.Frame {
	return dl.Get().In(uintptr(h), uintptr(base), bytes, uintptr(fileOffset), uintptr(devOffset))
}
