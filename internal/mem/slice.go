package mem

import "unsafe"

// A SliceHeader has the layout of every memory.Slice. Package kernel writes it, to give the
// stand-in of a kernel the addresses and lengths of the launch's arguments: a slice without a
// buffer, whose offset is the address. No method of such a slice reaches memory.
type SliceHeader struct {
	Buffer unsafe.Pointer
	Offset uintptr
	Len    int
	Root   bool
}
