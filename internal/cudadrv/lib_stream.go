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

func (l *Lib) EventRecordWithFlags(e Event, s Stream, flags uint32) Result {
	return l.Call(fnEventRecordWithFlags, dl.Get().In(uintptr(e), uintptr(s), uintptr(flags)))
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
