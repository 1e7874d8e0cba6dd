// Package route chooses the backend of each collective, by a rule or by measured times, and
// executes the collective by Chorus kernels, windows or copy engines if it does not choose NCCL.
package route

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Router chooses the backends of one rank's collectives, and owns the backends except NCCL.
type Router struct {
	comm     *nccl.Communicator
	in       collective.Inside   // of comm
	local    int                 // index of the local rank
	stream   *stream.Stream      // of the group
	kernels  *fabric.Rank        // nil if there are no Chorus kernels
	pushed   *fabric.Rank        // executes all-reduces by Pushed, or is nil
	layers   expertRanks         // of layers of experts
	window   *window             // nil if there is none
	ordered  *ordered            // nil if the order of reductions does not matter
	engines  bool                // copy engines reach all ranks, which are in this process
	opened   Strategy            // the strategy that Open got
	blocks   int                 // the maximum number of thread blocks of a Chorus kernel; 0: no maximum
	exchange collective.Exchange // with the other ranks, until all are open
	rule     atomic.Pointer[rule]
}

// A rule chooses among the backends, alike on all ranks.
type rule struct {
	strategy Strategy
	tuning   *Index   // nil without measured times
	only     Strategy // instead of tuning, while that is measured; 0 is none
}

// Routers are the routers of the local ranks of a group, by local rank. There are none if NCCL
// executes everything.
type Routers []*Router

// of returns the index of the router of a communicator, or -1.
func (rs Routers) of(c collective.Inside, rank int) int32 {
	if rank < len(rs) && rs[rank].in == c { // the ranks of one process
		return int32(rank)
	}
	return int32(slices.IndexFunc(rs, func(r *Router) bool { return r.in == c }))
}

// Strategy returns the strategy in use.
func (rs Routers) Strategy() Strategy {
	if len(rs) == 0 {
		return NCCLOnly
	}
	return rs[0].rule.Load().strategy
}

// Use changes the strategy of all local ranks.
func (rs Routers) Use(s Strategy) {
	for _, r := range rs {
		r.rule.Store(&rule{strategy: s, tuning: r.rule.Load().tuning})
	}
}

// UseOnly uses one strategy for every collective that it supports, whatever its
// size, until the caller calls restore.
func (rs Routers) UseOnly(s Strategy) (restore func()) {
	before := make([]*rule, len(rs))
	for i, r := range rs {
		before[i] = r.rule.Load()
		r.rule.Store(&rule{strategy: Tuned, tuning: before[i].tuning, only: s})
	}
	return func() {
		for i, r := range rs {
			r.rule.Store(before[i])
		}
	}
}

// Opened returns the strategy that Open got.
func (rs Routers) Opened() Strategy { return rs[0].opened }

// UseTuning chooses by measured times from now on.
func (rs Routers) UseTuning(x *Index) {
	for _, r := range rs {
		r.rule.Store(&rule{strategy: Tuned, tuning: x})
	}
}

// Strategies returns the strategies that the group can use, NCCLOnly first.
func (rs Routers) Strategies() []Strategy {
	list := []Strategy{NCCLOnly}
	if len(rs) == 0 {
		return list
	}
	k := rs[0]
	if k.kernels != nil {
		list = append(list, OwnKernels)
		for s := OneShot; s <= Pipelined; s++ {
			if k.kernels.Supports(algorithms[s]) == nil {
				list = append(list, s)
			}
		}
	}
	if k.window != nil {
		list = append(list, Windows)
	}
	if k.engines || k.pushed != nil {
		list = append(list, CopyEngines)
	}
	if k.opened == Tuned {
		list = append(list, Tuned)
	}
	return list
}

// Unsupported returns why Chorus kernels do not support a strategy, or nil.
func (rs Routers) Unsupported(s Strategy) error {
	if len(rs) == 0 || rs[0].kernels == nil || s >= NumStrategies {
		return nil
	}
	return rs[0].kernels.Supports(algorithms[s])
}

// Chosen returns the strategy of the local ranks for x.
func (rs Routers) Chosen(x collective.Op) Strategy {
	if len(rs) == 0 {
		return NCCLOnly
	}
	return rs[0].choose(&x)
}

