package nccl

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// sinceRegister is the first NCCL that has ncclCommRegister.
const sinceRegister = 21901

// A registration is a pool that is registered with a communicator.
type registration struct {
	stop func() error
	ids  map[uint64]ncclapi.RegID // by address; guarded by the communicator's mu
}

// pools are the pools that are registered with a communicator.
type pools struct {
	mu sync.Mutex
	by map[*memory.Pool]*registration
}

// RegisterPool registers the memory that p has on c's device, now and later, with NCCL
// (ncclCommRegister; torch's ProcessGroupNCCL.register_mem_pool). Collectives can then use
// it without copying it first. NCCL does so if all ranks have registered the operands of a
// collective, and the memory comes from Allocator:
//
//	p := memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
//
// RegisterPool enqueues nothing and is not collective. When p frees memory,
// NCCL deregisters it. If NCCL refuses to register new memory of p, the
// allocation fails. Registering a pool again does nothing. The registration
// ends with DeregisterPool or with c.
func (c *Communicator) RegisterPool(p *memory.Pool) error {
	const op = "nccl: register a pool"
	if c == nil || c.owner.Closed() {
		return fmt.Errorf("%s: %w", op, c.errClosed("ncclCommRegister"))
	}
	if c.version < sinceRegister {
		return fmt.Errorf("%s: %w", op, needs("ncclCommRegister", sinceRegister, c.version))
	}
	c.pools.mu.Lock()
	defer c.pools.mu.Unlock()
	if c.pools.by[p] != nil {
		return nil
	}
	if p == nil {
		return fmt.Errorf("%s: no pool given", op)
	}
	r := &registration{ids: map[uint64]ncclapi.RegID{}}
	var err error
	r.stop, err = inside.PoolOf(p).Watch(func(d *device.Device, ptr, bytes uint64, taken bool) error {
		if d != c.dev {
			return nil
		}
		if taken {
			return c.register(r, ptr, bytes)
		}
		return c.deregister(r, ptr)
	})
	if err != nil {
		return fmt.Errorf("%s on rank %d of %d (%s): %w", op, c.rank, c.size, c.dev, err)
	}
	if c.pools.by == nil {
		c.pools.by = map[*memory.Pool]*registration{}
	}
	c.pools.by[p] = r
	return nil
}

// DeregisterPool deregisters the memory of p (ncclCommDeregister; torch's
// ProcessGroupNCCL.deregister_mem_pool). Collectives that use it must have
// completed. It does nothing if p is not registered, and after the end of c.
func (c *Communicator) DeregisterPool(p *memory.Pool) error {
	if c == nil {
		return fmt.Errorf("nccl: deregister a pool: %w", c.errClosed("ncclCommDeregister"))
	}
	c.pools.mu.Lock()
	r := c.pools.by[p]
	delete(c.pools.by, p)
	c.pools.mu.Unlock()
	if r == nil {
		return nil
	}
	if err := r.stop(); err != nil {
		return fmt.Errorf("nccl: deregister a pool on rank %d of %d (%s): %w", c.rank, c.size, c.dev, err)
	}
	return nil
}

// register registers a segment with NCCL, unless the communicator has ended.
func (c *Communicator) register(r *registration, ptr, bytes uint64) error {
	return c.unlessEnded("ncclCommRegister", func() ncclapi.Result {
		id, res := c.api.CommRegister(*c.h, cudadrv.DevicePtr(ptr), uintptr(bytes))
		if res == ncclapi.Success {
			r.ids[ptr] = id
		}
		return res
	})
}

// unlessEnded calls NCCL about a resource of the communicator. It does nothing after the end of
// the communicator.
func (c *Communicator) unlessEnded(name string, call func() ncclapi.Result) error {
	if err := c.enter(name); err != nil {
		return c.ignoreIfClosed(err)
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error { return c.check(name, call()) })
}

func (c *Communicator) deregister(r *registration, ptr uint64) error {
	const name = "ncclCommDeregister"
	if err := c.enter(name); err != nil {
		return c.ignoreIfClosed(err)
	}
	defer c.mu.Unlock()
	id, ok := r.ids[ptr]
	if !ok {
		return nil
	}
	delete(r.ids, ptr)
	return relaxed(c.dev, func() error { return c.check(name, c.api.CommDeregister(*c.h, id)) })
}

// ignoreIfClosed drops the error of a call on a communicator that has ended or failed.
func (c *Communicator) ignoreIfClosed(err error) error {
	if c.isClosed() || c.failed.Load() != nil {
		return nil
	}
	return err
}

// Allocator allocates memory with NCCL (ncclMemAlloc, ncclMemFree). Collectives can use
// the memory without an internal copy once it is registered with their communicators. Free
// waits for the stream. Sizes are rounded up to whole pages of the device, usually 2 MiB,
// so use it for the segments of a pool.
var Allocator memory.Allocator = allocator{}

type allocator struct{}

func (allocator) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	const op = "nccl: allocate"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return 0, err
	}
	dev := s.Device()
	if bytes <= 0 {
		return 0, fmt.Errorf("%s %d bytes on %s: want more than none", op, bytes, dev)
	}
	var ptr cudadrv.DevicePtr
	err := call(dev, "ncclMemAlloc", func(api ncclapi.API) (r ncclapi.Result) {
		ptr, r = api.MemAlloc(uintptr(bytes))
		return r
	})
	if err == nil {
		return uint64(ptr), nil
	}
	// NCCL does not report the cause.
	if free, total, e := dev.MemoryInfo(); e == nil && free < uint64(bytes) {
		err = &memory.OutOfMemoryError{Device: dev.String(), Requested: uint64(bytes), Free: free, Total: total,
			Err: fmt.Errorf("%w: %w", device.ErrorOutOfMemory, err)}
	}
	return 0, err
}

func (allocator) Free(s *stream.Stream, ptr uint64, bytes int) error {
	const op = "nccl: free"
	if s == nil {
		return fmt.Errorf("%s: no stream given", op)
	}
	if err := gpu.StreamOf(s).RefuseCapture(op, "the graph may use the memory: free it after the graph"); err != nil {
		return err
	}
	dev := s.Device()
	// ncclMemFree unmaps the memory at once, even if it is in use.
	err := gpu.DeviceOf(dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(gpu.StreamOf(s).Raw()) })
	if err == nil || dev.Err() != nil { // a lost device no longer uses the memory
		err = call(dev, "ncclMemFree", func(api ncclapi.API) ncclapi.Result { return api.MemFree(cudadrv.DevicePtr(ptr)) })
	}
	if err != nil {
		return fmt.Errorf("%s %d bytes at %#x: %w", op, bytes, ptr, err)
	}
	return nil
}

// call calls NCCL without a communicator.
func call(dev *device.Device, name string, fn func(ncclapi.API) ncclapi.Result) error {
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return err
	}
	return relaxed(dev, func() error {
		if r := fn(api); r != ncclapi.Success {
			return &Error{Op: name, Rank: -1, Device: dev.String(), Err: Result(r), Detail: api.GetLastError(0)}
		}
		return nil
	})
}
