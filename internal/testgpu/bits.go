package testgpu

import (
	"bytes"
	"unsafe"
)

// SameBits reports whether two slices of numbers have the same bits. It is fast for long
// slices: the race detector checks each slice as one range.
func SameBits[T any](a, b []T) bool { return bytes.Equal(bytesOf(a), bytesOf(b)) }

func bytesOf[T any](x []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(z)))
}
