package memtrace

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/memory"
)

// A fake allocator gives each block a segment of its own, rounded up to 1024
// bytes, and keeps the freed ones of each size.
type fake struct {
	limit      int64 // of what is reserved; 0 is none
	next       uint64
	live       map[uint64]int64
	cache      map[int64][]uint64
	now, peaks Peaks
	calls      []string
	record     bool
}

var errFull = errors.New("the device is full")

func newFake() *fake {
	return &fake{next: 1 << 20, live: map[uint64]int64{}, cache: map[int64][]uint64{}}
}

func (f *fake) note(format string, args ...any) {
	if f.record {
		f.calls = append(f.calls, fmt.Sprintf(format, args...))
	}
}

func (f *fake) Alloc(stream, bytes int) (uint64, error) {
	f.note("alloc %d on %d", bytes, stream)
	size := (int64(bytes) + 1023) / 1024 * 1024
	ptr := f.next
	if free := f.cache[size]; len(free) > 0 {
		ptr = free[len(free)-1]
		f.cache[size] = free[:len(free)-1]
	} else {
		if f.limit > 0 && f.now.Reserved+size > f.limit {
			return 0, errFull
		}
		f.next += uint64(size)
		f.now.Reserved += size
	}
	f.live[ptr] = size
	f.now.Allocated += size
	f.peaks = Peaks{max(f.peaks.Allocated, f.now.Allocated), max(f.peaks.Reserved, f.now.Reserved)}
	return ptr, nil
}

func (f *fake) Free(ptr uint64) error {
	size, ok := f.live[ptr]
	if !ok {
		return fmt.Errorf("free of %#x, which is not allocated", ptr)
	}
	f.note("free")
	delete(f.live, ptr)
	f.now.Allocated -= size
	f.cache[size] = append(f.cache[size], ptr)
	return nil
}

func (f *fake) EmptyCache() error {
	f.note("empty")
	for size, free := range f.cache {
		f.now.Reserved -= size * int64(len(free))
	}
	clear(f.cache)
	return nil
}

func (f *fake) ResetPeaks() error { f.peaks = f.now; return nil }

func (f *fake) Stats() (s memory.Stats, err error) {
	s.AllocatedBytes.All = memory.Stat{Current: f.now.Allocated, Peak: f.peaks.Allocated}
	s.ReservedBytes.All = memory.Stat{Current: f.now.Reserved, Peak: f.peaks.Reserved}
	return s, nil
}
