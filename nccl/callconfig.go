package nccl

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// CallConfig are the options of single collectives (ncclCollConfig_t), for With. A nil field
// means the option of the communicator. If NCCL's environment variable of an option is set, it
// has precedence over CallConfig, and CallConfig over Config. All ranks must use the same
// options; NCCL does not check that, but virtual devices do.
type CallConfig struct {
	MinCTAs        *int // minimum number of thread blocks, 1 to 64
	MaxCTAs        *int // maximum number of thread blocks, 1 to 64, at most Config.MaxCTAs
	NVLSCTAs       *int // thread blocks for NVLink multicast
	CGAClusterSize *int // thread blocks in a cluster, 0 to 8; the same for all collectives of a Batch
	CTAPolicy      *int // 0 default, 1 efficiency, 2 zero, 3 both
	// Algorithm selects the algorithms that NCCL may use, for example "ring", "^symk" or
	// "tree,ring": names or their beginnings in any case, combined by + (and), comma (or) and
	// ^ (not). "" means that NCCL chooses. All-to-all, gather and scatter have no algorithms.
	Algorithm string
	// Fallback lets NCCL choose if no algorithm satisfies Algorithm. Without it, the
	// collective fails then.
	Fallback bool
	// ProfilerTag is passed to NCCL's profiler plugins. NCCL reserves the highest bit.
	ProfilerTag uint64
	// LaunchEvent is recorded when the kernel of the collective has started (NCCL 2.32.3 and
	// newer), so that a stream that waits for it overlaps with the collective. It does not say
	// that the result is complete. It must be an event of the rank's device without Timing and
	// Interprocess, and stay open until all waits for it have been passed. All ranks or none
	// must have one, and at most one collective of each communicator in a Batch. NCCL does
	// not record it if it uses copy engines or has only one rank. Such a collective cannot be
	// captured.
	LaunchEvent *stream.Event
}

// A configured adds a configuration to the operations of an Issuer.
type configured struct {
	comm   *Communicator
	batch  *Batch // nil unless the operations are added to a batch
	config callConfig
}

// A callConfig is a CallConfig in NCCL's form. The event is kept alive as long as it.
type callConfig struct {
	raw   *ncclapi.CollConfig
	event *stream.Event
}

// With returns an Issuer that issues collectives like on, with the options of cfg
// (ncclAllReduceConfig and the other functions with Config, NCCL 2.31.2 and newer):
//
//	ring, err := nccl.With(c, &nccl.CallConfig{Algorithm: "ring", MaxCTAs: new(8)})
//	if err != nil {
//		return err
//	}
//	err = nccl.AllReduce(ring, s, dst, src, nccl.Sum)
//
// With on the result of Batch.On, the collectives are added to the Batch. Prepare the Issuer
// once: its collectives then allocate nothing. If cfg is nil, With returns on. Send, Recv and
// the collectives with different lengths for each rank have no options, and refuse the Issuer.
func With(on Issuer, cfg *CallConfig) (Issuer, error) {
	if cfg == nil {
		return on, nil
	}
	c, b, _ := communicatorOf(on)
	if err := c.checkUsable("with"); err != nil {
		return nil, err
	}
	if err := c.needs(ncclapi.FuncAllReduceConfig); err != nil {
		return nil, err
	}
	if err := cfg.check(c); err != nil {
		return nil, fmt.Errorf("nccl: call config on rank %d of %d: %w: %w", c.rank, c.size, err, ErrorInvalidArgument)
	}
	raw := cfg.raw(c.version)
	if field, since := raw.TooNew(c.version); field != "" {
		return nil, needs("nccl.CallConfig: "+field, since, c.version)
	}
	return &configured{comm: c, batch: b, config: callConfig{raw, cfg.LaunchEvent}}, nil
}

