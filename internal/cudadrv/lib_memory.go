package cudadrv

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

// memAccessDesc is CUmemAccessDesc.
type memAccessDesc struct {
	LocationType int32
	LocationID   int32
	Flags        int32
}

const (
	memLocationTypeDevice       = 1
	memAccessFlagsProtReadWrite = 3
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

func (l *Lib) MemAllocAsync(bytes uintptr, s Stream) (DevicePtr, Result) {
	p, r := l.Call1(fnMemAllocAsync, dl.Get().Out().In(bytes, uintptr(s)))
	return DevicePtr(p), r
}

func (l *Lib) MemFreeAsync(p DevicePtr, s Stream) Result {
	return l.Call(fnMemFreeAsync, dl.Get().In(uintptr(p), uintptr(s)))
}

func (l *Lib) MemPoolSetAttribute(p MemPool, attr int32, value uint64) Result {
	return l.Call(fnMemPoolSetAttribute, dl.Get().In(uintptr(p), uintptr(attr)).InOut(value))
}

func (l *Lib) MemPoolSetAccess(p MemPool, peer Device) Result {
	desc := &memAccessDesc{memLocationTypeDevice, int32(peer), memAccessFlagsProtReadWrite}
	return l.Call(fnMemPoolSetAccess, dl.Get().In(uintptr(p)).Ptr(unsafe.Pointer(desc)).In(1))
}

func (l *Lib) MemPoolTrimTo(p MemPool, keep uintptr) Result {
	return l.Call(fnMemPoolTrimTo, dl.Get().In(uintptr(p), keep))
}

func (l *Lib) MemHostAlloc(bytes uintptr, flags uint32) (unsafe.Pointer, Result) {
	p, r := l.Call1(fnMemHostAlloc, dl.Get().Out().In(bytes, uintptr(flags)))
	return dl.Pointer(p), r
}

func (l *Lib) MemFreeHost(p unsafe.Pointer) Result { return l.Call(fnMemFreeHost, dl.Get().Ptr(p)) }

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

func (l *Lib) MemsetD8Async(dst DevicePtr, value uint8, count uintptr, s Stream) Result {
	return l.Call(fnMemsetD8Async, dl.Get().In(uintptr(dst), uintptr(value), count, uintptr(s)))
}
