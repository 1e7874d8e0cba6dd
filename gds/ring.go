package gds

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/memory"
)

// A ring limits the pinned memory that all files of a System use. The memory comes from
// package memory, which caches it for the next call until memory.EmptyHostCache. Waiting
// calls are served in order.
type ring struct {
	bound   int64 // in bytes
	err     error // of parsing the bound in the environment
	make    func(dev *device.Device, bytes int) (*memory.Pinned[byte], error)
	waiters atomic.Int32

	mu      sync.Mutex
	used    int64
	waiting []*waiter
	slots   int           // slots in use or being allocated
	given   chan struct{} // closed when a slot is returned, or the last allocation of one fails
}

// A waiter is a call that waits for a slot.
type waiter struct {
	bytes int64
	come  chan struct{}
}

// A slot is pinned memory that a worker fills and empties.
type slot struct {
	pinned *memory.Pinned[byte]
	buf    []byte
	bytes  int64
}

func (x *slot) at(i int64) unsafe.Pointer { return unsafe.Pointer(&x.buf[i]) }

var ringKey kept.Key

// ringOf returns the ring of the device's System.
func ringOf(dev *device.Device) (*ring, error) {
	r := gpu.DeviceOf(dev).System().Local(&ringKey, func() any { return newRing() }).(*ring)
	return r, r.err
}

func newRing() *ring {
	n, err := env.GDSPinned.Uint64()
	if err == nil && (n < minSlot || n > math.MaxInt64) {
		err = &env.ValueError{Name: env.GDSPinned.Name, Value: env.GDSPinned.Value(), Want: fmt.Sprintf("at least %d bytes", minSlot)}
	}
	return &ring{bound: int64(n), err: err, make: memory.MakePinned[byte], given: make(chan struct{})}
}

// errNoMore reports that all windows are taken, so that no slot is needed.
var errNoMore = errors.New("no more slots are wanted")

// acquire waits for a slot, unless ctx ends or over is closed. If no more memory can be
// pinned it waits for a slot of another worker.
func (r *ring) acquire(ctx context.Context, over <-chan struct{}, dev *device.Device, bytes int64) (*slot, error) {
	for {
		if err := r.awaitBytes(ctx, over, bytes); err != nil {
			return nil, err
		}
		x, given, err := r.pin(dev, bytes)
		if given == nil {
			return x, err
		}
		select {
		case <-given:
		case <-over:
			return nil, errNoMore
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// awaitBytes waits until the limit permits the bytes.
func (r *ring) awaitBytes(ctx context.Context, over <-chan struct{}, bytes int64) error {
	t := r.queue(bytes)
	if t == nil {
		return nil
	}
	defer r.waiters.Add(-1)
	select {
	case <-t.come:
		return nil
	case <-over:
		r.withdraw(t)
		return errNoMore
	case <-ctx.Done():
		r.withdraw(t)
		return context.Cause(ctx)
	}
}

// tryAcquire returns a slot, or nil if none is available at once.
func (r *ring) tryAcquire(dev *device.Device, bytes int64) (*slot, error) {
	r.mu.Lock()
	ok := len(r.waiting) == 0 && r.used+bytes <= r.bound
	if ok {
		r.used += bytes
	}
	r.mu.Unlock()
	if !ok {
		return nil, nil
	}
	x, _, err := r.pin(dev, bytes)
	return x, err
}

// queue reserves the bytes, or adds a waiter.
func (r *ring) queue(bytes int64) *waiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 && r.used+bytes <= r.bound {
		r.used += bytes
		return nil
	}
	t := &waiter{bytes, make(chan struct{})}
	r.waiting = append(r.waiting, t)
	r.waiters.Add(1)
	return t
}

// withdraw gives back a place in the queue, or the bytes that were granted meanwhile.
func (r *ring) withdraw(t *waiter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.waiting, t); i >= 0 {
		r.waiting = slices.Delete(r.waiting, i, i+1)
	} else {
		r.used -= t.bytes
	}
	r.grant()
}

// pin allocates a slot for reserved bytes. If that fails while others have slots, given is
// closed when a slot is returned.
func (r *ring) pin(dev *device.Device, bytes int64) (x *slot, given <-chan struct{}, err error) {
	r.mu.Lock()
	r.slots++
	before := r.given
	r.mu.Unlock()
	p, err := r.make(dev, int(bytes))
	if err == nil {
		return &slot{p, p.Data(), bytes}, nil, nil
	}
	r.giveBack(bytes)
	err = fmt.Errorf("%w: %s bounds the pinned memory that files use", err, env.GDSPinned.Name)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots--
	if r.slots > 0 || r.given != before {
		return nil, before, err
	}
	r.tell() // wake the waiters for this slot, which will not exist
	return nil, nil, err
}

// release returns a slot without pending copies.
func (r *ring) release(x *slot) error {
	err := x.pinned.Close()
	r.giveBack(x.bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots--
	r.tell()
	return err
}

// tell wakes the workers that wait for memory of others. r.mu is held.
func (r *ring) tell() {
	close(r.given)
	r.given = make(chan struct{})
}

func (r *ring) giveBack(bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used -= bytes
	r.grant()
}

// grant admits the first waiters while there is room for them. r.mu is held.
func (r *ring) grant() {
	for len(r.waiting) > 0 && r.used+r.waiting[0].bytes <= r.bound {
		r.used += r.waiting[0].bytes
		close(r.waiting[0].come)
		r.waiting = r.waiting[1:]
	}
}

// pressed reports whether a call waits for a slot.
func (r *ring) pressed() bool { return r.waiters.Load() > 0 }
