package comm

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// How often an operation is measured: in so many rounds, of launches of a graph that has
// some of them, together of about as many bytes.
const (
	tuneRounds   = 5
	tuneLaunches = 3
	tuneOps      = 20
	tuneBytes    = 16 << 20
)

// A tuner measures on one rank.
type tuner struct {
	m        *member
	dst, src *memory.Buffer
	from, to *stream.Event
}

// tune measures what the plan has, in its order.
func (m *member) tune(ctx context.Context, plan []Choice) (times []float64, err error) {
	x := &tuner{m: m}
	defer func() { err = errors.Join(err, x.close()) }()
	before := m.ways.rule.Load()
	defer m.ways.rule.Store(before)
	if err := x.open(plan); err != nil {
		return nil, err
	}
	for i := range plan {
		c := &plan[i]
		for _, t := range c.Times {
			if t.Strategy == CopyEngines { // of all ranks together
				times = append(times, 0)
				continue
			}
			m.ways.only(t.Strategy)
			us, err := x.time(ctx, c, []*stream.Stream{m.stream}, func() error { return x.issue(c) })
			if err != nil {
				return nil, fmt.Errorf("%s of %d bytes by %s on rank %d: %w", c.Operation, c.Bytes, t.Strategy, m.comm.Rank(), err)
			}
			times = append(times, us)
		}
	}
	return times, nil
}

// tuneEngines measures copy engines, where there are any, in graphs of all ranks and
// without.
func (g *Group) tuneEngines(ctx context.Context, t *Tuning) (err error) {
	if !g.members[0].ways.engines {
		return nil
	}
	var xs []*tuner
	defer func() {
		for _, x := range xs {
			err = errors.Join(err, x.close())
		}
	}()
	for i := range g.members {
		m := &g.members[i]
		xs = append(xs, &tuner{m: m})
		if err := xs[i].open(t.Choices); err != nil {
			return err
		}
		defer m.ways.rule.Store(m.ways.rule.Load())
		m.ways.only(CopyEngines)
		if err := g.members[0].stream.WaitStream(m.stream); err != nil { // on which it will run
			return err
		}
	}
	for i := range t.Choices {
		c := &t.Choices[i]
		j := slices.IndexFunc(c.Times, func(x Timing) bool { return x.Strategy == CopyEngines })
		if j < 0 {
			continue
		}
		all := func() error {
			return g.each(func(i int, _ *member) error { return xs[i].issue(c) })
		}
		if c.Times[j].Micros, err = xs[0].time(ctx, c, g.Streams(), all); err == nil {
			c.Times[j].Eager, err = xs[0].eager(ctx, c, all)
		}
		if err != nil {
			return fmt.Errorf("%s of %d bytes by %s: %w", c.Operation, c.Bytes, CopyEngines, err)
		}
	}
	return nil
}

// open allocates what the largest operation takes.
func (x *tuner) open(plan []Choice) (err error) {
	most := 0
	for i := range plan {
		c := &plan[i]
		if most = max(most, c.Bytes); c.what.kind != nccl.AllReduceKind && c.what.kind != nccl.BroadcastKind {
			most = max(most, c.Bytes*x.m.comm.Size())
		}
	}
	s := x.m.stream
	for _, b := range []**memory.Buffer{&x.dst, &x.src} {
		mem, err := memory.Make[uint8](s, most)
		if err != nil {
			return err
		}
		*b = mem.Buffer()
		if err := mem.Zero(s); err != nil {
			return err
		}
	}
	timing := &stream.EventConfig{Timing: true}
	if x.from, err = stream.NewEvent(s.Device(), timing); err == nil {
		x.to, err = stream.NewEvent(s.Device(), timing)
	}
	return err
}

func (x *tuner) close() error {
	return errors.Join(x.from.Close(), x.to.Close(), x.dst.Close(), x.src.Close())
}

// time returns how long an operation takes in a graph of the streams, in µs.
func (x *tuner) time(ctx context.Context, c *Choice, streams []*stream.Stream, issue func() error) (us float64, err error) {
	if err := issue(); err != nil { // which connects the ranks
		return 0, err
	}
	run := x.some(c, issue)
	exec, err := graph.Capture(streams, run)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, exec.Close()) }()
	return x.median(ctx, c, func() error { return exec.Launch(x.m.stream) })
}

