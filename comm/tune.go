package comm

import (
	"cmp"
	"context"
	"fmt"
	"runtime"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// TuneConfig are the options of Tune; nil means the defaults. They must be the same on
// all ranks.
type TuneConfig struct {
	MaxBytes int            // the largest size: of an all-reduce, or of one rank's part; default 1 GiB of an all-reduce or of all ranks' parts together, of small GPUs a 64th of their memory, of virtual devices 256 bytes
	Types    []memory.DType // of what is reduced; default float32 and bfloat16
	Ops      []Op           // default Sum and Max
}

// wholeBytes is up to which size it is measured, unless a device's memory is less than 64
// times as much, or it is virtual and has nothing to measure.
const (
	wholeBytes        = 1 << 30
	wholeBytesVirtual = 256
)

// oddBytes is up to how many bytes it is measured what sizes cost that are not made of
// whole 16 bytes.
const oddBytes = 4 << 20

// engineBytes is from where on copy engines are measured: a copy of less takes as long as
// one of that much.
const engineBytes = 256 << 10

// TunePlan returns what Tune will measure: the strategies that can carry each operation
// out, without times.
func TunePlan(g *Group, cfg *TuneConfig) ([]Choice, error) {
	if err := g.check("tune"); err != nil {
		return nil, err
	}
	var c TuneConfig
	if cfg != nil {
		c = *cfg
	}
	all, part := c.MaxBytes, c.MaxBytes
	if c.MaxBytes == 0 {
		var err error
		if all, err = whole(g.Device(0)); err != nil {
			return nil, err
		}
		part = max(all/g.size, 16)
	}
	if c.Types == nil {
		c.Types = []memory.DType{memory.Float32, memory.BFloat16T}
	}
	if c.Ops == nil {
		c.Ops = []Op{Sum, Max}
	}
	if all < 16 {
		return nil, refuse("tune", "MaxBytes is %d: want 16 or more", c.MaxBytes)
	}
	for _, t := range c.Types {
		if t.Size() == 0 || t == memory.Bool {
			return nil, refuse("tune", "type %s: want numbers", t)
		}
	}
	for _, op := range c.Ops {
		if !slices.Contains(tunedOps, op) {
			return nil, refuse("tune", "there is no reduction %s", op)
		}
	}
	k := g.members[0].ways
	if k == nil {
		return nil, nil // there is no choice
	}
	return c.plan(k, all, part), nil
}

// whole is the largest size that is measured by default.
func whole(dev *device.Device) (int, error) {
	if dev.System().Machine() != nil {
		return wholeBytesVirtual, nil
	}
	_, total, err := dev.MemoryInfo()
	return int(min(wholeBytes, total/64)), err
}

// plan has all operations, up to so many bytes of an all-reduce or a broadcast and of one
// rank's part.
func (c *TuneConfig) plan(k *ways, all, part int) (list []Choice) {
	for _, kind := range []nccl.CollectiveKind{nccl.AllReduceKind, nccl.AllGatherKind, nccl.ReduceScatterKind, nccl.BroadcastKind, nccl.AllToAllKind} {
		most := part
		if kind == nccl.AllReduceKind || kind == nccl.BroadcastKind {
			most = all
		}
		if !reduces(kind) {
			list = operation{kind: kind}.sizes(list, k, most)
			continue
		}
		for _, t := range c.Types {
			for _, op := range c.Ops {
				list = operation{kind, t, op}.sizes(list, k, most)
			}
		}
	}
	return list
}

// sizes adds the sizes of an operation: of whole 16 bytes from 16 on, twice as large
// each, and those that are one element smaller.
func (o operation) sizes(list []Choice, k *ways, most int) []Choice {
	size := max(o.dtype.Size(), 1)
	for bytes := 16; bytes > 0 && bytes <= most; bytes *= 2 {
		if bytes <= oddBytes {
			list = append(list, o.choice(k, bytes-size))
		}
		list = append(list, o.choice(k, bytes))
	}
	return list
}

// choice has the strategies that can.
func (o operation) choice(k *ways, bytes int) Choice {
	c := Choice{Operation: kindNames[o.kind], Bytes: bytes, what: o, Times: []Timing{{Strategy: NCCLOnly}}}
	if reduces(o.kind) {
		c.Type, c.Reduction = o.dtype.String(), o.op.String()
	}
	x := o.collective(bytes)
	for s := NCCLOnly + 1; s < Tuned; s++ {
		// Own kernels without a choice of algorithm are one of those that have one.
		if s == OwnKernels && o.kind == nccl.AllReduceKind || s.algorithm() && o.kind != nccl.AllReduceKind {
			continue
		}
		if s == CopyEngines && bytes < engineBytes {
			continue
		}
		if k.can(s, x, ownMost) {
			c.Times = append(c.Times, Timing{Strategy: s})
		}
	}
	return c
}

// algorithm reports whether a strategy is one way to reduce by own kernels.
func (s Strategy) algorithm() bool { return s >= OneShot && s <= TwoShotLines }

// carried is the type of the elements that an operation is measured with.
func (o operation) carried() memory.DType {
	if o.dtype == memory.Invalid {
		return memory.Uint8
	}
	return o.dtype
}

func (o operation) collective(bytes int) nccl.Collective {
	t := o.carried()
	return nccl.Collective{Kind: o.kind, DType: t, Op: o.op, Count: bytes / t.Size(), Together: true}
}

// Tune measures which strategy is the fastest for which operation and size, between the
// ranks of g, which has been made with Tuned: from now on the group goes by that, and so
// does each to whose Config it is given. All ranks get the same. It takes seconds,
// over slow links minutes, and waits for what is on the group's streams; nothing else may
// run on the devices. Where there is nothing but NCCL to choose from, it is empty.
// Collective. An error breaks the group where ranks may wait for others.
func Tune(ctx context.Context, g *Group, cfg *TuneConfig) (*Tuning, error) {
	plan, err := TunePlan(g, cfg)
	if err != nil {
		return nil, err
	}
	if err := g.checkWait("tune"); err != nil {
		return nil, err
	}
	if k := g.members[0].ways; k != nil && k.opened != Tuned {
		return nil, refuse("tune", "the group was made with the strategy %s: make it with %s", k.opened, Tuned)
	}
	at, err := g.sameSite(ctx)
	if err != nil {
		return nil, err
	}
	if err := g.samePlan(ctx, plan); err != nil {
		return nil, err
	}
	t := &Tuning{For: at, Choices: plan}
	if len(plan) == 0 {
		return t, nil
	}
	mine := make([][]float64, len(g.members))
	eg, running := errgroup.WithContext(ctx)
	for i := range g.members {
		eg.Go(func() (err error) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			mine[i], err = g.members[i].tune(running, plan)
			return err
		})
	}
	if err := eg.Wait(); err != nil {
		return nil, g.fail(fmt.Errorf("comm: tune: %w", err))
	}
	all, err := GatherValues(ctx, g, Gob, mine...)
	if err != nil {
		return nil, err
	}
	t.fill(all)
	if err := g.tuneEngines(ctx, t); err != nil {
		return nil, g.fail(fmt.Errorf("comm: tune: %w", err))
	}
	t.sort()
	g.adopt(t)
	return t, nil
}

