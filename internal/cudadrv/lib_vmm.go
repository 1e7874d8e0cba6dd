package cudadrv

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) MemGetAllocationGranularity(prop MemAllocationProp, option MemGranularity) (uintptr, Result) {
	n, r := l.Call1(fnMemGetAllocationGranularity, dl.Get().Out().Ptr(unsafe.Pointer(prop.c())).In(uintptr(option)))
	return uintptr(n), r
}

func (l *Lib) MemAddressReserve(bytes, alignment uintptr, hint DevicePtr) (DevicePtr, Result) {
	p, r := l.Call1(fnMemAddressReserve, dl.Get().Out().In(bytes, alignment, uintptr(hint), 0))
	return DevicePtr(p), r
}

func (l *Lib) MemAddressFree(p DevicePtr, bytes uintptr) Result {
	return l.Call(fnMemAddressFree, dl.Get().In(uintptr(p), bytes))
}

func (l *Lib) MemCreate(bytes uintptr, prop MemAllocationProp) (MemHandle, Result) {
	h, r := l.Call1(fnMemCreate, dl.Get().Out().In(bytes).Ptr(unsafe.Pointer(prop.c())).In(0))
	return MemHandle(h), r
}

func (l *Lib) MemRelease(h MemHandle) Result { return l.Call(fnMemRelease, dl.Get().In(uintptr(h))) }

func (l *Lib) MemMap(p DevicePtr, bytes, offset uintptr, h MemHandle) Result {
	return l.Call(fnMemMap, dl.Get().In(uintptr(p), bytes, offset, uintptr(h), 0))
}

func (l *Lib) MemUnmap(p DevicePtr, bytes uintptr) Result {
	return l.Call(fnMemUnmap, dl.Get().In(uintptr(p), bytes))
}

func (l *Lib) MemSetAccess(p DevicePtr, bytes uintptr, access MemAccess, devices ...Device) Result {
	if len(devices) == 0 {
		return ErrorInvalidValue
	}
	descs := make([]memAccessDesc, len(devices))
	for i, d := range devices {
		descs[i] = memAccessDesc{memLocation{memLocationTypeDevice, int32(d)}, int32(access)}
	}
	return l.Call(fnMemSetAccess, dl.Get().In(uintptr(p), bytes).Ptr(unsafe.Pointer(&descs[0])).In(uintptr(len(descs))))
}

func (l *Lib) MemExportToShareableHandle(h MemHandle, t MemHandleType) (int32, Result) {
	fd, r := l.Call1(fnMemExportToShareableHandle, dl.Get().Out().In(uintptr(h), uintptr(t), 0))
	return int32(fd), r
}

func (l *Lib) MemImportFromShareableHandle(fd int32, t MemHandleType) (MemHandle, Result) {
	h, r := l.Call1(fnMemImportFromShareableHandle, dl.Get().Out().In(uintptr(fd), uintptr(t)))
	return MemHandle(h), r
}
