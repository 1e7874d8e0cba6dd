package nccl

import (
	"fmt"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// Config are the options of a communicator (ncclConfig_t); nil means that NCCL
// chooses everything. A nil field is left to NCCL too. An option that is newer
// than the loaded NCCL is a *device.UnsupportedError: NCCL itself would ignore
// it in silence.
type Config struct {
	CGAClusterSize *int   // thread blocks in a cluster, 0 to 8; NCCL 2.17
	MinCTAs        *int   // thread blocks of a kernel at least, 1 to 64; NCCL 2.17
	MaxCTAs        *int   // thread blocks of a kernel at most, 1 to 64; NCCL 2.17
	NetName        string // the network plugin to use; NCCL 2.17
	SplitShare     *bool  // children of Split share resources; NCCL 2.18
	TrafficClass   *int   // of the network; NCCL 2.26
	Name           string // shown in traces, and in NCCL's logs from 2.27 on; that of a child is made of its parent's where it has none
	CollNet        *bool  // in-network reduction; NCCL 2.27
	CTAPolicy      *int   // 0 default, 1 efficiency, 2 zero; NCCL 2.27
	ShrinkShare    *bool  // children of Shrink share resources; NCCL 2.27
	NVLSCTAs       *int   // thread blocks for NVLink multicast; NCCL 2.27

	NChannelsPerNetPeer *int  // NCCL 2.28
	NVLinkCentricSched  *bool // favour NVLink over the network; NCCL 2.28
	GraphUsageMode      *int  // 0 never, 1 one graph, 2 graphs and other work at once; NCCL 2.29
	NumRMACtx           *int  // contexts of one-sided operations; NCCL 2.29
	MaxP2PPeers         *int  // NCCL 2.30
	GraphStreamOrdering *int  // NCCL 2.30

	// Timeout is how long an operation may take, from when it is issued until it
	// has completed: then the communicator fails with a *TimeoutError. 0 is
	// CHORUS_NCCL_TIMEOUT, ten minutes as in torch; a negative number is for ever.
	// Operations that a graph captured are timed only while NCCL has not returned from
	// them, and the time in which the process captures graphs counts only for what is
	// known to wait. Work that is enqueued behind an operation on its stream, before the
	// next look about a second later, may count as a part of it.
	Timeout time.Duration
	// TraceSize is how many operations the flight recorder keeps. 0 is
	// CHORUS_NCCL_TRACE_SIZE, 2000 as in torch; a negative number keeps none.
	TraceSize int
	// TraceFrames records who issued each operation, which takes about a
	// microsecond and an allocation. CHORUS_NCCL_TRACE_FRAMES does so too.
	TraceFrames bool
	// Recoverable leaves a communicator that has failed as it is, for Shrink; what
	// hangs goes on hanging until then, or until Close. Otherwise it is aborted.
	Recoverable bool
	// OnFailure is called once when the communicator fails, before it is aborted,
	// by the goroutine that has noticed. An error that it returns takes the place
	// of err as the cause, for example when other processes know it better. It must
	// come back, and must not call Err or Wait.
	OnFailure func(c *Communicator, err error) error
}

// apply takes over what NCCL need not know.
func (c *Config) apply(to *Communicator) (err error) {
	var cfg Config
	if c != nil {
		cfg = *c
	}
	if cfg.Timeout == 0 {
		if cfg.Timeout, err = env.NCCLTimeout.Duration(); err != nil {
			return err
		}
	}
	if cfg.TraceSize == 0 {
		if cfg.TraceSize, err = env.NCCLTraceSize.Int(); err != nil {
			return err
		}
	}
	if cfg.TraceSize > maxTrace {
		return fmt.Errorf("nccl: a flight recorder of %d operations: want at most %d in Config.TraceSize or %s", cfg.TraceSize, maxTrace, env.NCCLTraceSize.Name)
	}
	if err := readyLaunchers(); err != nil {
		return err
	}
	frames, err := env.NCCLTraceFrames.OneOf("yes", "no")
	if err != nil {
		return err
	}
	if c != nil {
		to.settings = &cfg
	}
	to.onFailure, to.recoverable = cfg.OnFailure, cfg.Recoverable
	to.rec = newRecorder(cfg.TraceSize)
	to.rec.rank, to.rec.size, to.rec.device, to.rec.name = to.rank, to.size, to.dev.String(), cfg.Name
	to.rec.number, to.rec.version, to.rec.timeout = to.number, to.version, max(cfg.Timeout, 0)
	to.rec.frames = cfg.TraceFrames || frames == "yes"
	return nil
}

// maxTrace is how many operations a flight recorder may have: some hundred MB.
const maxTrace = 1 << 20

// raw turns c into NCCL's struct for the loaded version. Data-path calls of a
// non-blocking communicator start a thread each, so Chorus's always block;
// NewCommunicator runs the initialisation apart instead.
func (c *Config) raw(version int32) (*ncclapi.Config, error) {
	r := ncclapi.NewConfig(version)
	r.Blocking = 1
	if c == nil {
		return r, nil
	}
	for _, f := range []struct {
		to  *int32
		val *int32
	}{
		{&r.CGAClusterSize, number(c.CGAClusterSize)},
		{&r.MinCTAs, number(c.MinCTAs)},
		{&r.MaxCTAs, number(c.MaxCTAs)},
		{&r.SplitShare, truth(c.SplitShare)},
		{&r.TrafficClass, number(c.TrafficClass)},
		{&r.CollnetEnable, truth(c.CollNet)},
		{&r.CTAPolicy, number(c.CTAPolicy)},
		{&r.ShrinkShare, truth(c.ShrinkShare)},
		{&r.NVLSCTAs, number(c.NVLSCTAs)},
		{&r.NChannelsPerNetPeer, number(c.NChannelsPerNetPeer)},
		{&r.NVLinkCentricSched, truth(c.NVLinkCentricSched)},
		{&r.GraphUsageMode, number(c.GraphUsageMode)},
		{&r.NumRMACtx, number(c.NumRMACtx)},
		{&r.MaxP2PPeers, number(c.MaxP2PPeers)},
		{&r.GraphStreamOrdering, number(c.GraphStreamOrdering)},
	} {
		if f.val != nil {
			*f.to = *f.val
		}
	}
	if c.NetName != "" {
		r.NetName = cstring(c.NetName)
	}
	// The name also serves the traces, where no NCCL is too old for it.
	if c.Name != "" && version >= sinceName {
		r.CommName = cstring(c.Name)
	}
	if field, since := r.TooNew(version); field != "" {
		return nil, needs("nccl.Config: "+field, since, version)
	}
	return r, nil
}

// sinceName is the first NCCL whose communicators have names.
const sinceName = 22703

func needs(feature string, since, have int32) error {
	return &device.UnsupportedError{Feature: feature, Need: "NCCL " + ncclapi.VersionText(since), Have: "NCCL " + ncclapi.VersionText(have)}
}

func number(p *int) *int32 {
	if p == nil {
		return nil
	}
	return new(int32(*p))
}

func truth(p *bool) *int32 {
	if p == nil {
		return nil
	}
	if *p {
		return new(int32(1))
	}
	return new(int32(0))
}

func cstring(s string) *byte { return &append([]byte(s), 0)[0] }
