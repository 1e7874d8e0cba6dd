package gds

import (
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
)

// maxDepth is how many slots a worker has at most.
const maxDepth = 4

// A lane is a stream on which one worker copies, with an event for each slot. A
// device keeps its lanes for later calls, as long as its context lives.
type lane struct {
	dev    *device.Device
	stream cudadrv.Stream
	events [maxDepth]cudadrv.Event
}

// lanes are those of a device that nobody uses.
type lanes struct {
	mu   sync.Mutex
	free []*lane
}

var lanesKey kept.Key

func lanesOf(dev *device.Device) *lanes {
	return dev.Local(&lanesKey, func() any { return new(lanes) }).(*lanes)
}

// takeLane returns a lane with nothing on it.
func takeLane(dev *device.Device) (*lane, error) {
	if l := lanesOf(dev).take(); l != nil {
		return l, nil
	}
	l := &lane{dev: dev}
	if err := l.open(); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// take returns a lane that there is, or nil.
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

// giveLane takes back a lane that has been drained.
func giveLane(l *lane) {
	list := lanesOf(l.dev)
	list.mu.Lock()
	defer list.mu.Unlock()
	list.free = append(list.free, l)
}

func (l *lane) open() error {
	err := l.dev.Do("cuStreamCreateWithPriority", func(drv cudadrv.Driver) (r cudadrv.Result) {
		l.stream, r = drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
		return r
	})
	for i := range l.events {
		if err != nil {
			return err
		}
		err = l.dev.Do("cuEventCreate", func(drv cudadrv.Driver) (r cudadrv.Result) {
			l.events[i], r = drv.EventCreate(cudadrv.EventDisableTiming | cudadrv.EventBlockingSync)
			return r
		})
	}
	return err
}

// close gives up what open has made. What the driver refuses goes with the
// context.
func (l *lane) close() {
	for _, e := range l.events {
		if e != 0 {
			_ = l.dev.Do("cuEventDestroy", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) })
		}
	}
	if l.stream != 0 {
		_ = l.dev.Do("cuStreamDestroy", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamDestroy(l.stream) })
	}
}

func (l *lane) upload(dst cudadrv.DevicePtr, src unsafe.Pointer, bytes int64) error {
	return l.dev.Do("cuMemcpyHtoDAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyHtoDAsync(dst, src, uintptr(bytes), l.stream)
	})
}

func (l *lane) download(src cudadrv.DevicePtr, dst unsafe.Pointer, bytes int64) error {
	return l.dev.Do("cuMemcpyDtoHAsync", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemcpyDtoHAsync(dst, src, uintptr(bytes), l.stream)
	})
}

// mark records the i-th event behind what is on the lane.
func (l *lane) mark(i int) error {
	return l.dev.Do("cuEventRecord", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(l.events[i], l.stream) })
}

// patience is how long a worker asks whether its copies are done before its thread
// sleeps until they are: waking it, above all in a virtual machine, may take longer
// than the copies. Tests change it.
var patience = 200 * time.Microsecond

// await waits for the i-th event: for copies only, which take their time and no
// longer.
func (l *lane) await(i int) error {
	for start := time.Now(); time.Since(start) < patience; runtime.Gosched() {
		if passed, err := l.passed(i); passed || err != nil {
			return err
		}
	}
	return l.dev.Do("cuEventSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventSynchronize(l.events[i]) })
}

// passed reports whether the i-th event has been reached.
func (l *lane) passed(i int) (passed bool, err error) {
	err = l.dev.Do("cuEventQuery", func(drv cudadrv.Driver) cudadrv.Result {
		r := drv.EventQuery(l.events[i])
		if r == cudadrv.ErrorNotReady {
			return cudadrv.Success
		}
		passed = true
		return r
	})
	return passed, err
}

// drain waits for everything on the lane.
func (l *lane) drain() error {
	return l.dev.Do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(l.stream) })
}
