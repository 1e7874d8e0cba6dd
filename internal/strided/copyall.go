package strided

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/stream"
)

// smallPiece is the maximum size of a contiguous copy in a kernel for many copies. For larger
// copies, driver calls are faster.
const smallPiece = 1 << 20

// CopyAll enqueues the copy of each tensor of src to the corresponding tensor of dst; see
// tensor.CopyAll. One kernel makes up to 120 copies of arrays that need no conversion and
// are small and contiguous, or consist of contiguous rows.
func CopyAll[T Tensor](s *stream.Stream, dst, src []T) error {
	return copyAll(s, arrays(dst), arrays(src), smallPiece)
}

// CopyByKernel is CopyAll without copies by the driver, if a kernel can make them.
func CopyByKernel[T Tensor](s *stream.Stream, dst, src []T) error {
	return copyAll(s, arrays(dst), arrays(src), math.MaxInt)
}

// copyAll uses one driver call for each contiguous copy of more than most bytes.
func copyAll(s *stream.Stream, dst, src []Array, most int) error {
	const op = "tensor: copy all"
	if len(dst) != len(src) {
		return fmt.Errorf("%s: %d tensors to %d: want as many", op, len(src), len(dst))
	}
	for i := range src {
		if err := checkCopy(op, &dst[i], &src[i]); err != nil {
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

// take adds a copy to a launch for many, if possible.
func (x *sorter) take(dst, src Array, most int) (bool, error) {
	if (x.s == nil || !gpu.StreamOf(x.s).Open()) || dst.Len() == 0 || dst.IsHost() || src.IsHost() || same(&dst, &src) {
		return false, nil
	}
	on, a, b := x.s.Device(), dst.Device(), src.Device()
	if on != a && on != b {
		return false, nil // Copy returns the error
	}
	src, err := src.as(dst.Shape)
	if err != nil {
		return false, err
	}
	p, ok := pieceOf(dst, src)
	if !ok || p.rows == 1 && p.row > most {
		return false, nil
	}
	if near, err := mem.Reach(on, a, b); err != nil || !near {
		return false, err
	}
	return x.add(p)
}
