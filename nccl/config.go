package nccl

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/memory"
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

	LaunchOrderImplicit *bool // operations of several communicators start in the sequence of the host's calls; NCCL 2.31
	NumRMASignals       *int  // signals of one-sided operations in each context; NCCL 2.31
	RMAEagerInit        *bool // prepare one-sided operations with the communicator, and not with its first window; NCCL 2.31
	HostCFTMode         *int  // logical endpoints of Blackwell GPUs: 1 enable, 2 disable, 3 enable if possible; NCCL 2.31
	// NVLSHostMode disables parts of NVLink multicast: 1 the transport, 2 the symmetric kernels
	// and copy engines, math.MaxInt32 all parts; NCCL 2.32.
	NVLSHostMode *int

	// Timeout is the maximum time from issuing an operation until its completion. When it
	// expires, the communicator fails with a *TimeoutError. 0 means CHORUS_NCCL_TIMEOUT,
	// or ten minutes as in torch; a negative value means no timeout. A captured operation
	// is timed until NCCL's call returns. Each launch of its graph has the timeout, too, and so have one-sided
	// operations; their time begins again when the watchdog observes that earlier launches on the stream have ended. Time during captures of this process does
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
	cfg := *cmp.Or(c, new(Config))
	timeout, err := timeoutOf(cfg.Timeout)
	if err != nil {
		return err
	}
	if cfg.TraceSize == 0 {
		want := fmt.Sprintf("a whole number of operations of at most %d, or 0 or less for no flight recorder", maxTrace)
		if cfg.TraceSize, err = env.NCCLTraceSize.IntWhere(want, func(n int) bool { return n <= maxTrace }); err != nil {
			return fmt.Errorf("nccl: %w", err)
		}
	}
	if cfg.TraceSize > maxTrace {
		return fmt.Errorf("nccl: a flight recorder of %d operations: want at most %d in Config.TraceSize", cfg.TraceSize, maxTrace)
	}
	if to.checksNaN, err = c.nanCheck(); err != nil {
		return err
	}
	if err := configureLaunchers(); err != nil {
		return err
	}
	if err := to.setRoom(); err != nil {
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
	to.rec = collective.NewRecorder(cfg.TraceSize)
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

// SetTimeout changes Config.Timeout for operations that are issued from now on.
// Operations that are already issued keep their timeout. SetTimeout may be
// called at any time (torch.distributed.distributed_c10d._set_pg_timeout).
// Batch.SetTimeout sets the timeout of single operations.
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
	for _, f := range []struct{ name, text string }{{"NetName", c.NetName}, {"Name", c.Name}} {
		if err := checkText("the field "+f.name, f.text); err != nil {
			return nil, fmt.Errorf("nccl: config: %w: %w", err, ErrorInvalidArgument)
		}
	}
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

// checkText returns the error of a text that C would cut off.
func checkText(what, s string) error {
	if strings.ContainsRune(s, 0) {
		return fmt.Errorf("%s, %q, contains a NUL byte", what, s)
	}
	return nil
}

// A UniqueID identifies a communicator that is about to be made (ncclUniqueId). The rank
// that made it sends its bytes to the other ranks, by any means. It contains the address
// of that process's listener and authorizes its owner to join: keep it secret. One id
// makes one communicator.
type UniqueID [128]byte

// NewUniqueID creates an id on the system of dev and starts listening for the
// ranks; the process must live until the communicator is made. It fails if NCCL has not answered within CHORUS_DRIVER_TIMEOUT.
func NewUniqueID(dev *device.Device) (UniqueID, error) {
	if dev == nil {
		return UniqueID{}, errors.New("nccl: new unique id: no device given")
	}
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return UniqueID{}, err
	}
	var id ncclapi.UniqueID
	var r ncclapi.Result
	err = gpu.DeviceOf(dev).InTime(func() string { return "ncclGetUniqueId" }, func() error {
		if err := startNetworking(dev); err != nil {
			return err
		}
		return relaxed(dev, func() error {
			id, r = api.GetUniqueID()
			return nil
		})
	})
	if err != nil {
		return UniqueID{}, err
	}
	if r != ncclapi.Success {
		return UniqueID{}, explainEncryption(dev, &Error{Op: "ncclGetUniqueId", Rank: -1, Err: Result(r), Detail: api.GetLastError(0)})
	}
	return UniqueID(id), nil
}

