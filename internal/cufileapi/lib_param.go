package cufileapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

// maxText is the longest text of a parameter, with its NUL: a path.
const maxText = 4096

func (l *Lib) SetParameterSizeT(p SizeTParam, v uintptr) Result {
	return l.Call(FuncSetParameterSizeT, dl.Get().In(uintptr(p), v))
}

func (l *Lib) SetParameterBool(p BoolParam, v bool) Result {
	return l.Call(FuncSetParameterBool, dl.Get().In(uintptr(p), word(v)))
}

func (l *Lib) SetParameterString(p StringParam, v string) Result {
	return l.Call(FuncSetParameterString, dl.Get().In(uintptr(p)).String(v))
}

func (l *Lib) GetParameterSizeT(p SizeTParam) (uintptr, Result) {
	v, r := l.Call1(FuncGetParameterSizeT, dl.Get().In(uintptr(p)).Out())
	return uintptr(v), r
}

func (l *Lib) GetParameterBool(p BoolParam) (bool, Result) {
	v, r := l.Call1(FuncGetParameterBool, dl.Get().In(uintptr(p)).Out())
	return byte(v) != 0, r
}

func (l *Lib) GetParameterString(p StringParam) (string, Result) {
	text := make([]byte, maxText)
	r := l.Call(FuncGetParameterString, dl.Get().In(uintptr(p)).Ptr(unsafe.Pointer(&text[0])).In(uintptr(len(text))))
	return dl.CString(text), r
}

func (l *Lib) GetParameterMinMaxValue(p SizeTParam) (least, greatest uintptr, r Result) {
	lo, hi, r := l.Call2(FuncGetParameterMinMaxValue, dl.Get().In(uintptr(p)).Out().Out())
	return uintptr(lo), uintptr(hi), r
}

func (l *Lib) SetParameterPosixPoolSlabArray(sizesKB, counts []uintptr) Result {
	return l.slabs(FuncSetParameterPosixPoolSlabArray, sizesKB, counts)
}

func (l *Lib) GetParameterPosixPoolSlabArray(sizesKB, counts []uintptr) Result {
	return l.slabs(FuncGetParameterPosixPoolSlabArray, sizesKB, counts)
}

func (l *Lib) slabs(f Func, sizesKB, counts []uintptr) Result {
	if len(sizesKB) != len(counts) {
		return InvalidValue // C has one length for both
	}
	return l.Call(f, dl.Get().Ptr(unsafe.Pointer(unsafe.SliceData(sizesKB))).
		Ptr(unsafe.Pointer(unsafe.SliceData(counts))).In(uintptr(len(counts))))
}
