package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/osthread"
)

var configuredLaunchers sync.Once

// configureLaunchers reads the options of the threads that enqueue operations concurrently
// from the environment.
func configureLaunchers() error {
	d, err := env.LaunchPollTime.Duration()
	if err == nil {
		configuredLaunchers.Do(func() { osthread.Launchers.PollTime = d })
	}
	return err
}

// single reports whether the group has one operation for each of its ranks.
func (b *Batch) single() bool { return len(b.ops) == len(b.comms) }

// concurrent reports whether threads may enqueue the operations concurrently, and makes room
// for their results. The group must have one operation for each of several ranks of one
// communicator: with two communicators, each device could get the operation of another
// communicator first and wait for the other device. A captured group is enqueued by one
// thread, because a capture may belong to a thread.
func (b *Batch) concurrent() bool {
	if len(b.ops) < 2 || !b.single() {
		return false
	}
	for i := range b.ops {
		if o := &b.ops[i]; o.Captured || o.comm.localRanks != b.comms[0].localRanks {
			return false
		}
	}
	b.resizeErrs()
	return true
}

// resizeErrs gives errs room for the result of each operation.
func (b *Batch) resizeErrs() {
	b.errs = b.errs[:0]
	for range b.ops {
		b.errs = append(b.errs, nil)
	}
}

// A launched is a Batch whose operations the polling threads enqueue.
type launched Batch

// Do enqueues operation i.
func (b *launched) Do(i int) { b.errs[i] = b.ops[i].execute() }

// finish records the results of the operations; nil means that all were enqueued. If only
// some operations were enqueued, or a part of one, they would wait forever for the others, so their
// communicators are broken.
func (b *Batch) finish(errs []error) (first error) {
	for i := range b.ops {
		if errs != nil && errs[i] != nil {
			if first == nil {
				first = errs[i]
			}
			continue
		}
		b.ops[i].countCaptured()
		if !b.implied(i, errs) {
			b.ops[i].comm.rec.Accept(&b.ops[i].Op.Call)
		}
	}
	if first == nil {
		b.markBehind()
		return nil
	}
	lost := (isFatal(first) || slices.ContainsFunc(errs, collective.Partial)) && !b.comms[0].wasAborted()
	for i := len(b.ops) - 1; !lost && i >= 0; i-- {
		if errs[i] != nil && b.ops[i].comm.alive() { // see undo
			b.ops[i].unrecord()
		}
	}
	if lost || slices.Contains(errs, nil) {
		b.failAll(first)
	}
	return first
}

// markBehind sets a mark behind the operations that have one before them.
func (b *Batch) markBehind() {
	for i := range b.ops {
		if o := &b.ops[i]; o.Marked {
			last := o
			for k := i + 1; k < len(b.ops); k++ {
				if x := &b.ops[k]; x.comm == o.comm && x.Stream == o.Stream {
					last = x
				}
			}
			o.comm.markBehind(last)
		}
	}
}

// implied reports whether the record of a later operation on the same stream implies that
// operation i was accepted.
func (b *Batch) implied(i int, errs []error) bool {
	o, j := &b.ops[i], i+1
	return j < len(b.ops) && (errs == nil || errs[j] == nil) &&
		b.ops[j].comm == o.comm && b.ops[j].Stream == o.Stream && b.ops[j].Captured == o.Captured
}

// failAll ends all communicators of the group. It sets the cause on each before it ends
// the first, because the others would otherwise see that end as their cause.
func (b *Batch) failAll(cause error) {
	ends := make([]*failure, len(b.comms))
	for i, c := range b.comms {
		ends[i] = c.setFailure(cause)
	}
	for i, c := range b.comms {
		if ends[i] != nil {
			go c.completeFailure(ends[i]) // waits until the group has left the communicator
		}
	}
}

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
		return nil, c.errorf(name, "%w", err)
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

// create has NCCL create the DevComm, which waits for all ranks.
func (d *DevComm) create(name string, reqs *ncclapi.DevCommRequirements) error {
	c := d.comm
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error { return c.check(name, c.api.DevCommCreate(*c.h, reqs, d.d)) })
}

// Bytes returns the ncclDevComm, for kernel.Bytes, as memory that must not be
// written.
func (d *DevComm) Bytes() []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(d.d)), d.bytes)
}

// Close destroys the DevComm (ncclDevCommDestroy), which no kernel may still
// use. Close is idempotent, and does nothing after the end of the communicator.
func (d *DevComm) Close() error {
	if d == nil || !d.owner.Close() {
		return nil
	}
	c := d.comm
	return c.unlessEnded("ncclDevCommDestroy", func() ncclapi.Result { return c.api.DevCommDestroy(*c.h, d.d) })
}
