// Package sanitizer finds uses of device memory that no event orders, and uses of freed
// memory, on any backend: the counterpart of torch.cuda._sanitizer. It decorates the driver,
// NCCL and cuFile. Their calls tell the operations, their streams, and the events, waits and
// synchronizations that order them. The sanitizer computes the order when the calls are made;
// it neither waits for the device nor reads its memory.
//
// The sanitizer tracks memory that the decorated driver allocates. It misses races on other
// memory and of unknown operations, and never reports them falsely:
//   - memory that others allocated: other libraries, other processes (IPC)
//   - kernels loaded without package kernel, addresses passed as kernel.Address or in structs
//   - pointers whose parameter it cannot parse count as reads
//   - writes of NCCL's windows by other ranks
//   - conflicts between two devices that NCCL or Chorus kernels for collectives synchronize:
//     operations of other ranks order them, which may be enqueued later
//
// The virtual devices use the engine without the decorators: clocks of streams, and the history of the
// uses of a block.
package sanitizer

import (
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A Sanitizer decorates the libraries of one backend.
type Sanitizer struct {
	*tracker
	nccl sync.Map // of ncclapi.API to its decorator: communicators of one library belong together
}

// New returns a sanitizer for the devices of a driver.
func New(inner cudadrv.Driver) *Sanitizer {
	return &Sanitizer{tracker: &tracker{
		inner:    inner,
		contexts: map[int]cudadrv.Context{},
		meets:    map[cudadrv.Context]bool{},
		legacy:   map[cudadrv.Context]*queue{},
		queues:   map[cudadrv.Stream]*queue{},
		events:   map[cudadrv.Event]*event{},
		kernels:  map[cudadrv.Function]description{},
		retained: map[cudadrv.Device]cudadrv.Context{},
		graphs:   map[cudadrv.Graph]*capture{},
		execs:    map[cudadrv.GraphExec]*exec{},
		known:    map[incident]bool{},
	}}
}

// Driver returns the decorated driver.
func (s *Sanitizer) Driver() cudadrv.Driver { return driver{s.inner, s.tracker} }

// NCCL returns the decorated NCCL.
func (s *Sanitizer) NCCL(api ncclapi.API) ncclapi.API {
	l, _ := s.nccl.LoadOrStore(api, &nccl{API: api, t: s.tracker, comms: map[ncclapi.Comm]*comm{}, groups: map[int]*group{}})
	return l.(ncclapi.API)
}

// CuFile returns a decorated cuFile.
func (s *Sanitizer) CuFile(api cufileapi.API) cufileapi.API { return cufile{api, s.tracker} }

// A driver is the decorated driver. It records operations after the driver has accepted them,
// and the end of handles and addresses before the driver reuses them.
type driver struct {
	cudadrv.Driver
	t *tracker
}

var _ cudadrv.Watcher = driver{}

// enqueued records an operation if the driver has accepted it.
func (d driver) enqueued(r cudadrv.Result, name string, ctx cudadrv.Context, s cudadrv.Stream, uses ...cudadrv.Use) cudadrv.Result {
	if r == cudadrv.Success {
		d.t.enqueue(ctx, s, name, Here(), uses...)
	}
	return r
}

func (d driver) DevicePrimaryCtxRetain(dev cudadrv.Device) (cudadrv.Context, cudadrv.Result) {
	ctx, r := d.Driver.DevicePrimaryCtxRetain(dev)
	if r == cudadrv.Success {
		d.t.mu.Lock()
		defer d.t.mu.Unlock()
		d.t.retained[dev] = ctx
	}
	return ctx, r
}

// DevicePrimaryCtxRelease forgets the context if this was its last reference.
func (d driver) DevicePrimaryCtxRelease(dev cudadrv.Device) cudadrv.Result {
	r := d.Driver.DevicePrimaryCtxRelease(dev)
	if r != cudadrv.Success {
		return r
	}
	if _, active, r := d.Driver.DevicePrimaryCtxGetState(dev); r != cudadrv.Success || active != 0 {
		return cudadrv.Success
	}
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	if ctx, ok := d.t.retained[dev]; ok {
		d.t.reset(ctx)
	}
	return cudadrv.Success
}

func (d driver) CtxSynchronize() cudadrv.Result {
	ctx := d.t.current()
	d.t.mu.Lock()
	all := d.t.device(ctx)
	d.t.mu.Unlock()
	r := d.Driver.CtxSynchronize()
	if r == cudadrv.Success {
		d.t.waited(all)
	}
	return r
}
