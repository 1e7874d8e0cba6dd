package cudadrv

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) MemAllocAsync(bytes uintptr, s Stream) (DevicePtr, Result) {
	p, r := l.Call1(fnMemAllocAsync, dl.Get().Out().In(bytes, uintptr(s)))
	return DevicePtr(p), r
}

func (l *Lib) MemFreeAsync(p DevicePtr, s Stream) Result {
	return l.Call(fnMemFreeAsync, dl.Get().In(uintptr(p), uintptr(s)))
}

func (l *Lib) MemPoolGetAttribute(p MemPool, attr int32) (uint64, Result) {
	return l.Call1(fnMemPoolGetAttribute, dl.Get().In(uintptr(p), uintptr(attr)).Out())
}

func (l *Lib) MemPoolSetAttribute(p MemPool, attr int32, value uint64) Result {
	return l.Call(fnMemPoolSetAttribute, dl.Get().In(uintptr(p), uintptr(attr)).InOut(value))
}

func (l *Lib) MemPoolSetAccess(p MemPool, peer Device) Result {
	desc := &memAccessDesc{memLocation{memLocationTypeDevice, int32(peer)}, int32(MemAccessReadWrite)}
	return l.Call(fnMemPoolSetAccess, dl.Get().In(uintptr(p)).Ptr(unsafe.Pointer(desc)).In(1))
}

func (l *Lib) MemPoolTrimTo(p MemPool, keep uintptr) Result {
	return l.Call(fnMemPoolTrimTo, dl.Get().In(uintptr(p), keep))
}
