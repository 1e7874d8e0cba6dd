package virtual

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// DefaultNCCL is the version that the virtual NCCL is of unless it is told another.
// It has the functions of that version and no newer ones.
const DefaultNCCL = 22803

// ncclLib implements ncclapi.API. Its methods are spread over the nccl files.
type ncclLib struct {
	m       *Machine
	cliques map[token]*clique // guarded by m.mu
	groups  groups

	mu        sync.Mutex
	comms     map[ncclapi.Comm]*comm
	lastText  string
	lastSum   ncclapi.RedOp
	lastRegID ncclapi.RegID
}

var _ ncclapi.API = (*ncclLib)(nil)

func newNCCL(m *Machine) *ncclLib {
	return &ncclLib{
		m: m, cliques: map[token]*clique{}, comms: map[ncclapi.Comm]*comm{},
		groups:  groups{threads: map[int]*group{}},
		lastSum: ncclapi.Avg,
	}
}

func (l *ncclLib) Has(f ncclapi.Func) bool {
	return f >= 0 && f < ncclapi.NumFuncs && f.Since() <= l.m.cfg.NCCL
}

// enter asks the fault plan about a call that enqueues nothing.
func (l *ncclLib) enter(f ncclapi.Func) ncclapi.Result {
	if !l.Has(f) {
		return ncclapi.MissingSymbol
	}
	status, _ := l.m.faults.hit(f.Name())
	if status != 0 {
		return l.refuse(ncclapi.Result(status), "the fault plan failed %s", f.Name())
	}
	return ncclapi.Success
}

// refuse remembers a sentence for GetLastError and returns the result.
func (l *ncclLib) refuse(r ncclapi.Result, format string, args ...any) ncclapi.Result {
	l.setError(fmt.Sprintf(format, args...))
	return r
}

func (l *ncclLib) setError(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastText = text
}

func (l *ncclLib) GetVersion() (int32, ncclapi.Result) {
	return l.m.cfg.NCCL, l.enter(ncclapi.FuncGetVersion)
}

func (l *ncclLib) GetErrorString(r ncclapi.Result) string {
	if text := r.Meaning(); text != "" {
		return text
	}
	return "unknown result code"
}

// GetLastError returns the reason of a communicator's asynchronous error, or
// else that of the last call that failed.
func (l *ncclLib) GetLastError(h ncclapi.Comm) string {
	if c := l.find(h); c != nil {
		if f := c.state(); f != nil {
			return f.Text
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastText
}

func (l *ncclLib) find(h ncclapi.Comm) *comm {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.comms[h]
}

// comm returns the live communicator of a handle.
func (l *ncclLib) comm(f ncclapi.Func, h ncclapi.Comm) (*comm, ncclapi.Result) {
	if c := l.find(h); c != nil {
		return c, ncclapi.Success
	}
	if h == 0 {
		return nil, l.refuse(ncclapi.InvalidArgument, "%s: the communicator is null", f.Name())
	}
	return nil, l.refuse(ncclapi.InvalidArgument, "%s: %#x is no communicator, or it was destroyed or aborted", f.Name(), uintptr(h))
}

// begin is enter and comm: what calls on a communicator begin with.
func (l *ncclLib) begin(f ncclapi.Func, h ncclapi.Comm) (*comm, ncclapi.Result) {
	if r := l.enter(f); r != ncclapi.Success {
		return nil, r
	}
	return l.comm(f, h)
}

// usable is comm for a communicator on which something is to be issued.
func (l *ncclLib) usable(f ncclapi.Func, h ncclapi.Comm) (*comm, ncclapi.Result) {
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

func (l *ncclLib) CommGetAsyncError(h ncclapi.Comm) (async, r ncclapi.Result) {
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

// number answers the calls that ask for one number of a communicator.
func (l *ncclLib) number(f ncclapi.Func, h ncclapi.Comm, get func(*comm) int32) (int32, ncclapi.Result) {
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return 0, r
	}
	return get(c), ncclapi.Success
}

func (l *ncclLib) CommCount(h ncclapi.Comm) (int32, ncclapi.Result) {
	return l.number(ncclapi.FuncCommCount, h, func(c *comm) int32 { return int32(c.n) })
}

func (l *ncclLib) CommCuDevice(h ncclapi.Comm) (int32, ncclapi.Result) {
	return l.number(ncclapi.FuncCommCuDevice, h, func(c *comm) int32 { return c.dev.ordinal })
}

func (l *ncclLib) CommUserRank(h ncclapi.Comm) (int32, ncclapi.Result) {
	return l.number(ncclapi.FuncCommUserRank, h, func(c *comm) int32 { return int32(c.rank) })
}

// CommFinalize waits until this rank has done its part in all that was
// enqueued.
func (l *ncclLib) CommFinalize(h ncclapi.Comm) ncclapi.Result {
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
	c.final = true
	for c.running > 0 && c.failure == nil {
		c.idle.Wait()
	}
	if c.failure != nil {
		return c.failure.Result
	}
	return ncclapi.Success
}

func (l *ncclLib) CommDestroy(h ncclapi.Comm) ncclapi.Result {
	return l.endComm(ncclapi.FuncCommDestroy, h, false)
}

func (l *ncclLib) CommAbort(h ncclapi.Comm) ncclapi.Result {
	return l.endComm(ncclapi.FuncCommAbort, h, true)
}

func (l *ncclLib) endComm(f ncclapi.Func, h ncclapi.Comm, abort bool) ncclapi.Result {
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
	// In a group aborting ends at once what runs, and frees at the group's end.
	if abort && l.groups.open() != nil {
		c.close(true)
	}
	return l.later(func() ncclapi.Result {
		l.free(c, abort)
		return ncclapi.Success
	})
}

// free ends a communicator. NCCL waits for what was launched before; what is launched from
// then on, by a call that was inside, finds no communicator.
func (l *ncclLib) free(c *comm, abort bool) {
	_ = l.mayManage(ncclapi.FuncCommDestroy) // it spoils captures, and goes on
	if abort {
		l.m.mu.Lock()
		c.freed = true
		l.m.mu.Unlock()
	}
	// Aborting is what ends a rank that waits in CommDestroy: until the
	// communicator is closed, its handle is good.
	c.close(abort)
	l.mu.Lock()
	_, first := l.comms[c.handle]
	delete(l.comms, c.handle)
	l.mu.Unlock()
	if first {
		l.m.mu.Lock()
		c.leaveClique()
		l.m.mu.Unlock()
	}
}

// adopt gives a connected communicator its handle.
func (l *ncclLib) adopt(c *comm) ncclapi.Comm {
	l.m.mu.Lock()
	c.enterClique()
	c.handle = ncclapi.Comm(l.m.handle())
	l.m.mu.Unlock()
	l.mu.Lock()
	l.comms[c.handle] = c
	l.mu.Unlock()
	return c.handle
}

// takeDevice consumes the thread's context for a call that makes something on
// the current device.
func (l *ncclLib) takeDevice(f ncclapi.Func) (*device, ncclapi.Result) {
	bound := l.m.threads.take()
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	dev := l.m.deviceOf(bound)
	switch {
	case dev == nil || dev.retained == 0:
		return nil, l.refuse(ncclapi.UnhandledCUDAError, "%s: no context is bound to the calling thread", f.Name())
	case dev.status != cudadrv.Success:
		return nil, l.refuse(ncclapi.UnhandledCUDAError, "%s: %s", f.Name(), dev.why)
	}
	return dev, ncclapi.Success
}
