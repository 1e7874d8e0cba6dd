package nccl

import (
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/internal/spinpool"
)

var configuredLaunchers sync.Once

// configureLaunchers reads the options of the threads that enqueue operations concurrently
// from the environment.
func configureLaunchers() error {
	d, err := env.LaunchPatience.Duration()
	if err == nil {
		configuredLaunchers.Do(func() { spinpool.Launchers.PollTime = d })
	}
	return err
}

// single reports whether the group has one operation for each of its ranks.
func (g *group) single() bool { return len(g.ops) == len(g.comms) }

// concurrent reports whether threads may enqueue the operations concurrently, and makes room
// for their results. The group must have one operation for each of several ranks of one
// communicator: with two communicators, each device could get the operation of another
// communicator first and wait for the other device. A captured group is enqueued by one
// thread, because a capture may belong to a thread.
func (g *group) concurrent() bool {
	if len(g.ops) < 2 || !g.single() {
		return false
	}
	for i := range g.ops {
		if o := &g.ops[i]; o.Captured || o.comm.clique != g.comms[0].clique {
			return false
		}
	}
	g.resizeErrs()
	return true
}

// resizeErrs makes room for the result of each operation.
func (g *group) resizeErrs() {
	g.errs = g.errs[:0]
	for range g.ops {
		g.errs = append(g.errs, nil)
	}
}

// Do enqueues operation i.
func (g *group) Do(i int) { g.errs[i] = g.ops[i].execute() }

// finish records the results of the operations; nil means that all were enqueued. If only
// some operations were enqueued, or a part of one, they would wait forever for the others, so their
// communicators are broken.
func (g *group) finish(errs []error) (first error) {
	for i := range g.ops {
		if errs != nil && errs[i] != nil {
			if first == nil {
				first = errs[i]
			}
		} else if !g.implied(i, errs) {
			g.ops[i].comm.rec.Accept(&g.ops[i].Op)
		}
	}
	if first == nil {
		g.markBehind()
		return nil
	}
	lost := (isFatal(first) || slices.ContainsFunc(errs, ranks.Partial)) && !g.comms[0].wasAborted()
	for i := len(g.ops) - 1; !lost && i >= 0; i-- {
		if errs[i] != nil && g.ops[i].comm.alive() { // see undo
			g.ops[i].unrecord()
		}
	}
	if lost || slices.Contains(errs, nil) {
		g.failAll(first)
	}
	return first
}

// markBehind sets a mark behind the operations that have one before them.
func (g *group) markBehind() {
	for i := range g.ops {
		if o := &g.ops[i]; o.Marked {
			last := o
			for k := i + 1; k < len(g.ops); k++ {
				if x := &g.ops[k]; x.comm == o.comm && x.Stream == o.Stream {
					last = x
				}
			}
			o.comm.markBehind(last)
		}
	}
}

// implied reports whether the record of a later operation on the same stream implies that
// operation i was accepted.
func (g *group) implied(i int, errs []error) bool {
	o, j := &g.ops[i], i+1
	return j < len(g.ops) && (errs == nil || errs[j] == nil) &&
		g.ops[j].comm == o.comm && g.ops[j].Stream == o.Stream && g.ops[j].Captured == o.Captured
}

// failAll ends all communicators of the group. It sets the cause on each before it ends
// the first, because the others would otherwise see that end as their cause.
func (g *group) failAll(cause error) {
	ends := make([]*failure, len(g.comms))
	for i, c := range g.comms {
		ends[i] = c.setFailure(cause)
	}
	for i, c := range g.comms {
		if ends[i] != nil {
			go c.completeFailure(ends[i]) // waits until the group has left the communicator
		}
	}
}
