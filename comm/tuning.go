package comm

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A Tuning is a table of the fastest strategies of each collective, measured on one kind
// of devices. Its For is the Site, and its Choices has a Choice for each operation and size. An empty
// Tuning is valid for all devices; NCCL then runs everything. Its method Save writes it to a file.
type Tuning = route.Tuning

// A Site is the set of conditions that the times of a Tuning depend on. It has the GPU and the Backend; the numbers of
// Ranks, of Hosts and of ranks in each process (Locals); and the versions of the Driver, of NCCL and of the Chorus
// Kernels.
type Site = route.Site

// A Choice is the measurement of one Operation and size in Bytes; a reduction also has a Type and a Reduction. Its Times
// has a Timing for each strategy, the fastest first. An operation that was not measured uses the most similar Choice.
// The criteria are, in this order:
//   - the same kind
//   - both or neither are sums of floats of at most 32 bits
//   - the same type and reduction
//   - both or neither are a multiple of 16 bytes
//   - the nearest logarithm of the size
type Choice = route.Choice

// A Timing is the duration of an operation with a Strategy: Micros, in a graph of several operations on the slowest
// rank, and Eager, without a graph, for copy engines only. Both are in microseconds.
type Timing = route.Timing

// TuningFile returns the path of the file that groups use: CHORUS_TUNING_FILE, or
// chorus/tuning.json in the user's cache directory.
func TuningFile() (string, error) { return route.TuningFile() }

// LoadTuning returns the Tuning for a site from a file, and nil if the file has none for
// the same GPUs and numbers of ranks and processes. It returns an error if the file is
// invalid, or if its Tuning was measured under other conditions, such as another version.
func LoadTuning(path string, at Site) (*Tuning, error) { return route.LoadTuning(path, at) }

// TuneConfig are the options of Tune; nil means the defaults. They must be the same on
// all ranks.
type TuneConfig struct {
	MaxBytes int            // the largest size: of an all-reduce, or of one rank's part; default 1 GiB of an all-reduce or of all ranks' parts together, a 64th of the memory of small GPUs, 256 bytes on virtual devices
	Types    []memory.DType // element types of the reductions; default float32 and bfloat16
	Ops      []Op           // default Sum and Max
}

// plan returns the options for package route.
func (cfg *TuneConfig) plan() (c route.PlanConfig) {
	if cfg != nil {
		c.MaxBytes, c.Types = cfg.MaxBytes, cfg.Types
		for _, o := range cfg.Ops {
			c.Ops = append(c.Ops, collective.Reduction(o))
		}
	}
	return c
}

// plan returns the measurements that Tune will make: the possible strategies for each
// operation, without times.
func (g *Group) plan(c route.PlanConfig) ([]Choice, error) {
	const op = "tune"
	if err := g.check(op); err != nil {
		return nil, err
	}
	plan, err := g.routers.Plan(c)
	if err != nil {
		return nil, badArgument(op, "%w", err)
	}
	return plan, nil
}

