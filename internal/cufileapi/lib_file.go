package cufileapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
)

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

func (l *Lib) ReadAsync(h Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) Result {
	return l.Call(FuncReadAsync, enqueued(h, base, size, fileOffset, devOffset, done, s))
}

func (l *Lib) WriteAsync(h Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) Result {
	return l.Call(FuncWriteAsync, enqueued(h, base, size, fileOffset, devOffset, done, s))
}

func enqueued(h Handle, base cudadrv.DevicePtr, size *uintptr, fileOffset, devOffset, done *int64, s cudadrv.Stream) *dl.Frame {
	return dl.Get().In(uintptr(h), uintptr(base)).Ptr(unsafe.Pointer(size)).Ptr(unsafe.Pointer(fileOffset)).
		Ptr(unsafe.Pointer(devOffset)).Ptr(unsafe.Pointer(done)).In(uintptr(s))
}

func (l *Lib) StreamRegister(s cudadrv.Stream, flags uint32) Result {
	return l.Call(FuncStreamRegister, dl.Get().In(uintptr(s), uintptr(flags)))
}

func (l *Lib) StreamDeregister(s cudadrv.Stream) Result {
	return l.Call(FuncStreamDeregister, dl.Get().In(uintptr(s)))
}

func (l *Lib) BatchIOSetUp(nr uint32) (Batch, Result) {
	b, r := l.Call1(FuncBatchIOSetUp, dl.Get().Out().In(uintptr(nr)))
	return Batch(b), r
}

func (l *Lib) BatchIOSubmit(b Batch, params []IOParams, flags uint32) Result {
	return l.Call(FuncBatchIOSubmit, dl.Get().
		In(uintptr(b), uintptr(len(params))).Ptr(unsafe.Pointer(unsafe.SliceData(params))).In(uintptr(flags)))
}

func (l *Lib) BatchIOGetStatus(b Batch, minNr uint32, events []IOEvents, timeout *Timespec) (uint32, Result) {
	nr, r := l.Call1(FuncBatchIOGetStatus, dl.Get().
		In(uintptr(b), uintptr(minNr)).InOut(uint64(len(events))).
		Ptr(unsafe.Pointer(unsafe.SliceData(events))).Ptr(unsafe.Pointer(timeout)))
	if r != Success {
		return 0, r
	}
	return uint32(nr), r
}

func (l *Lib) BatchIOCancel(b Batch) Result {
	return l.Call(FuncBatchIOCancel, dl.Get().In(uintptr(b)))
}

func (l *Lib) BatchIODestroy(b Batch) { l.Call(FuncBatchIODestroy, dl.Get().In(uintptr(b))) }
