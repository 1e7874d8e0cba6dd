package nccl

import (
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/crew"
	"github.com/gochorus/chorus/internal/env"
)

// launchers are the process's threads that enqueue the operations of a group at the same
// time: one thread takes as long for eight ranks as for one, eight times.
var launchers = new(crew.Crew)

var setLaunchers sync.Once

// readyLaunchers sets what the environment says of them.
func readyLaunchers() error {
	patience, err := env.LaunchPatience.Duration()
	if err == nil {
		setLaunchers.Do(func() { launchers.Patience = patience })
	}
	return err
}

// single reports whether the group has one operation for each of its ranks.
func (g *group) single() bool { return len(g.ops) == len(g.comms) }

// apart reports whether threads may enqueue the operations: one for each of several
// ranks of one communicator, since with two communicators each device could get another
// one's operation first, and wait for the other device. Into a graph they go together: a
// capture may belong to a thread.
func (g *group) apart() bool {
	if len(g.ops) < 2 || !g.single() {
		return false
	}
	for i := range g.ops {
		if o := &g.ops[i]; o.captured || o.comm.clique != g.comms[0].clique {
			return false
		}
	}
	g.expect()
	return true
}

// expect makes room for what becomes of each operation.
func (g *group) expect() {
	g.errs = g.errs[:0]
	for range g.ops {
		g.errs = append(g.errs, nil)
	}
}

// Do enqueues operation i.
func (g *group) Do(i int) {
	o := &g.ops[i]
	g.errs[i] = o.give()
	if err := o.settle(g.errs[i] == nil); g.errs[i] == nil {
		g.errs[i] = err
	}
}

// inTurn enqueues the operations one after the other, without a group of NCCL.
func (g *group) inTurn() error {
	g.expect()
	for i := range g.ops {
		if g.Do(i); g.errs[i] == nil {
			continue
		}
		for j := i + 1; j < len(g.ops); j++ {
			g.errs[j] = g.errs[i]
		}
		break
	}
	return g.outcome()
}

// outcome notes what became of each operation. Those that were taken while another one
// was not wait for what does not come: they end with their communicators.
func (g *group) outcome() (first error) {
	for i := range g.ops {
		if err := g.errs[i]; err == nil {
			if !g.leads(i) {
				g.ops[i].comm.rec.took(&g.ops[i])
			}
		} else if first == nil {
			first = err
		}
	}
	if first == nil {
		return nil
	}
	lost := final(first) && !g.comms[0].over() // it was not aborted
	for i := len(g.ops) - 1; !lost && i >= 0; i-- {
		if g.errs[i] != nil {
			g.ops[i].refused()
		}
	}
	if lost || slices.Contains(g.errs, nil) {
		g.breakWith(first)
	}
	return first
}

// leads reports whether what was taken after operation i says all that it does. Where there
// are no errors all were taken.
func (g *group) leads(i int) bool {
	o, j := &g.ops[i], i+1
	return j < len(g.ops) && (len(g.errs) == 0 || g.errs[j] == nil) &&
		g.ops[j].comm == o.comm && g.ops[j].stream == o.stream && g.ops[j].captured == o.captured
}

// breakWith ends all communicators of the group. Each has the cause before the first one
// ends, which the others would take for it.
func (g *group) breakWith(cause error) {
	ends := make([]*failure, len(g.comms))
	for i, c := range g.comms {
		ends[i] = c.blame(cause)
	}
	for i, c := range g.comms {
		if ends[i] != nil {
			go c.end(ends[i]) // it waits until the group has left the communicator
		}
	}
}