// check validates the options, because NCCL would ignore a number that is out
// of range.
func (cfg *CallConfig) check(c *Communicator) error {
	for _, f := range []struct {
		name     string
		val      *int
		from, to int
	}{
		{"MinCTAs", cfg.MinCTAs, 1, 64}, {"MaxCTAs", cfg.MaxCTAs, 1, 64}, {"NVLSCTAs", cfg.NVLSCTAs, 1, 64},
		{"CGAClusterSize", cfg.CGAClusterSize, 0, 8}, {"CTAPolicy", cfg.CTAPolicy, 0, 3},
	} {
		if f.val != nil && (*f.val < f.from || *f.val > f.to) {
			return fmt.Errorf("%s is %d: want %d to %d", f.name, *f.val, f.from, f.to)
		}
	}
	switch {
	case cfg.MinCTAs != nil && cfg.MaxCTAs != nil && *cfg.MinCTAs > *cfg.MaxCTAs:
		return fmt.Errorf("MinCTAs is %d and MaxCTAs %d: want MinCTAs <= MaxCTAs", *cfg.MinCTAs, *cfg.MaxCTAs)
	case cfg.ProfilerTag>>63 != 0:
		return fmt.Errorf("ProfilerTag is %#x: NCCL reserves the highest bit", cfg.ProfilerTag)
	}
	if err := checkText("the field Algorithm", cfg.Algorithm); err != nil || cfg.LaunchEvent == nil {
		return err
	}
	return checkLaunchEvent(cfg.LaunchEvent, c)
}

// checkLaunchEvent checks that NCCL can record an event.
func checkLaunchEvent(e *stream.Event, c *Communicator) error {
	const unusable = cudadrv.EventDisableTiming | cudadrv.EventInterprocess
	switch {
	case e.Device() != c.dev:
		return fmt.Errorf("LaunchEvent is of %s: want an event of %s", e.Device(), c.dev)
	case handle.Of(e).Flags&unusable != cudadrv.EventDisableTiming:
		return fmt.Errorf("LaunchEvent has Timing or Interprocess: want an event without")
	}
	return nil
}

// raw converts the options to NCCL's struct for the loaded version.
func (cfg *CallConfig) raw(version int32) *ncclapi.CollConfig {
	r := ncclapi.NewCollConfig(version)
	for _, f := range []struct {
		to  *int32
		val *int
	}{
		{&r.MinCTAs, cfg.MinCTAs}, {&r.MaxCTAs, cfg.MaxCTAs}, {&r.NVLSCTAs, cfg.NVLSCTAs},
		{&r.CGAClusterSize, cfg.CGAClusterSize}, {&r.CTAPolicy, cfg.CTAPolicy},
	} {
		if f.val != nil {
			*f.to = int32(*f.val)
		}
	}
	if cfg.Algorithm != "" {
		r.AlgSelection = cstring(cfg.Algorithm)
	}
	if cfg.Fallback {
		r.ForceAlgSelection = 0
	}
	r.UserProfilerTag = cfg.ProfilerTag
	if cfg.LaunchEvent != nil {
		r.LaunchCompletionEvent = uintptr(gpu.EventOf(cfg.LaunchEvent))
	}
	return r
}

// configurable reports whether NCCL has a function with a configuration for an operation.
func configurable(k collective.Kind) bool { return ncclapi.Collectives[functions[k]].Configured != 0 }

// checkConfig refuses an operation that cannot have its configuration.
func (o *operation) checkConfig() error {
	at := func() string { return fmt.Sprintf("nccl: %s on rank %d of %d", o.Kind, o.comm.rank, o.comm.size) }
	switch {
	case !configurable(o.Kind):
		return fmt.Errorf("%s: it has no CallConfig: use the Communicator itself, or Batch.On: %w", at(), ErrorInvalidUsage)
	case o.Captured && o.config.event != nil:
		return fmt.Errorf("%s: a graph cannot capture a collective with a CallConfig.LaunchEvent: %w", at(), ErrorInvalidUsage)
	}
	return nil
}

// checkConfigs refuses a group whose configurations NCCL does not support together.
func (b *Batch) checkConfigs() error {
	for i := range b.ops {
		o := &b.ops[i]
		for j := range b.ops[:i] {
			p := &b.ops[j]
			if p.comm != o.comm || !configurable(p.Kind) || !configurable(o.Kind) {
				continue
			}
			why := ""
			if o.config.hasEvent() && p.config.hasEvent() {
				why = "two operations have a CallConfig.LaunchEvent: want at most one"
			} else if a, b := o.config.cluster(), p.config.cluster(); a != b {
				why = "two operations have different values of CallConfig.CGAClusterSize: want the same"
			}
			if why != "" {
				return o.comm.errorf(o.Kind, "in one group %s: %w", why, ErrorInvalidUsage)
			}
		}
	}
	return nil
}

