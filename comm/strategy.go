package comm

import (
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/ranks"

	"github.com/gochorus/chorus/internal/route"
)

// A Strategy selects the backend of a group's collectives. NCCL runs everything that a
// strategy does not support: other operations, types and sizes, operations on other
// streams than the group's, and several operations of one rank in a single NCCL group. All
// ranks must have the same strategy. In a group with Config.Deterministic a strategy does not
// change the bits of reductions. Its value is its name in CHORUS_COMM_STRATEGY.
type Strategy string

// The strategies.
const (
	// ByEnvironment is the strategy named by CHORUS_COMM_STRATEGY; the default is nccl.
	ByEnvironment Strategy = ""
	// NCCLOnly uses NCCL for everything.
	NCCLOnly Strategy = "nccl"
	// OwnKernels uses Chorus kernels for small all-reduces, all-gathers, reduce-scatters,
	// broadcasts and all-to-alls, if all ranks are GPUs of one host that can access each
	// other's memory, and at most 8. NCCL runs everything else. Each rank uses up to 35
	// MiB of device memory for them, which counts as allocated (Tuned: 128 MiB). While
	// such an operation waits for other ranks, its kernel occupies the device. All ranks
	// get bitwise identical results. Groups of Split use only NCCL.
	//
	// Chorus kernels run operations on the group's streams, issued alone or as the only
	// collective of their rank in an NCCL group. A rank's operations run one after the
	// other, as with NCCL. A captured operation keeps that order: a launch of its graph,
	// on any stream, comes after the earlier operations and before the later ones. Close
	// waits until the streams that ran such operations have completed them.
	//
	// The strategies "one-shot", "two-shot-packets", "two-shot" and "two-shot-lines" are
	// OwnKernels with one algorithm for all-reduces of every size that the algorithm
	// supports. They exist for measurements. One-shot: every rank sends all its elements to
	// all ranks. The others: every rank reduces a part and sends the result to all ranks.
	// One-shot and two-shot-packets send packets, two-shot sends plain bytes between
	// barriers. Two-shot-lines sends lines of 128 bytes; it requires NVLink between all GPUs
	// and every GPU visible in each process.
	OwnKernels Strategy = "own"
	// Windows uses NCCL's kernels for symmetric memory (NCCL 2.27.3 and newer). Small
	// operands are copied to a window that all ranks have registered, and results are
	// copied back. It supports sums of 16-bit and 32-bit floats, all-gathers and
	// reduce-scatters, up to 4 MiB. Before NCCL 2.28.7 these kernels corrupt parts whose
	// size is not a multiple of 8 bytes, so ordinary kernels run those. Each rank uses 8
	// MiB of device memory. The order of operations and graphs, and the wait of Close, are
	// as for OwnKernels. Memory that is already in a window needs no strategy
	// (nccl.Communicator.RegisterWindow). NCCL 2.28.3 cannot abort these kernels: if one
	// of them waits for a lost rank, closing the group takes ten seconds and returns an
	// error, and the device is usable again only after the process ends.
	Windows Strategy = "windows"
	// CopyEngines uses the devices' copy engines for all-gathers and all-to-alls. It
	// requires that all ranks are in this process and can access each other's memory, and
	// that one call, or one NCCL group, has the operations of all ranks and nothing else.
	// Copy engines occupy no multiprocessor, and are the fastest for large sizes. NCCL
	// runs all other operations; in a Tuned group the next fastest strategy does.
	CopyEngines Strategy = "copy-engines"
	// Tuned uses a Tuning to select the strategy for each operation, type and size. The
	// Tuning is Config.Tuning, or comes from the file CHORUS_TUNING_FILE. If the file has
	// none for these devices, it is measured when the group is made and written to the
	// file.
	Tuned Strategy = "tuned"
)

// route returns the strategy of package route.
func (s Strategy) route() (route.Strategy, error) {
	r, err := route.ParseStrategy(string(s))
	if err != nil {
		return 0, asBadArgument(fmt.Errorf("comm: %w", err))
	}
	return r, nil
}

// strategyOf is the inverse of Strategy.route.
func strategyOf(s route.Strategy) Strategy { return Strategy(s.String()) }

// strategy returns the strategy of the configuration, or of the environment.
func (c *Config) strategy() (route.Strategy, error) {
	if c != nil && c.Strategy != ByEnvironment {
		return c.Strategy.route()
	}
	name, err := env.CommStrategy.OneOf(route.Names[route.NCCLOnly:]...)
	if err != nil {
		return route.NCCLOnly, err
	}
	return route.ParseStrategy(name)
}

// Strategy returns the strategy in use. It is NCCLOnly if the configured strategy is not
// supported.
func (g *Group) Strategy() Strategy { return strategyOf(g.routers.Strategy()) }

// Strategies returns the strategies that the group can use, NCCLOnly first. Only the
// resources of Config.Strategy are allocated; with Tuned the resources of all strategies
// are.
func (g *Group) Strategies() []Strategy {
	var list []Strategy
	for _, s := range g.routers.Strategies() {
		list = append(list, strategyOf(s))
	}
	return list
}

// Use selects s, one of Strategies, for later operations. All ranks must call it with the
// same strategy, between the same operations. If the strategies differ, all ranks get an
// error that matches ErrMismatch and keep their strategy. Over several processes Use waits
// for all operations on the group's streams, and ends early under the same conditions as
// Wait. The strategies of the ranks may then differ, and the group must be closed.
// Collective.
func (g *Group) Use(ctx context.Context, s Strategy) error {
	return g.changeStrategy(ctx, s, g.routers.Use)
}

// changeStrategy sets the rule of all local ranks, if all ranks want the same strategy.
func (g *Group) changeStrategy(ctx context.Context, s Strategy, set func(route.Strategy)) error {
	const op = "use"
	if err := g.checkSame(ctx, op, fmt.Sprintf("the strategy %q", s), sameArguments); err != nil {
		return err
	}
	r, err := s.route()
	if err != nil {
		return err
	}
	if !slices.Contains(g.Strategies(), s) {
		return badArgument(op, "the group has no strategy %s: it has %v%s", s, g.Strategies(), g.unsupportedReason(r))
	}
	set(r)
	return nil
}

// unsupportedReason says why the Chorus kernels do not support s, after a colon, or returns "".
func (g *Group) unsupportedReason(s route.Strategy) string {
	if err := g.routers.Unsupported(s); err != nil {
		return ": " + err.Error()
	}
	return ""
}

// chosen returns the strategy that executes such a collective: NCCLOnly, or one of the
// other Strategies but Tuned.
func (g *Group) chosen(x ranks.Collective) Strategy {
	return strategyOf(g.routers.Chosen(x))
}
