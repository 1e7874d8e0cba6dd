//go:build !nolinkname

package dl

import (
	"runtime"
	"unsafe"
)

// crossC and passC are the addresses of the C functions cross and pass in cross_amd64.s.
var crossC, passC uintptr

// cgocall runs a C function on the system stack. Like cgo it receives arguments on the
// goroutine's stack, which does not move until C runs.
//
//go:noescape
//go:linkname cgocall runtime.cgocall
func cgocall(fn uintptr, arg unsafe.Pointer) int32

// cross calls C as purego does, but optionally calls another function first, and copies
// the arguments once less.
func (f *Frame) cross() {
	cgocall(crossC, unsafe.Pointer(&f.crossing))
	runtime.KeepAlive(f)
}

// pass calls C with the arguments only.
func (p *passage) pass() int32 { return cgocall(passC, unsafe.Pointer(p)) }
