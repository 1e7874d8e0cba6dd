package main

import (
	"context"
	"errors"

	"github.com/gochorus/chorus/cmd/chorus/internal/doctor"
	"github.com/gochorus/chorus/cmd/chorus/internal/perf"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/backend"
)

// notMeasured returns measurements that have a reason for their absence.
func notMeasured(reason string) *doctor.Measured {
	none := doctor.Speed{Missing: reason}
	return &doctor.Measured{Peers: none, Pairs: none, AllReduce: none, Pinned: none}
}

// measured measures the GPUs of all processes together. All processes call it.
func (m *member) measured(ctx context.Context) *doctor.Measured {
	if err := m.find(0); err != nil {
		return notMeasured(err.Error())
	}
	if m.Size() == 1 && len(m.devs) == 1 {
		all := notMeasured("one GPU: the check needs two")
		all.Copies, all.Pinned = m.copies(ctx), m.pinned()
		return all
	}
	g, err := m.group(ctx, nil)
	if err != nil {
		return notMeasured(err.Error())
	}
	defer g.Close()
	all := &doctor.Measured{Peers: m.peers(), Pinned: m.pinned()}
	if all.Copies, err = m.copiesInTurn(ctx, g); err != nil {
		return notMeasured(err.Error())
	}
	all.Pairs = speedOf(measurePairs(ctx, g, m.virtual()))
	all.AllReduce = speedOf(measureAllReduce(ctx, g, m.virtual()))
	if err := g.Shutdown(ctx); err != nil {
		return notMeasured(err.Error())
	}
	return all
}

// virtual reports whether the devices are virtual, and then small sizes suffice.
func (m *member) virtual() bool { return m.devs[0].System().Backend() != backend.CUDA }

func measurePairs(ctx context.Context, g *comm.Group, virtual bool) (*perf.Report, error) {
	p := &perf.PairPlan{Bytes: 64 << 20, Iterations: 5, Warmups: 1}
	if virtual {
		p.Bytes, p.Iterations = 1<<10, 1
	}
	return perf.MeasurePairs(ctx, g, p)
}

func measureAllReduce(ctx context.Context, g *comm.Group, virtual bool) (*perf.Report, error) {
	bytes, iterations := 1<<30, 10
	if virtual {
		bytes, iterations = 1<<10, 1
	}
	op, err := perf.Find("all_reduce")
	if err != nil {
		return nil, err
	}
	types, err := perf.ParseDTypes("float")
	sums, err2 := perf.ParseReductions("sum")
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	return perf.Run(ctx, g, &perf.Plan{
		Operations: []*perf.Operation{op}, DTypes: types, Reductions: sums, Sizes: perf.Sizes{Min: bytes, Max: bytes, Step: 1},
		Iterations: iterations, Warmups: 2, Checks: 1,
	}, nil)
}

// speedOf returns the verdict of a report. The times of virtual devices say nothing about a host.
func speedOf(r *perf.Report, err error) doctor.Speed {
	switch {
	case err != nil:
		return doctor.Speed{Missing: err.Error()}
	case r.Verdict == nil:
		return doctor.Speed{Missing: "no known bandwidth of the links of " + r.Device}
	case r.Backend != backend.CUDA:
		return doctor.Speed{Missing: r.Verdict.Reason}
	}
	return doctor.Speed{OK: r.Verdict.OK, Reason: r.Verdict.Reason}
}