// Tune measures which strategy is the fastest for each operation and size
// between the ranks of g. g must use the strategy Tuned. All ranks return the
// same Tuning, which g uses from now on, and other groups if it is their
// Config.Tuning. Tune takes seconds, over slow links minutes, and waits for all
// operations on the group's streams; the devices must run nothing else. If NCCL
// is the only possibility, the Tuning is empty. If an error occurs while ranks
// may wait for others, the group is broken. Collective.
func Tune(ctx context.Context, g *Group, cfg *TuneConfig) (*Tuning, error) {
	options := cfg.plan()
	plan, err := g.plan(options)
	if err != nil {
		return nil, err
	}
	if len(g.routers) > 0 && g.routers.Opened() != route.Tuned {
		return nil, badArgument("tune", "the group was made with the strategy %s: make it with %s", g.routers.Opened(), Tuned)
	}
	at, err := g.sameSite(ctx)
	if err != nil {
		return nil, err
	}
	// Ranks with different plans would wait for each other.
	digest := sha256.Sum256(fmt.Append(nil, plan))
	if err := g.checkSame(ctx, "tune", fmt.Sprintf("the options %+v (plan %x)", options, digest[:4]), sameArguments); err != nil {
		return nil, err
	}
	t := &Tuning{For: at, Choices: plan}
	if len(plan) == 0 {
		return t, nil
	}
	mine, err := g.routers.Measure(ctx, plan)
	if err != nil {
		return nil, g.fail(fmt.Errorf("comm: tune: %w", err))
	}
	all, err := GatherValues(ctx, g, Gob, mine...)
	if err != nil {
		return nil, err
	}
	if err := g.routers.Complete(ctx, t, all); err != nil {
		return nil, g.fail(fmt.Errorf("comm: tune: %w", err))
	}
	index, err := route.IndexOf(t)
	if err != nil {
		return nil, g.fail(fmt.Errorf("comm: tune: %w", err))
	}
	g.routers.UseTuning(index)
	return t, nil
}

// Site returns the conditions under which a Tuning of the group is valid.
func (g *Group) Site() (Site, error) {
	if g == nil || len(g.members) == 0 {
		return Site{}, g.check("site")
	}
	dev := g.members[0].comm.Device()
	name, err := dev.Name()
	if err != nil {
		return Site{}, err
	}
	version, err := nccl.Version(dev)
	if err != nil {
		return Site{}, err
	}
	return Site{GPU: name, Ranks: g.size, Hosts: g.hosts(), Locals: len(g.members), Backend: dev.System().Backend(),
		Driver: dev.System().Libraries()[0].Version, NCCL: version, Kernels: g.kernelsVersion()}, nil
}

// kernelsVersion returns the version of the Chorus kernels. Times of deterministic groups count
// for these only, because NCCL does not reduce there.
func (g *Group) kernelsVersion() string {
	if g.alwaysInOrder() {
		return fabric.Version() + route.Deterministically
	}
	return fabric.Version()
}

// hosts returns the number of hosts.
func (g *Group) hosts() int {
	if g.reporter == nil {
		return 1
	}
	seen := map[int]bool{}
	for _, rank := range g.reporter.worldRanks() {
		seen[g.reporter.hosts[rank]] = true
	}
	return len(seen)
}

// sameSite returns the site, or an error on all ranks if their sites differ.
func (g *Group) sameSite(ctx context.Context) (Site, error) {
	at, err := g.Site()
	if err != nil {
		return at, err
	}
	return at, g.checkSame(ctx, "tune", fmt.Sprintf("the site %+v", at), "a tuning is for ranks that are alike")
}

// setInitialTuning gives all ranks of a Tuned group the Tuning of rank 0: its Config.Tuning, or the one
// of its file. If there is none, setInitialTuning measures one and saves it. It replaces one that is out of date in the file of the user's
// cache: after an update of the driver or of Chorus, programs must not fail until somebody calls chorus tune.
func (g *Group) setInitialTuning(ctx context.Context) error {
	if g.Strategy() != Tuned {
		return nil
	}
	var mine *Tuning
	if g.cfg != nil {
		mine = g.cfg.Tuning
	}
	found, err := g.shareTuning(ctx, mine, env.TuningFile.Value() == "")
	if err != nil || found.Tuning != nil {
		return err
	}
	t, err := Tune(ctx, g, nil)
	if err != nil {
		return err
	}
	if g.hasRank(0) {
		if err := t.Save(ctx, found.Path); err != nil { // the group does not need the file
			slog.Warn("chorus: the measured tuning could not be saved: the next group measures again", "error", err)
		}
	}
	return nil
}

