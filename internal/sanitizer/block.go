package sanitizer

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/race"
)

// A block is an allocation of the driver, a reservation of addresses, or page-locked memory.
type block struct {
	base, size uint64
	ctx        cudadrv.Context // 0 for page-locked memory
	kind       string
	pool       bool // of a memory pool: cuMemFree does not wait
	history    race.History
	pieces     *race.Pieces // allocated from it by an allocator, or nil
	freed      string       // the call that freed it, or ""
	freedAt    *race.Place
}

func (b *block) String() string {
	return fmt.Sprintf("the %s of %d bytes at %#x", b.kind, b.size, b.base)
}

// barred returns the reason why [lo, hi) must not be used, or "".
func (b *block) barred(lo, hi uint64) string {
	if b.freed != "" {
		return fmt.Sprintf("which lies in %v that was freed by %s (%v)", b, b.freed, b.freedAt)
	}
	return b.pieces.Barred(b, b.base, lo, hi)
}

// blocks are sorted by address and do not overlap. A freed block stays until an allocation
// takes its addresses.
type blocks struct{ list []*block }

func (x *blocks) search(p uint64) (int, bool) {
	return slices.BinarySearchFunc(x.list, p, func(b *block, p uint64) int { return cmp.Compare(b.base, p) })
}

// find returns the block with the address, or nil.
func (x *blocks) find(p uint64) *block {
	i, found := x.search(p)
	if !found {
		i--
	}
	if i < 0 || p-x.list[i].base >= x.list[i].size {
		return nil
	}
	return x.list[i]
}

// at returns the unfreed block that begins at the address, or nil.
func (x *blocks) at(p uint64) *block {
	if i, found := x.search(p); found && x.list[i].freed == "" {
		return x.list[i]
	}
	return nil
}

// add adds a block in place of the blocks that had its addresses.
func (x *blocks) add(b *block) {
	first, found := x.search(b.base)
	if !found && first > 0 && x.list[first-1].base+x.list[first-1].size > b.base {
		first--
	}
	last := first
	for last < len(x.list) && x.list[last].base < b.base+b.size {
		last++
	}
	x.list = slices.Replace(x.list, first, last, b)
}

func (x *blocks) deleteOf(ctx cudadrv.Context) {
	x.list = slices.DeleteFunc(x.list, func(b *block) bool { return b.ctx == ctx })
}
