package alloc

import (
	"runtime"
	"sync"
	"syscall"
	"unsafe"
)

// A program with many small blocks accesses slots all over their memory. In ordinary pages
// each access would also miss the TLB. Therefore pages of slots are allocated from memory
// that asks the kernel for huge pages. A page is reused
// after the garbage collector has found that its segment is unreachable.
var slabs struct {
	mu   sync.Mutex
	free []*[slotPage]slot
	rest []byte // of the last chunk
}

const (
	slabChunk    = 16 << 20
	slotPageSize = slotPage * unsafe.Sizeof(slot{})
)

// newSlotPage returns a page of slots for a segment; a cleanup of the segment frees it.
func newSlotPage(s *segment) []slot {
	p := takeSlotPage()
	if p == nil {
		return make([]slot, slotPage)
	}
	runtime.AddCleanup(s, giveSlotPage, p)
	return p[:]
}

// takeSlotPage returns zeroed slots, or nil if the system has no memory.
func takeSlotPage() *[slotPage]slot {
	slabs.mu.Lock()
	defer slabs.mu.Unlock()
	if n := len(slabs.free); n > 0 {
		p := slabs.free[n-1]
		slabs.free = slabs.free[:n-1]
		clear(p[:])
		return p
	}
	if len(slabs.rest) == 0 {
		chunk, err := syscall.Mmap(-1, 0, slabChunk, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		if err != nil {
			return nil
		}
		_ = syscall.Madvise(chunk, syscall.MADV_HUGEPAGE) // without huge pages it is only slower
		slabs.rest = chunk
	}
	p := (*[slotPage]slot)(unsafe.Pointer(&slabs.rest[0]))
	slabs.rest = slabs.rest[slotPageSize:]
	return p
}

func giveSlotPage(p *[slotPage]slot) {
	slabs.mu.Lock()
	defer slabs.mu.Unlock()
	slabs.free = append(slabs.free, p)
}