// SetTuning sets rank 0's t on all ranks of a group with the strategy Tuned.
// NCCL runs everything if t is empty. If rank 0's t is nil, the group uses the
// entry of rank 0's TuningFile, or an empty Tuning if the file has none. If the
// Tuning was not made for such a group, all ranks return an error and the group
// is closed. Collective.
func SetTuning(ctx context.Context, g *Group, t *Tuning) error {
	const op = "set tuning"
	if err := g.check(op); err != nil {
		return err
	}
	if !slices.Contains(g.Strategies(), Tuned) {
		return badArgument(op, "the group has the strategies %v: make it with Tuned", g.Strategies())
	}
	found, err := g.shareTuning(ctx, t, false)
	if err == nil && found.Tuning == nil {
		g.routers.UseTuning(nil)
	}
	return err
}

// A sharedTuning is the message of rank 0 to the other ranks.
type sharedTuning struct {
	Tuning *Tuning // nil if the file has none
	Err    string
	Path   string // the file to write a new Tuning to
}

// shareTuning sets rank 0's t on all ranks, or the Tuning of its file if t is nil. renew says that one that is out of date counts as none.
func (g *Group) shareTuning(ctx context.Context, t *Tuning, renew bool) (x sharedTuning, err error) {
	at, err := g.sameSite(ctx)
	if err != nil {
		return x, err
	}
	if g.hasRank(0) {
		x = findTuning(t, at, renew)
	}
	if err := BroadcastValue(ctx, g, 0, &x, JSON); err != nil {
		return x, err
	}
	if x.Err != "" {
		_ = g.Shutdown(ctx) // Close would end the other ranks before they have read the reason
		return x, errors.New(told(x.Err))
	}
	if x.Tuning == nil {
		return x, nil
	}
	index, err := route.IndexOf(x.Tuning)
	if err != nil {
		return x, err
	}
	g.routers.UseTuning(index)
	return x, nil
}

// findTuning returns t, or the Tuning of this process's file if t is nil.
func findTuning(t *Tuning, at Site, renew bool) (x sharedTuning) {
	var err error
	if t != nil {
		x.Tuning = t
		_, err = route.IndexOf(t)
		if err = errors.Join(route.Fits(t, at), err); err != nil {
			err = fmt.Errorf("comm: the given tuning is not valid: %w", err)
		}
	} else if x.Path, err = route.TuningFile(); err == nil {
		x.Tuning, err = route.LoadTuning(x.Path, at)
		if renew && errors.Is(err, route.ErrOutdated) {
			slog.Info("chorus: the group measures its tuning again", "because", err)
			err = nil
		}
	}
	if err != nil {
		return sharedTuning{Err: err.Error()}
	}
	return x
}

// A Strategy selects the backend of a group's collectives. NCCL runs everything that a
// strategy does not support: other operations, types and sizes, operations on other
// streams than the group's, and several operations of one rank in a single NCCL group. All
// ranks must have the same strategy. In a group with Config.Deterministic a strategy does not
// change the bits of reductions. Its value is its name in CHORUS_COMM_STRATEGY.
type Strategy = route.Name

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
	// get bitwise identical results. Groups of Split use only NCCL. Where NCCL connects two ranks, for example at
	// their first transfer, it waits for such kernels. So a goroutine that issues for several ranks
	// issues a collective of all of them in one NCCL group, as with NCCL.
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
	// and every GPU visible in each process. "pipelined" is two-shot in chunks, of which several
	// are in progress at a time. It has no limit of the size, and also runs all-gathers,
	// reduce-scatters and all-to-alls. Each rank uses 128 MiB of device memory for it.
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
	// CopyEngines leaves the multiprocessors to other kernels, such as the matrix products of a backward pass: the devices' copy
	// engines move the data. NCCL runs what CopyEngines does not support; in a Tuned group the next fastest strategy does.
	//
	// All-gathers and all-to-alls require that all ranks are in this process and can access each other's memory, and
	// that one call, or one NCCL group, has the operations of all ranks and nothing else.
	//
	// All-reduces of 1 MiB and more work in any processes of one host, with at most 8 ranks whose GPUs can access each other's
	// memory, but not in a Tuned group. A kernel only adds what has arrived. Up to 64 MiB they take longer than NCCL's when nothing else
	// runs: see docs/PERFORMANCE.md. Each rank uses 128 MiB of device memory. The order of operations and graphs, and
	// the wait of Close, are as for OwnKernels. Close frees that memory when the ranks of other processes have closed, too.
	// A rank that waits for others holds a hardware queue of its device. Where as many streams of a device wait as it has queues
	// (CUDA_DEVICE_MAX_CONNECTIONS, 8), nothing else of it runs. So with 8 queues a device should be in at most three such groups at a time, and with one
	// queue in one. All-reduces of a group in one capture need an order by events. Of 65536 pairs of all-reduces that differ between
	// ranks in type, length or reduction, one is not noticed on the devices, and has an undefined result. The ranks' processes share a
	// PID namespace and a user, because they find each other's flags in /proc.
	CopyEngines Strategy = "copy-engines"
	// Tuned uses a Tuning to select the strategy for each operation, type and size. The
	// Tuning is Config.Tuning, or comes from the file CHORUS_TUNING_FILE. If the file has
	// none for these devices, it is measured when the group is made and written to the
	// file. So is one of another version in the file of the user's cache.
	Tuned Strategy = "tuned"
)

