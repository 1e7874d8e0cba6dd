package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Window is memory of this rank that the other ranks may read and write (ncclWindow_t).
// NCCL uses its symmetric kernels for collectives on symmetric windows.
type Window struct {
	owner handle.Owner
	comm  *Communicator
	h     *ncclapi.Window // NCCL writes the handle through it
	bytes int
	span  *span // nil unless it is symmetric
	hold  *inside.Hold
}

// RegisterWindow registers the first bytes of b as a window (ncclCommWindowRegister, NCCL 2.27.3
// and newer). All ranks must call it, in the same order relative to other operations, and
// it returns when all have. symmetric promises that all ranks have the same size and use
// the same offsets in collectives (NCCL_WIN_COLL_SYMMETRIC). Before NCCL 2.28.7
// collectives are refused if its kernels are incorrect: all-gathers and reduce-scatters of
// parts that are not a multiple of 8 bytes, and several such collectives in one Group. Symmetric kernels
// of NCCL 2.28.0 to before 2.30.7 are reported to read stale data in graphs behind another kernel. With these versions, test
// graphs of collectives on symmetric windows before you rely on them.
//
// The memory must come from Allocator, begin at a multiple of 4096 bytes of an
// allocation (NCCL_WIN_REQUIRED_ALIGNMENT). The window holds it: if b is closed, the memory is
// freed when the window is closed. A memory.Pool with Allocator aligns slices to 512 bytes, so
// allocate a window's memory first in a separate pool, or make all sizes in the
// pool multiples of 4096 bytes. The end of the communicator closes the window,
// too. If ctx ends first, RegisterWindow returns the cause, and c must be
// closed.
func (c *Communicator) RegisterWindow(ctx context.Context, b *memory.Buffer, bytes int, symmetric bool) (*Window, error) {
	const f = ncclapi.FuncCommWindowRegister
	name := f.Name()
	if err := c.checkUsable(name); err != nil {
		return nil, err
	}
	if err := c.needs(f); err != nil {
		return nil, err
	}
	x, err := memory.View[uint8](b, 0, bytes)
	if err != nil {
		return nil, c.errorf(name, "%w", err)
	}
	if err := inside.CheckBuffer(name, x.Buffer(), x.Len(), c.dev); err != nil {
		return nil, fmt.Errorf("nccl: %w", err)
	}
	w := &Window{comm: c, h: new(ncclapi.Window), bytes: bytes}
	if symmetric {
		w.span = &span{cudadrv.DevicePtr(x.Ptr()), cudadrv.DevicePtr(x.Ptr()) + cudadrv.DevicePtr(bytes)}
	}
	if w.hold, err = c.holdMemory(name, b); err != nil {
		return nil, err
	}
	begun := time.Now()
	done := make(chan error, 1)
	go func() { done <- w.register(name, cudadrv.DevicePtr(x.Ptr())) }()
	select {
	case err := <-done:
		if err != nil {
			return nil, errors.Join(err, c.letGoMemory(w.hold))
		}
		if symmetric {
			c.addSpan(*w.span)
		}
		handle.Init(w, &w.owner, handle.About{Kind: "nccl window", On: c.dev, Bytes: bytes})
		return w, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("nccl: %s on rank %d of %d (%s): gave up after %v, other ranks have not come: %w",
			name, c.rank, c.size, c.dev, time.Since(begun).Round(time.Millisecond), context.Cause(ctx))
	}
}

// register has NCCL register the window, which waits for all ranks.
func (w *Window) register(name string, ptr cudadrv.DevicePtr) error {
	c, flags := w.comm, ncclapi.WindowDefault
	if w.span != nil {
		flags = ncclapi.WindowCollSymmetric
	}
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error {
		return c.check(name, c.api.CommWindowRegister(*c.h, ptr, uintptr(w.bytes), w.h, flags))
	})
}

