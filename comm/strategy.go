package comm

import (
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/nccl"
)

// A Strategy says what carries a group's collectives out. What a strategy cannot do is
// NCCL's: other operations, types and sizes, operations on other streams than the
// group's, and a rank's several operations in one group of NCCL. All ranks must have the
// same strategy.
type Strategy uint8

// The strategies.
const (
	// ByEnvironment is what CHORUS_COMM_STRATEGY says; nccl is the default.
	ByEnvironment Strategy = iota
	// NCCLOnly is NCCL for everything.
	NCCLOnly
	// OwnKernels is Chorus's own kernels for small all-reduces, all-gathers,
	// reduce-scatters, broadcasts and all-to-alls, where all ranks are GPUs of one host
	// that reach each other's memory, at most 8 of them, and NCCL for everything else.
	// Each rank then has 35 MiB of device memory for them, which counts as allocated (Tuned:
	// 128 MiB).
	// While such an operation waits for other ranks, its kernel keeps the device busy.
	// All ranks have the same bits. Groups of Split have NCCL alone.
	//
	// They are for what is on the group's streams, by itself or as its rank's only
	// collective in a group of NCCL. A rank's operations run one after the other, as
	// with NCCL: a graph that has captured some, on whatever stream it is launched, comes
	// after those before and before those after. Close waits until the streams that have
	// had such operations are past their work.
	OwnKernels
	// OneShot, TwoShotPackets, TwoShot and TwoShotLines are OwnKernels with one algorithm
	// for all-reduces, up to the most that it can: every rank sends all to all; every rank
	// reduces a share and sends that on, both in packets; as plain bytes between barriers;
	// or in lines of 128 bytes, where NVLink joins all GPUs and each process sees all of
	// them. They are for measurements.
	OneShot
	TwoShotPackets
	TwoShot
	TwoShotLines
	// Windows is NCCL's own kernels for symmetric memory (NCCL 2.27.3 and newer): what
	// is small is copied to a window that all ranks have registered, and its result from
	// there: sums of floats of 16 and 32 bits, all-gathers and reduce-scatters, up to
	// 4 MiB. Before NCCL 2.28.7 these corrupt parts that are no multiple of 8 bytes,
	// which the ordinary kernels then get. Each rank has 8 MiB of device memory for it; the
	// order of operations and graphs, and what Close waits for, are as for OwnKernels. Memory
	// that is in windows already needs no strategy (nccl.Communicator.RegisterWindow).
	// NCCL 2.28.3 cannot abort these kernels: where one waits for a rank that is lost, the
	// end of the group takes ten seconds and returns an error, and only the end of the
	// process frees the device.
	Windows
	// CopyEngines is the devices' copy engines for all-gathers and all-to-alls of a group
	// whose ranks are all of this process and reach each other's memory, where one call,
	// or one group of NCCL, has those of all ranks and nothing else: no kernel waits, and
	// no multiprocessor is kept busy. What comes otherwise is NCCL's, or in a group that is
	// Tuned that of the next fastest strategy. It is for what is large.
	CopyEngines
	// Tuned is for each operation, type and size what a Tuning says: that of
	// Config.Tuning, of the file CHORUS_TUNING_FILE, or, where there is none for such
	// devices yet, one that is measured when the group is made and written there.
	Tuned
	strategies
)

var strategyNames = [strategies]string{
	ByEnvironment: "by environment", NCCLOnly: "nccl", OwnKernels: "own", OneShot: "one-shot",
	TwoShotPackets: "two-shot-packets", TwoShot: "two-shot", TwoShotLines: "two-shot-lines", Windows: "windows", CopyEngines: "copy-engines", Tuned: "tuned",
}

// String returns the name that CHORUS_COMM_STRATEGY has for it.
func (s Strategy) String() string {
	if s < strategies {
		return strategyNames[s]
	}
	return fmt.Sprintf("Strategy(%d)", uint8(s))
}

// ParseStrategy returns the strategy of a name.
func ParseStrategy(name string) (Strategy, error) {
	for s := NCCLOnly; s < strategies; s++ {
		if strategyNames[s] == name {
			return s, nil
		}
	}
	return 0, unfit(fmt.Errorf("comm: there is no strategy %q: want one of %v", name, strategyNames[NCCLOnly:]))
}

// MarshalText is for encoding/json and others.
func (s Strategy) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText is for encoding/json and others.
func (s *Strategy) UnmarshalText(text []byte) (err error) {
	*s, err = ParseStrategy(string(text))
	return err
}

