package gpu

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/goroutine"
)

// This file tracks the captures that the process has begun and not ended: the capturing
// goroutine, the mode and the calls that it forbids, and the other streams that the
// goroutine has used meanwhile. The driver tracks which streams take part.

// A Capture is a capture of this process that has not ended.
type Capture struct {
	ID     uint64  // the driver's, unique in the System
	Stream *Stream // that began it
	graph  Holder
	mode   cudadrv.CaptureMode
	pool   Holdable // the pool for package memory

	goroutine uintptr // that began it
	users     []user  // streams that the goroutine has used, guarded by open.mu

	mu   sync.Mutex
	held []Holdable // the pool, and the objects of Captured
}

// modeName returns torch's name of the mode.
func (c *Capture) modeName() string {
	return map[cudadrv.CaptureMode]string{
		cudadrv.CaptureGlobal: "global", cudadrv.CaptureThreadLocal: "thread_local", cudadrv.CaptureRelaxed: "relaxed",
	}[c.mode]
}

// A user is a stream that the capturing goroutine has used.
type user struct {
	stream *Stream
	joined bool // it took part in the capture
}

var open struct {
	count atomic.Int32 // the number of captures, readable without the lock
	begin sync.RWMutex // held while a capture begins
	mu    sync.Mutex
	list  []*Capture
}

// AnyCapture reports whether the process is capturing a graph on any stream.
func AnyCapture() bool { return open.count.Load() != 0 }

var making atomic.Int32 // graphs that are being instantiated at the end of a capture

// Make calls fn, which ends a capture and makes its graph.
func Make(fn func() error) error {
	making.Add(1)
	defer making.Add(-1)
	return fn()
}

// Pending reports whether the process is capturing a graph, or has captured one that is
// not made yet.
func Pending() bool { return AnyCapture() || making.Load() != 0 }

// Outside calls fn and prevents captures from beginning meanwhile. It does nothing if the
// process is capturing a graph on any stream. It reports whether it called fn.
func Outside(fn func()) bool {
	open.begin.RLock()
	defer open.begin.RUnlock()
	if AnyCapture() {
		return false
	}
	fn()
	return true
}

// register calls begin, which begins the capture in the driver for the calling goroutine.
// No call of Outside is in progress meanwhile.
func (c *Capture) register(begin func() error) error {
	open.begin.Lock()
	defer open.begin.Unlock()
	if err := begin(); err != nil {
		return err
	}
	c.goroutine = goroutine.ID()
	open.mu.Lock()
	defer open.mu.Unlock()
	open.list = append(open.list, c)
	open.count.Add(1)
	return nil
}

// forget removes the capture.
func (c *Capture) forget() {
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.Index(open.list, c); i >= 0 {
		open.list = slices.Delete(open.list, i, i+1)
		open.count.Add(-1)
	}
}

// find returns the first capture that matches, or nil.
func find(match func(*Capture) bool) *Capture {
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.IndexFunc(open.list, match); i >= 0 {
		return open.list[i]
	}
	return nil
}

// exclusive returns the capture that prevents the calling goroutine's thread from
// beginning another one, or nil.
func exclusive() *Capture {
	me := goroutine.ID()
	return find(func(c *Capture) bool { return c.goroutine == me && c.mode != cudadrv.CaptureRelaxed })
}

// CaptureOf returns the latest capture of a System that the calling goroutine has begun,
// or nil.
func CaptureOf(sys *System) *Capture {
	if !AnyCapture() {
		return nil
	}
	me := goroutine.ID()
	open.mu.Lock()
	defer open.mu.Unlock()
	for _, c := range slices.Backward(open.list) {
		if c.goroutine == me && c.Stream.dev.sys == sys {
			return c
		}
	}
	return nil
}

// use records that the calling goroutine enqueues operations on s, in its capture if it
// has one.
func (s *Stream) use() {
	if !AnyCapture() {
		return
	}
	me := goroutine.ID()
	c := find(func(c *Capture) bool {
		return c.goroutine == me && !slices.ContainsFunc(c.users, func(u user) bool { return u.stream == s && u.joined })
	})
	if c == nil {
		return
	}
	yes, err := s.Capturing()
	yes = yes && err == nil
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.IndexFunc(c.users, func(u user) bool { return u.stream == s }); i >= 0 {
		c.users[i].joined = yes
	} else {
		c.users = append(c.users, user{s, yes})
	}
}

// strays returns the streams that the capturing goroutine has used and that did not take
// part in the capture.
func (c *Capture) strays() (names []string) {
	open.mu.Lock()
	defer open.mu.Unlock()
	for _, u := range c.users {
		if !u.joined {
			names = append(names, u.stream.String())
		}
	}
	return names
}
