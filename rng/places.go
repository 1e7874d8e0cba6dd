package rng

import (
	"errors"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// placeBytes is the size of a place: seed and offset.
const placeBytes = 16

// places allocates the places of a device's launches. Prepare writes a place before
// the graph runs, so the memory must not be a block that the captured function has
// used and closed: operations that were captured before the fill would overwrite the
// place in each launch. That is why places come neither from the pool of the capture
// nor from a stream that anybody captures.
type places struct {
	dev  *device.Device
	pool *memory.Pool

	mu sync.Mutex
	s  *stream.Stream // in whose order the places are allocated and freed; nil before the first
}

var placesKey kept.Key

// allPlaces are those of one System, which closes them.
type allPlaces struct {
	mu   sync.Mutex
	list map[*device.Device]*places
}

func placesOf(dev *device.Device) *places {
	all := dev.System().Local(&placesKey, func() any { return &allPlaces{list: map[*device.Device]*places{}} }).(*allPlaces)
	all.mu.Lock()
	defer all.mu.Unlock()
	p := all.list[dev]
	if p == nil {
		p = &places{dev: dev, pool: memory.PrivatePool()}
		all.list[dev] = p
	}
	return p
}

// Close gives up the streams and the memory that no graph uses.
func (a *allPlaces) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, p := range a.list {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}

func (p *places) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pool.LetGo(nil)
	if err := p.s.Close(); p.dev.Err() == nil { // a lost device destroys nothing, and has said so
		return err
	}
	return nil
}

// stream returns the stream of the places.
func (p *places) stream() (*stream.Stream, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.s != nil {
		return p.s, nil
	}
	s, err := stream.New(p.dev, nil)
	if err != nil {
		return nil, err
	}
	p.s = s
	return s, nil
}

// alloc returns the address of a place for work behind s, the stream of the places.
func (p *places) alloc(s *stream.Stream) (at uint64, err error) {
	err = p.pool.Use(s, func() (err error) {
		at, err = memory.AllocRaw(s, placeBytes)
		return err
	})
	return at, err
}

// free gives a place back that last, the stream of the last launch, may still read.
func (p *places) free(at uint64, last *stream.Stream) {
	if memory.RecordStreamRaw(at, last) != nil {
		_ = p.s.Follow(last) // last is closed, so that nobody captures it
	}
	_ = memory.FreeRaw(p.dev, at) // the errors are of a lost device, which its users know
}
