package strided

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The minimum sizes, of a row and in total, for a copy of rows between devices by a copy
// engine. The rows must be contiguous in the destination: a copy engine reads strided rows
// faster than a kernel, but does not write them faster. Between devices the driver accepts
// any pitch (the tests use 68 bytes on H200s); it needs the pitch of cuMemAllocPitch only
// within one device.
var (
	engineRow   = 256
	engineBytes = 1 << 20
)

// engineRows returns the copy of src to dst as a piece, and reports whether a copy engine
// can copy its rows. The tensors have one shape and are on different devices.
func engineRows(dst, src Array) (piece, bool) {
	p, ok := pieceOf(dst, src)
	return p, ok && p.rows > 1 && p.row >= engineRow && p.bytes() >= engineBytes &&
		p.toStep == p.row && p.fromStep >= p.row && p.fromStep <= maxPitch
}

// ByEngine reports whether Copy uses a copy engine for a copy between two devices that can
// access each other: of contiguous memory, or of long rows that become contiguous. The
// tensors have the same shape.
func ByEngine[T Tensor](dst, src T) bool {
	to, from := dst.array(), src.array()
	if p, ok := pieceOf(to, from); ok && p.rows == 1 {
		return true
	}
	_, ok := engineRows(to, from)
	return ok
}

// copyRows copies a piece, which is src to dst.
func copyRows(s *stream.Stream, dst, src Array, p piece) error {
	to, err := dst.rows(p.toStep, p)
	if err != nil {
		return err
	}
	from, err := src.rows(p.fromStep, p)
	if err != nil {
		return err
	}
	return copyPitched(s, to, from, p.row, p.rows)
}

// rows returns the memory that the rows of a piece occupy.
func (t *Array) rows(pitch int, p piece) (pitched, error) {
	x, err := memory.View[uint8](t.mem.buf, t.Offset, (p.rows-1)*pitch+p.row)
	return pitched{x, pitch}, err
}
