package memory

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ranges are the address ranges of a System's pinned memory. CopyFrom needs them
// because it must wait for a copy from pinned memory. Lookups take no lock; changes are
// rare.
type ranges struct {
	mu   sync.Mutex               // held by writers
	list atomic.Pointer[[]extent] // sorted; never modified in place
}

type extent struct{ start, bytes uintptr }

func (r *ranges) load() []extent {
	if l := r.list.Load(); l != nil {
		return *l
	}
	return nil
}

// add adds a range. It returns false if the range overlaps another one.
func (r *ranges) add(p unsafe.Pointer, bytes uintptr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.load()
	i := after(list, uintptr(p))
	if i > 0 && list[i-1].has(uintptr(p)) || i < len(list) && list[i].start-uintptr(p) < bytes {
		return false
	}
	list = slices.Insert(slices.Clone(list), i, extent{uintptr(p), bytes})
	r.list.Store(&list)
	return true
}

func (r *ranges) remove(p unsafe.Pointer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := slices.Clone(r.load())
	if i := after(list, uintptr(p)) - 1; i >= 0 && list[i].start == uintptr(p) {
		list = slices.Delete(list, i, i+1)
	}
	r.list.Store(&list)
}

func (e extent) has(p uintptr) bool { return p-e.start < e.bytes }

// after returns the index of the first range that begins after p.
func after(list []extent, p uintptr) int {
	i, found := slices.BinarySearchFunc(list, p, func(e extent, p uintptr) int { return cmp.Compare(e.start, p) })
	if found {
		i++
	}
	return i
}

func (r *ranges) has(p unsafe.Pointer) bool {
	list := r.load()
	i := after(list, uintptr(p))
	return i > 0 && list[i-1].has(uintptr(p))
}