// sinceFloat8 is the first NCCL that reduces 8-bit floats.
const sinceFloat8 = 22403

// A wireType is the NCCL type for elements of one of Chorus's types.
type wireType struct {
	move   ncclapi.DType // for operations without arithmetic; bytes if some NCCL version lacks the type
	reduce ncclapi.DType
	sums   bool  // NCCL can reduce the type
	since  int32 // the first NCCL version that can
}

var wireTypes = [...]wireType{
	memory.Bool:       {move: ncclapi.Uint8, reduce: ncclapi.Uint8, sums: true},
	memory.Int8:       {move: ncclapi.Int8, reduce: ncclapi.Int8, sums: true},
	memory.Uint8:      {move: ncclapi.Uint8, reduce: ncclapi.Uint8, sums: true},
	memory.Int16:      {move: ncclapi.Uint8},
	memory.Uint16:     {move: ncclapi.Uint8},
	memory.Int32:      {move: ncclapi.Int32, reduce: ncclapi.Int32, sums: true},
	memory.Uint32:     {move: ncclapi.Uint32, reduce: ncclapi.Uint32, sums: true},
	memory.Int64:      {move: ncclapi.Int64, reduce: ncclapi.Int64, sums: true},
	memory.Uint64:     {move: ncclapi.Uint64, reduce: ncclapi.Uint64, sums: true},
	memory.Float16:    {move: ncclapi.Float16, reduce: ncclapi.Float16, sums: true},
	memory.BFloat16:   {move: ncclapi.BFloat16, reduce: ncclapi.BFloat16, sums: true},
	memory.Float32:    {move: ncclapi.Float32, reduce: ncclapi.Float32, sums: true},
	memory.Float64:    {move: ncclapi.Float64, reduce: ncclapi.Float64, sums: true},
	memory.Float8E4M3: {move: ncclapi.Uint8, reduce: ncclapi.Float8E4M3, sums: true, since: sinceFloat8},
	memory.Float8E5M2: {move: ncclapi.Uint8, reduce: ncclapi.Float8E5M2, sums: true, since: sinceFloat8},
}

// A Result is a status code of NCCL (ncclResult_t). errors.Is compares against
// its constants; its text is the C name.
type Result int32

// The status codes of NCCL.
const (
	ErrorUnhandledCUDA   = Result(ncclapi.UnhandledCUDAError)
	ErrorSystem          = Result(ncclapi.SystemError)
	ErrorInternal        = Result(ncclapi.InternalError)
	ErrorInvalidArgument = Result(ncclapi.InvalidArgument)
	ErrorInvalidUsage    = Result(ncclapi.InvalidUsage)
	ErrorRemote          = Result(ncclapi.RemoteError)
	ErrorTimeout         = Result(ncclapi.Timeout)
)

// Error returns the C name, such as ncclRemoteError.
func (r Result) Error() string { return ncclapi.Result(r).Error() }

// meaning explains the status in a sentence without a full stop.
func (r Result) meaning() string { return ncclapi.Result(r).Meaning() }

// An Error is a call of NCCL that failed, or an operation that failed later.
type Error struct {
	Op     string // the C function, such as ncclAllReduce
	Rank   int    // -1 if the call is not for a rank
	Size   int
	Device string // such as "cuda:3"
	Err    Result
	Detail string // NCCL's own last message (ncclGetLastError), or ""
	Async  bool   // the operation failed after it was enqueued
}

func (e *Error) Error() string {
	who := ""
	if e.Rank >= 0 {
		who = fmt.Sprintf(" on rank %d of %d (%s)", e.Rank, e.Size, e.Device)
	}
	text := fmt.Sprintf("nccl: %s%s: %s (%s)", e.Op, who, e.Err, e.Err.meaning())
	if e.Async {
		text = fmt.Sprintf("nccl: an earlier operation failed%s: %s (%s)", who, e.Err, e.Err.meaning())
	}
	switch {
	case e.Detail != "":
		text += ": " + e.Detail
	case e.Err == ErrorUnhandledCUDA || e.Err == ErrorSystem || e.Err == ErrorInternal:
		text += "; NCCL_DEBUG=WARN in the environment makes NCCL print the cause"
	}
	return text
}

