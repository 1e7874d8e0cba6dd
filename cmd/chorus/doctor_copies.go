package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gochorus/chorus/cmd/chorus/internal/doctor"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// peers tests the copies between all pairs of GPUs of this process.
func (m *member) peers() doctor.Speed {
	if len(m.devs) == 1 {
		return doctor.Speed{Missing: "each process has one GPU: start chorus doctor --measure without chorus run"}
	}
	if env.P2P.Value() == "off" {
		return doctor.Speed{Missing: env.P2P.Name + "=off: direct copies are not in use"}
	}
	tested := 0
	for i, a := range m.devs {
		for _, b := range m.devs[:i] {
			can, err := a.CanAccessPeer(b)
			if err != nil {
				return doctor.Speed{Missing: err.Error()}
			}
			if !can {
				continue
			}
			works, err := gpu.DeviceOf(a).PeerWorks(gpu.DeviceOf(b))
			if err != nil {
				return doctor.Speed{Missing: err.Error()}
			}
			if !works {
				return doctor.Speed{Reason: fmt.Sprintf("wrong data between GPUs %d and %d", b.Ordinal(), a.Ordinal())}
			}
			tested++
		}
	}
	if tested == 0 {
		return doctor.Speed{OK: true, Reason: "no pair has direct access"}
	}
	return doctor.Speed{OK: true, Reason: fmt.Sprintf("direct copies between all %d pairs bring the right data", tested)}
}

// copiesInTurn measures the copies of all ranks: the processes of a host one after the other.
func (m *member) copiesInTurn(ctx context.Context, g *comm.Group) ([]doctor.Copy, error) {
	most := 1
	for _, x := range m.Members() {
		most = max(most, x.LocalSize)
	}
	var mine []doctor.Copy
	for i := range most {
		if i == m.LocalRank() {
			mine = m.copies(ctx)
		}
		if err := g.Barrier(ctx); err != nil {
			return nil, err
		}
	}
	all, err := comm.GatherValues(ctx, g, nil, mine...)
	for rank := range all {
		all[rank].Rank = rank
	}
	return all, err
}

// copies measures the copies of the GPUs of this process, one after the other.
func (m *member) copies(ctx context.Context) []doctor.Copy {
	list := make([]doctor.Copy, len(m.devs))
	bytes := 256 << 20
	if m.virtual() {
		bytes = 1 << 10
	}
	for i, d := range m.devs {
		c, err := measureCopy(ctx, d, bytes)
		if err != nil {
			c.Missing = err.Error()
		}
		c.Rank, c.OnlyMemory = i, m.virtual()
		list[i] = c
	}
	return list
}

// measureCopy measures copies of pinned memory in both directions.
func measureCopy(ctx context.Context, d *device.Device, bytes int) (c doctor.Copy, err error) {
	p, err := d.Properties()
	if err != nil {
		return c, err
	}
	c.Product = p.Name
	s, err := stream.New(d, nil)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	x, err := memory.Make[uint8](s, bytes)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	host, err := memory.MakePinned[uint8](d, bytes)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, host.Close()) }()
	if c.ToGPU, err = bandwidth(ctx, s, bytes, func() error { return x.CopyFromPinned(s, host) }); err != nil {
		return c, err
	}
	c.FromGPU, err = bandwidth(ctx, s, bytes, func() error { return x.CopyToPinned(s, host) })
	return c, err
}

// repeats is the number of timed copies. The fastest one counts.
const repeats = 4

// bandwidth times a copy on the device, in 10^9 bytes a second.
func bandwidth(ctx context.Context, s *stream.Stream, bytes int, issue func() error) (_ float64, err error) {
	var marks [2]*stream.Event
	for i := range marks {
		if marks[i], err = stream.NewEvent(s.Device(), &stream.EventConfig{Timing: true}); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, marks[i].Close()) }()
	}
	best := time.Duration(0)
	for i := range repeats {
		if err := errors.Join(marks[0].Record(s), issue(), marks[1].Record(s), marks[1].Sync(ctx)); err != nil {
			return 0, err
		}
		took, err := marks[1].Elapsed(marks[0])
		if err != nil {
			return 0, err
		}
		if i == 0 || took < best {
			best = took
		}
	}
	return float64(bytes) / max(best.Seconds(), 1e-9) / 1e9, nil
}
