package ncclapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

var _ API = (*Lib)(nil)

// The methods of Lib have no comments: each is the C function of
// its name.

func (l *Lib) GetVersion() (int32, Result) {
	v, r := l.Call1(FuncGetVersion, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) GetUniqueID() (UniqueID, Result) {
	id := new(UniqueID)
	r := l.Call(FuncGetUniqueID, dl.Get().Ptr(unsafe.Pointer(id)))
	return *id, r
}

func (l *Lib) GetLastError(c Comm) string {
	return l.Text(FuncGetLastError, dl.Get().In(uintptr(c)))
}

func (l *Lib) CommInitRankScalable(out *Comm, nranks, rank int32, ids []UniqueID, cfg *Config) Result {
	return l.Call(FuncCommInitRankScalable, dl.Get().
		Ptr(unsafe.Pointer(out)).In(uintptr(nranks), uintptr(rank), uintptr(len(ids))).
		Ptr(unsafe.Pointer(unsafe.SliceData(ids))).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) CommSplit(c Comm, color, key int32, out *Comm, cfg *Config) Result {
	return l.Call(FuncCommSplit, dl.Get().
		In(uintptr(c), uintptr(color), uintptr(key)).Ptr(unsafe.Pointer(out)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) CommShrink(c Comm, exclude []int32, out *Comm, cfg *Config, flags int32) Result {
	return l.Call(FuncCommShrink, dl.Get().
		In(uintptr(c)).Ptr(unsafe.Pointer(unsafe.SliceData(exclude))).In(uintptr(len(exclude))).
		Ptr(unsafe.Pointer(out)).Ptr(unsafe.Pointer(cfg)).In(uintptr(flags)))
}

func (l *Lib) CommFinalize(c Comm) Result { return l.Call(FuncCommFinalize, dl.Get().In(uintptr(c))) }

func (l *Lib) CommDestroy(c Comm) Result { return l.Call(FuncCommDestroy, dl.Get().In(uintptr(c))) }

func (l *Lib) CommAbort(c Comm) Result { return l.Call(FuncCommAbort, dl.Get().In(uintptr(c))) }

func (l *Lib) CommGetAsyncError(c Comm) (async Result, r Result) {
	v, r := l.Call1(FuncCommGetAsyncError, dl.Get().In(uintptr(c)).Out())
	return Result(v), r
}

func (l *Lib) CommCount(c Comm) (int32, Result) {
	v, r := l.Call1(FuncCommCount, dl.Get().In(uintptr(c)).Out())
	return int32(v), r
}

func (l *Lib) CommUserRank(c Comm) (int32, Result) {
	v, r := l.Call1(FuncCommUserRank, dl.Get().In(uintptr(c)).Out())
	return int32(v), r
}

func (l *Lib) CommRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr) (RegID, Result) {
	h, r := l.Call1(FuncCommRegister, dl.Get().In(uintptr(c), uintptr(p), bytes).Out())
	return RegID(h), r
}

func (l *Lib) CommDeregister(c Comm, h RegID) Result {
	return l.Call(FuncCommDeregister, dl.Get().In(uintptr(c), uintptr(h)))
}

func (l *Lib) CommWindowRegister(c Comm, p cudadrv.DevicePtr, bytes uintptr, out *Window, flags int32) Result {
	return l.Call(FuncCommWindowRegister, dl.Get().
		In(uintptr(c), uintptr(p), bytes).Ptr(unsafe.Pointer(out)).In(uintptr(flags)))
}

func (l *Lib) CommWindowDeregister(c Comm, w Window) Result {
	return l.Call(FuncCommWindowDeregister, dl.Get().In(uintptr(c), uintptr(w)))
}

func (l *Lib) CommRevoke(c Comm, flags int32) Result {
	return l.Call(FuncCommRevoke, dl.Get().In(uintptr(c), uintptr(flags)))
}

func (l *Lib) CommGetUniqueID(c Comm) (UniqueID, Result) {
	id := new(UniqueID)
	r := l.Call(FuncCommGetUniqueID, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(id)))
	return *id, r
}

func (l *Lib) CommGrow(c Comm, nranks int32, id *UniqueID, rank int32, out *Comm, cfg *Config) Result {
	return l.Call(FuncCommGrow, dl.Get().
		In(uintptr(c), uintptr(nranks)).Ptr(unsafe.Pointer(id)).In(uintptr(rank)).
		Ptr(unsafe.Pointer(out)).Ptr(unsafe.Pointer(cfg)))
}

func (l *Lib) CommSuspend(c Comm, flags int32) Result {
	return l.Call(FuncCommSuspend, dl.Get().In(uintptr(c), uintptr(flags)))
}

func (l *Lib) CommResume(c Comm) Result { return l.Call(FuncCommResume, dl.Get().In(uintptr(c))) }

func (l *Lib) CommMemStats(c Comm, stat int32) (uint64, Result) {
	return l.Call1(FuncCommMemStats, dl.Get().In(uintptr(c), uintptr(stat)).Out())
}

func (l *Lib) CommQueryProperties(c Comm, p *Properties) Result {
	return l.Call(FuncCommQueryProperties, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(p)))
}

func (l *Lib) DevCommCreate(c Comm, reqs *DevCommRequirements, out *DevComm) Result {
	return l.Call(FuncDevCommCreate, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(reqs)).Ptr(unsafe.Pointer(out)))
}

func (l *Lib) DevCommDestroy(c Comm, d *DevComm) Result {
	return l.Call(FuncDevCommDestroy, dl.Get().In(uintptr(c)).Ptr(unsafe.Pointer(d)))
}

func (l *Lib) WinGetUserPtr(c Comm, w Window) (cudadrv.DevicePtr, Result) {
	p, r := l.Call1(FuncWinGetUserPtr, dl.Get().In(uintptr(c), uintptr(w)).Out())
	return cudadrv.DevicePtr(p), r
}