// samePlan returns an error on all ranks where they do not have the same plan: they would
// wait for each other.
func (g *Group) samePlan(ctx context.Context, plan []Choice) error {
	all, err := GatherValues(ctx, g, Gob, slices.Repeat([]string{fmt.Sprint(plan)}, len(g.members))...)
	if err != nil {
		return err
	}
	for rank, other := range all {
		if other != all[0] {
			return refuse("tune", "rank %d is to measure other things than rank 0: give all the same TuneConfig", rank)
		}
	}
	return nil
}

// fill takes the times of the slowest ranks.
func (t *Tuning) fill(all [][]float64) {
	n := 0
	for i := range t.Choices {
		times := t.Choices[i].Times
		for j := range times {
			for _, one := range all {
				times[j].Micros = max(times[j].Micros, one[n])
			}
			n++
		}
	}
}

// sort puts the fastest strategy first.
func (t *Tuning) sort() {
	for i := range t.Choices {
		slices.SortStableFunc(t.Choices[i].Times, func(a, b Timing) int { return cmp.Compare(a.Micros, b.Micros) })
	}
}

// adopt makes the group go by a Tuning that was checked.
func (g *Group) adopt(t *Tuning) {
	x := t.index()
	for i := range g.members {
		if k := g.members[i].ways; k != nil {
			k.rule.Store(&rule{strategy: Tuned, tuning: x})
		}
	}
}
