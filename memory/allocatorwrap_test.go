package memory

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/stream"
)

// Limit returns an Allocator that keeps at most the given number of bytes of a
// allocated at any time, on all devices together. An allocation beyond the limit fails
// with an *OutOfMemoryError whose Total is the limit, and does not call a.
func Limit(a Allocator, bytes int) Allocator { return &limiter{Allocator: a, limit: bytes} }

type limiter struct {
	Allocator
	limit int

	mu   sync.Mutex
	used int
}

func (l *limiter) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	if err := checkAlloc(s, bytes); err != nil {
		return 0, err
	}
	if free, ok := l.reserve(bytes); !ok {
		return 0, &OutOfMemoryError{Device: s.Device().String(), Requested: uint64(bytes), Free: uint64(free), Total: uint64(max(l.limit, 0)),
			Err: fmt.Errorf("the limit of the allocator: %w", device.ErrorOutOfMemory)}
	}
	ptr, err := l.Allocator.Alloc(s, bytes)
	if err != nil {
		l.giveBack(bytes)
	}
	return ptr, err
}

func (l *limiter) Free(s *stream.Stream, ptr uint64, bytes int) error {
	err := l.Allocator.Free(s, ptr, bytes)
	if err == nil {
		l.giveBack(bytes)
	}
	return err
}

func (l *limiter) reserve(bytes int) (free int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if free = max(l.limit-l.used, 0); bytes > free {
		return free, false
	}
	l.used += bytes
	return free, true
}

func (l *limiter) giveBack(bytes int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.used -= bytes
}

// A Counter is an Allocator that counts the allocations made through it.
type Counter struct {
	Allocator
	c *counting
}

// AllocatorCounts are the counts of a Counter. An Alloc or Free that failed is counted
// only in Failures.
type AllocatorCounts struct {
	Allocations Stat  // blocks
	Bytes       Stat  // bytes of these blocks
	Failures    int64 // calls that returned an error
}

// Count returns an Allocator that calls a and counts its allocations.
func Count(a Allocator) *Counter {
	c := &counting{Allocator: a}
	return &Counter{c, c}
}

// Counts returns the current counts.
func (c *Counter) Counts() AllocatorCounts {
	c.c.mu.Lock()
	defer c.c.mu.Unlock()
	return c.c.counts
}

type counting struct {
	Allocator

	mu     sync.Mutex
	counts AllocatorCounts
}

func (c *counting) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	ptr, err := c.Allocator.Alloc(s, bytes)
	c.count(+1, bytes, err)
	return ptr, err
}

func (c *counting) Free(s *stream.Stream, ptr uint64, bytes int) error {
	err := c.Allocator.Free(s, ptr, bytes)
	c.count(-1, bytes, err)
	return err
}

func (c *counting) count(by int64, bytes int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.counts.Failures++
		return
	}
	c.counts.Allocations.add(by)
	c.counts.Bytes.add(by * int64(bytes))
}
