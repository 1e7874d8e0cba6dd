package ncclapi

import (
	"runtime"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
)

// ParamGetParameter returns parameters of every type as text, and ParamGetI64 every number. The
// getters of narrower types, of text and of bytes return the same values, so they are not bound.
//
// NCCL owns the strings that it returns for parameters, until the next such call of the
// thread.

func (l *Lib) ParamGetParameter(key string) (string, Result) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	text, n, r := l.Call2(FuncParamGetParameter, dl.Get().String(key).Out().Out())
	if r != Success || text == 0 {
		return "", r
	}
	return string(unsafe.Slice((*byte)(dl.Pointer(text)), int(int32(n)))), r
}

func (l *Lib) ParamGetAllParameterKeys() ([]string, Result) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	table, n, r := l.Call2(FuncParamGetAllParameterKeys, dl.Get().Out().Out())
	if r != Success || table == 0 {
		return nil, r
	}
	var keys []string
	for _, text := range unsafe.Slice((*uintptr)(dl.Pointer(table)), int(int32(n))) {
		keys = append(keys, dl.GoString(text))
	}
	return keys, r
}

func (l *Lib) ParamBind(key string) (Param, Result) {
	p, r := l.Call1(FuncParamBind, dl.Get().Out().String(key))
	return Param(p), r
}

func (l *Lib) ParamGetI64(p Param) (int64, Result) {
	v, r := l.Call1(FuncParamGetI64, dl.Get().In(uintptr(p)).Out())
	return int64(v), r
}

func (l *Lib) ParamDumpAll() Result {
	if r := l.Call(FuncParamDumpAll, dl.Get()); r == MissingSymbol {
		return r
	}
	return Success // the function of C has no result
}
