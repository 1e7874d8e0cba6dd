package virtual

import (
	"fmt"
	"os"
	"slices"
	"sort"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

const (
	// Device addresses begin at 1<<48, behind all host addresses. Each device has 1<<43
	// of them, so that those of all 64 end below 1<<50: allocators know no higher ones.
	addressBase  = 1 << 48
	addressShift = 43

	blockAlign = 512
	blockGuard = 4096 // unused addresses behind each block
	hostAlign  = 4096

	// Poison is laid page by page at the first touch, so that a large block of
	// which little is used costs little: an allocator's segments mostly are such.
	poisonPage = 1 << 16

	// A freed block of at most this size is poisoned whole.
	poisonFreed = 1 << 20

	// How many freed blocks an arena remembers for the sake of explanations.
	keepFreed = 4096
)

// A block is one allocation, or one reservation of addresses. m.mu guards all but
// the bytes.
type block struct {
	dev        *device // nil for page-locked host memory
	addr       uint64
	size       uint64
	data       []byte   // nil once freed
	region     *region  // that data lies in; nil for Go's memory
	file       *os.File // that other processes can map; nil where they cannot
	clean      pages
	pool       *pool   // of cuMemAllocAsync; nil for others
	space      *space  // what is mapped in a reservation; nil for others
	opened     *opened // of cuIpcOpenMemHandle; nil for others
	pieces     *pieces // that an allocator gave out of it; nil where none did
	public     bool    // of ncclMemAlloc: every device may use it
	registered bool    // of cuMemHostRegister: the bytes are the user's
	cufile     int     // how many of cuFile's registrations lie in it
	freeing    bool    // a free was called: no call may name it any more
	freedBy    string  // the call that freed it, once it has
	history    history
}

func (b *block) String() string {
	where := "page-locked host memory"
	if b.dev != nil {
		where = fmt.Sprintf("device %d", b.dev.ordinal)
	}
	kind := "block"
	if b.space != nil {
		kind = "reservation"
	}
	return fmt.Sprintf("the %s of %d bytes at %#x of %s", kind, b.size, b.addr, where)
}

// bytes returns a part of the block, poisoned where nothing was written yet.
func (b *block) bytes(offset, n uint64) []byte {
	if b.space != nil {
		b.space.lay(b, offset, n)
	}
	b.clean.lay(b.data, offset, n)
	return b.data[offset : offset+n : offset+n]
}

// pages says of each page of some memory whether it is still to be poisoned. Nil
// is memory without such pages.
type pages []bool

func newPages(bytes uint64) pages {
	p := make(pages, (bytes+poisonPage-1)/poisonPage)
	for i := range p {
		p[i] = true
	}
	return p
}

// lay poisons the pages that [offset, offset+n) touches, where that is to be done.
func (p pages) lay(data []byte, offset, n uint64) {
	for page := offset / poisonPage; page < uint64(len(p)) && page*poisonPage < offset+n; page++ {
		if p[page] {
			p[page] = false
			poison(data[page*poisonPage : min((page+1)*poisonPage, uint64(len(data)))])
		}
	}
}

// stain poisons [offset, offset+n) of data anew, whole pages not before their first
// touch.
func (p pages) stain(data []byte, offset, n uint64) {
	for at, end := offset, offset+n; at < end; {
		page := at / poisonPage
		next := min((page+1)*poisonPage, end)
		switch {
		case page < uint64(len(p)) && p[page]:
		case page < uint64(len(p)) && at == page*poisonPage && next == min((page+1)*poisonPage, uint64(len(data))):
			p[page] = true
		default:
			poison(data[at:next])
		}
		at = next
	}
}

// retire makes the block's addresses invalid for good.
func (b *block) retire(by string) {
	if b.size <= poisonFreed && !b.registered && b.opened == nil { // what is not its own lives on
		poison(b.data)
	}
	if b.space != nil {
		b.space.clear(b)
	}
	b.freeing, b.freedBy = true, by
	if b.region != nil && b.space == nil {
		b.region.detach(0, uintptr(len(b.data)))
	}
	if b.file != nil {
		b.file.Close()
	}
	b.data, b.region, b.file, b.clean, b.pieces, b.history = nil, nil, nil, nil, nil, history{}
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
	return &block{dev: dev, size: n, data: alignedBytes(n, align), clean: newPages(n)}
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
func (d *device) alloc(n uintptr, fresh func() *block) *block {
	if n > d.m.cfg.Memory-d.arena.used {
		return nil
	}
	addr, ok := d.arena.place(uint64(n), blockAlign)
	if !ok {
		return nil
	}
	b := fresh()
	b.addr = addr
	d.arena.blocks = append(d.arena.blocks, b)
	d.take(n)
	return b
}

// place finds addresses for n bytes.
func (a *arena) place(n, align uint64) (addr uint64, ok bool) {
	addr = (a.next + align - 1) &^ (align - 1)
	if addr > a.end || n > a.end-addr || 2*blockGuard > a.end-addr-n {
		return 0, false
	}
	a.next = (addr + n + blockGuard + blockAlign - 1) &^ (blockAlign - 1)
	return addr, true
}

// take counts memory, which is there, as used.
func (d *device) take(n uintptr) {
	d.arena.used += n
	d.squeezePools()
}

// giveUp counts a block as free from the call on that frees it, as a pool that
// reuses memory in stream order does.
func (b *block) giveUp() {
	b.dev.arena.used -= uintptr(b.size)
	if b.pool != nil {
		b.pool.give(b.size)
	}
	b.leave()
}

// leave makes the block one that no call may name.
func (b *block) leave() {
	b.dev.m.cufile.freed(b)
	b.freeing = true
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
