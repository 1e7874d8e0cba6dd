// Package nccl implements the interface of NCCL over the memory of virtual devices.
//
// Ranks of a communicator find each other by the unique id, in one process or in
// several, over Unix-domain sockets (or TCP, see Config). If ranks issue different
// collectives, every rank receives an error with the difference.
package nccl

import (
	"fmt"
	"strings"
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// defaultVersion is the default version of the virtual NCCL. The virtual NCCL has
// the functions of its version and no newer ones.
const defaultVersion = 22803

// Config describes the NCCL of a machine.
type Config struct {
	Version int32  // default: 2.28.3
	Network string // where ranks listen: "" for Unix sockets of this host, an IP address for TCP, or InProcess
}

// hosts reports whether the ranks may be on several hosts.
func (c *Config) hosts() bool { return c.Network != "" && c.Network != InProcess }

// lib implements ncclapi.API. Its methods are in the files of the objects that they use.
type lib struct {
	m          *machine.Machine
	cfg        Config
	localRanks map[token]*localRanks    // guarded by the lock of the machine
	loaded     map[*machine.Device]bool // devices that have NCCL's kernels; guarded by the lock of the machine
	adopted    map[*comm]bool           // the live communicators; guarded by the lock of the machine
	orders     orders
	groups     groups
	process    string // see member

	mu        sync.Mutex
	comms     map[ncclapi.Comm]*comm
	lastText  string
	lastRegID ncclapi.RegID
}

// New returns the NCCL of a machine.
func New(m *machine.Machine, cfg Config) ncclapi.API {
	if cfg.Version == 0 {
		cfg.Version = defaultVersion
	}
	l := &lib{
		m: m, cfg: cfg, localRanks: map[token]*localRanks{}, loaded: map[*machine.Device]bool{}, comms: map[ncclapi.Comm]*comm{},
		groups:  groups{threads: map[uintptr]*group{}},
		adopted: map[*comm]bool{}, orders: orders{devices: map[string]*deviceOrder{}, comms: map[token][]*comm{}, reports: map[[2]token]string{}},
		process: randomToken().String(),
	}
	m.AddReports(l.openGroups)
	m.AddReports(l.orders.list)
	return l
}

func (l *lib) Has(f ncclapi.Func) bool {
	return f >= 0 && f < ncclapi.NumFuncs && f.Since() <= l.cfg.Version
}

// enter consults the fault plan for a call that does not enqueue.
func (l *lib) enter(f ncclapi.Func) ncclapi.Result {
	if !l.Has(f) {
		return ncclapi.MissingSymbol
	}
	x := l.m.Fault(f.Name())
	if x.Status != 0 {
		return l.refuse(ncclapi.Result(x.Status), "the fault plan failed %s", f.Name())
	}
	return ncclapi.Success
}

// refuse records the text for GetLastError and returns the result.
func (l *lib) refuse(r ncclapi.Result, format string, args ...any) ncclapi.Result {
	l.setError(fmt.Sprintf(format, args...))
	return r
}

func (l *lib) setError(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastText = text
}

func (l *lib) GetVersion() (int32, ncclapi.Result) {
	return l.cfg.Version, l.enter(ncclapi.FuncGetVersion)
}

// GetLastError returns the reason for a communicator's asynchronous error or, if
// there is none, for the last failed call.
func (l *lib) GetLastError(h ncclapi.Comm) string {
	if c := l.find(h); c != nil {
		if f := c.state(); f != nil {
			return f.Text
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastText
}

func (l *lib) find(h ncclapi.Comm) *comm {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.comms[h]
}

// deviceOf returns the device of a communicator, or nil.
func (l *lib) deviceOf(h ncclapi.Comm) *machine.Device {
	if c := l.find(h); c != nil {
		return c.dev
	}
	return nil
}

// comm returns the live communicator of a handle.
func (l *lib) comm(f ncclapi.Func, h ncclapi.Comm) (*comm, ncclapi.Result) {
	if c := l.find(h); c != nil {
		return c, ncclapi.Success
	}
	if h == 0 {
		return nil, l.refuse(ncclapi.InvalidArgument, "%s: the communicator is null", f.Name())
	}
	return nil, l.refuse(ncclapi.InvalidArgument, "%s: %#x is not a communicator, or it was destroyed or aborted", f.Name(), uintptr(h))
}

// begin combines enter and comm, for calls on a communicator.
func (l *lib) begin(f ncclapi.Func, h ncclapi.Comm) (*comm, ncclapi.Result) {
	if r := l.enter(f); r != ncclapi.Success {
		return nil, r
	}
	return l.comm(f, h)
}

// usable is comm for a communicator that must accept operations.
func (l *lib) usable(f ncclapi.Func, h ncclapi.Comm) (*comm, ncclapi.Result) {
	c, r := l.comm(f, h)
	if r != ncclapi.Success {
		return nil, r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.failure != nil:
		return nil, c.failure.Result
	case c.revoked:
		return nil, l.refuse(ncclapi.InvalidUsage, "%s: the communicator of rank %d was revoked", f.Name(), c.rank)
	case c.suspended:
		return nil, l.refuse(ncclapi.InvalidUsage, "%s: the communicator of rank %d is suspended", f.Name(), c.rank)
	case c.final:
		return nil, l.refuse(ncclapi.InvalidArgument, "%s: the communicator of rank %d is finalized", f.Name(), c.rank)
	}
	return c, ncclapi.Success
}

func (l *lib) CommGetAsyncError(h ncclapi.Comm) (async, r ncclapi.Result) {
	if r := l.enter(ncclapi.FuncCommGetAsyncError); r != ncclapi.Success {
		return ncclapi.Success, r
	}
	c, r := l.comm(ncclapi.FuncCommGetAsyncError, h)
	if r != ncclapi.Success {
		return ncclapi.Success, r
	}
	if f := c.state(); f != nil {
		return f.Result, ncclapi.Success
	}
	return ncclapi.Success, ncclapi.Success
}

// number implements the calls that return one number of a communicator.
func (l *lib) number(f ncclapi.Func, h ncclapi.Comm, get func(*comm) int32) (int32, ncclapi.Result) {
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return 0, r
	}
	return get(c), ncclapi.Success
}

func (l *lib) CommCount(h ncclapi.Comm) (int32, ncclapi.Result) {
	return l.number(ncclapi.FuncCommCount, h, func(c *comm) int32 { return int32(c.n) })
}

func (l *lib) CommUserRank(h ncclapi.Comm) (int32, ncclapi.Result) {
	return l.number(ncclapi.FuncCommUserRank, h, func(c *comm) int32 { return int32(c.rank) })
}

func (l *lib) CommCuDevice(h ncclapi.Comm) (int32, ncclapi.Result) {
	return l.number(ncclapi.FuncCommCuDevice, h, func(c *comm) int32 { return c.dev.Ordinal() })
}

// CommFinalize waits until this rank has run all enqueued operations.
func (l *lib) CommFinalize(h ncclapi.Comm) ncclapi.Result {
	if r := l.enter(ncclapi.FuncCommFinalize); r != ncclapi.Success {
		return r
	}
	c, r := l.usable(ncclapi.FuncCommFinalize, h)
	if r != ncclapi.Success {
		return r
	}
	_ = l.mayManage(ncclapi.FuncCommFinalize)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.final, c.finalizing = true, true
	defer func() { c.finalizing = false }()
	for c.running > 0 && c.failure == nil {
		c.idle.Wait()
	}
	if c.failure != nil {
		return c.failure.Result
	}
	return ncclapi.Success
}

func (c *comm) isFinalizing() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.finalizing
}

func (l *lib) CommDestroy(h ncclapi.Comm) ncclapi.Result {
	return l.endComm(ncclapi.FuncCommDestroy, h, false)
}

func (l *lib) CommAbort(h ncclapi.Comm) ncclapi.Result {
	return l.endComm(ncclapi.FuncCommAbort, h, true)
}

func (l *lib) endComm(f ncclapi.Func, h ncclapi.Comm, abort bool) ncclapi.Result {
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return r
	}
	if l.groups.queued(c) {
		return l.refuse(ncclapi.InvalidUsage, "%s: rank %d has operations in a group that is still open", f.Name(), c.rank)
	}
	if c.captured() {
		return l.refuse(ncclapi.InvalidUsage, "%s: a graph has operations of rank %d: destroy it and its executables first", f.Name(), c.rank)
	}
	if l.groups.open() == nil && c.isFinalizing() {
		return l.refuse(ncclapi.InternalError, "%s: ncclCommFinalize of rank %d has not returned: NCCL would end the process", f.Name(), c.rank)
	}
	// Within a group, aborting stops running operations immediately and frees at the end of the group.
	if abort && l.groups.open() != nil {
		c.close(true)
	}
	return l.later(func() ncclapi.Result {
		l.free(c, abort)
		return ncclapi.Success
	})
}

