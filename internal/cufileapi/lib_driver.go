package cufileapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

func (l *Lib) GetVersion() (int32, Result) {
	v, r := l.Call1(FuncGetVersion, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) DriverOpen() Result { return l.Call(FuncDriverOpen, dl.Get()) }

func (l *Lib) DriverClose() Result { return l.Call(FuncDriverClose, dl.Get()) }

func (l *Lib) UseCount() int64 { return int64(l.Call(FuncUseCount, dl.Get())) }

func (l *Lib) DriverGetProperties(p *DrvProps) Result {
	return l.Call(FuncDriverGetProperties, dl.Get().Ptr(unsafe.Pointer(p)))
}

func (l *Lib) DriverSetPollMode(poll bool, thresholdKB uintptr) Result {
	return l.Call(FuncDriverSetPollMode, dl.Get().In(word(poll), thresholdKB))
}

func (l *Lib) DriverSetMaxDirectIOSize(kb uintptr) Result {
	return l.Call(FuncDriverSetMaxDirectIOSize, dl.Get().In(kb))
}

func (l *Lib) DriverSetMaxCacheSize(kb uintptr) Result {
	return l.Call(FuncDriverSetMaxCacheSize, dl.Get().In(kb))
}

func (l *Lib) DriverSetMaxPinnedMemSize(kb uintptr) Result {
	return l.Call(FuncDriverSetMaxPinnedMemSize, dl.Get().In(kb))
}

func (l *Lib) GetBARSizeInKB(gpu int32) (uintptr, Result) {
	kb, r := l.Call1(FuncGetBARSizeInKB, dl.Get().In(uintptr(gpu)).Out())
	return uintptr(kb), r
}

func word(b bool) uintptr {
	if b {
		return 1
	}
	return 0
}
