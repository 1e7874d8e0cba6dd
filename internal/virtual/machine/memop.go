package machine

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// StreamBatchMemOp orders no accesses of other memory: CUDA does not see what a wait waits for.
func (d driver) StreamBatchMemOp(h cudadrv.Stream, ops []cudadrv.StreamMemOp) cudadrv.Result {
	c, s, r := d.beginStream("cuStreamBatchMemOp", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	const most = 256 // of cuStreamBatchMemOp
	if len(ops) == 0 || len(ops) > most || slices.ContainsFunc(ops, func(x cudadrv.StreamMemOp) bool { return x.At == 0 || x.At%4 != 0 }) {
		return cudadrv.ErrorInvalidValue
	}
	ops = slices.Clone(ops)
	c.enqueue(s, func(o *Op) {
		for _, x := range ops {
			if !o.memOp(x) {
				return
			}
		}
	})
	return cudadrv.Success
}

// memOp performs an operation on a word, and returns false if the device is
// lost.
func (o *Op) memOp(x cudadrv.StreamMemOp) bool {
	m := o.s.dev.m
	m.mu.Lock()
	data, t := o.share(x.At, 4)
	m.mu.Unlock()
	if t != nil {
		o.Fail(t)
		return false
	}
	word := &View[uint32](data)[0]
	if !x.Waits {
		atomic.StoreUint32(word, x.Value)
		return true
	}
	return o.holdQueue(func() bool {
		return o.await(fmt.Sprintf("a bit of %#x at %#x", x.Value, uint64(x.At)), func() bool { return atomic.LoadUint32(word)&x.Value != 0 })
	})
}

// holdQueue runs a wait for a word while it holds a hardware queue. When on
// H200s as many wait as there are queues, work on all other streams of the
// device begins only after such a wait has ended, whatever their priorities.
func (o *Op) holdQueue(wait func() bool) bool {
	dev, m := o.s.dev, o.s.dev.m
	m.mu.Lock()
	dev.valueWaits++
	m.mu.Unlock()
	ok := wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	if dev.valueWaits--; dev.valueWaitsEnd != nil {
		close(dev.valueWaitsEnd)
		dev.valueWaitsEnd = nil
	}
	return ok
}

// awaitQueue waits until a hardware queue of the device is free. m.mu is held, except during the wait.
func (o *Op) awaitQueue() {
	dev, m := o.s.dev, o.s.dev.m
	for dev.valueWaits >= m.cfg.Queues && dev.status == cudadrv.Success {
		if dev.valueWaitsEnd == nil {
			dev.valueWaitsEnd = make(chan struct{})
		}
		end, before := dev.valueWaitsEnd, o.blocked
		o.blocked = "a hardware queue, all of which streams hold that wait for memory"
		m.mu.Unlock()
		m.watch(dev, end, func() string {
			return fmt.Sprintf("%s on %v waits for %s: use fewer groups of ranks at a time, or set CUDA_DEVICE_MAX_CONNECTIONS (at most %d)", o.Name, o.s, o.blocked, maxQueues)
		})
		m.mu.Lock()
		o.blocked = before
	}
}