// choose returns the strategy for x: the first one of the rule that supports x.
// Only all-reduces have a choice among all algorithms of Chorus kernels.
func (k *Router) choose(x *collective.Op) Strategy {
	s := k.firstSupported(x)
	if s.Algorithm() && s != Pipelined && x.Kind != collective.AllReduce {
		return OwnKernels
	}
	return s
}

func (k *Router) firstSupported(x *collective.Op) Strategy {
	r := k.rule.Load()
	switch {
	case x.Kind == 0: // an operation that is always NCCL's
		return NCCLOnly
	case r.strategy == CopyEngines && x.Kind == collective.AllReduce:
		return k.orNCCL(Pushed, x, 0)
	case r.strategy != Tuned:
		return k.orNCCL(r.strategy, x, kernelLimit(x))
	case r.only != 0:
		return k.orNCCL(r.only, x, MostBytes)
	}
	for _, s := range r.tuning.find(x) {
		if s == NCCLOnly || k.supports(s, x, MostBytes) {
			return s
		}
	}
	return NCCLOnly
}

// orNCCL returns s if s supports x, and otherwise NCCLOnly.
func (k *Router) orNCCL(s Strategy, x *collective.Op, most int) Strategy {
	if k.supports(s, x, most) {
		return s
	}
	return NCCLOnly
}

// supports reports whether s supports x. Chorus kernels support up to so many bytes if they choose
// their algorithm.
func (k *Router) supports(s Strategy, x *collective.Op, most int) bool {
	switch s {
	case OwnKernels:
		return k.kernels != nil && x.Bytes() <= most && k.kernelsSupport(s, x)
	case OneShot, TwoShotPackets, TwoShot, TwoShotLines:
		return k.kernels != nil && (x.Kind == collective.AllReduce || x.Bytes() <= most) && k.kernelsSupport(s, x)
	case Pipelined:
		return k.kernels != nil && x.Kind != collective.Broadcast && k.kernelsSupport(s, x)
	case Pushed:
		return k.pushed != nil && x.Bytes() >= pushedLeast && k.pushed.Takes(x, fabric.Pushed)
	case Windows:
		return k.window != nil && k.window.fits(x)
	case CopyEngines:
		return k.engines && x.Together && (x.Kind == collective.AllGather || x.Kind == collective.AllToAll) && x.N > 0
	}
	return false
}

func (k *Router) kernelsSupport(s Strategy, x *collective.Op) bool {
	return k.kernels.Takes(x, algorithms[s])
}

// abort ends the Chorus kernels in flight.
func (k *Router) abort() {
	if k.kernels != nil {
		k.kernels.Abort()
	}
	k.pushed.Abort()
	for _, r := range k.layers.all() {
		r.Abort()
	}
}

// Open returns a Router for each of the communicators, with everything that the strategy needs
// and the devices support, and none if NCCL is the only possibility. After an error the caller
// closes the routers when the communicators have ended. With an order, reductions are
// deterministic. Chorus kernels have at most so many thread blocks, unless blocks is 0. exchange is not used with NCCLOnly.
func Open(ctx context.Context, s Strategy, order *Order, blocks int, comms []*nccl.Communicator, streams []*stream.Stream, exchange func(rank int) collective.Exchange) (Routers, error) {
	if s == NCCLOnly && order == nil || comms[0].Size() == 1 {
		return nil, nil
	}
	rs := make(Routers, len(comms))
	for i, c := range comms {
		rs[i] = &Router{comm: c, in: collective.Of(c), local: i, stream: streams[i], opened: s, blocks: blocks}
		if s != NCCLOnly {
			rs[i].exchange = exchange(c.Rank())
		}
	}
	if err := rs.open(ctx, s, order); err != nil {
		return rs, err
	}
	// All ranks have the same result, so either all routers have a backend or none has.
	if rs[0].kernels == nil && rs[0].pushed == nil && rs[0].window == nil && !rs[0].engines {
		if s = NCCLOnly; order == nil {
			return nil, nil
		}
	}
	if order != nil {
		if err := rs.openOrdered(*order); err != nil {
			return rs, err
		}
	}
	for _, r := range rs {
		r.exchange = nil
		r.rule.Store(&rule{strategy: s})
		r.in.AddBackend(r.abort)
	}
	return rs, nil
}

