package nccl

import (
	"fmt"
	"strings"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/ranks"
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
	ranks.Seal
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

// check validates the options. NCCL would ignore a number that is out of range.
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
	case strings.ContainsRune(cfg.Algorithm, 0):
		return fmt.Errorf("the field Algorithm, %q, contains a NUL byte", cfg.Algorithm)
	case cfg.ProfilerTag>>63 != 0:
		return fmt.Errorf("ProfilerTag is %#x: NCCL reserves the highest bit", cfg.ProfilerTag)
	case cfg.LaunchEvent == nil:
		return nil
	}
	return checkLaunchEvent(cfg.LaunchEvent, c)
}

// checkLaunchEvent checks that NCCL can record an event.
func checkLaunchEvent(e *stream.Event, c *Communicator) error {
	const unusable = cudadrv.EventDisableTiming | cudadrv.EventInterprocess
	switch {
	case e.Device() != c.dev:
		return fmt.Errorf("LaunchEvent is of %s: want an event of %s", e.Device(), c.dev)
	case gpu.EventFlagsOf(e)&unusable != cudadrv.EventDisableTiming:
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
func configurable(k flight.Kind) bool {
	switch k {
	case flight.AllReduce, flight.Reduce, flight.Broadcast, flight.AllGather, flight.ReduceScatter,
		flight.AllToAll, flight.Gather, flight.Scatter:
		return true
	}
	return false
}

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
func (g *group) checkConfigs() error {
	for i := range g.ops {
		o := &g.ops[i]
		for j := range g.ops[:i] {
			p := &g.ops[j]
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
				return fmt.Errorf("nccl: %s on rank %d of %d: in one group %s: %w", o.Kind, o.comm.rank, o.comm.size, why, ErrorInvalidUsage)
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

// callConfigured is callNCCL for an operation with a configuration.
func (o *operation) callConfigured() ncclapi.Result {
	api, h, s, cfg := o.comm.api, *o.comm.h, gpu.StreamOf(o.Stream).Raw(), o.config.raw
	n, root := uintptr(o.N*o.unit), int32(o.Root)
	if o.comm.size == 1 && o.redop > ncclapi.Avg {
		return o.callOneRank() // a single rank has no use for a configuration
	}
	switch o.Kind {
	case flight.AllReduce:
		return api.AllReduceConfig(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s, cfg)
	case flight.Reduce:
		return api.ReduceConfig(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, root, h, s, cfg)
	case flight.Broadcast:
		from := o.src.ptr
		if o.comm.rank != o.Root {
			from = o.dst.ptr
		}
		return api.BroadcastConfig(from, o.dst.ptr, n, o.wire, root, h, s, cfg)
	case flight.AllGather:
		return api.AllGatherConfig(o.src.ptr, o.dst.ptr, n, o.wire, h, s, cfg)
	case flight.ReduceScatter:
		return api.ReduceScatterConfig(o.src.ptr, o.dst.ptr, n, o.wire, o.redop, h, s, cfg)
	case flight.AllToAll:
		return api.AlltoAllConfig(o.src.ptr, o.dst.ptr, n, o.wire, h, s, cfg)
	case flight.Gather:
		return api.GatherConfig(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s, cfg)
	case flight.Scatter:
		return api.ScatterConfig(o.src.ptr, o.dst.ptr, n, o.wire, root, h, s, cfg)
	}
	return ncclapi.InvalidUsage
}