// strategyOf returns the number of a strategy.
func strategyOf(s Strategy) (route.Strategy, error) {
	r, err := route.ParseStrategy(s)
	if err != nil {
		return 0, asBadArgument(fmt.Errorf("comm: %w", err))
	}
	return r, nil
}

// strategy returns the strategy of the configuration, or of the environment.
func (c *Config) strategy() (route.Strategy, error) {
	if c != nil && c.Strategy != ByEnvironment {
		return strategyOf(c.Strategy)
	}
	name, err := env.CommStrategy.OneOf(route.Names[route.NCCLOnly:]...)
	if err != nil {
		return route.NCCLOnly, err
	}
	return route.ParseStrategy(Strategy(name))
}

// Strategy returns the strategy in use, which is NCCLOnly if the configured
// strategy is not supported.
func (g *Group) Strategy() Strategy { return g.routers.Strategy().Name() }

// Strategies returns the strategies that the group can use, NCCLOnly first. Only the
// resources of Config.Strategy are allocated; with Tuned the resources of all strategies
// are.
func (g *Group) Strategies() []Strategy {
	var list []Strategy
	for _, s := range g.routers.Strategies() {
		list = append(list, s.Name())
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
	if g == nil {
		return g.check("use")
	}
	return g.changeStrategy(ctx, s, g.routers.Use)
}

// changeStrategy sets the rule of all local ranks, if all ranks want the same strategy.
func (g *Group) changeStrategy(ctx context.Context, s Strategy, set func(route.Strategy)) error {
	const op = "use"
	if err := g.checkSame(ctx, op, fmt.Sprintf("the strategy %q", s), sameArguments); err != nil {
		return err
	}
	r, err := strategyOf(s)
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
func (g *Group) chosen(x collective.Op) Strategy {
	return g.routers.Chosen(x).Name()
}

// An Order makes the reductions of a group deterministic (Config.Deterministic), and is the order
// of their additions. The same inputs then give the same bits. The following do not matter:
//   - the length of the call, and the position of an element in it
//   - the strategy, the tuning, and NCCL's version and settings
//   - the number of processes and hosts
//   - whether the call is eager or in a graph, alone or in a batch
//
// PyTorch and NCCL do not have this option.
//
// The guarantee is for AllReduce, ReduceScatter, ReduceScatterV and ReduceTo, also of tensors
// and lists of tensors, and for packages that use them, such as ddp and optim. Operations that
// the caller issues through Communicator have no guarantee.
//
// The contract for each element is:
//   - The elements of ranks 0 to Block-1 are combined in rank order: first ranks 0 and 1, then
//     the result and rank 2. So are the elements of each further Block ranks; the last block may
//     be shorter. Then the results of the blocks are combined in their order.
//   - Float16, bfloat16 and the 8-bit floats are converted to float32 first. All these
//     combinations, and Avg's division by Size, compute in float32. Other types compute in
//     their own type; integers wrap around, and Avg divides them toward zero.
//   - The result is rounded to the element type once, at the end, to nearest even. It is not
//     rounded between blocks or hosts. 8-bit floats that are too large become NaN (e4m3) or
//     infinity (e5m2), as in torch.
//   - Max and Min of a number and a NaN are the number.
//   - A PreMulSum multiplies each rank's element by that rank's factor, and rounds the product to
//     the element type, before the sum.
//   - The payload and the sign of a NaN are not guaranteed.
//
// If a program needs the guarantee for some calls only, it sets OnRequest and issues these calls in
// batches with Batch.SetDeterministic. All others are then as fast as without an Order.
//
// Chorus kernels execute all-reduces of any length, and other reductions of up to 64 KiB for each
// rank, if there is one block and the strategy has Chorus kernels, as OwnKernels and Tuned do. These
// kernels take about as long as NCCL's reductions without an order. Each rank then uses up
// to 128 MiB of device memory for them. NCCL copies the elements of all other reductions in rounds to
// the rank that reduces them, and a kernel there reduces them. Reductions in a batch with several
// collectives of a rank belong to these. Each rank uses 64 MiB of device memory for that. Both count as
// allocated.
//
// Over several hosts with one block, every rank receives its part from every other rank: n ranks
// on each host send about n times the bytes of NCCL's reductions to the other hosts. If each host
// has a whole number of blocks of two or more ranks, the ranks first reduce within the blocks. They
// send only the results to other hosts; those of 16-bit floats are float32. Groups of Split do
// not do that.
type Order struct {
	// Block is the number of ranks in a block. 0 means one block of all ranks: then the order is
	// the rank order, and groups of the same size agree, however their ranks are divided among
	// hosts. Set it to the number of ranks of a host for the order "within each host, then by
	// host". Groups of the same size with the same Block agree too: with 4, one host of 8 ranks and
	// two hosts of 4 ranks.
	Block int
	// OnRequest limits the guarantee to the batches for which Batch.SetDeterministic was called.
	OnRequest bool
}

func (o *Order) check(op string) error {
	if o != nil && o.Block < 0 {
		return badArgument(op, "Deterministic.Block is %d: want 0 for one block, or the number of ranks in a block", o.Block)
	}
	return nil
}

// order returns the order of the configuration, or nil. hosts has the host of each rank; nil means
// one host.
func (c *Config) order(hosts []int) *route.Order {
	if c == nil || c.Deterministic == nil {
		return nil
	}
	block := c.Deterministic.Block
	return &route.Order{Block: block, Hosts: blocksWithinHosts(hosts, block), OnRequest: c.Deterministic.OnRequest}
}

// blocksWithinHosts reports whether there are several hosts, and the ranks of each block are on
// one of them.
func blocksWithinHosts(hosts []int, block int) bool {
	several := false
	for rank, host := range hosts {
		if several = several || host != hosts[0]; block > 0 && host != hosts[rank/block*block] {
			return false
		}
	}
	return several && block > 0
}

// orderName describes the order to other ranks.
func (c *Config) orderName() string {
	if c == nil || c.Deterministic == nil {
		return "none"
	}
	name := fmt.Sprintf("blocks of %d ranks", c.Deterministic.Block)
	if c.Deterministic.OnRequest {
		name += " on request"
	}
	return name
}

// Deterministic returns the order of the group's reductions, or nil if they are not
// deterministic.
func (g *Group) Deterministic() *Order {
	if g == nil || g.cfg == nil || g.cfg.Deterministic == nil {
		return nil
	}
	o := *g.cfg.Deterministic
	return &o
}

// alwaysInOrder reports whether all reductions of the group are deterministic.
func (g *Group) alwaysInOrder() bool {
	o := g.Deterministic()
	return o != nil && !o.OnRequest
}
