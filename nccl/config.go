package nccl

import (
	"fmt"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// Config are the options of a communicator (ncclConfig_t); nil means NCCL's defaults. A
// nil field means NCCL's default too. An option that is newer than the loaded NCCL causes
// a *device.UnsupportedError; NCCL itself would silently ignore it.
type Config struct {
	CGAClusterSize *int   // thread blocks in a cluster, 0 to 8; NCCL 2.17
	MinCTAs        *int   // minimum number of thread blocks of a kernel, 1 to 64, only with MaxCTAs; NCCL 2.17
	MaxCTAs        *int   // maximum number of thread blocks of a kernel, 1 to 64; NCCL 2.17
	NetName        string // the network plugin to use; NCCL 2.17
	SplitShare     *bool  // children of Split share resources; NCCL 2.18
	TrafficClass   *int   // traffic class of the network; NCCL 2.26
	Name           string // shown in traces, and in NCCL's logs from 2.27 on; the default for a child is derived from its parent's name
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

	LaunchOrderImplicit *bool // operations of several communicators start in the order of the host's calls; NCCL 2.31
	NumRMASignals       *int  // signals of one-sided operations in each context; NCCL 2.31
	RMAEagerInit        *bool // prepare one-sided operations with the communicator, and not with its first window; NCCL 2.31
	HostCFTMode         *int  // logical endpoints of Blackwell GPUs: 1 enable, 2 disable, 3 enable if possible; NCCL 2.31
	// NVLSHostMode disables parts of NVLink multicast: 1 the transport, 2 the symmetric kernels
	// and copy engines, math.MaxInt32 all parts; NCCL 2.32.
	NVLSHostMode *int

	// Timeout is the maximum time from issuing an operation until its completion. When it
	// expires, the communicator fails with a *TimeoutError. 0 means CHORUS_NCCL_TIMEOUT,
	// or ten minutes as in torch; a negative value means no timeout. A captured operation
	// is timed only until NCCL's call returns. Time during captures of this process does
	// not count, unless the operation is known to be waiting. If other work is
	// enqueued behind an operation before the watchdog's next check, about a second later,
	// the time of that work may count as well.
	Timeout time.Duration
	// TraceSize is the number of operations in the flight recorder. 0 means
	// CHORUS_NCCL_TRACE_SIZE, or 2000 as in torch; a negative value disables the recorder.
	TraceSize int
	// TraceFrames records the call stack of each operation, which takes about a
	// microsecond and an allocation. CHORUS_NCCL_TRACE_FRAMES enables it too.
	TraceFrames bool
	// NaNCheck checks the input of each operation of a floating-point type for elements that
	// are not a number, with a kernel on the operation's stream (TORCH_NCCL_NAN_CHECK). The
	// communicator then fails with a *NaNError; the host never waits for a check. Captured
	// operations are checked at each launch of their graph. CHORUS_NCCL_NAN_CHECK=1 enables it
	// too. Each rank checks only its own input, and receives are not checked.
	NaNCheck bool
	// Recoverable keeps a failed communicator for Shrink instead of aborting it. Its
	// pending operations may hang until Shrink or Close. A communicator that fails while a call waits in
	// NCCL for the other ranks, as a rank's first operations do, is aborted nevertheless.
	Recoverable bool
	// OnFailure is called once when the communicator fails, before it is aborted, by the
	// goroutine that noticed the failure. If it returns an error, that error replaces err
	// as the cause, for example because other processes know the cause better. It must
	// return, and must not call Err or Wait.
	OnFailure func(c *Communicator, err error) error
}

// apply applies the options that NCCL does not know.
func (c *Config) apply(to *Communicator) (err error) {
	var cfg Config
	if c != nil {
		cfg = *c
	}
	timeout, err := timeoutOf(cfg.Timeout)
	if err != nil {
		return err
	}
	if cfg.TraceSize == 0 {
		if cfg.TraceSize, err = env.NCCLTraceSize.Int(); err != nil {
			return err
		}
	}
	if cfg.TraceSize > maxTrace {
		return fmt.Errorf("nccl: a flight recorder of %d operations: want at most %d in Config.TraceSize or %s", cfg.TraceSize, maxTrace, env.NCCLTraceSize.Name)
	}
	if to.checksNaN, err = c.nanCheck(); err != nil {
		return err
	}
	if err := configureLaunchers(); err != nil {
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
	to.rec = flight.NewRecorder(cfg.TraceSize)
	to.rec.Rank, to.rec.Size, to.rec.Device, to.rec.Name = to.rank, to.size, to.dev.String(), cfg.Name
	to.rec.UUID, _ = gpu.DeviceOf(to.dev).UUID() // only a trace shows it
	to.rec.Number, to.rec.Library = to.number, ncclapi.VersionText(to.version)
	to.rec.SetTimeout(timeout)
	to.rec.Frames = cfg.TraceFrames || frames == "yes"
	return nil
}

// timeoutOf returns a timeout, or the one of the environment if it is 0.
func timeoutOf(d time.Duration) (time.Duration, error) {
	if d != 0 {
		return d, nil
	}
	return env.NCCLTimeout.Duration()
}

// SetTimeout changes Config.Timeout for operations that are issued from now on. Operations
// that are already issued keep their timeout. It may be called at any time
// (torch.distributed.distributed_c10d._set_pg_timeout). Batch.SetTimeout sets the timeout of
// single operations.
func (c *Communicator) SetTimeout(d time.Duration) error {
	if err := c.checkUsable("set timeout"); err != nil {
		return err
	}
	d, err := timeoutOf(d)
	if err == nil {
		c.rec.SetTimeout(d)
	}
	return err
}

// maxTrace is the maximum size of a flight recorder: some hundred MB.
const maxTrace = 1 << 20

// raw converts c to NCCL's struct for the loaded version. Communicators are created in
// blocking mode, because each data-path call of a non-blocking communicator starts a
// thread. NewCommunicator runs the initialization on its own goroutine instead.
func (c *Config) raw(version int32) (*ncclapi.Config, error) {
	r := ncclapi.NewConfig(version)
	r.Blocking = 1
	if c == nil {
		return r, nil
	}
	c.override(r)
	if c.NetName != "" {
		r.NetName = cstring(c.NetName)
	}
	// Traces use the name too, so that a name is never too new for NCCL.
	if c.Name != "" && version >= sinceName {
		r.CommName = cstring(c.Name)
	}
	if field, since := r.TooNew(version); field != "" {
		return nil, needs("nccl.Config: "+field, since, version)
	}
	return r, nil
}

// override sets the options that are set in c.
func (c *Config) override(r *ncclapi.Config) {
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
		{&r.LaunchOrderImplicit, truth(c.LaunchOrderImplicit)},
		{&r.NumRMASig, number(c.NumRMASignals)},
		{&r.RMAEagerInit, truth(c.RMAEagerInit)},
		{&r.HostCFTMode, number(c.HostCFTMode)},
		{&r.NVLSHostMode, number(c.NVLSHostMode)},
	} {
		if f.val != nil {
			*f.to = *f.val
		}
	}
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
