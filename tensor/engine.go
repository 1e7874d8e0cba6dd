package tensor

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A copy engine copies rows between devices from so many bytes of a row and of all on,
// where they lie one after the other in the destination: it reads rows that are apart
// faster than a kernel, but does not write them so. The driver takes any steps between
// devices, as the tests' of 68 bytes on H200s, and wants cuMemAllocPitch's only within one.
var (
	engineRow   = 256
	engineBytes = 1 << 20
)

// engineRows returns the copy of src to dst, which have one shape and are of two devices,
// as a piece, and reports whether it is rows that a copy engine takes.
func engineRows(dst, src Tensor) (piece, bool) {
	p, ok := pieceOf(dst, src)
	return p, ok && p.rows > 1 && p.row >= engineRow && p.bytes() >= engineBytes &&
		p.toStep == p.row && p.fromStep >= p.row && p.fromStep <= memory.MaxPitch
}

// ByEngine reports whether Copy leaves to a copy engine what goes between two devices that
// reach each other: one run, or long rows that become one. The tensors have one shape. For
// Chorus's own packages.
func ByEngine(dst, src Tensor) bool {
	if p, ok := pieceOf(dst, src); ok && p.rows == 1 {
		return true
	}
	_, ok := engineRows(dst, src)
	return ok
}

// copyRows copies a piece, which is src to dst.
func copyRows(s *stream.Stream, dst, src Tensor, p piece) error {
	to, err := dst.rows(p.toStep, p)
	if err != nil {
		return err
	}
	from, err := src.rows(p.fromStep, p)
	if err != nil {
		return err
	}
	return memory.CopyRows(s, to, from, p.row, p.rows)
}

// rows returns the memory that rows of a piece take.
func (t Tensor) rows(pitch int, p piece) (memory.Rows, error) {
	x, err := memory.View[uint8](t.mem.buf, t.off, (p.rows-1)*pitch+p.row)
	return memory.Rows{Slice: x, Pitch: pitch}, err
}
