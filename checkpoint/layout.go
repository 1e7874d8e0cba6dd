package checkpoint

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/memory"
)

// slotAlign is the alignment of tensors in device memory, in bytes. The allocator has the same
// alignment, and it is enough for every kernel. Every element's size divides it.
const slotAlign = 512

func roundUp(n, align int) int { return (n + align - 1) / align * align }

// placed is a tensor of a checkpoint with its place in the file and in the memory
// of the ranks.
type placed struct {
	info Info
	cut  division // as the plan says
	flat division // where parts are contiguous, merged to one dimension

	file int   // which of the files
	off  int64 // of the first byte there
	from int   // bytes of an element there

	scattered *scattered // nil if the file has it in one run

	to memory.DType // in memory
	at []int        // by rank: the first byte of the part in its slab; -1 if the rank has no part
}

// casts reports whether elements change their type on the way.
func (s *placed) casts() bool { return s.to != s.info.DType }

// contiguous reports whether the parts of all ranks are runs of the file.
func (s *placed) contiguous() bool { return s.flat.outer == 1 }

// bytes returns the size of a rank's part in memory.
func (s *placed) bytes(rank int) int { return s.cut.elements(rank) * s.to.Size() }

// fileBytes returns the size of the whole tensor in its file.
func (s *placed) fileBytes() int { return s.flat.outer * s.flat.width * s.from }

// layOut gives every part its place, for each rank in the same order. Tensors that all ranks
// have whole come first, so that they have the same places on all ranks and are exchanged in
// long runs. The other tensors follow in the order of the files. layOut returns the size of
// each rank's slab.
func layOut(tensors []*placed, ranks int) (sizes []int, err error) {
	sizes = make([]int, ranks)
	for _, everywhere := range []bool{true, false} {
		for _, s := range tensors {
			if s.cut.everywhere() != everywhere {
				continue
			}
			s.at = make([]int, ranks)
			for r := range s.at {
				if s.at[r] = -1; !s.cut.holds(r) {
					continue
				}
				if s.bytes(r) > math.MaxInt-slotAlign-sizes[r] {
					return nil, fmt.Errorf("the tensors of rank %d up to %q are larger than any memory", r, s.info.Name)
				}
				s.at[r] = sizes[r]
				sizes[r] = roundUp(sizes[r]+s.bytes(r), slotAlign)
			}
		}
	}
	return sizes, nil
}

// fits reports whether the sizes of a tensor are numbers that int holds.
func fits(shape []int, size int) bool {
	n := size
	for _, d := range shape {
		if d != 0 && n > math.MaxInt/d {
			return false
		}
		n *= d
	}
	return true
}