// strategy is that of the configuration, or the environment's.
func (c *Config) strategy() (Strategy, error) {
	if c != nil && c.Strategy != ByEnvironment {
		if c.Strategy >= strategies {
			return 0, unfit(fmt.Errorf("comm: there is no %s", c.Strategy))
		}
		return c.Strategy, nil
	}
	name, err := env.CommStrategy.OneOf(strategyNames[NCCLOnly:]...)
	if err != nil {
		return NCCLOnly, err
	}
	return ParseStrategy(name)
}

// Strategy returns what carries the group's collectives out: NCCLOnly where nothing else
// could be had.
func (g *Group) Strategy() Strategy {
	if k := g.members[0].ways; k != nil {
		return k.rule.Load().strategy
	}
	return NCCLOnly
}

// Strategies returns those that the group can use, NCCLOnly first. What Config.Strategy
// needs is what there is: Tuned has all.
func (g *Group) Strategies() []Strategy {
	list := []Strategy{NCCLOnly}
	k := g.members[0].ways
	if k == nil {
		return list
	}
	if k.own != nil {
		list = append(list, OwnKernels)
		for s := OneShot; s <= TwoShotLines; s++ {
			if k.own.Supports(ownAlgorithms[s]) == nil {
				list = append(list, s)
			}
		}
	}
	if k.window != nil {
		list = append(list, Windows)
	}
	if k.engines {
		list = append(list, CopyEngines)
	}
	if k.opened == Tuned {
		list = append(list, Tuned)
	}
	return list
}

// Use makes s, one of Strategies, carry out what is issued from now on. All ranks call
// it with the same one, between the same operations: where they differ it is an error that
// matches ErrMismatch on all of them, and the strategy stays. Over several processes it
// waits for all that is on the group's streams, and ends early as Wait does: then others
// may have the new one already, and the group is to be closed. Collective.
func (g *Group) Use(ctx context.Context, s Strategy) error {
	return g.change(ctx, s, func(k *ways) { k.use(s) })
}

// UseWhole is Use, but s carries out all that it can, and not only what is as small as it
// is fast with. It is to measure that. For Chorus's own packages.
func (g *Group) UseWhole(ctx context.Context, s Strategy) error {
	return g.change(ctx, s, func(k *ways) { k.only(s) })
}

// change sets the rule of all local ranks where all ranks want the same strategy.
func (g *Group) change(ctx context.Context, s Strategy, set func(*ways)) error {
	const op = "use"
	if err := g.checkWait(op); err != nil {
		return err
	}
	if err := g.sameStrategy(ctx, s); err != nil {
		return err
	}
	if !slices.Contains(g.Strategies(), s) {
		return refuse(op, "the group has no strategy %s: it has %v%s", s, g.Strategies(), g.whyNot(s))
	}
	for i := range g.members {
		if k := g.members[i].ways; k != nil {
			set(k)
		}
	}
	return nil
}

// whyNot says what keeps own kernels from a strategy of theirs, after a colon, or nothing.
func (g *Group) whyNot(s Strategy) string {
	k := g.members[0].ways
	if k == nil || k.own == nil || s >= strategies {
		return ""
	}
	if err := k.own.Supports(ownAlgorithms[s]); err != nil {
		return ": " + err.Error()
	}
	return ""
}

// sameStrategy returns an error on all ranks where they do not want the same one.
func (g *Group) sameStrategy(ctx context.Context, s Strategy) error {
	if len(g.members) == g.size {
		if err := context.Cause(ctx); err != nil { // there is nobody else
			return fmt.Errorf("comm: use %s: %w", s, err)
		}
		return nil
	}
	all, err := GatherValues(ctx, g, Gob, slices.Repeat([]uint8{uint8(s)}, len(g.members))...)
	if err != nil {
		return err
	}
	for rank, other := range all {
		if other != all[0] {
			return refuse("use", "rank %d wants the strategy %s and rank 0 %s: call Use with the same on all", rank, Strategy(other), Strategy(all[0]))
		}
	}
	return nil
}

// Chosen returns what carries such a collective out on the group's streams, if it is
// given some addresses: NCCLOnly, or one of the other Strategies but Tuned. Together is
// whether one call has it of all ranks, as those of this package have where all are of
// this process, and Captured whether it is for a graph.
func (g *Group) Chosen(x nccl.Collective) Strategy {
	if k := g.members[0].ways; k != nil {
		return k.choose(x)
	}
	return NCCLOnly
}
