package cudadrv

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) StreamBeginCapture(s Stream, mode CaptureMode) Result {
	return l.Call(fnStreamBeginCapture, dl.Get().In(uintptr(s), uintptr(mode)))
}

func (l *Lib) StreamEndCapture(s Stream) (Graph, Result) {
	g, r := l.Call1(fnStreamEndCapture, dl.Get().In(uintptr(s)).Out())
	return Graph(g), r
}

func (l *Lib) StreamIsCapturing(s Stream) (CaptureStatus, Result) {
	v, r := l.Call1(fnStreamIsCapturing, dl.Get().In(uintptr(s)).Out())
	return CaptureStatus(v), r
}

func (l *Lib) StreamGetCaptureInfo(s Stream) (status CaptureStatus, id uint64, r Result) {
	v, id, r := l.Call2(fnStreamGetCaptureInfo, dl.Get().In(uintptr(s)).Out().Out().In(0, 0, 0)) // no graph, no dependencies
	return CaptureStatus(v), id, r
}

func (l *Lib) StreamGetCaptureGraph(s Stream) (Graph, Result) {
	_, g, r := l.Call2(fnStreamGetCaptureInfo, dl.Get().In(uintptr(s)).Out().In(0).Out().In(0, 0)) // no id, no dependencies
	return Graph(g), r
}

func (l *Lib) ThreadExchangeStreamCaptureMode(mode CaptureMode) (CaptureMode, Result) {
	v, r := l.Call1(fnThreadExchangeStreamCaptureMode, dl.Get().InOut(uint64(mode)))
	return CaptureMode(v), r
}

func (l *Lib) GraphGetNodes(g Graph) (uintptr, Result) {
	n, r := l.Call1(fnGraphGetNodes, dl.Get().In(uintptr(g), 0).Out()) // no array: only the number
	return uintptr(n), r
}

func (l *Lib) GraphInstantiateWithFlags(g Graph, flags uint64) (GraphExec, Result) {
	e, r := l.Call1(fnGraphInstantiateWithFlags, dl.Get().Out().In(uintptr(g), uintptr(flags)))
	return GraphExec(e), r
}

func (l *Lib) GraphLaunch(e GraphExec, s Stream) Result {
	return l.Call(fnGraphLaunch, dl.Get().In(uintptr(e), uintptr(s)))
}

func (l *Lib) GraphUpload(e GraphExec, s Stream) Result {
	return l.Call(fnGraphUpload, dl.Get().In(uintptr(e), uintptr(s)))
}

func (l *Lib) GraphExecUpdate(e GraphExec, g Graph) (GraphExecUpdateResult, Result) {
	info := new(graphExecUpdateResultInfo)
	r := l.Call(fnGraphExecUpdate, dl.Get().In(uintptr(e), uintptr(g)).Ptr(unsafe.Pointer(info)))
	return info.Result, r
}

func (l *Lib) GraphExecDestroy(e GraphExec) Result {
	return l.Call(fnGraphExecDestroy, dl.Get().In(uintptr(e)))
}

func (l *Lib) GraphDestroy(g Graph) Result { return l.Call(fnGraphDestroy, dl.Get().In(uintptr(g))) }

func (l *Lib) UserObjectCreate(f dl.Closure) (UserObject, Result) {
	const references = 1
	o, r := l.Call1(fnUserObjectCreate, dl.Get().Out().In(uintptr(f), dl.ReleaseClosure(), references, userObjectNoDestructorSync))
	return UserObject(o), r
}

func (l *Lib) UserObjectRelease(o UserObject, count uint32) Result {
	return l.Call(fnUserObjectRelease, dl.Get().In(uintptr(o), uintptr(count)))
}

func (l *Lib) GraphRetainUserObject(g Graph, o UserObject, count, flags uint32) Result {
	return l.Call(fnGraphRetainUserObject, dl.Get().In(uintptr(g), uintptr(o), uintptr(count), uintptr(flags)))
}

func (l *Lib) GraphDebugDotPrint(g Graph, path string, flags uint32) Result {
	return l.Call(fnGraphDebugDotPrint, dl.Get().In(uintptr(g)).String(path).In(uintptr(flags)))
}
