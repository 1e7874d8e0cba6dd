package rng

import (
	"errors"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// placeBytes is the size of a place: seed and offset.
const placeBytes = 16

// places allocates the places of a device's launches. Prepare writes a place
// before the graph runs. The memory must not be a block that the captured
// function has used and closed, because captured operations before the fill would
// overwrite the place in each launch. Therefore places use neither the pool of
// the capture nor a captured stream.
type places struct {
	dev  *device.Device
	pool *memory.Pool

	mu sync.Mutex
	s  *stream.Stream // stream of allocations and frees; nil before the first
}

var placesKey kept.Key

// allPlaces holds the places of a System, which closes them.
type allPlaces struct {
	mu   sync.Mutex
	list map[*device.Device]*places
}

func placesOf(dev *device.Device) *places {
	all := gpu.DeviceOf(dev).System().Local(&placesKey, func() any { return &allPlaces{list: map[*device.Device]*places{}} }).(*allPlaces)
	all.mu.Lock()
	defer all.mu.Unlock()
	p := all.list[dev]
	if p == nil {
		var private memory.PoolConfig
		mem.MakePrivate(&private)
		p = &places{dev: dev, pool: memory.NewPool(&private)}
		all.list[dev] = p
	}
	return p
}

// Close closes the streams. Package memory, which the System closes next, returns the
// memory of the pools to the driver.
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
	if err := p.s.Close(); p.dev.Err() == nil { // a lost device cannot destroy streams, and has reported its error
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
	handle.InitForever(&gpu.StreamOf(s).Owner) // close closes it, and devices may be dropped without Close
	p.s = s
	return s, nil
}

// alloc returns the address of a place for work on s, the stream of the places.
func (p *places) alloc(s *stream.Stream) (at uint64, err error) {
	err = p.pool.Use(s, func() (err error) {
		at, err = memory.AllocRaw(s, placeBytes)
		return err
	})
	return at, err
}

// free frees a place that last, the stream of the last launch, may still read.
func (p *places) free(at uint64, last *stream.Stream) {
	if memory.RecordStreamRaw(at, last) != nil {
		_ = gpu.StreamOf(p.s).Follow(gpu.StreamOf(last)) // last is closed, so it is not captured
	}
	_ = memory.FreeRaw(p.dev, at) // fails only on a lost device, which reports its own error
}
