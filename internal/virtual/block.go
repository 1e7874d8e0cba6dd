package virtual

import (
	"fmt"
	"slices"
	"sort"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

const (
	// Device addresses have bit 48 set, which no host address has, and the
	// device's ordinal in the bits from 44 up.
	addressBase  = 1 << 48
	addressShift = 44

	blockAlign = 512
	blockGuard = 4096 // unused addresses behind each block
	hostAlign  = 4096

	// Poison is laid page by page at the first touch, so that a large block of
	// which little is used costs little.
	poisonPage = 1 << 20

	// How many freed blocks an arena remembers for the sake of explanations.
	keepFreed = 4096
)

// A block is one allocation. m.mu guards all but the bytes.
type block struct {
	dev     *device // nil for page-locked host memory
	addr    uint64
	size    uint64
	data    []byte // nil once freed
	clean   []bool // pages not yet poisoned
	pooled  bool   // of cuMemAllocAsync
	public  bool   // of ncclMemAlloc: every device may use it
	freeing bool   // a free was called: no call may name it any more
	freedBy string // the call that freed it, once it has
	history history
}

func (b *block) String() string {
	where := "page-locked host memory"
	if b.dev != nil {
		where = fmt.Sprintf("device %d", b.dev.ordinal)
	}
	return fmt.Sprintf("the block of %d bytes at %#x of %s", b.size, b.addr, where)
}

// bytes returns a part of the block, poisoned where nothing was written yet.
func (b *block) bytes(offset, n uint64) []byte {
	for page := offset / poisonPage; page*poisonPage < offset+n; page++ {
		if b.clean[page] {
			b.clean[page] = false
			poison(b.data[page*poisonPage : min((page+1)*poisonPage, b.size)])
		}
	}
	return b.data[offset : offset+n : offset+n]
}

// retire makes the block's addresses invalid for good.
func (b *block) retire(by string) {
	if b.size <= poisonPage {
		poison(b.data)
	}
	b.freeing, b.freedBy = true, by
	b.data, b.clean, b.history = nil, nil, history{}
}

// poison fills p with a pattern that is not a number in each of the 16, 32 and
// 64-bit float types and hardly a plausible integer.
func poison(p []byte) {
	if len(p) == 0 {
		return
	}
	p[0] = 0xf5
	if len(p) > 1 {
		p[1] = 0xff
	}
	for n := 2; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}

// alignedBytes returns n zero bytes at a multiple of align.
func alignedBytes(n uint64, align uintptr) []byte {
	raw := make([]byte, n+uint64(align))
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(raw))) & (align - 1)
	return raw[skip : uint64(skip)+n : uint64(skip)+n]
}

func newBlock(dev *device, n uint64, align uintptr) *block {
	b := &block{dev: dev, size: n, data: alignedBytes(n, align), clean: make([]bool, (n+poisonPage-1)/poisonPage)}
	for i := range b.clean {
		b.clean[i] = true
	}
	return b
}

// An arena has the blocks of one device in the order of their addresses, which
// is the order in which they were made: an address is never given out twice.
type arena struct {
	blocks []*block
	next   uint64
	end    uint64
	used   uintptr // bytes of the blocks whose free was not called
	freed  int     // how many of blocks are freed
}

func newArena(ordinal int32) arena {
	base := uint64(addressBase) + uint64(ordinal)<<addressShift
	return arena{next: base + 1<<32, end: base + 1<<addressShift}
}

// alloc makes a block, or returns nil when the device has not enough memory.
func (d *device) alloc(n uintptr) *block {
	a := &d.arena
	if n > d.m.cfg.Memory-a.used || uint64(n)+2*blockGuard > a.end-a.next {
		return nil
	}
	b := newBlock(d, uint64(n), blockAlign)
	b.addr = a.next
	a.next += (b.size + blockGuard + blockAlign - 1) &^ (blockAlign - 1)
	a.used += n
	a.blocks = append(a.blocks, b)
	return b
}

// giveUp counts a block as free from the call on that frees it, as a pool that
// reuses memory in stream order does.
func (b *block) giveUp() {
	b.freeing = true
	b.dev.arena.used -= uintptr(b.size)
	b.dev.arena.freed++
	b.dev.arena.forget()
}

// forget drops old freed blocks when there are too many.
func (a *arena) forget() {
	if a.freed <= 2*keepFreed {
		return
	}
	a.blocks = slices.DeleteFunc(a.blocks, func(b *block) bool {
		if b.freedBy == "" || a.freed <= keepFreed {
			return false
		}
		a.freed--
		return true
	})
}

func (a *arena) clear(by string) {
	for _, b := range a.blocks {
		if b.freedBy == "" {
			b.retire(by)
		}
	}
	a.used, a.freed = 0, len(a.blocks)
	a.forget()
}

// lookup returns the block that p lies in, or the nearest one before it, or
// nil.
func lookup(blocks []*block, p uint64) *block {
	i := sort.Search(len(blocks), func(i int) bool { return blocks[i].addr > p })
	if i == 0 {
		return nil
	}
	return blocks[i-1]
}

func (b *block) contains(p uint64) bool { return b != nil && p-b.addr < max(b.size, 1) }

// find returns the block, live or freed, that p points into. When there is
// none, near is the one that p may have run out of. m.mu is held.
func (m *Machine) find(p cudadrv.DevicePtr) (b, near *block) {
	blocks := m.pinned
	if p >= addressBase {
		ordinal := (p - addressBase) >> addressShift
		if ordinal >= cudadrv.DevicePtr(len(m.devices)) {
			return nil, nil
		}
		blocks = m.devices[ordinal].arena.blocks
	}
	near = lookup(blocks, uint64(p))
	if near.contains(uint64(p)) {
		return near, nil
	}
	return nil, near
}
