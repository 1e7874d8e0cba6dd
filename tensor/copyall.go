package tensor

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// smallPiece is up to how many bytes it does not pay that a copy of one run is a call of
// its own.
const smallPiece = 1 << 20

// CopyAll enqueues the copy of each tensor of src to the same one of dst on s, as Copy
// does. Those that need no conversion are made by one kernel for up to 120 of them
// (torch._foreach_copy_), also between devices where kernels reach the other one, if they
// are one run each and small, or rows of neighbours. The tensors of dst share no memory
// with each other or with those of src.
func CopyAll(s *stream.Stream, dst, src []Tensor) error { return copyAll(s, dst, src, smallPiece) }

// CopyByKernel is CopyAll that leaves no copy to the driver which kernels can make. For
// Chorus's own packages.
func CopyByKernel(s *stream.Stream, dst, src []Tensor) error {
	return copyAll(s, dst, src, math.MaxInt)
}

// copyAll makes runs of more than some bytes by a call of the driver each.
func copyAll(s *stream.Stream, dst, src []Tensor, most int) error {
	const op = "tensor: copy all"
	if len(dst) != len(src) {
		return fmt.Errorf("%s: %d tensors to %d: want as many", op, len(src), len(dst))
	}
	for i := range src {
		if err := CheckCopy(op, dst[i], src[i]); err != nil {
			return fmt.Errorf("%w (tensor %d of %d)", err, i, len(src))
		}
	}
	x := sorterOn(s)
	defer x.done()
	for i := range src {
		taken, err := x.take(dst[i], src[i], most)
		if err == nil && !taken {
			err = Copy(s, dst[i], src[i])
		}
		if err != nil {
			return err
		}
	}
	return x.flush()
}

// take makes a copy one of many, where it can be.
func (x *sorter) take(dst, src Tensor, most int) (bool, error) {
	if !x.s.Open() || dst.Len() == 0 || dst.IsHost() || src.IsHost() || same(dst, src) {
		return false, nil
	}
	on, a, b := x.s.Device(), dst.Device(), src.Device()
	if on != a && on != b {
		return false, nil // of which Copy tells
	}
	src, err := src.as(dst.shape)
	if err != nil {
		return false, err
	}
	p, ok := pieceOf(dst, src)
	if !ok || p.rows == 1 && p.row > most {
		return false, nil
	}
	if near, err := memory.Reach(on, a, b); err != nil || !near {
		return false, err
	}
	return x.add(p)
}
