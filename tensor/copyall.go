package tensor

import (
	"fmt"
	"math/bits"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// maxPieces is how many copies a kernel makes; tensor.cu says so too.
const maxPieces = 10

// smallPiece is up to how many bytes it does not pay that a copy is a call of its
// own.
const smallPiece = 1 << 20

// CopyAll enqueues the copy of each tensor of src to the same one of dst on s, as Copy
// does. Of those within a device that are one run each, without a conversion, and small, ten
// are made by one kernel (torch._foreach_copy_). The tensors of dst share no memory with
// each other or with those of src.
func CopyAll(s *stream.Stream, dst, src []Tensor) error {
	const op = "tensor: copy all"
	if len(dst) != len(src) {
		return fmt.Errorf("%s: %d tensors to %d: want as many", op, len(src), len(dst))
	}
	for i := range src {
		if err := CheckCopy(op, dst[i], src[i]); err != nil {
			return fmt.Errorf("%w (tensor %d of %d)", err, i, len(src))
		}
	}
	var batch []int
	flush := func() error {
		defer func() { batch = batch[:0] }()
		if len(batch) == 1 {
			return Copy(s, dst[batch[0]], src[batch[0]])
		}
		return copyPieces(s, dst, src, batch)
	}
	for i := range src {
		if !small(s, dst[i], src[i]) {
			if err := Copy(s, dst[i], src[i]); err != nil {
				return err
			}
			continue
		}
		if dst[i].Len() == 0 {
			continue
		}
		if len(batch) == maxPieces {
			if err := flush(); err != nil {
				return err
			}
		}
		batch = append(batch, i)
	}
	return flush()
}

// small reports whether a copy may be one of many.
func small(s *stream.Stream, dst, src Tensor) bool {
	return s.Open() && dst.Device() == s.Device() && src.Device() == s.Device() && dst.dtype == src.dtype &&
		dst.Bytes() <= smallPiece && dst.Len() == src.Len() && dst.Contiguous() && src.Contiguous() && !same(dst, src)
}

// copyPieces makes the copies of a batch.
func copyPieces(s *stream.Stream, dst, src []Tensor, batch []int) error {
	if len(batch) == 0 {
		return nil
	}
	k, err := kernelsOf(s.Device())
	if err != nil {
		return err
	}
	all := uint64(16) // a common width
	for _, i := range batch {
		all |= dst[i].Ptr() | src[i].Ptr() | uint64(dst[i].Bytes())
	}
	width := 1 << bits.TrailingZeros64(all)
	args := make([]kernel.Arg, 2, 2+3*maxPieces)
	end := 0
	for _, i := range batch {
		to, err := dst[i].from(0)
		if err != nil {
			return err
		}
		from, err := src[i].from(0)
		if err != nil {
			return err
		}
		end += dst[i].Bytes() / width
		args = append(args, kernel.Ptr(to), kernel.Ptr(from), kernel.Uint32(uint32(end)))
	}
	for range maxPieces - len(batch) {
		args = append(args, kernel.Null(), kernel.Null(), kernel.Uint32(uint32(end)))
	}
	args[0], args[1] = kernel.Uint32(uint32(end)), kernel.Uint32(uint32(len(batch)))
	return k.pieces[bits.TrailingZeros(uint(width))].Launch(s, cover(end), args...)
}

// standInPieces stands in for many copies of elements that are a number of Ws wide.
func standInPieces[W memory.Element](width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		begin := 0
		for i := range int(c.Uint32(1)) {
			end := int(c.Uint32(4 + 3*i))
			n := (end - begin) * width
			copy(kernel.Update[W](c, 2+3*i, n), kernel.Read[W](c, 3+3*i, n))
			begin = end
		}
	}
}

// pieceParams are how many elements and pieces there are, and the pieces.
func pieceParams() []kernel.Param {
	ps := []kernel.Param{kernel.U32, kernel.U32}
	for range maxPieces {
		ps = append(ps, kernel.Pointer, kernel.Pointer, kernel.U32)
	}
	return ps
}

// from returns the memory of a tensor of a device from a byte behind its first
// element on.
func (t Tensor) from(byteOffset int) (memory.Slice[uint8], error) {
	return memory.View[uint8](t.mem.buf, t.off+byteOffset, 0)
}