// Ptr returns NCCL's device address of the window (ncclWinGetUserPtr, NCCL 2.29.2 and
// newer).
func (w *Window) Ptr() (uint64, error) {
	const f = ncclapi.FuncWinGetUserPtr
	if err := w.checkUsable(f); err != nil {
		return 0, err
	}
	if err := w.comm.enter(f.Name()); err != nil {
		return 0, err
	}
	defer w.comm.mu.Unlock()
	p, r := w.comm.api.WinGetUserPtr(*w.comm.h, *w.h)
	return uint64(p), w.comm.check(f.Name(), r)
}

// PeerPtr returns the address at which this rank's device accesses the window of rank peer by
// load and store (ncclGetPeerDevicePointer, NCCL 2.29.2 and newer). It returns 0 if the device
// cannot access it, for example because the rank is on another host. Kernels take the address by
// kernel.Address, and must order their accesses with the other ranks themselves. The address is
// valid until one of the two ranks closes the window or its communicator. All ranks must have
// registered memory of Allocator.
func (w *Window) PeerPtr(peer int) (uint64, error) {
	const f = ncclapi.FuncGetPeerDevicePointer
	if err := w.checkUsable(f); err != nil {
		return 0, err
	}
	c := w.comm
	if peer < 0 || peer >= c.size {
		return 0, c.errorf(f.Name(), "rank %d does not exist", peer)
	}
	if err := c.enter(f.Name()); err != nil {
		return 0, err
	}
	defer c.mu.Unlock()
	p, r := c.api.GetPeerDevicePointer(*w.h, 0, int32(peer))
	return uint64(p), c.check(f.Name(), r)
}

// Close deregisters the window on this rank (ncclCommWindowDeregister), which
// no operation may still use, and frees its memory if the buffer is closed. Close is idempotent, and does
// nothing after the end of the communicator. If the memory cannot be freed because its stream is captured into a graph,
// Close returns a *device.CaptureError and the window stays open.
func (w *Window) Close() error {
	if w == nil || w.owner.Closed() {
		return nil
	}
	if err := w.hold.Refused(); err != nil {
		return fmt.Errorf("nccl: close a window: %w", err)
	}
	if !w.owner.Close() {
		return nil
	}
	c := w.comm
	if w.span != nil {
		defer c.dropSpan(*w.span)
	}
	err := c.unlessEnded("ncclCommWindowDeregister", func() ncclapi.Result { return c.api.CommWindowDeregister(*c.h, *w.h) })
	if err != nil {
		return err // the memory may still be a window
	}
	return c.letGoMemory(w.hold)
}

// registered is the memory that a communicator holds, because NCCL knows its addresses.
type registered struct {
	mu    sync.Mutex
	ended bool
	holds map[*inside.Hold]bool
}

// holdMemory keeps the memory of a buffer allocated until letGoMemory or the end of c.
func (c *Communicator) holdMemory(name string, b *memory.Buffer) (*inside.Hold, error) {
	c.registered.mu.Lock()
	defer c.registered.mu.Unlock()
	if c.registered.ended {
		return nil, c.errClosed(name)
	}
	h := inside.BufferOf(b).Hold()
	if h == nil {
		return nil, c.errorf(name, "the buffer: %w", device.ErrClosed)
	}
	if c.registered.holds == nil {
		c.registered.holds = map[*inside.Hold]bool{}
	}
	c.registered.holds[h] = true
	return h, nil
}

// letGoMemory ends what holdMemory began, and frees the memory if its buffer is closed. The caller must not be in NCCL, which
// the end of a pool's memory calls.
func (c *Communicator) letGoMemory(h *inside.Hold) error {
	c.registered.mu.Lock()
	delete(c.registered.holds, h)
	c.registered.mu.Unlock()
	return h.End()
}

// letGoAllMemory is letGoMemory for all memory that c holds, at its end.
func (c *Communicator) letGoAllMemory() {
	c.registered.mu.Lock()
	holds := c.registered.holds
	c.registered.holds, c.registered.ended = nil, true
	c.registered.mu.Unlock()
	for h := range holds {
		_ = h.End() // if the device is lost, that was already reported
	}
}

