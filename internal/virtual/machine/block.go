package machine

import (
	"fmt"
	"os"
	"slices"
	"sort"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

const (
	// Device addresses start at 1<<48, above all host addresses. Each device has
	// 1<<43 addresses, so that all 64 devices end below 1<<50, the limit of
	// Chorus's allocators.
	addressBase  = 1 << 48
	addressShift = 43

	blockAlign = 512
	blockGuard = 4096 // unused addresses after each block
	hostAlign  = 4096

	// Poison is written page by page at the first touch, because large blocks,
	// such as an allocator's segments, are often used only in part.
	poisonPage = 1 << 16

	// A freed block up to this size is poisoned completely.
	poisonFreed = 1 << 20

	// The number of freed blocks that an arena remembers for explanations.
	keepFreed = 4096
)

// A Block is one allocation, or one reservation of addresses. m.mu guards all
// fields, but not the bytes.
type Block struct {
	dev        *Device // nil for page-locked host memory
	addr       uint64
	size       uint64
	data       []byte   // nil once freed
	region     *region  // that contains data; nil for Go memory
	file       *os.File // that other processes can map, or nil
	clean      pages
	pool       *pool             // of cuMemAllocAsync, or nil
	space      *space            // the mappings of a reservation, or nil
	opened     *opened           // of cuIpcOpenMemHandle, or nil
	pieces     *sanitizer.Pieces // allocated from it by an allocator, or nil
	public     bool              // of ncclMemAlloc: accessible from every device
	registered bool              // of cuMemHostRegister: the bytes belong to the user
	// registrations is the number of its registrations with cuFile.
	registrations int
	freeing       bool   // a free was called: later calls must not use it
	freedBy       string // the call that freed it, after it ran
	history       sanitizer.History
}

func (b *Block) String() string {
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

// bytes returns a part of the block, whose bytes are poisoned if they were
// never written.
func (b *Block) bytes(offset, n uint64) []byte {
	if b.space != nil {
		b.space.lay(b, offset, n)
	}
	b.clean.lay(b.data, offset, n)
	return b.data[offset : offset+n : offset+n]
}

// overwrite is bytes for a fill with one value: it returns the parts that the caller fills.
func (b *Block) overwrite(offset, n uint64, value byte) (parts [][]byte) {
	if b.space == nil {
		return b.clean.overwrite(b.data, offset, n, value)
	}
	for _, x := range b.space.within(offset, n) {
		lo, hi := max(offset, x.lo), min(offset+n, x.hi)
		parts = append(parts, x.memory.clean.overwrite(b.data[x.lo:x.hi], lo-x.lo, hi-lo, value)...)
	}
	return parts
}

// pages has the state of each page of some memory. Nil is memory that is poisoned or
// written everywhere.
type pages []pageState

type pageState uint8

const (
	laid    pageState = iota // poisoned or written
	fresh                    // still to be poisoned; all bytes are zero
	stained                  // still to be poisoned; the bytes come from an earlier use
)

func newPages(bytes uint64) pages {
	p := make(pages, (bytes+poisonPage-1)/poisonPage)
	for i := range p {
		p[i] = fresh
	}
	return p
}

// lay poisons the unpoisoned pages that [offset, offset+n) touches.
func (p pages) lay(data []byte, offset, n uint64) {
	for page := offset / poisonPage; page < uint64(len(p)) && page*poisonPage < offset+n; page++ {
		if p[page] != laid {
			p[page] = laid
			Poison(data[page*poisonPage : min((page+1)*poisonPage, uint64(len(data)))])
		}
	}
}

// overwrite prepares [offset, offset+n) for a fill with one value. It returns
// the parts that the caller fills, without fresh pages if the value is zero,
// and does not poison pages that the fill covers as a whole.
func (p pages) overwrite(data []byte, offset, n uint64, value byte) (parts [][]byte) {
	begin := offset // of the part that is open
	for at, end := offset, offset+n; at < end; {
		page := at / poisonPage
		next := min((page+1)*poisonPage, end)
		switch whole := at == page*poisonPage && next == min((page+1)*poisonPage, uint64(len(data))); {
		case page >= uint64(len(p)) || p[page] == laid:
		case !whole:
			p.lay(data, at, 1)
		case p[page] == fresh && value == 0:
			parts, begin = append(parts, data[begin:at]), next
			fallthrough
		default:
			p[page] = laid
		}
		at = next
	}
	return append(parts, data[begin:offset+n])
}

// stain poisons [offset, offset+n) of data again, but defers whole pages until
// their first touch.
func (p pages) stain(data []byte, offset, n uint64) {
	for at, end := offset, offset+n; at < end; {
		page := at / poisonPage
		next := min((page+1)*poisonPage, end)
		switch {
		case page < uint64(len(p)) && p[page] != laid:
		case page < uint64(len(p)) && at == page*poisonPage && next == min((page+1)*poisonPage, uint64(len(data))):
			p[page] = stained
		default:
			Poison(data[at:next])
		}
		at = next
	}
}

// retire invalidates the block's addresses permanently.
func (b *Block) retire(by string) {
	if b.size <= poisonFreed && !b.registered && b.opened == nil { // memory of another owner stays valid
		Poison(b.data)
	}
	if b.space != nil {
		b.space.clear(b)
	}
	b.freeing, b.freedBy = true, by
	if b.region != nil && b.space == nil && b.dev != nil {
		b.region.detach(0, uintptr(len(b.data)))
	}
	if b.file != nil {
		b.file.Close()
	}
	b.data, b.region, b.file, b.clean, b.pieces, b.history = nil, nil, nil, nil, nil, sanitizer.History{}
}

// Poison fills p with a pattern that is NaN in the 16, 32 and 64-bit float types
// and an implausible integer.
func Poison(p []byte) {
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

// poison poisons page-locked memory without touching its pages if it is a
// region.
func (b *Block) poison() {
	if b.region == nil || b.region.poison() != nil {
		Poison(b.data)
	}
}

// alignedBytes returns n zero bytes aligned to align.
func alignedBytes(n uint64, align uintptr) []byte {
	raw := make([]byte, n+uint64(align))
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(raw))) & (align - 1)
	return raw[skip : uint64(skip)+n : uint64(skip)+n]
}

func newBlock(dev *Device, n uint64, align uintptr) *Block {
	return &Block{dev: dev, size: n, data: alignedBytes(n, align), clean: newPages(n)}
}

// outsideGo is from how many bytes on page-locked memory is not Go's: the race detector
// keeps four bytes for each byte of Go's memory, and fills them when the memory is made.
const outsideGo = 1 << 20

// newHostBlock returns a block of page-locked memory.
func newHostBlock(n uint64) *Block {
	if n >= outsideGo {
		if r, err := newRegion(uintptr(n)); err == nil {
			return &Block{size: n, data: r.bytes(n), region: r}
		}
	}
	return newBlock(nil, n, hostAlign)
}

// An arena holds the blocks of one device in ascending order of addresses. This
// is also the order of allocation, because an address is never reused.
type arena struct {
	blocks []*Block
	next   uint64
	end    uint64
	used   uintptr // bytes of the blocks that were not freed
	freed  int     // number of freed blocks
}

func newArena(ordinal int32) arena {
	base := uint64(addressBase) + uint64(ordinal)<<addressShift
	return arena{next: base + 1<<32, end: base + 1<<addressShift}
}

// alloc creates a block, or returns nil if the device does not have enough memory.
func (d *Device) alloc(n uintptr, fresh func() *Block) *Block {
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

// place reserves addresses for n bytes.
func (a *arena) place(n, align uint64) (addr uint64, ok bool) {
	addr = (a.next + align - 1) &^ (align - 1)
	if addr > a.end || n > a.end-addr || 2*blockGuard > a.end-addr-n {
		return 0, false
	}
	a.next = (addr + n + blockGuard + blockAlign - 1) &^ (blockAlign - 1)
	return addr, true
}

// take adds to the used memory, which must be available.
func (d *Device) take(n uintptr) {
	d.arena.used += n
	d.squeezePools()
}

// giveUp counts a block as free from the time of the call on, like a pool that
// reuses memory in stream order.
func (b *Block) giveUp() {
	b.dev.arena.used -= uintptr(b.size)
	if b.pool != nil {
		b.pool.give(b.size)
	}
	b.leave()
}

// leave removes the block from those that calls may use.
func (b *Block) leave() {
	b.dev.m.checkUnregistered(b)
	b.freeing = true
	b.dev.arena.freed++
	b.dev.arena.forget()
}

// checkUnregistered reports memory that is freed while it is registered with cuFile: with
// nvidia-fs, that would hang. m.mu is held.
func (m *Machine) checkUnregistered(b *Block) {
	if b.registrations > 0 {
		m.Report(fmt.Sprintf("virtual cuFile: %v was freed before cuFileBufDeregister: deregister memory first (seed %#x)", b, m.seed))
	}
}

// forget drops the oldest freed blocks if there are too many.
func (a *arena) forget() {
	if a.freed <= 2*keepFreed {
		return
	}
	a.blocks = slices.DeleteFunc(a.blocks, func(b *Block) bool {
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

// lookup returns the block that contains p, or the nearest block below it, or nil.
func lookup(blocks []*Block, p uint64) *Block {
	i := sort.Search(len(blocks), func(i int) bool { return blocks[i].addr > p })
	if i == 0 {
		return nil
	}
	return blocks[i-1]
}

func (b *Block) contains(p uint64) bool { return b != nil && p-b.addr < max(b.size, 1) }

// Find returns the block, live or freed, that contains p. If there is none, near
// is the nearest block below p, which p may have overrun. m.mu is held.
func (m *Machine) Find(p cudadrv.DevicePtr) (b, near *Block) {
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
