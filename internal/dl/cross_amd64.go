package dl

import (
	"runtime"
	"unsafe"
)

// crossC and passC have the addresses of cross and pass in cross_amd64.s, C functions.
var crossC, passC uintptr

// cgocall runs a C function on the system's stack. Like cgo's own calls it takes what lies
// on the goroutine's stack, which stays where it is until C runs.
//
//go:noescape
//go:linkname cgocall runtime.cgocall
func cgocall(fn uintptr, arg unsafe.Pointer) int32

// cross goes to C as purego does, but with one function before the other where
// that is wanted, and without copying the arguments once more.
func (f *Frame) cross() {
	cgocall(crossC, unsafe.Pointer(&f.crossing))
	runtime.KeepAlive(f)
}

// pass goes to C with nothing but the arguments.
func (p *passage) pass() int32 { return cgocall(passC, unsafe.Pointer(p)) }