// hasEvent reports whether a configuration has an event; c may be nil.
func (c *callConfig) hasEvent() bool { return c != nil && c.event != nil }

// cluster returns the size of clusters; c may be nil.
func (c *callConfig) cluster() int32 {
	if c == nil {
		return ncclapi.Undefined
	}
	return c.raw.CGAClusterSize
}

// An Op is a reduction (ncclRedOp_t): one of the constants, or PreMulSum.Op.
type Op int32

// The reductions. Avg divides the sum by the number of ranks. For bools, whose bytes must
// be 0 or 1, Sum and Max return true if any rank has true, and Prod and Min if all ranks
// have true, as in torch.distributed. Bools have no Avg.
const (
	Sum  = Op(ncclapi.Sum)
	Prod = Op(ncclapi.Prod)
	Max  = Op(ncclapi.Max)
	Min  = Op(ncclapi.Min)
	Avg  = Op(ncclapi.Avg)
)

// String returns NCCL's name of the reduction, such as "sum".
func (o Op) String() string { return collective.Reduction(o).String() }

// A PreMulSum is a sum that first multiplies each rank's elements by that rank's factor
// (ncclRedOpCreatePreMulSum), for example to scale gradients.
type PreMulSum struct {
	owner handle.Owner
	comm  *Communicator
	op    ncclapi.RedOp
	dtype memory.DType
}

// NewPreMulSum creates a reduction for operations of c on elements of T, with
// this rank's factor, which may differ from that of other ranks. Close it after
// the last operation that uses it is enqueued; the end of c closes it too.
// NewPreMulSum enqueues nothing and is not collective.
func NewPreMulSum[T memory.Element](c *Communicator, factor T) (*PreMulSum, error) {
	return c.newPreMulSum(memory.DTypeOf[T](), unsafe.Pointer(&factor), ncclapi.ScalarHostImmediate)
}

// NewPreMulSumFrom is NewPreMulSum with a factor in device memory, one element,
// which operations read when they run. It must stay allocated until the last of
// them has completed.
func NewPreMulSumFrom[T memory.Element](c *Communicator, factor memory.Slice[T]) (*PreMulSum, error) {
	const op = "nccl: ncclRedOpCreatePreMulSum"
	if err := c.checkUsable("ncclRedOpCreatePreMulSum"); err != nil {
		return nil, err
	}
	if factor.Len() != 1 {
		return nil, fmt.Errorf("%s on rank %d of %d: the factor has %d elements: want 1", op, c.rank, c.size, factor.Len())
	}
	if err := inside.CheckBuffer(op, factor.Buffer(), factor.Len(), c.dev); err != nil {
		return nil, err
	}
	return c.newPreMulSum(factor.DType(), dl.Pointer(factor.Ptr()), ncclapi.ScalarDevice)
}

func (c *Communicator) newPreMulSum(t memory.DType, scalar unsafe.Pointer, residence int32) (*PreMulSum, error) {
	const name = "ncclRedOpCreatePreMulSum"
	if err := c.checkUsable(name); err != nil {
		return nil, err
	}
	w := wireTypes[t]
	if !w.sums || t == memory.Bool {
		return nil, c.errorf(name, "NCCL cannot multiply %s", t)
	}
	if c.version < w.since {
		return nil, needs("nccl: "+name+" of "+t.String(), w.since, c.version)
	}
	p := &PreMulSum{comm: c, dtype: t}
	if err := c.enter(name); err != nil {
		return nil, err
	}
	defer c.mu.Unlock()
	var r ncclapi.Result
	p.op, r = c.api.RedOpCreatePreMulSum(scalar, w.reduce, residence, *c.h)
	if err := c.check(name, r); err != nil {
		return nil, err
	}
	c.sums.Store(Op(p.op), factorOf(t, scalar, residence))
	handle.Init(p, &p.owner, handle.About{Kind: "pre-multiplied sum", On: c.dev})
	return p, nil
}

// A factor is the factor of a PreMulSum: one element in bits, or at a device address.
type factor struct {
	dtype    memory.DType
	bits, at uint64
}

func factorOf(t memory.DType, scalar unsafe.Pointer, residence int32) factor {
	f := factor{dtype: t}
	if residence == ncclapi.ScalarDevice {
		f.at = uint64(uintptr(scalar))
		return f
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&f.bits)), t.Size()), unsafe.Slice((*byte)(scalar), t.Size()))
	return f
}

