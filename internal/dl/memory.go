package dl

import (
	"bytes"
	"unsafe"
)

// Pointer converts an address from C to a pointer. The memory must belong to C: the
// garbage collector neither moves nor frees it.
func Pointer(address uint64) unsafe.Pointer {
	// Not unsafe.Pointer(uintptr), which go vet reports.
	return *(*unsafe.Pointer)(unsafe.Pointer(&address))
}

// GoString copies the NUL-terminated string at a C address; 0 is "".
func GoString(address uintptr) string {
	if address == 0 {
		return ""
	}
	p := Pointer(uint64(address))
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

// CString returns the text of a buffer that C filled, up to its first NUL.
func CString(b []byte) string {
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
