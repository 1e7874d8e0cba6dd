package cudadrv

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) MemGetInfo() (free, total uintptr, r Result) {
	v, w, r := l.Call2(fnMemGetInfo, dl.Get().Out().Out())
	return uintptr(v), uintptr(w), r
}

func (l *Lib) MemAlloc(bytes uintptr) (DevicePtr, Result) {
	p, r := l.Call1(fnMemAlloc, dl.Get().Out().In(bytes))
	return DevicePtr(p), r
}

func (l *Lib) MemFree(p DevicePtr) Result { return l.Call(fnMemFree, dl.Get().In(uintptr(p))) }

func (l *Lib) MemGetAddressRange(p DevicePtr) (base DevicePtr, bytes uintptr, r Result) {
	v, w, r := l.Call2(fnMemGetAddressRange, dl.Get().Out().Out().In(uintptr(p)))
	return DevicePtr(v), uintptr(w), r
}

func (l *Lib) IpcGetMemHandle(p DevicePtr) (IpcMemHandle, Result) {
	h := new(IpcMemHandle)
	r := l.Call(fnIpcGetMemHandle, dl.Get().Ptr(unsafe.Pointer(h)).In(uintptr(p)))
	return *h, r
}

func (l *Lib) IpcOpenMemHandle(h IpcMemHandle, flags uint32) (DevicePtr, Result) {
	p, r := l.Call1(fnIpcOpenMemHandle, dl.Get().Out().Struct64((*[64]byte)(&h)).In(uintptr(flags)))
	return DevicePtr(p), r
}

func (l *Lib) IpcCloseMemHandle(p DevicePtr) Result {
	return l.Call(fnIpcCloseMemHandle, dl.Get().In(uintptr(p)))
}

func (l *Lib) MemHostAlloc(bytes uintptr, flags uint32) (unsafe.Pointer, Result) {
	p, r := l.Call1(fnMemHostAlloc, dl.Get().Out().In(bytes, uintptr(flags)))
	return dl.Pointer(p), r
}

func (l *Lib) MemFreeHost(p unsafe.Pointer) Result { return l.Call(fnMemFreeHost, dl.Get().Ptr(p)) }

func (l *Lib) MemHostRegister(p unsafe.Pointer, bytes uintptr, flags uint32) Result {
	return l.Call(fnMemHostRegister, dl.Get().Ptr(p).In(bytes, uintptr(flags)))
}

func (l *Lib) MemHostUnregister(p unsafe.Pointer) Result {
	return l.Call(fnMemHostUnregister, dl.Get().Ptr(p))
}

func (l *Lib) MemcpyHtoDAsync(dst DevicePtr, src unsafe.Pointer, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyHtoDAsync, dl.Get().In(uintptr(dst)).Ptr(src).In(bytes, uintptr(s)))
}

func (l *Lib) MemcpyDtoHAsync(dst unsafe.Pointer, src DevicePtr, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyDtoHAsync, dl.Get().Ptr(dst).In(uintptr(src), bytes, uintptr(s)))
}

func (l *Lib) MemcpyDtoDAsync(dst, src DevicePtr, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyDtoDAsync, dl.Get().In(uintptr(dst), uintptr(src), bytes, uintptr(s)))
}

func (l *Lib) MemcpyPeerAsync(dst DevicePtr, dstCtx Context, src DevicePtr, srcCtx Context, bytes uintptr, s Stream) Result {
	return l.Call(fnMemcpyPeerAsync, dl.Get().In(uintptr(dst), uintptr(dstCtx), uintptr(src), uintptr(srcCtx), bytes, uintptr(s)))
}

func (l *Lib) Memcpy2DAsync(c Memcpy2D, s Stream) Result {
	return l.Call(fnMemcpy2DAsync, dl.Get().Ptr(unsafe.Pointer(c.c())).In(uintptr(s)))
}

func (l *Lib) MemsetD8Async(dst DevicePtr, value uint8, count uintptr, s Stream) Result {
	return l.Call(fnMemsetD8Async, dl.Get().In(uintptr(dst), uintptr(value), count, uintptr(s)))
}