func (rs Routers) open(ctx context.Context, s Strategy, order *Order) error {
	switch s {
	case NCCLOnly:
		return nil
	case Windows:
		return rs.openWindows(ctx)
	case CopyEngines:
		if err := rs.openPushed(ctx); err != nil {
			return err
		}
		return rs.openEngines()
	case Pipelined:
		return rs.openKernels(ctx, s, MostBytes)
	case Pushed:
		return rs.openPushed(ctx)
	case Tuned:
		if err := rs.openKernels(ctx, s, MostBytes); err != nil {
			return err
		}
		if err := rs.openWindows(ctx); err != nil {
			return err
		}
		return rs.openEngines()
	}
	bytes := kernelBytes * 16 / 15 // so that as many fit in lines
	if order != nil {
		bytes = max(bytes, pieceBytes)
	}
	return rs.openKernels(ctx, s, bytes)
}

// openEach opens a backend on all local ranks at once. If a device does not support it,
// openEach frees it on all ranks and returns nil: all ranks learn the same. After other errors
// Close frees it, when nothing uses it any more.
func (rs Routers) openEach(ctx context.Context, what string, open func(context.Context, *Router) error, free func(*Router) error) error {
	err := rs.each(ctx, func(ctx context.Context, i int) error { return open(ctx, rs[i]) })
	if err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return fmt.Errorf("comm: %s: %w", what, err)
	}
	var errs []error
	for _, r := range rs {
		if err != nil {
			errs = append(errs, free(r))
		}
	}
	return errors.Join(errs...)
}

// each runs fn for all local ranks at once, and returns the first error. It ends the context
// of the other ranks when fn fails for one.
func (rs Routers) each(ctx context.Context, fn func(ctx context.Context, i int) error) (first error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	var once sync.Once
	for i := range rs {
		all.Go(func() {
			if err := fn(ctx, i); err != nil {
				once.Do(func() { first = err; cancel(err) })
			}
		})
	}
	all.Wait()
	return first
}

// Close frees the backends of all local ranks, when nothing is in flight or the communicators
// were aborted.
func (rs Routers) Close() error {
	errs := make([]error, len(rs))
	var all sync.WaitGroup
	for i, r := range rs {
		all.Go(func() { errs[i] = r.close() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// close frees the backends. If NCCL has not ended its operations, close does nothing: a wait
// for the stream would never end.
func (k *Router) close() error {
	if k.in.AbortFailed() {
		return nil
	}
	var errs []error
	for _, r := range k.layers.all() {
		errs = append(errs, r.Close())
	}
	return errors.Join(append(errs, k.kernels.Close(), k.pushed.Close(), k.window.close(), k.ordered.close())...)
}

// A Strategy is the number of a comm.Strategy. Package comm documents the strategies.
type Strategy uint8

// The strategies.
const (
	ByEnvironment Strategy = iota
	NCCLOnly
	OwnKernels
	OneShot
	TwoShotPackets
	TwoShot
	TwoShotLines
	Pipelined
	Pushed
	Windows
	CopyEngines
	Tuned
	NumStrategies
)

// Names has the names that CHORUS_COMM_STRATEGY has for the strategies.
var Names = [NumStrategies]string{
	ByEnvironment: "by environment", NCCLOnly: "nccl", OwnKernels: "own", OneShot: "one-shot",
	TwoShotPackets: "two-shot-packets", TwoShot: "two-shot", TwoShotLines: "two-shot-lines", Pipelined: "pipelined", Pushed: "pushed", Windows: "windows", CopyEngines: "copy-engines", Tuned: "tuned",
}

// String returns the name that CHORUS_COMM_STRATEGY has for s.
func (s Strategy) String() string {
	if s < NumStrategies {
		return Names[s]
	}
	return fmt.Sprintf("Strategy(%d)", uint8(s))
}

// ParseStrategy returns the strategy with the given name.
func ParseStrategy(name Name) (Strategy, error) {
	for s := NCCLOnly; s < NumStrategies; s++ {
		if s.Name() == name {
			return s, nil
		}
	}
	return 0, fmt.Errorf("there is no strategy %q: want one of %v", name, Names[NCCLOnly:])
}

// A Name is the name of a Strategy: a comm.Strategy.
type Name string

// Name returns the name that CHORUS_COMM_STRATEGY has for s.
func (s Strategy) Name() Name { return Name(s.String()) }

// Algorithm reports whether s is one algorithm of Chorus kernels.
func (s Strategy) Algorithm() bool { return s >= OneShot && s <= Pipelined }
