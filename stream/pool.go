package stream

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kept"
)

// poolStreams is the number of streams in the pool per priority and device, the same as in
// torch.
const poolStreams = 32

// pool has a device's shared streams by priority, from 0 downwards.
type pool struct {
	mu     sync.Mutex
	levels []poolLevel
}

type poolLevel struct {
	streams [poolStreams]*Stream // each created when it is first returned
	next    int
}

var poolKey kept.Key

// FromPool returns a stream of the pool that the process shares; most calls do not create
// one (torch.cuda.Stream). Each priority of a device has 32 streams, which are returned in
// turn: the 33rd call returns the first one again, and its users then wait for each other.
// The streams live as long as the device; Close does nothing. For an exclusive stream use
// New.
//
// priority is at most 0. Streams with a lower number run first. A number below the
// device's PriorityRange means its greatest priority.
func FromPool(dev *device.Device, priority int) (*Stream, error) {
	const op = "stream: from pool"
	if err := checkPriority(op, dev, priority); err != nil {
		return nil, err
	}
	p := gpu.DeviceOf(dev).Local(&poolKey, func() any { return new(pool) }).(*pool)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.levels == nil {
		_, greatest, err := PriorityRange(dev)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		p.levels = make([]poolLevel, 1-greatest)
	}
	priority = max(priority, 1-len(p.levels))
	l := &p.levels[-priority]
	s := l.streams[l.next]
	if s == nil {
		var err error
		if s, err = create(op, dev, gpu.PooledStream, priority); err != nil {
			return nil, err
		}
		handle.InitForever(&gpu.StreamOf(s).Owner)
		l.streams[l.next] = s
	}
	l.next = (l.next + 1) % poolStreams
	return s, nil
}

// PriorityRange returns the numbers of the lowest and of the highest priority of streams
// on dev: 0 and -5 on an H200 (cuCtxGetStreamPriorityRange,
// torch.cuda.Stream.priority_range).
func PriorityRange(dev *device.Device) (least, greatest int, err error) {
	if dev == nil {
		return 0, 0, fmt.Errorf("stream: priority range: no device given")
	}
	err = gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		l, g, r := drv.CtxGetStreamPriorityRange()
		least, greatest = int(l), int(g)
		return r
	})
	return least, greatest, err
}

// Priority returns the stream's priority within its device's range
// (cuStreamGetPriority).
func (s *Stream) Priority() (int, error) {
	if err := s.check("stream: priority"); err != nil {
		return 0, err
	}
	var p int32
	err := gpu.DeviceOf(s.dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		p, r = drv.StreamGetPriority(gpu.StreamOf(s).Raw())
		return r
	})
	return int(p), err
}

// checkPriority validates the arguments of calls that make a stream.
func checkPriority(op string, dev *device.Device, priority int) error {
	if dev == nil {
		return fmt.Errorf("%s: no device given", op)
	}
	if priority > 0 {
		return fmt.Errorf("%s on %s: priority %d: want 0, or less for a greater priority: %w", op, dev, priority, device.ErrorInvalidValue)
	}
	return nil
}