// eager returns how long an operation takes that is enqueued by itself, in µs.
func (x *tuner) eager(ctx context.Context, c *Choice, issue func() error) (us float64, err error) {
	return x.median(ctx, c, x.some(c, issue))
}

// some issues as many operations of a choice as are measured at once.
func (x *tuner) some(c *Choice, issue func() error) func() error {
	return func() error {
		for range x.operations(c) {
			if err := issue(); err != nil {
				return err
			}
		}
		return nil
	}
}

func (x *tuner) operations(c *Choice) int {
	if x.virtual() {
		return 1
	}
	return min(max(tuneBytes/c.Bytes, 1), tuneOps)
}

// virtual reports whether there is nothing to measure.
func (x *tuner) virtual() bool { return x.m.comm.Device().System().Machine() != nil }

// median returns how long one of the operations takes that run enqueues, in µs: the
// median of the rounds.
func (x *tuner) median(ctx context.Context, c *Choice, run func() error) (us float64, err error) {
	launches, rounds := tuneLaunches, tuneRounds
	if x.virtual() {
		launches, rounds = 1, 1
	}
	var all []float64
	for range rounds {
		d, err := x.round(ctx, run, launches)
		if err != nil {
			return 0, err
		}
		all = append(all, d/float64(x.operations(c)*launches))
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// round calls run, once to bring the ranks together, and returns how long took what the
// other calls enqueue, in µs.
func (x *tuner) round(ctx context.Context, run func() error, launches int) (float64, error) {
	s := x.m.stream
	if err := run(); err != nil {
		return 0, err
	}
	if err := x.from.Record(s); err != nil {
		return 0, err
	}
	for range launches {
		if err := run(); err != nil {
			return 0, err
		}
	}
	if err := x.to.Record(s); err != nil {
		return 0, err
	}
	if err := x.m.comm.Wait(ctx, s); err != nil {
		return 0, err
	}
	d, err := x.to.Elapsed(x.from)
	return float64(d.Nanoseconds()) / 1e3, err
}

// issue issues the operation.
func (x *tuner) issue(c *Choice) error { return issuers[c.what.carried()](x, c) }

// issuers issue an operation of elements of a type.
var issuers = map[memory.DType]func(*tuner, *Choice) error{
	memory.Int8: issueOf[int8], memory.Uint8: issueOf[uint8], memory.Int16: issueOf[int16], memory.Uint16: issueOf[uint16],
	memory.Int32: issueOf[int32], memory.Uint32: issueOf[uint32], memory.Int64: issueOf[int64], memory.Uint64: issueOf[uint64],
	memory.Float16T: issueOf[memory.Float16], memory.BFloat16T: issueOf[memory.BFloat16],
	memory.Float32: issueOf[float32], memory.Float64: issueOf[float64],
	memory.Float8E4M3T: issueOf[memory.Float8E4M3], memory.Float8E5M2T: issueOf[memory.Float8E5M2],
}

func issueOf[T memory.Element](x *tuner, c *Choice) error {
	part := c.Bytes / c.what.carried().Size()
	all := part * x.m.comm.Size()
	count := map[nccl.CollectiveKind][2]int{
		nccl.AllReduceKind: {part, part}, nccl.BroadcastKind: {part, part}, nccl.AllGatherKind: {all, part},
		nccl.ReduceScatterKind: {part, all}, nccl.AllToAllKind: {all, all},
	}[c.what.kind]
	dst, err := memory.View[T](x.dst, 0, count[0])
	if err != nil {
		return err
	}
	src, err := memory.View[T](x.src, 0, count[1])
	if err != nil {
		return err
	}
	k, s := x.m.comm, x.m.stream
	switch c.what.kind {
	case nccl.AllReduceKind:
		return nccl.AllReduce(k, s, dst, src, c.what.op)
	case nccl.BroadcastKind:
		return nccl.Broadcast(k, s, dst, src, 0)
	case nccl.AllGatherKind:
		return nccl.AllGather(k, s, dst, src)
	case nccl.ReduceScatterKind:
		return nccl.ReduceScatter(k, s, dst, src, c.what.op)
	}
	return nccl.AllToAll(k, s, dst, src)
}