// Unwrap returns the status, for errors.Is.
func (e *Error) Unwrap() error { return e.Err }

// An encryption is the state of NCCL's encryption in this process.
type encryption struct {
	mu      sync.Mutex
	key     []byte // nil until SetEncryption
	started bool   // NCCL may have opened connections
}

var encryptionKey handle.Key

// encryptionOf returns the state for the System of a device.
func encryptionOf(dev *device.Device) *encryption {
	return gpu.DeviceOf(dev).System().Local(&encryptionKey, func() any { return &encryption{} }).(*encryption)
}

// SetEncryption has NCCL encrypt its connections over TCP with TLS 1.3 and
// authenticate the other ranks by a key (ncclSetEncryption). The key has at
// least 32 bytes, none of them 0. NCCL must be 2.32.3 or newer, and built with
// OpenSSL 3. All processes of the job must call it with the same key before
// they make the first id or communicator on the System of dev, and keep the
// key, which a second call must repeat. If CHORUS_NCCL_ENCRYPT is yes,
// comm.Join calls it with a key of the job.
//
// Only NCCL's own sockets are encrypted: its start-up and its socket transport. NVLink, shared
// memory, InfiniBand and network plugins are not. Chorus's tests have run this on virtual devices
// only, so look at the traffic before you rely on it.
func SetEncryption(dev *device.Device, key []byte) error {
	const f = ncclapi.FuncSetEncryption
	if dev == nil {
		return errors.New("nccl: set encryption: no device given")
	}
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return err
	}
	v, _ := api.GetVersion()
	if !api.Has(f) {
		return needs(f.Name(), f.Since(), v)
	}
	if len(key) < ncclapi.MinPSK || bytes.IndexByte(key, 0) >= 0 {
		return fmt.Errorf("nccl: %s: a key of %d bytes: want at least %d bytes, and none of them 0: %w", f.Name(), len(key), ncclapi.MinPSK, ErrorInvalidArgument)
	}
	e := encryptionOf(dev)
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.key != nil && bytes.Equal(e.key, key):
		return nil
	case e.key != nil:
		return fmt.Errorf("nccl: %s: this process already uses another key: use one key for the whole job: %w", f.Name(), ErrorInvalidUsage)
	case e.started:
		return fmt.Errorf("nccl: %s: this process has already made an id or a communicator: set the key before: %w", f.Name(), ErrorInvalidUsage)
	}
	cfg := ncclapi.NewEncryptionConfig(v, string(key))
	if err := call(dev, f.Name(), func(api ncclapi.API) ncclapi.Result { return api.SetEncryption(cfg) }); err != nil {
		return err
	}
	e.key = bytes.Clone(key)
	return nil
}

// startNetworking notes that NCCL opens connections. It returns an error if the environment asks
// for encryption and there is no key.
func startNetworking(dev *device.Device) error {
	e := encryptionOf(dev)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.key == nil {
		switch want, err := env.NCCLEncrypt.OneOf("yes", "no"); {
		case err != nil:
			return err
		case want == "yes":
			return fmt.Errorf("nccl: %s is yes, but there is no key: make the communicator by comm.Join in a job with a secret, or call nccl.SetEncryption before: %w",
				env.NCCLEncrypt.Name, ErrorInvalidUsage)
		}
	}
	e.started = true
	return nil
}

// explainEncryption adds the requirements of encryption to an error that NCCL returns without
// them.
func explainEncryption(dev *device.Device, err error) error {
	if !errors.Is(err, ErrorInvalidUsage) && !errors.Is(err, ErrorSystem) {
		return err
	}
	e := encryptionOf(dev)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.key == nil {
		return err
	}
	return fmt.Errorf("%w (encryption is on: NCCL must be built with TLS_BACKEND=OPENSSL3, and find libssl.so.3 and libcrypto.so.3)", err)
}
