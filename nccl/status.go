package nccl

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/internal/status"
)

// observeTime limits the queries of streams for a status. Without them, completions of the
// last second may be missing.
const observeTime = 200 * time.Millisecond

// registerStatus registers the communicators of the process as a source of the status.
var registerStatus = sync.OnceFunc(func() { status.Add("NCCL", describe) })

// describe adds all communicators that are not closed.
func describe(p *status.Process) {
	observeAll()
	p.NCCL = versionOf(liveMembers())
	for _, r := range liveRecorders() {
		p.Groups = append(p.Groups, groupOf(r))
	}
}

// versionOf returns the version of NCCL that communicators use, or "" if there are none.
func versionOf(list []*member) string {
	for _, m := range list {
		if c := m.comm.Value(); c != nil {
			if v, r := c.api.GetVersion(); r == ncclapi.Success {
				return ncclapi.VersionText(v)
			}
		}
	}
	return ""
}

var observing atomic.Bool

// observeAll records completions, as the watchdog does once a second.
func observeAll() {
	if !observing.CompareAndSwap(false, true) {
		return // it still waits for the driver
	}
	poll.Within(observeTime, func() error {
		defer observing.Store(false)
		observe(liveMembers())
		return nil
	})
}

// observeWithin records the completions of communicators, if the driver answers within d.
func observeWithin(d time.Duration, list []*member) {
	poll.Within(d, func() error {
		observe(list)
		return nil
	})
}

// observe records the completions of communicators.
func observe(list []*member) {
	for _, m := range list {
		if c := m.comm.Value(); c != nil && c.failed.Load() == nil && !c.isClosed() && m.Pending() {
			_, _, _ = c.watch.Observe() // the watchdog reports errors
		}
	}
}

func groupOf(r *flight.Recorder) status.Group {
	s := r.Standing()
	g := status.Group{
		ID: r.Group, Name: r.Name, Rank: r.Rank, Size: r.Size, WorldRank: s.WorldRank, Device: r.Device,
		Issued: s.Issued, Completed: min(s.Completed, s.Issued), IdleNanos: int64(s.Idle),
	}
	if s.State != flight.Scheduled {
		g.State = s.State.String()
	}
	if s.Oldest.Record > 0 {
		g.Oldest = &status.Op{Text: s.Oldest.String(), State: s.Oldest.State, Kind: s.Kind.Plain(), Collective: s.Oldest.Collective, AgeNanos: int64(s.Age)}
	}
	r.Totals(func(k flight.Kind, by flight.Service, size int, t flight.Total) {
		g.Totals = append(g.Totals, status.Total{
			Op: k.Label(), Strategy: strategies[by], Size: flight.SizeNames[size], Count: t.Count, Bytes: t.Bytes,
		})
	})
	return g
}

// strategies are the names of services in metrics.
var strategies = [...]string{ranks.NCCL: "nccl", ranks.Kernels: "kernels", ranks.Windows: "windows", ranks.CopyEngines: "copy_engines", ranks.Ordered: "ordered"}
