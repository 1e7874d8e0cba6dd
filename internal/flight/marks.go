package flight

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// Marks are events on the streams of a communicator, which show how far its operations have
// progressed. Two events for each operation would add a quarter to its time. Marks are
// therefore set only around an operation that comes some time after the last marks. The event
// before the operation shows whether its stream has reached it, and the event behind it whether
// it has completed. If one of many operations between two marks hangs, the marks do not show
// which one, nor whether other work between them does.
type Marks struct {
	dev    *device.Device
	mu     sync.Mutex
	list   [numMarks]Mark
	next   int
	closed bool

	last atomic.Int64 // time of the last request for a mark
}

// A Mark is a position on a stream.
type Mark struct {
	event  cudadrv.Event
	used   bool
	Stream uintptr
	Record uint64 // the mark is after the stream's operations up to this one; 0 if it says nothing about them
	Next   uint64 // the stream's operations from this one on are after the mark; 0 if that is not known
	Direct bool   // operation Next follows the mark directly: a stream that has passed the mark has reached it
	At     int64
}

const (
	numMarks  = 32
	markEvery = int64(2 * time.Millisecond) // two marks take a few thousandths of this time
)

// closeTimeout is how long Close waits for a call of the driver to return.
const closeTimeout = 100 * time.Millisecond

// NewMarks returns the marks of a device.
func NewMarks(dev *device.Device) *Marks { return &Marks{dev: dev} }

// Due reports whether it is time for a mark.
func (m *Marks) Due(t int64) bool { return t-m.last.Load() > markEvery }

// SetRequested records the time of a request for a mark.
func (m *Marks) SetRequested(t int64) { m.last.Store(t) }

// Set sets a mark on a stream, which must not be in a capture. The mark replaces the oldest one,
// or the newest one if the stream has not passed the oldest: the oldest one then shows
// which operation hangs. Set returns the mark that it has replaced if its stream has passed it.
func (m *Marks) Set(s *stream.Stream, mark Mark) (passed Mark, err error) {
	if !m.mu.TryLock() {
		return passed, nil // this mark is optional
	}
	defer m.mu.Unlock()
	if m.closed {
		return passed, nil
	}
	k := &m.list[m.next]
	if k.used {
		if ok, err := m.passed(k); err == nil && !ok {
			m.next = (m.next + numMarks - 1) % numMarks
			k = &m.list[m.next]
		} else if ok {
			passed = *k
		}
	}
	if k.event == 0 {
		err := gpu.DeviceOf(m.dev).DoRelaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
			k.event, r = drv.EventCreate(cudadrv.EventDisableTiming)
			return r
		})
		if err != nil {
			return passed, err
		}
	}
	k.used = false
	err = gpu.DeviceOf(m.dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(k.event, gpu.StreamOf(s).Raw()) })
	if err != nil {
		return passed, err
	}
	mark.event, mark.used, mark.Stream = k.event, true, uintptr(gpu.StreamOf(s).Raw())
	*k = mark
	m.next = (m.next + 1) % numMarks
	return passed, nil
}

func (m *Marks) passed(k *Mark) (passed bool, err error) {
	return QueryDone(m.dev, "cuEventQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(k.event) })
}

// Query queries the marks, the newest first. passed has the marks that their streams have
// passed, ahead the others. If operations complete in order, a passed mark behind operations
// implies that all earlier ones are passed.
func (m *Marks) Query(ordered bool) (passed, ahead []Mark, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, nil, nil
	}
	for i := range numMarks {
		k := &m.list[(m.next+numMarks-1-i)%numMarks]
		if !k.used {
			continue
		}
		ok, err := m.passed(k)
		if err != nil {
			return passed, ahead, err
		}
		if !ok {
			ahead = append(ahead, *k)
			continue
		}
		if passed = append(passed, *k); ordered && k.Record > 0 {
			break
		}
	}
	slices.Reverse(ahead)
	return passed, ahead, nil
}

// Newest returns the record of the newest mark.
func (m *Marks) Newest() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := &m.list[(m.next+numMarks-1)%numMarks]; k.used {
		return k.Record
	}
	return 0
}

// Close destroys the events, unless a call of the driver hangs.
func (m *Marks) Close() {
	if !poll.UntilNoLaterThan(closeTimeout, m.mu.TryLock) {
		return
	}
	defer m.mu.Unlock()
	m.closed = true
	for i := range m.list {
		if e := m.list[i].event; e != 0 {
			_ = gpu.DeviceOf(m.dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) })
		}
	}
}

// QueryDone queries the driver whether something has completed.
func QueryDone(dev *device.Device, op string, query func(cudadrv.Driver) cudadrv.Result) (done bool, err error) {
	result := cudadrv.Success
	err = gpu.DeviceOf(dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result {
		switch result = query(drv); result {
		case cudadrv.ErrorNotReady, cudadrv.ErrorCapturedEvent, cudadrv.ErrorStreamCaptureUnsupported, cudadrv.ErrorStreamCaptureImplicit:
			return cudadrv.Success
		}
		return result
	})
	return err == nil && result == cudadrv.Success, err
}