// free destroys a communicator. NCCL waits for operations launched before, but
// an operation launched later, by a call that was in progress, uses a freed
// communicator.
func (l *lib) free(c *comm, abort bool) {
	_ = l.mayManage(ncclapi.FuncCommDestroy) // invalidates captures, and destroys anyway
	if abort {
		l.m.Lock()
		c.freed = true
		l.m.Unlock()
	}
	// An abort must be able to wake a rank that waits in CommDestroy, so the
	// handle stays valid until the communicator is closed.
	c.close(abort)
	l.mu.Lock()
	_, first := l.comms[c.handle]
	delete(l.comms, c.handle)
	l.mu.Unlock()
	if first {
		l.m.Lock()
		c.leaveLocalRanks()
		l.m.Unlock()
	}
}

// adopt assigns a handle to a connected communicator.
func (l *lib) adopt(c *comm) ncclapi.Comm {
	l.m.Lock()
	c.enterLocalRanks()
	c.handle = ncclapi.Comm(l.m.Handle())
	l.m.Unlock()
	l.mu.Lock()
	l.comms[c.handle] = c
	l.mu.Unlock()
	return c.handle
}

// takeDevice unbinds the thread's context, for a call that creates an object on
// the current device.
func (l *lib) takeDevice(f ncclapi.Func) (*machine.Device, ncclapi.Result) {
	bound := l.m.Unbind()
	l.m.Lock()
	defer l.m.Unlock()
	dev := l.m.Retained(bound)
	switch {
	case dev == nil:
		return nil, l.refuse(ncclapi.UnhandledCUDAError, "%s: no context is bound to the calling thread", f.Name())
	case dev.Status() != cudadrv.Success:
		return nil, l.refuse(ncclapi.UnhandledCUDAError, "%s: %s", f.Name(), dev.Why())
	}
	return dev, ncclapi.Success
}

