package nccl

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A DevCommConfig has the resources of a DevComm. They must be the same on all ranks.
type DevCommConfig struct {
	// Bytes is sizeof(ncclDevComm) in the headers that the kernels are compiled with. The
	// headers must have the version of the loaded NCCL, or an older one that it supports.
	Bytes int
	// Barriers is the number of barriers between all ranks, and LSABarriers the number of barriers
	// between the ranks that access each other's memory by load and store: usually one for
	// each block of a kernel.
	Barriers, LSABarriers int
	// LLA2ABlocks and LLA2ASlots are the numbers of blocks and slots for low-latency
	// all-to-alls.
	LLA2ABlocks, LLA2ASlots int
}

// A DevComm is a communicator for kernels that use NCCL's device API (ncclDevComm). A kernel
// takes it by value: declare the parameter with kernel.Struct(len(d.Bytes())) and pass
// kernel.Bytes(d.Bytes()). Compile the kernel with NCCL's headers, by kernel.Source.Options.
// Networks and NVLink multicast are not requested.
type DevComm struct {
	owner handle.Owner
	comm  *Communicator
	d     *ncclapi.DevComm
	bytes int
}

// NewDevComm creates a DevComm (ncclDevCommCreate). It needs NCCL 2.29.2: older versions
// cannot detect that the headers have another layout. All ranks must call it, in the same order
// relative to other operations, and it returns when all have. Virtual devices do not support
// it. If ctx ends first, it returns the cause, and c must be closed.
func (c *Communicator) NewDevComm(ctx context.Context, cfg *DevCommConfig) (*DevComm, error) {
	const f = ncclapi.FuncDevCommCreate
	name := f.Name()
	if err := c.checkUsable(name); err != nil {
		return nil, err
	}
	if err := c.needs(f); err != nil {
		return nil, err
	}
	if c.version < ncclapi.FirstDevComm {
		return nil, needs(name, ncclapi.FirstDevComm, c.version)
	}
	reqs, err := cfg.requirements(c.version)
	if err != nil {
		return nil, fmt.Errorf("nccl: %s on rank %d of %d: %w", name, c.rank, c.size, err)
	}
	d := &DevComm{comm: c, d: new(ncclapi.DevComm), bytes: cfg.Bytes}
	begun, done := time.Now(), make(chan error, 1)
	go func() { done <- d.create(name, reqs) }()
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		handle.Init(d, &d.owner, handle.About{Kind: "nccl device communicator", On: c.dev})
		return d, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("nccl: %s on rank %d of %d (%s): gave up after %v, other ranks have not come: %w",
			name, c.rank, c.size, c.dev, time.Since(begun).Round(time.Millisecond), context.Cause(ctx))
	}
}

// requirements validates the configuration.
func (cfg *DevCommConfig) requirements(version int32) (*ncclapi.DevCommRequirements, error) {
	if cfg == nil || cfg.Bytes < 1 || cfg.Bytes > ncclapi.DevCommBytes {
		return nil, fmt.Errorf("Bytes is not 1 to %d: set it to sizeof(ncclDevComm)", ncclapi.DevCommBytes)
	}
	r := ncclapi.NewDevCommRequirements(version)
	for _, x := range []struct {
		n  int
		to *int32
	}{{cfg.Barriers, &r.BarrierCount}, {cfg.LSABarriers, &r.LSABarrierCount}, {cfg.LLA2ABlocks, &r.LSALLA2ABlockCount}, {cfg.LLA2ASlots, &r.LSALLA2ASlotCount}} {
		if x.n < 0 || x.n > 1<<20 {
			return nil, errors.New("a number of barriers, blocks or slots is not 0 to 1048576")
		}
		*x.to = int32(x.n)
	}
	return r, nil
}

// create makes NCCL create it. NCCL waits for all ranks.
func (d *DevComm) create(name string, reqs *ncclapi.DevCommRequirements) error {
	c := d.comm
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error { return c.check(name, c.api.DevCommCreate(*c.h, reqs, d.d)) })
}

// Bytes returns the ncclDevComm, for kernel.Bytes. It must not be written.
func (d *DevComm) Bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(d.d)), d.bytes)
}

// Close destroys it (ncclDevCommDestroy). Kernels that use it must have completed. Close is
// idempotent, and does nothing after the end of the communicator.
func (d *DevComm) Close() error {
	if d == nil || !d.owner.Close() {
		return nil
	}
	c := d.comm
	return c.unlessEnded("ncclDevCommDestroy", func() ncclapi.Result { return c.api.DevCommDestroy(*c.h, d.d) })
}
