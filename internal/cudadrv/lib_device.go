package cudadrv

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

var _ Driver = (*Lib)(nil)

// textBytes holds any device name or PCI address that the driver writes.
const textBytes = 256

// The methods of Lib have no comments: each is the C function of
// its name.

func (l *Lib) Init() Result { return l.Call(fnInit, dl.Get().In(0)) }

func (l *Lib) DriverGetVersion() (int32, Result) {
	v, r := l.Call1(fnDriverGetVersion, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) DeviceGetCount() (int32, Result) {
	n, r := l.Call1(fnDeviceGetCount, dl.Get().Out())
	return int32(n), r
}

func (l *Lib) DeviceGet(ordinal int32) (Device, Result) {
	d, r := l.Call1(fnDeviceGet, dl.Get().Out().In(uintptr(ordinal)))
	return Device(d), r
}

func (l *Lib) DeviceGetName(d Device) (string, Result) {
	b := make([]byte, textBytes)
	r := l.Call(fnDeviceGetName, dl.Get().Ptr(unsafe.Pointer(&b[0])).In(textBytes, uintptr(d)))
	return dl.CString(b), r
}

func (l *Lib) DeviceGetUUID(d Device) (UUID, Result) {
	u := new(UUID)
	r := l.Call(fnDeviceGetUUID, dl.Get().Ptr(unsafe.Pointer(u)).In(uintptr(d)))
	return *u, r
}

func (l *Lib) DeviceGetAttribute(a Attribute, d Device) (int32, Result) {
	v, r := l.Call1(fnDeviceGetAttribute, dl.Get().Out().In(uintptr(a), uintptr(d)))
	return int32(v), r
}

func (l *Lib) DeviceTotalMem(d Device) (uintptr, Result) {
	n, r := l.Call1(fnDeviceTotalMem, dl.Get().Out().In(uintptr(d)))
	return uintptr(n), r
}

func (l *Lib) DeviceGetPCIBusID(d Device) (string, Result) {
	b := make([]byte, textBytes)
	r := l.Call(fnDeviceGetPCIBusID, dl.Get().Ptr(unsafe.Pointer(&b[0])).In(textBytes, uintptr(d)))
	return dl.CString(b), r
}

func (l *Lib) DeviceCanAccessPeer(d, peer Device) (int32, Result) {
	v, r := l.Call1(fnDeviceCanAccessPeer, dl.Get().Out().In(uintptr(d), uintptr(peer)))
	return int32(v), r
}

func (l *Lib) DeviceGetDefaultMemPool(d Device) (MemPool, Result) {
	p, r := l.Call1(fnDeviceGetDefaultMemPool, dl.Get().Out().In(uintptr(d)))
	return MemPool(p), r
}

func (l *Lib) DevicePrimaryCtxRetain(d Device) (Context, Result) {
	c, r := l.Call1(fnDevicePrimaryCtxRetain, dl.Get().Out().In(uintptr(d)))
	return Context(c), r
}

func (l *Lib) DevicePrimaryCtxRelease(d Device) Result {
	return l.Call(fnDevicePrimaryCtxRelease, dl.Get().In(uintptr(d)))
}

func (l *Lib) DevicePrimaryCtxGetState(d Device) (flags uint32, active int32, r Result) {
	v, w, r := l.Call2(fnDevicePrimaryCtxGetState, dl.Get().In(uintptr(d)).Out().Out())
	return uint32(v), int32(w), r
}

func (l *Lib) DeviceGetP2PAttribute(a P2PAttribute, src, dst Device) (int32, Result) {
	v, r := l.Call1(fnDeviceGetP2PAttribute, dl.Get().Out().In(uintptr(a), uintptr(src), uintptr(dst)))
	return int32(v), r
}

func (l *Lib) CtxSetCurrent(c Context) Result {
	return l.Call(fnCtxSetCurrent, dl.Get().In(uintptr(c)))
}

func (l *Lib) CtxGetCurrent() (Context, Result) {
	c, r := l.Call1(fnCtxGetCurrent, dl.Get().Out())
	return Context(c), r
}

func (l *Lib) CtxSynchronize() Result { return l.Call(fnCtxSynchronize, dl.Get()) }

func (l *Lib) CtxGetStreamPriorityRange() (least, greatest int32, r Result) {
	v, w, r := l.Call2(fnCtxGetStreamPriorityRange, dl.Get().Out().Out())
	return int32(v), int32(w), r
}

func (l *Lib) CtxEnablePeerAccess(peer Context, flags uint32) Result {
	return l.Call(fnCtxEnablePeerAccess, dl.Get().In(uintptr(peer), uintptr(flags)))
}

func (l *Lib) ProfilerStart() Result { return l.Call(fnProfilerStart, dl.Get()) }

func (l *Lib) ProfilerStop() Result { return l.Call(fnProfilerStop, dl.Get()) }
