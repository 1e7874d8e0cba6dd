package dl

import (
	"runtime"
	"unsafe"
)

// crossC has the address of cross in cross_amd64.s, a C function.
var crossC uintptr

//go:linkname cgocall runtime.cgocall
func cgocall(fn uintptr, arg unsafe.Pointer) int32

// cross goes to C as purego does, but with one function before the other where
// that is wanted, and without copying the arguments once more.
func (f *Frame) cross() {
	cgocall(crossC, unsafe.Pointer(&f.crossing))
	runtime.KeepAlive(f)
}
