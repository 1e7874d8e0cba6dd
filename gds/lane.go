package gds

import (
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
)

// maxDepth is the maximum number of slots of a worker.
const maxDepth = 4

// A lane is a stream for the copies of one worker, with an event for each slot. A device
// keeps its lanes for later calls, until its context is released.
type lane struct {
	dev    *gpu.Device
	stream cudadrv.Stream
	events [maxDepth]cudadrv.Event
}

// lanes are the unused lanes of a device.
type lanes struct {
	mu   sync.Mutex
	free []*lane
}

var lanesKey kept.Key

func lanesOf(dev *gpu.Device) *lanes {
	return dev.Local(&lanesKey, func() any { return new(lanes) }).(*lanes)
}

// takeLane returns an idle lane.
func takeLane(dev *gpu.Device) (*lane, error) {
	if l := lanesOf(dev).take(); l != nil {
		return l, nil
	}
	l := &lane{dev: dev}
	if err := l.allocate(); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// take returns an existing lane, or nil.
func (x *lanes) take() *lane {
	x.mu.Lock()
	defer x.mu.Unlock()
	n := len(x.free)
	if n == 0 {
		return nil
	}
	l := x.free[n-1]
	x.free = x.free[:n-1]
	return l
}

// giveLane returns a drained lane.
func giveLane(l *lane) {
	list := lanesOf(l.dev)
	list.mu.Lock()
	defer list.mu.Unlock()
	list.free = append(list.free, l)
}

func (l *lane) allocate() (err error) {
	l.stream, err = l.dev.NewStream(0)
	for i := range l.events {
		if err != nil {
			return err
		}
		l.events[i], err = l.dev.NewEvent(cudadrv.EventDisableTiming | cudadrv.EventBlockingSync)
	}
	return err
}

// close destroys the resources that open has created. Resources that the driver does not
// destroy are released with the context.
func (l *lane) close() {
	for _, e := range l.events {
		if e != 0 {
			_ = l.dev.DestroyEvent(e)
		}
	}
	if l.stream != 0 {
		_ = l.dev.DestroyStream(l.stream)
	}
}

func (l *lane) upload(dst cudadrv.DevicePtr, src unsafe.Pointer, bytes int64) error {
	return l.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(dst, src, uintptr(bytes), l.stream)
	})
}

func (l *lane) download(src cudadrv.DevicePtr, dst unsafe.Pointer, bytes int64) error {
	return l.dev.Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoHAsync(dst, src, uintptr(bytes), l.stream)
	})
}

// mark records event i after the operations on the lane.
func (l *lane) mark(i int) error { return l.dev.RecordEvent(l.events[i], l.stream) }

// patience is how long a worker polls for the end of its copies before its thread sleeps.
// Waking the thread, especially in a virtual machine, may take longer than the copies.
// Tests change it.
var patience = 200 * time.Microsecond

// await waits for event i. Only copies precede it, so the wait is short.
func (l *lane) await(i int) error {
	for start := time.Now(); time.Since(start) < patience; runtime.Gosched() {
		if passed, err := l.passed(i); passed || err != nil {
			return err
		}
	}
	return l.dev.SyncEvent(l.events[i])
}

// passed reports whether event i has passed.
func (l *lane) passed(i int) (bool, error) { return l.dev.QueryEvent(l.events[i]) }

// drain waits for everything on the lane.
func (l *lane) drain() error { return l.dev.SyncStream(l.stream) }