func (w *Window) checkUsable(f ncclapi.Func) error {
	if w == nil || w.owner.Closed() {
		return fmt.Errorf("nccl: %s: the window is closed: %w", f.Name(), device.ErrClosed)
	}
	if err := w.comm.checkUsable(f.Name()); err != nil {
		return err
	}
	return w.comm.needs(f)
}

// Put enqueues a copy of src into the window of rank peer, at a byte offset, and then a
// signal to that rank (ncclPutSignal, NCCL 2.29.2 and newer). w is this rank's window from
// the same registration; src must lie in a window too. src may be changed when s has
// passed the operation. peer sees the copy when its WaitSignal has completed.
// On virtual devices, the ranks must be in one process.
func Put[T memory.Element](w *Window, s *stream.Stream, src memory.Slice[T], peer, offset int) error {
	const f = ncclapi.FuncPutSignal
	if err := w.checkUsable(f); err != nil {
		return err
	}
	if err := w.comm.oneSided(f, s, peer); err != nil {
		return err
	}
	if err := inside.CheckBuffer(f.Name(), src.Buffer(), src.Len(), w.comm.dev); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	if offset < 0 || src.Bytes() > w.bytes-offset {
		return w.comm.errorf(f.Name(), "%d bytes at byte %d: the window has %d", src.Bytes(), offset, w.bytes)
	}
	return w.comm.signal(f, s, func(h ncclapi.Comm) ncclapi.Result {
		return w.comm.api.PutSignal(cudadrv.DevicePtr(src.Ptr()), uintptr(src.Bytes()), ncclapi.Uint8, int32(peer), *w.h, uintptr(offset), 0, 0, 0, h, gpu.StreamOf(s).Raw())
	})
}

// Signal enqueues a signal to rank peer (ncclSignal, NCCL 2.29.2 and newer).
// On virtual devices, the ranks must be in one process.
func Signal(c *Communicator, s *stream.Stream, peer int) error {
	const f = ncclapi.FuncSignal
	if err := c.oneSided(f, s, peer); err != nil {
		return err
	}
	return c.signal(f, s, func(h ncclapi.Comm) ncclapi.Result {
		return c.api.Signal(int32(peer), 0, 0, 0, h, gpu.StreamOf(s).Raw())
	})
}

// WaitSignal enqueues a wait of s, but not of the host, for n signals of rank
// peer, and for all data that peer has put before them (ncclWaitSignal, NCCL
// 2.29.2 and newer). On virtual devices, the ranks must be in one process.
func WaitSignal(c *Communicator, s *stream.Stream, peer, n int) error {
	const f = ncclapi.FuncWaitSignal
	if err := c.oneSided(f, s, peer); err != nil {
		return err
	}
	if n < 1 {
		return c.errorf(f.Name(), "%d signals: want one or more", n)
	}
	descs := []ncclapi.SignalDesc{{Ops: int32(n), Peer: int32(peer)}}
	return c.signal(f, s, func(h ncclapi.Comm) ncclapi.Result { return c.api.WaitSignal(descs, h, gpu.StreamOf(s).Raw()) })
}

// oneSided validates the common arguments of one-sided operations.
func (c *Communicator) oneSided(f ncclapi.Func, s *stream.Stream, peer int) error {
	if err := c.checkUsable(f.Name()); err != nil {
		return err
	}
	if err := c.needs(f); err != nil {
		return err
	}
	if err := gpu.CheckStream(f.Name(), s, gpu.DeviceOf(c.dev)); err != nil {
		return fmt.Errorf("nccl: %w", err)
	}
	if peer < 0 || peer >= c.size {
		return c.errorf(f.Name(), "rank %d does not exist", peer)
	}
	if ncclapi.PutsInGraphs.Affects(c.version) {
		why := fmt.Sprintf("NCCL %s does not capture one-sided operations: use 2.30.3 or newer", ncclapi.VersionText(c.version))
		if err := gpu.StreamOf(s).RefuseCapture(f.Name(), why); err != nil {
			return fmt.Errorf("nccl: %w", err)
		}
	}
	return gpu.StreamOf(s).Captured(held{c})
}

