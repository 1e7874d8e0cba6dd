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
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/memory"
)

// A ring bounds the pinned memory that all files of a System have in use. The
// memory itself is that of package memory, which keeps it for the next call until
// memory.EmptyHostCache. Who waits comes in its turn.
type ring struct {
	bound   int64 // in bytes
	err     error // of the environment's bound
	make    func(dev *device.Device, bytes int) (*memory.Pinned[byte], error)
	waiters atomic.Int32

	mu      sync.Mutex
	used    int64
	waiting []*turn
	slots   int           // that somebody has, or is being given
	given   chan struct{} // closed when one of them is given back, or the last one not given
}

// A turn is one who waits.
type turn struct {
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
	r := dev.System().Local(&ringKey, func() any { return newRing() }).(*ring)
	return r, r.err
}

func newRing() *ring {
	n, err := env.GDSPinned.Uint64()
	if err == nil && (n < minSlot || n > math.MaxInt64) {
		err = &env.ValueError{Name: env.GDSPinned.Name, Value: env.GDSPinned.Value(), Want: fmt.Sprintf("at least %d bytes", minSlot)}
	}
	return &ring{bound: int64(n), err: err, make: memory.MakePinned[byte], given: make(chan struct{})}
}

// errNoMore says that nothing is left for which a slot would be wanted.
var errNoMore = errors.New("no more slots are wanted")

// acquire waits for a slot, unless ctx ends or over is closed. While no more memory can
// be pinned it waits for what others have.
func (r *ring) acquire(ctx context.Context, over <-chan struct{}, dev *device.Device, bytes int64) (*slot, error) {
	for {
		if err := r.enter(ctx, over, bytes); err != nil {
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

// enter waits until the bytes are within the bound.
func (r *ring) enter(ctx context.Context, over <-chan struct{}, bytes int64) error {
	t := r.queue(bytes)
	if t == nil {
		return nil
	}
	defer r.waiters.Add(-1)
	select {
	case <-t.come:
		return nil
	case <-over:
		r.leave(t)
		return errNoMore
	case <-ctx.Done():
		r.leave(t)
		return context.Cause(ctx)
	}
}

// tryAcquire returns a slot, or nil where there is none at once.
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

// queue takes the bytes, or a place among those who wait for them.
func (r *ring) queue(bytes int64) *turn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.waiting) == 0 && r.used+bytes <= r.bound {
		r.used += bytes
		return nil
	}
	t := &turn{bytes, make(chan struct{})}
	r.waiting = append(r.waiting, t)
	r.waiters.Add(1)
	return t
}

// leave gives up a place, or what it has got meanwhile.
func (r *ring) leave(t *turn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.waiting, t); i >= 0 {
		r.waiting = slices.Delete(r.waiting, i, i+1)
	} else {
		r.used -= t.bytes
	}
	r.grant()
}

// pin makes the slot for bytes that are taken. Where it cannot while others have slots,
// given is closed when one of those is given back.
func (r *ring) pin(dev *device.Device, bytes int64) (x *slot, given <-chan struct{}, err error) {
	r.mu.Lock()
	r.slots++
	before := r.given
	r.mu.Unlock()
	p, err := r.make(dev, int(bytes))
	if err == nil {
		return &slot{p, p.Data(), bytes}, nil, nil
	}
	r.free(bytes)
	err = fmt.Errorf("%w: %s bounds the pinned memory that files use", err, env.GDSPinned.Name)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots--
	if r.slots > 0 || r.given != before {
		return nil, before, err
	}
	r.tell() // those who waited for this one, which there will not be
	return nil, nil, err
}

// release gives a slot back that nothing is in flight from.
func (r *ring) release(x *slot) error {
	err := x.pinned.Close()
	r.free(x.bytes)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.slots--
	r.tell()
	return err
}

// tell lets those look again who wait for memory that others have. r.mu is held.
func (r *ring) tell() {
	close(r.given)
	r.given = make(chan struct{})
}

func (r *ring) free(bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used -= bytes
	r.grant()
}

// grant lets those in who have room now. r.mu is held.
func (r *ring) grant() {
	for len(r.waiting) > 0 && r.used+r.waiting[0].bytes <= r.bound {
		r.used += r.waiting[0].bytes
		close(r.waiting[0].come)
		r.waiting = r.waiting[1:]
	}
}

// pressed reports whether somebody waits for a slot.
func (r *ring) pressed() bool { return r.waiters.Load() > 0 }
