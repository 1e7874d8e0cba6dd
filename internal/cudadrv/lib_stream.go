package cudadrv

import (
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) StreamCreateWithPriority(flags uint32, priority int32) (Stream, Result) {
	s, r := l.Call1(fnStreamCreateWithPriority, dl.Get().Out().In(uintptr(flags), uintptr(priority)))
	return Stream(s), r
}

func (l *Lib) StreamDestroy(s Stream) Result { return l.Call(fnStreamDestroy, dl.Get().In(uintptr(s))) }

func (l *Lib) StreamSynchronize(s Stream) Result {
	return l.Call(fnStreamSynchronize, dl.Get().In(uintptr(s)))
}

func (l *Lib) StreamQuery(s Stream) Result { return l.Call(fnStreamQuery, dl.Get().In(uintptr(s))) }

func (l *Lib) StreamWaitEvent(s Stream, e Event, flags uint32) Result {
	return l.Call(fnStreamWaitEvent, dl.Get().In(uintptr(s), uintptr(e), uintptr(flags)))
}

func (l *Lib) StreamGetPriority(s Stream) (int32, Result) {
	p, r := l.Call1(fnStreamGetPriority, dl.Get().In(uintptr(s)).Out())
	return int32(p), r
}

func (l *Lib) StreamGetCtx(s Stream) (Context, Result) {
	c, r := l.Call1(fnStreamGetCtx, dl.Get().In(uintptr(s)).Out())
	return Context(c), r
}

func (l *Lib) LaunchHostFunc(s Stream, f dl.Closure) Result {
	return l.Call(fnLaunchHostFunc, dl.Get().In(uintptr(s), dl.CallClosure(), uintptr(f)))
}

func (l *Lib) EventCreate(flags uint32) (Event, Result) {
	e, r := l.Call1(fnEventCreate, dl.Get().Out().In(uintptr(flags)))
	return Event(e), r
}

func (l *Lib) EventDestroy(e Event) Result { return l.Call(fnEventDestroy, dl.Get().In(uintptr(e))) }

func (l *Lib) EventRecord(e Event, s Stream) Result {
	return l.Call(fnEventRecord, dl.Get().In(uintptr(e), uintptr(s)))
}

func (l *Lib) EventQuery(e Event) Result { return l.Call(fnEventQuery, dl.Get().In(uintptr(e))) }

func (l *Lib) EventSynchronize(e Event) Result {
	return l.Call(fnEventSynchronize, dl.Get().In(uintptr(e)))
}

func (l *Lib) EventElapsedTime(start, end Event) (milliseconds float32, r Result) {
	v, r := l.Call1(fnEventElapsedTime, dl.Get().Out().In(uintptr(start), uintptr(end)))
	return math.Float32frombits(uint32(v)), r
}

func (l *Lib) IpcGetEventHandle(e Event) (IpcEventHandle, Result) {
	h := new(IpcEventHandle)
	r := l.Call(fnIpcGetEventHandle, dl.Get().Ptr(unsafe.Pointer(h)).In(uintptr(e)))
	return *h, r
}

func (l *Lib) IpcOpenEventHandle(h IpcEventHandle) (Event, Result) {
	e, r := l.Call1(fnIpcOpenEventHandle, dl.Get().Out().Struct64((*[64]byte)(&h)))
	return Event(e), r
}

func (l *Lib) ModuleLoadData(image []byte) (Module, Result) {
	if n := len(image); n == 0 || image[n-1] != 0 {
		// PTX is text that ends at its NUL; a cubin knows its own size.
		image = append(image[:n:n], 0)
	}
	m, r := l.Call1(fnModuleLoadData, dl.Get().Out().Ptr(unsafe.Pointer(&image[0])))
	return Module(m), r
}

func (l *Lib) ModuleUnload(m Module) Result { return l.Call(fnModuleUnload, dl.Get().In(uintptr(m))) }

func (l *Lib) ModuleGetFunction(m Module, name string) (Function, Result) {
	f, r := l.Call1(fnModuleGetFunction, dl.Get().Out().In(uintptr(m)).String(name))
	return Function(f), r
}

func (l *Lib) LaunchKernel(f Function, grid, block [3]uint32, sharedBytes uint32, s Stream, params unsafe.Pointer) Result {
	return l.Call(fnLaunchKernel, dl.Get().In(uintptr(f),
		uintptr(grid[0]), uintptr(grid[1]), uintptr(grid[2]),
		uintptr(block[0]), uintptr(block[1]), uintptr(block[2]),
		uintptr(sharedBytes), uintptr(s)).Ptr(params).In(0)) // no extra
}