// signal enqueues a one-sided operation, which the watchdog watches.
func (c *Communicator) signal(f ncclapi.Func, s *stream.Stream, call func(ncclapi.Comm) ncclapi.Result) error {
	if err := c.enter(f.Name()); err != nil {
		return err
	}
	defer c.mu.Unlock()
	captured, err := s.Capturing()
	if err != nil {
		return err
	}
	span := gpu.StreamOf(s).Span(timeline.Collective, f.Name())
	err = c.check(f.Name(), call(*c.h))
	span.End(err)
	if err == nil && !captured && c.watch.Launched(s, collective.OneSidedLaunches, 0) {
		go c.runWatch()
	}
	return err
}

// A Registration is memory that is registered with NCCL for one communicator, independent
// of RegisterPool.
type Registration struct {
	owner handle.Owner
	comm  *Communicator
	id    ncclapi.RegID
	hold  *inside.Hold
}

// Register registers the memory of b, so that collectives can use it without
// copying it first if all ranks have registered their operands
// (ncclCommRegister). It enqueues nothing and is not collective. If b is closed before the
// Registration, its memory is freed when the Registration is closed. The end of the communicator
// closes it too.
func (c *Communicator) Register(b *memory.Buffer) (*Registration, error) {
	const f = ncclapi.FuncCommRegister
	if err := c.checkUsable(f.Name()); err != nil {
		return nil, err
	}
	if b == nil {
		return nil, c.errorf(f.Name(), "no buffer given")
	}
	x, err := memory.View[uint8](b, 0, max(b.Bytes(), 0))
	if err == nil {
		err = inside.CheckBuffer(f.Name(), b, x.Len(), c.dev)
	}
	if err != nil {
		return nil, c.errorf(f.Name(), "%w", err)
	}
	r := &Registration{comm: c}
	if r.hold, err = c.holdMemory(f.Name(), b); err != nil {
		return nil, err
	}
	if err := r.register(f.Name(), x); err != nil {
		return nil, errors.Join(err, c.letGoMemory(r.hold))
	}
	handle.Init(r, &r.owner, handle.About{Kind: "nccl registration", On: c.dev, Bytes: x.Bytes()})
	return r, nil
}

func (r *Registration) register(name string, x memory.Slice[uint8]) error {
	c := r.comm
	if err := c.enter(name); err != nil {
		return err
	}
	defer c.mu.Unlock()
	return relaxed(c.dev, func() error {
		var res ncclapi.Result
		r.id, res = c.api.CommRegister(*c.h, cudadrv.DevicePtr(x.Ptr()), uintptr(x.Bytes()))
		return c.check(name, res)
	})
}

// Close deregisters the memory (ncclCommDeregister), which no operation may
// still use, and frees it if the buffer is closed. Close is idempotent, and does nothing after the end of the
// communicator. If the memory cannot be freed because its stream is captured into a graph, Close returns a
// *device.CaptureError and the Registration stays open.
func (r *Registration) Close() error {
	if r == nil || r.owner.Closed() {
		return nil
	}
	if err := r.hold.Refused(); err != nil {
		return fmt.Errorf("nccl: close a registration: %w", err)
	}
	if !r.owner.Close() {
		return nil
	}
	c := r.comm
	err := c.unlessEnded("ncclCommDeregister", func() ncclapi.Result { return c.api.CommDeregister(*c.h, r.id) })
	if err != nil {
		return err // NCCL may still know the memory
	}
	return c.letGoMemory(r.hold)
}

// symmetricUnit divides the parts that the symmetric kernels with the defect SymmetricParts pack correctly, in bytes.
const symmetricUnit = 8

// A span is the memory of a symmetric window.
type span struct{ from, to cudadrv.DevicePtr }

// addSpan records a symmetric window.
func (c *Communicator) addSpan(s span) {
	c.spansMu.Lock()
	defer c.spansMu.Unlock()
	c.spans.Store(new(append(slices.Clone(c.symmetricSpans()), s)))
}

