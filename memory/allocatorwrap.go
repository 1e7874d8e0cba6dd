package memory

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"sync"
	"time"

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
	a Allocator

	mu     sync.Mutex
	counts AllocatorCounts
}

// AllocatorCounts are the counts of a Counter. An Alloc or Free that failed is counted
// only in Failures.
type AllocatorCounts struct {
	Allocations Stat  // blocks
	Bytes       Stat  // bytes of these blocks
	Failures    int64 // calls that returned an error
}

// Count returns an Allocator that calls a and counts its allocations.
func Count(a Allocator) *Counter { return &Counter{a: a} }

// Counts returns the current counts.
func (c *Counter) Counts() AllocatorCounts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counts
}

// Alloc allocates from the wrapped Allocator.
func (c *Counter) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	ptr, err := c.a.Alloc(s, bytes)
	c.count(+1, bytes, err)
	return ptr, err
}

// Free frees through the wrapped Allocator.
func (c *Counter) Free(s *stream.Stream, ptr uint64, bytes int) error {
	err := c.a.Free(s, ptr, bytes)
	c.count(-1, bytes, err)
	return err
}

func (c *Counter) count(by int64, bytes int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.counts.Failures++
		return
	}
	c.counts.Allocations.add(by)
	c.counts.Bytes.add(by * int64(bytes))
}

// A Logger is an Allocator that writes a line for each call.
type Logger struct {
	a Allocator

	mu  sync.Mutex
	w   *csv.Writer
	err error
}

// Log returns an Allocator that calls a and writes one line of comma-separated values
// after each call: the time in RFC 3339, "alloc" or "free", the address, the bytes, the
// stream, and the error or nothing. The first line has the names of the columns.
func Log(a Allocator, w io.Writer) *Logger {
	l := &Logger{a: a, w: csv.NewWriter(w)}
	l.line("time", "action", "pointer", "size", "stream", "error")
	return l
}

// Err returns the first write error. A write error does not fail an allocation.
func (l *Logger) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Alloc allocates from the wrapped Allocator.
func (l *Logger) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	ptr, err := l.a.Alloc(s, bytes)
	l.call("alloc", s, ptr, bytes, err)
	return ptr, err
}

// Free frees through the wrapped Allocator.
func (l *Logger) Free(s *stream.Stream, ptr uint64, bytes int) error {
	err := l.a.Free(s, ptr, bytes)
	l.call("free", s, ptr, bytes, err)
	return err
}

func (l *Logger) call(action string, s *stream.Stream, ptr uint64, bytes int, err error) {
	on, text := "", ""
	if s != nil {
		on = s.String()
	}
	if err != nil {
		text = err.Error()
	}
	l.line(time.Now().Format(time.RFC3339Nano), action, "0x"+strconv.FormatUint(ptr, 16), strconv.Itoa(bytes), on, text)
}

func (l *Logger) line(fields ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.w.Write(fields)
	if l.w.Flush(); err == nil {
		err = l.w.Error()
	}
	if l.err == nil {
		l.err = err
	}
}

// Fail returns an Allocator that fails on demand, to test how a program handles failed
// allocations. It calls plan before each Alloc, with the number of the call, from 1,
// and its bytes. If plan returns an error, such as device.ErrorOutOfMemory, Alloc
// returns that error, wrapped, and does not call a.
func Fail(a Allocator, plan func(call, bytes int) error) Allocator {
	return &failing{Allocator: a, plan: plan}
}

type failing struct {
	Allocator
	plan func(call, bytes int) error

	mu    sync.Mutex
	calls int
}

func (f *failing) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	f.mu.Lock()
	f.calls++
	call := f.calls
	f.mu.Unlock()
	if err := f.plan(call, bytes); err != nil {
		return 0, fmt.Errorf("memory: allocate %d bytes: call %d is to fail: %w", bytes, call, err)
	}
	return f.Allocator.Alloc(s, bytes)
}
