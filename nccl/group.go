package nccl

import (
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/race"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/internal/spinpool"
)

// A group is a list of validated operations that are issued to NCCL between ncclGroupStart
// and ncclGroupEnd. A Batch fills it.
type group struct {
	ops          []operation
	counts       []int           // the sends and recvs of the operations
	comms        []*Communicator // of the operations, without duplicates, in lock order
	errs         []error         // of the operations, if an operation fails or launchers enqueue them
	transferEnds []transferEnd   // of the transfers between its ranks
	extents      []extent        // of its operations, by address
	places       []race.Place    // of the calls that added the operations; none on CUDA
	configured   bool            // an operation has a configuration
	timeout      time.Duration   // of its operations; 0 means the communicator's
}

// reset removes all operations.
func (g *group) reset() {
	clear(g.ops)
	clear(g.comms)
	if len(g.transferEnds) > 0 {
		clear(g.transferEnds)
	}
	if len(g.errs) > 0 {
		clear(g.errs)
	}
	g.ops, g.counts, g.comms, g.transferEnds, g.errs = g.ops[:0], g.counts[:0], g.comms[:0], g.transferEnds[:0], g.errs[:0]
	g.extents, g.timeout, g.configured = g.extents[:0], 0, false
}

// add appends a validated operation.
func (g *group) add(o *operation) (err error) {
	if gpu.AnyCapture() {
		if o.capture, err = gpu.StreamOf(o.Stream).CaptureID(); err != nil {
			return err
		}
	}
	if o.comm.places {
		if n := len(g.ops); n == len(g.places) {
			g.places = append(g.places, race.Place{})
		}
		g.places[len(g.ops)].Mark()
	}
	g.ops = append(g.ops, *o)
	g.configured = g.configured || o.config != nil
	if o.sends == nil {
		return nil
	}
	// The caller may change its counts before the group is enqueued.
	at := &g.ops[len(g.ops)-1]
	at.sends, at.recvs = g.copyCounts(o.sends), g.copyCounts(o.recvs)
	return nil
}

func (g *group) copyCounts(counts []int) []int {
	i := len(g.counts)
	g.counts = append(g.counts, counts...)
	return g.counts[i:len(g.counts):len(g.counts)]
}

// enqueue enqueues all operations, or none.
func (g *group) enqueue() error {
	if len(g.ops) == 0 {
		return nil
	}
	if err := g.enqueueLocked(); err != nil {
		return g.ops[0].comm.bestCause(err)
	}
	return nil
}

// enqueueLocked is enqueue with the error as it was noticed.
func (g *group) enqueueLocked() error {
	if err := g.prepare(); err != nil {
		return err
	}
	defer g.unlock()
	if err := g.record(); err != nil {
		return err
	}
	if g.concurrent() && spinpool.Launchers.Try(len(g.ops), g) {
		return g.finish(g.errs)
	}
	if err := g.execute(ncclapi.API.GroupEnd); err != nil {
		g.resizeErrs()
		for i := range g.errs {
			g.errs[i] = err
		}
		return g.finish(g.errs)
	}
	return g.finish(nil)
}

// record records the operations, or none.
func (g *group) record() error {
	t := flight.Now()
	for i := range g.ops {
		g.ops[i].Timeout, g.ops[i].Batched = g.timeout, true
		if err := g.ops[i].record(t); err != nil {
			for j := i - 1; j >= 0; j-- {
				g.ops[j].unrecord()
			}
			return err
		}
	}
	return g.checkInputs()
}

// execute gives the operations to NCCL in one group of NCCL.
func (g *group) execute(end func(ncclapi.API) ncclapi.Result) error {
	if err := g.startGroup(); err != nil {
		return err
	}
	return g.endGroup(end)
}

// startGroup starts a group of NCCL, which is bound to the OS thread, and gives it the
// operations. After nil, endGroup must follow. If NCCL refuses an operation, it drops the group.
func (g *group) startGroup() error {
	runtime.LockOSThread()
	var err error
	if g.capturing() {
		err = relaxed(g.ops[0].comm.dev, g.startGroupRelaxed)
	} else {
		err = g.startGroupRelaxed()
	}
	if err != nil {
		runtime.UnlockOSThread()
	}
	return err
}

// startGroupRelaxed is startGroup in the thread's current capture mode.
func (g *group) startGroupRelaxed() error {
	c := g.ops[0].comm
	if err := c.check("ncclGroupStart", c.api.GroupStart()); err != nil {
		return err
	}
	for i := range g.ops {
		o := &g.ops[i]
		if o.Service == ranks.Kernels || o.Service == ranks.Ordered { // not NCCL's
			continue
		}
		if err := o.execute(); err != nil {
			c.api.GroupEnd()
			return err
		}
	}
	return nil
}

// endGroup ends the group that startGroup has started.
func (g *group) endGroup(end func(ncclapi.API) ncclapi.Result) error {
	defer runtime.UnlockOSThread()
	c := g.ops[0].comm
	if !g.capturing() {
		return c.check("ncclGroupEnd", end(c.api))
	}
	return relaxed(c.dev, func() error { return c.check("ncclGroupEnd", end(c.api)) })
}

// capturing reports whether NCCL must be called in the relaxed capture mode.
func (g *group) capturing() bool { return g.ops[0].Captured || gpu.AnyCapture() }

// prepare validates the group as a whole and locks all its communicators, in the order in
// which they were made, so that two groups cannot deadlock.
func (g *group) prepare() error {
	if g.ops[0].comm.sharesGPUs {
		g.awaitRoom()
	}
	for i := range g.ops {
		if err := g.ops[i].validateAgain(); err != nil {
			return err
		}
		if c := g.ops[i].comm; len(g.comms) == 0 {
			g.comms = append(g.comms, c)
		} else if len(g.comms) > 1 || c != g.comms[0] {
			if err := g.include(c); err != nil {
				return err
			}
		}
	}
	if len(g.ops) > 1 || flight.Kinds[g.ops[0].Kind].Peer {
		if err := g.checkTogether(); err != nil {
			return err
		}
	}
	for i, c := range g.comms {
		if err := c.enter("ncclGroupEnd"); err != nil {
			g.comms = g.comms[:i]
			g.unlock()
			return err
		}
	}
	return nil
}

// checkTogether validates the operations against each other.
func (g *group) checkTogether() error {
	if err := g.checkCaptures(); err != nil {
		return err
	}
	if err := g.checkOverlap(); err != nil {
		return err
	}
	if err := g.match(); err != nil {
		return err
	}
	if err := g.checkSymmetric(); err != nil || !g.configured {
		return err
	}
	return g.checkConfigs()
}

// include adds a communicator to the group unless the group has it.
func (g *group) include(c *Communicator) error {
	if first := g.ops[0].comm; c.api != first.api {
		return fmt.Errorf("nccl: ncclGroupEnd: rank %d (%s) and rank %d (%s) are of two systems: want a group of one",
			first.rank, first.dev, c.rank, c.dev)
	}
	if at, found := slices.BinarySearchFunc(g.comms, c, func(a, b *Communicator) int { return int(a.number - b.number) }); !found {
		g.comms = slices.Insert(g.comms, at, c)
	}
	return nil
}

func (g *group) unlock() {
	for _, c := range g.comms {
		c.mu.Unlock()
	}
}