// dropSpan undoes addSpan.
func (c *Communicator) dropSpan(s span) {
	c.spansMu.Lock()
	defer c.spansMu.Unlock()
	list := slices.Clone(c.symmetricSpans())
	if i := slices.Index(list, s); i >= 0 {
		list = slices.Delete(list, i, i+1)
	}
	c.spans.Store(&list)
}

func (c *Communicator) symmetricSpans() []span {
	if list := c.spans.Load(); list != nil {
		return *list
	}
	return nil
}

// symmetricKernel reports whether NCCL has a symmetric kernel for an operation.
func symmetricKernel(k collective.Kind, t memory.DType, op collective.Reduction) bool {
	switch k {
	case collective.AllGather:
		return true
	case collective.AllReduce, collective.ReduceScatter:
		switch t {
		case memory.Float16, memory.BFloat16, memory.Float32, memory.Float8E4M3, memory.Float8E5M2:
			return op == collective.Sum
		}
	}
	return false
}

// symmetricKernelWrong reports whether the symmetric kernel is incorrect for a part of the given size.
func (c *Communicator) symmetricKernelWrong(k collective.Kind, part int) bool {
	return ncclapi.SymmetricParts.Affects(c.version) && (k == collective.AllGather || k == collective.ReduceScatter) && part%symmetricUnit != 0
}

// symmetric reports whether NCCL will use a symmetric kernel for the operation.
func (o *operation) symmetric() bool {
	spans := o.comm.symmetricSpans()
	return len(spans) > 0 && symmetricKernel(o.Kind, o.DType, o.Reduction) && within(&o.Dst, spans, o.DType) && within(&o.Src, spans, o.DType)
}

// within reports whether an operand lies in one of the spans.
func within(x *collective.Operand, spans []span, t memory.DType) bool {
	end := x.Ptr + cudadrv.DevicePtr(x.Len*t.Size())
	return slices.ContainsFunc(spans, func(s span) bool { return s.from <= x.Ptr && end <= s.to })
}

// checkSymmetric refuses an operation that NCCL's kernel computes incorrectly.
func (o *operation) checkSymmetric() error {
	if part := o.N * o.DType.Size(); o.symmetric() && o.comm.symmetricKernelWrong(o.Kind, part) {
		return o.errTooOld(fmt.Sprintf("%d bytes of each rank in symmetric windows: NCCL %s corrupts sizes that are not a multiple of %d bytes: pad the part",
			part, ncclapi.VersionText(o.comm.version), symmetricUnit))
	}
	return nil
}

// checkSymmetric refuses a group that NCCL's kernels compute incorrectly.
func (b *Batch) checkSymmetric() error {
	for i := range b.ops {
		o := &b.ops[i]
		if o.comm.spans.Load() == nil || !ncclapi.SymmetricGroups.Affects(o.comm.version) || !o.symmetric() {
			continue
		}
		for j := range b.ops[:i] {
			if p := &b.ops[j]; p.comm == o.comm && p.symmetric() {
				return o.errTooOld(fmt.Sprintf("it is in one group with another operation, %s, both in symmetric windows: NCCL %s corrupts the results: issue them one after the other",
					p.Kind, ncclapi.VersionText(o.comm.version)))
			}
		}
	}
	return nil
}

func (o *operation) errTooOld(why string) error {
	return o.comm.errorf(o.Kind, "%s, or use NCCL 2.28.7 or newer: %w", why, ErrorInvalidUsage)
}

// An InUseError reports that a communicator cannot be closed because a graph has captured
// its operations: NCCL would wait until the graph is closed.
type InUseError struct {
	Op         string // "close" or "shut down"
	Rank, Size int
	Device     string
	Graph      string // the first such graph
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("nccl: %s rank %d of %d (%s): %s uses it: close the graph first", e.Op, e.Rank, e.Size, e.Device, e.Graph)
}

// holds are the graphs that use a communicator.
type holds struct {
	mu    sync.Mutex
	by    []hold
	abort bool // abort when the last graph is closed
}

