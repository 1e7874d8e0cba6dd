// Package captures knows the captures of graphs that the process has begun and not ended:
// which goroutine captures, in which mode, what that forbids to whom, and which other
// streams the goroutine has used meanwhile. The driver knows which streams take part.
package captures

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/goroutine"
)

// A Capture is one capture that has not ended.
type Capture struct {
	System any    // of the stream that began it
	ID     uint64 // the driver's, unique in the System
	Device any
	Stream fmt.Stringer // that began it
	Graph  fmt.Stringer
	Mode   cudadrv.CaptureMode
	Owner  any // what package stream keeps with it

	goroutine uintptr // that began it
	users     []user  // streams that the goroutine has used, guarded by open.mu
}

// ModeName returns torch's name of the mode.
func (c *Capture) ModeName() string {
	return map[cudadrv.CaptureMode]string{
		cudadrv.CaptureGlobal: "global", cudadrv.CaptureThreadLocal: "thread_local", cudadrv.CaptureRelaxed: "relaxed",
	}[c.Mode]
}

// A user is a stream that the capturing goroutine has used.
type user struct {
	stream fmt.Stringer
	joined bool // it took part in the capture
}

var open struct {
	count atomic.Int32 // how many there are, for a look without the lock
	begin sync.RWMutex // held while one begins
	mu    sync.Mutex
	list  []*Capture
}

// Any reports whether the process captures a graph on any stream.
func Any() bool { return open.count.Load() != 0 }

// Outside calls fn, unless the process captures a graph on any stream, and keeps
// captures from beginning meanwhile. It reports whether it did.
func Outside(fn func()) bool {
	open.begin.RLock()
	defer open.begin.RUnlock()
	if Any() {
		return false
	}
	fn()
	return true
}

// Begin calls begin, which begins the capture for the calling goroutine at the driver,
// while nobody is Outside.
func Begin(c *Capture, begin func() error) error {
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

// End forgets the capture.
func End(c *Capture) {
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.Index(open.list, c); i >= 0 {
		open.list = slices.Delete(open.list, i, i+1)
		open.count.Add(-1)
	}
}

// Find returns the first capture that matches, or nil.
func Find(match func(*Capture) bool) *Capture {
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.IndexFunc(open.list, match); i >= 0 {
		return open.list[i]
	}
	return nil
}

// Exclusive returns the capture that keeps the calling goroutine's thread from
// beginning another one, or nil.
func Exclusive() *Capture {
	me := goroutine.ID()
	return Find(func(c *Capture) bool { return c.goroutine == me && c.Mode != cudadrv.CaptureRelaxed })
}

// Mine returns the last capture of a System that the calling goroutine has begun, or nil.
func Mine(system any) *Capture {
	if !Any() {
		return nil
	}
	me := goroutine.ID()
	open.mu.Lock()
	defer open.mu.Unlock()
	for _, c := range slices.Backward(open.list) {
		if c.goroutine == me && c.System == system {
			return c
		}
	}
	return nil
}

// Use notes that the calling goroutine, if it captures, uses a stream. joined says
// whether the stream takes part in a capture; it is called when that is not known yet.
func Use(s fmt.Stringer, joined func() bool) {
	me := goroutine.ID()
	c := Find(func(c *Capture) bool {
		return c.goroutine == me && !slices.ContainsFunc(c.users, func(u user) bool { return u.stream == s && u.joined })
	})
	if c == nil {
		return
	}
	yes := joined()
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.IndexFunc(c.users, func(u user) bool { return u.stream == s }); i >= 0 {
		c.users[i].joined = yes
	} else {
		c.users = append(c.users, user{s, yes})
	}
}

// Strays returns the streams that the capturing goroutine has used and that did not take
// part in the capture.
func (c *Capture) Strays() (names []string) {
	open.mu.Lock()
	defer open.mu.Unlock()
	for _, u := range c.users {
		if !u.joined {
			names = append(names, u.stream.String())
		}
	}
	return names
}
