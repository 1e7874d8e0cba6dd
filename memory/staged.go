package memory

import (
	"errors"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/stream"
)

// stageBytes is how much a stage holds: large enough that the bus and not the
// host's calls set the pace.
const stageBytes = 4 << 20

// A stager copies from one device to another through two pieces of pinned
// memory: while one is filled the other is emptied. The host only enqueues. It
// lives as long as the devices' contexts.
type stager struct {
	mu       sync.Mutex
	from, to *device.Device
	out, in  cudadrv.Stream   // of from and of to
	begin    [2]cudadrv.Event // of from and of to: where the user's stream was
	stages   [2]stage
	ready    bool
}

type stage struct {
	p     unsafe.Pointer
	full  cudadrv.Event // of from
	empty cudadrv.Event // of to
}

// stagersKey is for the stagers of a device, by where they copy to.
var stagersKey kept.Key

// copyStaged enqueues a copy between devices through pinned memory.
func copyStaged[T Element](s *stream.Stream, dst, src Slice[T]) error {
	if err := s.RefuseCapture("memory: copy", "copies between these devices are staged, and a staged one cannot be launched again: copy before the capture"); err != nil {
		return err
	}
	from, to := src.Device(), dst.Device()
	stagers := from.Local(&stagersKey, func() any { return new(sync.Map) }).(*sync.Map)
	g, ok := stagers.Load(to)
	if !ok {
		g, _ = stagers.LoadOrStore(to, &stager{from: from, to: to})
	}
	return g.(*stager).copy(s, dst.Raw(), src.Raw(), uintptr(src.Bytes()))
}

func (g *stager) copy(s *stream.Stream, dst, src cudadrv.DevicePtr, bytes uintptr) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.open(); err != nil {
		return err
	}
	begin := g.begin[0]
	if s.Device() == g.to {
		begin = g.begin[1]
	}
	if err := record(s.Device(), begin, s.Raw()); err != nil {
		return err
	}
	if err := wait(g.from, g.out, begin); err != nil { // and in waits for out
		return err
	}
	if err := g.enqueue(s, dst, src, bytes); err != nil {
		// What is under way uses the memory, and s does not wait for it.
		return errors.Join(err, g.drain())
	}
	return nil
}

// enqueue lets the bytes pass, and s wait for the last of them.
func (g *stager) enqueue(s *stream.Stream, dst, src cudadrv.DevicePtr, bytes uintptr) error {
	last := 0
	for at := uintptr(0); at < bytes; at += stageBytes {
		last = int(at / stageBytes % 2)
		if err := g.pass(&g.stages[last], dst+cudadrv.DevicePtr(at), src+cudadrv.DevicePtr(at), min(stageBytes, bytes-at)); err != nil {
			return err
		}
	}
	return wait(s.Device(), s.Raw(), g.stages[last].empty)
}

// drain waits for what the stager has enqueued.
func (g *stager) drain() error {
	sync := func(d *device.Device, s cudadrv.Stream) error {
		return d.Do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s) })
	}
	return errors.Join(sync(g.from, g.out), sync(g.to, g.in))
}

// pass fills a stage as soon as it is empty and empties it again.
func (g *stager) pass(x *stage, dst, src cudadrv.DevicePtr, n uintptr) error {
	if err := wait(g.from, g.out, x.empty); err != nil {
		return err
	}
	err := g.from.Do("cuMemcpyDtoHAsync", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemcpyDtoHAsync(x.p, src, n, g.out) })
	if err != nil {
		return err
	}
	if err := record(g.from, x.full, g.out); err != nil {
		return err
	}
	if err := wait(g.to, g.in, x.full); err != nil {
		return err
	}
	err = g.to.Do("cuMemcpyHtoDAsync", func(drv cudadrv.Driver) cudadrv.Result { return drv.MemcpyHtoDAsync(dst, x.p, n, g.in) })
	if err != nil {
		return err
	}
	return record(g.to, x.empty, g.in)
}

// open makes what is not there yet, so that it can be called again after an
// error.
func (g *stager) open() error {
	if g.ready {
		return nil
	}
	for _, x := range []struct {
		dev *device.Device
		s   *cudadrv.Stream
	}{{g.from, &g.out}, {g.to, &g.in}} {
		if err := newStream(x.dev, x.s); err != nil {
			return err
		}
	}
	events := []struct {
		dev *device.Device
		e   *cudadrv.Event
	}{{g.from, &g.begin[0]}, {g.to, &g.begin[1]}}
	for i := range g.stages {
		x := &g.stages[i]
		events = append(events, struct {
			dev *device.Device
			e   *cudadrv.Event
		}{g.from, &x.full}, struct {
			dev *device.Device
			e   *cudadrv.Event
		}{g.to, &x.empty})
		if x.p != nil {
			continue
		}
		err := g.from.Do("cuMemHostAlloc", func(drv cudadrv.Driver) (r cudadrv.Result) {
			x.p, r = drv.MemHostAlloc(stageBytes, cudadrv.MemHostAllocPortable)
			return r
		})
		if err != nil {
			return err
		}
	}
	for _, x := range events {
		if err := newEvent(x.dev, x.e); err != nil {
			return err
		}
	}
	g.ready = true
	return nil
}

func newStream(d *device.Device, s *cudadrv.Stream) error {
	if *s != 0 {
		return nil
	}
	return d.Do("cuStreamCreateWithPriority", func(drv cudadrv.Driver) (r cudadrv.Result) {
		*s, r = drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
		return r
	})
}

func newEvent(d *device.Device, e *cudadrv.Event) error {
	if *e != 0 {
		return nil
	}
	return d.Do("cuEventCreate", func(drv cudadrv.Driver) (r cudadrv.Result) {
		*e, r = drv.EventCreate(cudadrv.EventDisableTiming)
		return r
	})
}

func record(d *device.Device, e cudadrv.Event, s cudadrv.Stream) error {
	return d.Do("cuEventRecord", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(e, s) })
}

func wait(d *device.Device, s cudadrv.Stream, e cudadrv.Event) error {
	return d.Do("cuStreamWaitEvent", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamWaitEvent(s, e, 0) })
}