// kinds has the kind of each function that a ncclapi.Call can have.
var kinds = [ncclapi.NumFuncs]kind{
	ncclapi.FuncAllReduce: kindAllReduce, ncclapi.FuncBroadcast: kindBroadcast, ncclapi.FuncReduce: kindReduce,
	ncclapi.FuncAllGather: kindAllGather, ncclapi.FuncReduceScatter: kindReduceScatter, ncclapi.FuncAlltoAll: kindAlltoAll,
	ncclapi.FuncGather: kindGather, ncclapi.FuncScatter: kindScatter, ncclapi.FuncSend: kindSend, ncclapi.FuncRecv: kindRecv,
}

func (l *lib) Collective(c ncclapi.Call) ncclapi.Result {
	d := &ncclapi.Collectives[c.Func]
	i := issue{
		f: c.Called(), kind: kinds[c.Func], count: c.Count, t: c.Type, comm: c.Comm, stream: c.Stream, cfg: c.Config,
		perRankSend: d.Sends == ncclapi.EachRank, perRankRecv: d.Recvs == ncclapi.EachRank, sendAtRoot: d.SendRoot, recvAtRoot: d.RecvRoot,
	}
	if d.Sends != ncclapi.None {
		i.send, i.sends = c.Send, 1
	}
	if d.Recvs != ncclapi.None {
		i.recv, i.recvs = c.Recv, 1
	}
	if strings.Contains(d.Arguments, "o") {
		i.op = c.Op
	}
	if strings.Contains(d.Arguments, "p") {
		i.root = c.Root
	}
	return i.submit(l)
}