// A hold is a graph that uses a communicator; also one that is being captured.
type hold struct {
	graph       gpu.Holder
	collectives *atomic.Uint64 // number of captured collectives
}

// find returns the number of collectives that a graph has captured, or nil if it does not use the communicator. mu is held.
func (h *holds) find(g gpu.Holder) *atomic.Uint64 {
	for i := range h.by {
		if h.by[i].graph == g {
			return h.by[i].collectives
		}
	}
	return nil
}

// A held is a communicator as the graphs see it that use it.
type held struct{ *Communicator }

// Hold notes that a graph uses c.
func (c held) Hold(g gpu.Holder) {
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	if c.holds.find(g) == nil {
		c.holds.by = append(c.holds.by, hold{g, new(atomic.Uint64)})
	}
}

// LetGo undoes Hold.
func (c held) LetGo(g gpu.Holder) {
	c.holds.mu.Lock()
	c.holds.by = slices.DeleteFunc(c.holds.by, func(h hold) bool { return h.graph == g })
	abort := c.holds.abort && len(c.holds.by) == 0
	c.holds.mu.Unlock()
	if abort {
		_ = c.Abort()
	}
}

// capturedBy returns the number of collectives that a graph has captured, or nil if it does not use c.
func (c *Communicator) capturedBy(g gpu.Holder) *atomic.Uint64 {
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	return c.holds.find(g)
}

// PreparerOf returns what counts the launches of a graph, and of another one that Update gives its operations.
func (c held) PreparerOf(g gpu.Holder) gpu.Preparer { return launches{c, c.capturedBy(g)} }

// launches count the launches of the operations that a graph has captured.
type launches struct {
	held
	collectives *atomic.Uint64
}

// Prepare does nothing before a launch.
func (l launches) Prepare(gpu.HasStream) error { return nil }

// Launched lets the watchdog watch a launch of a graph, also one that CUDA has refused: it may have enqueued a part. A single
// rank waits for no other.
func (l launches) Launched(s gpu.HasStream, err error) {
	n := uint64(0)
	if l.collectives != nil && err == nil {
		n = l.collectives.Load()
	}
	if on, ok := s.(*stream.Stream); ok && l.size > 1 && l.watch.Launched(on, collective.GraphLaunches, n) {
		go l.runWatch()
	}
}

var _ gpu.Counter = held{}

// graphNames names the graphs that use c, for the error of a launch of one of them.
func (c *Communicator) graphNames() string {
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	switch len(c.holds.by) {
	case 0:
		return "a graph that was closed"
	case 1:
		return c.holds.by[0].graph.String()
	}
	return fmt.Sprintf("one of %d graphs, such as %s", len(c.holds.by), c.holds.by[0].graph)
}

// inUse returns an *InUseError if a graph uses c.
func (c *Communicator) inUse(op string) error {
	if c == nil {
		return nil
	}
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	if len(c.holds.by) == 0 {
		return nil
	}
	return &InUseError{Op: op, Rank: c.rank, Size: c.size, Device: c.dev.String(), Graph: c.holds.by[0].graph.String()}
}

// noGraphs reports whether no graph uses c any more. If a graph is closed while a goroutine
// launches it, it is destroyed after the launch, and NCCL must not free the communicator
// earlier.
func (c *Communicator) noGraphs() bool {
	c.holds.mu.Lock()
	defer c.holds.mu.Unlock()
	return len(c.holds.by) == 0
}

// closeGraphs closes the graphs that use c. It returns false if one is being
// captured, because the abort then comes with the end of the capture.
func (c *Communicator) closeGraphs() bool {
	c.holds.mu.Lock()
	by := slices.Clone(c.holds.by)
	c.holds.abort = true
	c.holds.mu.Unlock()
	closed := true
	for _, h := range by {
		// If the driver does not answer, it will after the communicator is aborted.
		if err, _ := poll.Within(callTimeout, h.graph.Close); errors.Is(err, stream.ErrCapturing) {
			closed = false
		}
	}
	return closed
}
