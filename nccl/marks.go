package nccl

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// marks are events behind operations, which tell how far a communicator has come.
// An event for each operation would cost a quarter of its time, so there is one
// before an operation that comes some time after the last mark. Where many come at
// once, only the first and the last of them can be told from each other: of what hangs
// among them nobody knows which it is.
type marks struct {
	dev  *device.Device
	mu   sync.Mutex
	list [numMarks]mark
	next int
	over bool

	last atomic.Int64 // when somebody last wanted one
}

type mark struct {
	event  cudadrv.Event
	stream uintptr
	record uint64 // the operations of the stream up to this one are before it; 0 is an unused mark
	at     int64
}

const (
	numMarks  = 32
	markEvery = int64(time.Millisecond) // of which it then costs a few thousandths
)

// due reports whether it is time for a mark.
func (m *marks) due(t int64) bool { return t-m.last.Load() > markEvery }

// set marks the place behind the operations up to a record on their stream, which
// takes part in no capture, at a time of the recorder's clock. The mark takes the place of
// the oldest one, or of the newest one if the stream has not come to the oldest: that one
// tells what hangs.
func (m *marks) set(s *stream.Stream, record uint64, at int64) error {
	if !m.mu.TryLock() {
		return nil // it is not that important
	}
	defer m.mu.Unlock()
	if m.over {
		return nil
	}
	if m.ahead() {
		m.next = (m.next + numMarks - 1) % numMarks
	}
	k := &m.list[m.next]
	if k.event == 0 {
		err := m.dev.DoRelaxed("cuEventCreate", func(drv cudadrv.Driver) (r cudadrv.Result) {
			k.event, r = drv.EventCreate(cudadrv.EventDisableTiming)
			return r
		})
		if err != nil {
			return err
		}
	}
	k.record = 0
	err := m.dev.DoRelaxed("cuEventRecord", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(k.event, s.Raw()) })
	if err != nil {
		return err
	}
	k.stream, k.record, k.at = uintptr(s.Raw()), record, at
	m.next = (m.next + 1) % numMarks
	return nil
}

// ahead reports whether the oldest mark is in use and its stream has not come to it.
func (m *marks) ahead() bool {
	k := &m.list[m.next]
	if k.record == 0 {
		return false
	}
	ok, err := m.query(k)
	return err == nil && !ok
}

func (m *marks) query(k *mark) (passed bool, err error) {
	return asked(m.dev, "cuEventQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(k.event) })
}

// look asks for the marks, from the newest on: passed has those that their streams have
// passed, and ahead the others. Where operations complete in order, those before a passed
// one are passed too.
func (m *marks) look(ordered bool) (passed, ahead []mark, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.over {
		return nil, nil, nil
	}
	for i := range numMarks {
		k := &m.list[(m.next+numMarks-1-i)%numMarks]
		if k.record == 0 {
			continue
		}
		ok, err := m.query(k)
		if err != nil {
			return passed, ahead, err
		}
		if !ok {
			ahead = append(ahead, *k)
			continue
		}
		if passed = append(passed, *k); ordered {
			break
		}
	}
	slices.Reverse(ahead)
	return passed, ahead, nil
}

// newest is the record of the last mark.
func (m *marks) newest() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.list[(m.next+numMarks-1)%numMarks].record
}

// close gives the events up, unless the driver does not answer who asks for one.
func (m *marks) close() {
	if !poll.UntilNoLaterThan(callPatience, m.mu.TryLock) {
		return
	}
	defer m.mu.Unlock()
	m.over = true
	for i := range m.list {
		if e := m.list[i].event; e != 0 {
			_ = m.dev.DoRelaxed("cuEventDestroy", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) })
		}
	}
}

// asked asks the driver whether something is done.
func asked(dev *device.Device, op string, query func(cudadrv.Driver) cudadrv.Result) (done bool, err error) {
	result := cudadrv.Success
	err = dev.DoRelaxed(op, func(drv cudadrv.Driver) cudadrv.Result {
		switch result = query(drv); result {
		case cudadrv.ErrorNotReady, cudadrv.ErrorCapturedEvent, cudadrv.ErrorStreamCaptureUnsupported, cudadrv.ErrorStreamCaptureImplicit:
			return cudadrv.Success
		}
		return result
	})
	return err == nil && result == cudadrv.Success, err
}