// Op returns the reduction, for operations of its communicator.
func (p *PreMulSum) Op() Op { return Op(p.op) }

// Close frees the reduction (ncclRedOpDestroy), without affecting operations
// that are already enqueued. Close is idempotent, and does nothing after the
// end of the communicator.
func (p *PreMulSum) Close() error {
	const name = "ncclRedOpDestroy"
	if p == nil || !p.owner.Close() {
		return nil
	}
	c := p.comm
	c.sums.Delete(p.Op())
	if err := c.enter(name); err != nil {
		return c.ignoreIfClosed(err)
	}
	defer c.mu.Unlock()
	return c.check(name, c.api.RedOpDestroy(p.op, *c.h))
}

// oneRankParts returns how many elements of an operation of a single rank with a PreMulSum NCCL must
// get at first; it gets the others in a second operation. NCCL 2.28's kernel (oneRankReduce) divides
// the elements evenly among its blocks and rounds the parts down to whole packs of 16 bytes, so that it omits the
// last elements, unless the parts are whole packs.
func oneRankParts(n, size uintptr) (first uintptr) {
	const mostBlocks, blockBytes, pack = 32, 16 << 10, 16
	for {
		blocks := min(mostBlocks, (n*size+blockBytes-1)/blockBytes)
		if blocks <= 1 {
			return n
		}
		rest := n % (blocks * pack / size)
		if rest == 0 {
			return n
		}
		n -= rest
	}
}

// callOneRank calls NCCL for a reduction of a single rank with a PreMulSum.
func (o *operation) callOneRank(c ncclapi.Call) ncclapi.Result {
	n, size := c.Count, o.wire.Size()
	c.Count = oneRankParts(n, size)
	if r := o.comm.api.Collective(c); r != ncclapi.Success || c.Count == n {
		return r
	}
	c.Send, c.Recv, c.Count = c.Send+cudadrv.DevicePtr(c.Count*size), c.Recv+cudadrv.DevicePtr(c.Count*size), n-c.Count
	return o.comm.api.Collective(c)
}

// setWireType determines NCCL's type and reduction for the operation, and validates them.
func (o *operation) setWireType(reduces bool) error {
	w := &wireTypes[o.DType]
	o.unit = 1
	if !reduces {
		if o.wire = w.move; o.wire == ncclapi.Uint8 {
			o.unit = o.DType.Size()
		}
		return nil
	}
	o.wire, o.redop = w.reduce, ncclapi.RedOp(o.Reduction)
	if w.sums && w.since <= o.comm.version && uint(o.Reduction) < uint(Avg) && o.DType != memory.Bool {
		return nil
	}
	return o.checkReduction(w)
}

// checkReduction is translate for unusual types and reductions.
func (o *operation) checkReduction(w *wireType) error {
	c, op := o.comm, Op(o.Reduction)
	at := func() string { return fmt.Sprintf("nccl: %s on rank %d of %d", o.Kind, c.rank, c.size) }
	if !w.sums {
		return fmt.Errorf("%s: NCCL cannot reduce %s", at(), o.DType)
	}
	if c.version < w.since {
		return needs(at()+" of "+o.DType.String(), w.since, c.version)
	}
	if op < Sum || op > Avg {
		v, ok := c.sums.Load(op)
		switch f, _ := v.(factor); {
		case !ok:
			return fmt.Errorf("%s: %s is not a reduction of this communicator: want sum, prod, max, min, avg or an open PreMulSum", at(), op)
		case f.dtype != o.DType:
			return fmt.Errorf("%s: %s is a reduction of %s and not of %s", at(), op, f.dtype, o.DType)
		}
		return nil
	}
	switch {
	case o.DType == memory.Bool && op == Avg:
		return fmt.Errorf("%s: bools have no average: want sum or max, prod or min", at())
	case o.DType == memory.Bool && op == Sum:
		o.redop = ncclapi.Max
	case op == Avg && c.size == 1:
		// NCCL 2.28 refuses the mean of 8-bit floats of a single rank, and corrupts the
		// last of an odd number of 16-bit floats.
		o.redop = ncclapi.Sum
	}
	return nil
}
