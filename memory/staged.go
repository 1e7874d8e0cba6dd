package memory

import (
	"errors"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// stageBytes is the size of a stage: large enough that the bus limits the copy, not the
// calls of the host.
const stageBytes = 4 << 20

// A stager copies from one device to another through two pieces of pinned memory: while
// one is filled the other is emptied. The host only enqueues. The stager lives as long
// as the contexts of the devices.
type stager struct {
	mu       sync.Mutex
	from, to *gpu.Device
	out, in  cudadrv.Stream   // on from and on to
	begin    [2]cudadrv.Event // on from and on to: the position of the user's stream
	stages   [2]stage
	ready    bool
}

type stage struct {
	p     unsafe.Pointer
	full  cudadrv.Event // on from
	empty cudadrv.Event // on to
}

// stagersKey is the key of a device's stagers, by destination device.
var stagersKey kept.Key

// copyStaged enqueues a copy between devices through pinned memory.
func copyStaged[T Element](s *stream.Stream, dst, src Slice[T]) error {
	if err := gpu.StreamOf(s).RefuseCapture("memory: copy", "copies between these devices are staged, and a staged one cannot be launched again: copy before the capture"); err != nil {
		return err
	}
	from, to := gpu.DeviceOf(src.Device()), gpu.DeviceOf(dst.Device())
	stagers := from.Local(&stagersKey, func() any { return new(sync.Map) }).(*sync.Map)
	g, ok := stagers.Load(to)
	if !ok {
		g, _ = stagers.LoadOrStore(to, &stager{from: from, to: to})
	}
	return g.(*stager).copy(gpu.StreamOf(s), dst.raw(), src.raw(), uintptr(src.Bytes()))
}

func (g *stager) copy(s *gpu.Stream, dst, src cudadrv.DevicePtr, bytes uintptr) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.allocate(); err != nil {
		return err
	}
	begin := g.begin[0]
	if s.Device() == g.to {
		begin = g.begin[1]
	}
	if err := s.Device().RecordEvent(begin, s.Raw()); err != nil {
		return err
	}
	if err := g.from.WaitEvent(g.out, begin); err != nil { // and in waits for out
		return err
	}
	if err := g.enqueue(s, dst, src, bytes); err != nil {
		// s does not wait for the operations that are already enqueued, and they use
		// the memory.
		return errors.Join(err, g.drain())
	}
	return nil
}

// enqueue enqueues the copies and makes s wait for the last one.
func (g *stager) enqueue(s *gpu.Stream, dst, src cudadrv.DevicePtr, bytes uintptr) error {
	last := 0
	for at := uintptr(0); at < bytes; at += stageBytes {
		last = int(at / stageBytes % 2)
		if err := g.pass(&g.stages[last], dst+cudadrv.DevicePtr(at), src+cudadrv.DevicePtr(at), min(stageBytes, bytes-at)); err != nil {
			return err
		}
	}
	return s.Wait(g.stages[last].empty)
}

// drain waits for the operations that the stager has enqueued.
func (g *stager) drain() error {
	return errors.Join(g.from.SyncStream(g.out), g.to.SyncStream(g.in))
}

// pass fills a stage once it is empty, and then empties it.
func (g *stager) pass(x *stage, dst, src cudadrv.DevicePtr, n uintptr) error {
	if err := g.from.WaitEvent(g.out, x.empty); err != nil {
		return err
	}
	err := g.from.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemcpyDtoHAsync(x.p, src, n, g.out) })
	if err != nil {
		return err
	}
	if err := g.from.RecordEvent(x.full, g.out); err != nil {
		return err
	}
	if err := g.to.WaitEvent(g.in, x.full); err != nil {
		return err
	}
	err = g.to.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemcpyHtoDAsync(dst, x.p, n, g.in) })
	if err != nil {
		return err
	}
	return g.to.RecordEvent(x.empty, g.in)
}

// allocate creates the streams, events and memory that do not exist yet, so that it can be
// called again after an error.
func (g *stager) allocate() (err error) {
	if g.ready {
		return nil
	}
	stream := func(dev *gpu.Device, s *cudadrv.Stream) {
		if err == nil && *s == 0 {
			*s, err = dev.NewStream(0)
		}
	}
	event := func(dev *gpu.Device, e *cudadrv.Event) {
		if err == nil && *e == 0 {
			*e, err = dev.NewEvent(cudadrv.EventDisableTiming)
		}
	}
	stream(g.from, &g.out)
	stream(g.to, &g.in)
	event(g.from, &g.begin[0])
	event(g.to, &g.begin[1])
	for i := range g.stages {
		x := &g.stages[i]
		event(g.from, &x.full)
		event(g.to, &x.empty)
		if err == nil && x.p == nil {
			err = g.from.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
				x.p, r = drv.MemHostAlloc(stageBytes, cudadrv.MemHostAllocPortable)
				return r
			})
		}
	}
	g.ready = err == nil
	return err
}
