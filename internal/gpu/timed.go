package gpu

import (
	"context"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
)

// timed decorates the driver while a timeline is recorded. Virtual devices record the operations
// of streams themselves, so it records only the host there.
type timed struct {
	cudadrv.Driver
	d   *Device
	rec *timeline.Recorder
	t   *timing // nil on virtual devices, and after the end of the recording
}

// timed returns the decorated driver.
func (d *Device) timed(rec *timeline.Recorder, drv cudadrv.Driver) cudadrv.Driver {
	if d.sys.Machine != nil {
		return timed{Driver: drv, d: d, rec: rec}
	}
	t := d.timingOf(rec)
	if t == nil {
		return timed{Driver: drv, d: d, rec: rec}
	}
	x := t.timed.Load()
	if x == nil || x.Driver != drv {
		x = &timed{Driver: drv, d: d, rec: rec, t: t}
		t.timed.Store(x) // the next call does not allocate
	}
	return x
}

// NameKernel stores the name of a kernel for timelines.
func (d *Device) NameKernel(f cudadrv.Function, name string) { d.kernels.Store(f, name) }

func (x timed) kernel(f cudadrv.Function) string {
	if name, ok := x.d.kernels.Load(f); ok {
		return name.(string)
	}
	return "kernel"
}

// run issues a call that enqueues an operation.
func (x timed) run(kind, name string, s cudadrv.Stream, bytes uintptr, call func() cudadrv.Result) cudadrv.Result {
	if x.t == nil {
		return call()
	}
	p := x.t.begin(x.Driver, kind, name, s, uint64(bytes))
	r := call()
	x.t.end(x.Driver, p, r == cudadrv.Success)
	return r
}

func (x timed) LaunchKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return x.run(timeline.Kernel, x.kernel(f), s, 0, func() cudadrv.Result { return x.Driver.LaunchKernel(f, grid, block, shared, s, params) })
}

func (x timed) LaunchCooperativeKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return x.run(timeline.Kernel, x.kernel(f), s, 0, func() cudadrv.Result {
		return x.Driver.LaunchCooperativeKernel(f, grid, block, shared, s, params)
	})
}

func (x timed) MemcpyHtoDAsync(dst cudadrv.DevicePtr, src unsafe.Pointer, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return x.run(timeline.Copy, "cuMemcpyHtoDAsync", s, n, func() cudadrv.Result { return x.Driver.MemcpyHtoDAsync(dst, src, n, s) })
}

func (x timed) MemcpyDtoHAsync(dst unsafe.Pointer, src cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return x.run(timeline.Copy, "cuMemcpyDtoHAsync", s, n, func() cudadrv.Result { return x.Driver.MemcpyDtoHAsync(dst, src, n, s) })
}

func (x timed) MemcpyDtoDAsync(dst, src cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return x.run(timeline.Copy, "cuMemcpyDtoDAsync", s, n, func() cudadrv.Result { return x.Driver.MemcpyDtoDAsync(dst, src, n, s) })
}

func (x timed) MemcpyPeerAsync(dst cudadrv.DevicePtr, dstCtx cudadrv.Context, src cudadrv.DevicePtr, srcCtx cudadrv.Context, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return x.run(timeline.Copy, "cuMemcpyPeerAsync", s, n, func() cudadrv.Result { return x.Driver.MemcpyPeerAsync(dst, dstCtx, src, srcCtx, n, s) })
}

func (x timed) Memcpy2DAsync(c cudadrv.Memcpy2D, s cudadrv.Stream) cudadrv.Result {
	return x.run(timeline.Copy, "cuMemcpy2DAsync", s, c.WidthInBytes*c.Height, func() cudadrv.Result { return x.Driver.Memcpy2DAsync(c, s) })
}

func (x timed) MemsetD8Async(dst cudadrv.DevicePtr, value uint8, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return x.run(timeline.Fill, "cuMemsetD8Async", s, n, func() cudadrv.Result { return x.Driver.MemsetD8Async(dst, value, n, s) })
}

func (x timed) GraphLaunch(e cudadrv.GraphExec, s cudadrv.Stream) cudadrv.Result {
	return x.run(timeline.Graph, "cuGraphLaunch", s, 0, func() cudadrv.Result { return x.Driver.GraphLaunch(e, s) })
}

func (x timed) LaunchHostFunc(s cudadrv.Stream, f dl.Closure) cudadrv.Result {
	return x.run(timeline.Callback, "cuLaunchHostFunc", s, 0, func() cudadrv.Result { return x.Driver.LaunchHostFunc(s, f) })
}

func (x timed) EventRecord(e cudadrv.Event, s cudadrv.Stream) cudadrv.Result {
	r := x.Driver.EventRecord(e, s)
	if x.t != nil {
		x.t.recorded(e, s, r == cudadrv.Success)
	}
	return r
}

func (x timed) StreamWaitEvent(s cudadrv.Stream, e cudadrv.Event, flags uint32) cudadrv.Result {
	r := x.Driver.StreamWaitEvent(s, e, flags)
	if x.t != nil {
		x.t.waited(s, e, r == cudadrv.Success)
	}
	return r
}

// unseen notes that a call enqueues work without a record.
func (x timed) unseen(s cudadrv.Stream) {
	if x.t != nil {
		x.t.forget(s)
	}
}

func (x timed) StreamDestroy(s cudadrv.Stream) cudadrv.Result {
	x.unseen(s)
	return x.Driver.StreamDestroy(s)
}

func (x timed) StreamBatchMemOp(s cudadrv.Stream, ops []cudadrv.StreamMemOp) cudadrv.Result {
	x.unseen(s)
	return x.Driver.StreamBatchMemOp(s, ops)
}

func (x timed) GraphUpload(e cudadrv.GraphExec, s cudadrv.Stream) cudadrv.Result {
	x.unseen(s)
	return x.Driver.GraphUpload(e, s)
}

func (x timed) MemAllocAsync(n uintptr, s cudadrv.Stream) (cudadrv.DevicePtr, cudadrv.Result) {
	x.unseen(s)
	return x.Driver.MemAllocAsync(n, s)
}

func (x timed) MemFreeAsync(p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result {
	x.unseen(s)
	return x.Driver.MemFreeAsync(p, s)
}

// host issues a call that blocks the host.
func (x timed) host(kind, name string, bytes uintptr, call func() cudadrv.Result) (r cudadrv.Result) {
	x.rec.Host(kind, name, x.d.ordinal, uint64(bytes), func() { r = call() })
	return r
}

func (x timed) CtxSynchronize() cudadrv.Result {
	return x.host(timeline.Wait, "cuCtxSynchronize", 0, x.Driver.CtxSynchronize)
}

func (x timed) StreamSynchronize(s cudadrv.Stream) cudadrv.Result {
	return x.host(timeline.Wait, "cuStreamSynchronize", 0, func() cudadrv.Result { return x.Driver.StreamSynchronize(s) })
}

func (x timed) EventSynchronize(e cudadrv.Event) cudadrv.Result {
	return x.host(timeline.Wait, "cuEventSynchronize", 0, func() cudadrv.Result { return x.Driver.EventSynchronize(e) })
}

func (x timed) MemAlloc(n uintptr) (p cudadrv.DevicePtr, r cudadrv.Result) {
	r = x.host(timeline.Driver, "cuMemAlloc", n, func() (r cudadrv.Result) { p, r = x.Driver.MemAlloc(n); return r })
	return p, r
}

func (x timed) MemFree(p cudadrv.DevicePtr) cudadrv.Result {
	return x.host(timeline.Driver, "cuMemFree", 0, func() cudadrv.Result { return x.Driver.MemFree(p) })
}

func (x timed) MemCreate(n uintptr, prop cudadrv.MemAllocationProp) (h cudadrv.MemHandle, r cudadrv.Result) {
	r = x.host(timeline.Driver, "cuMemCreate", n, func() (r cudadrv.Result) { h, r = x.Driver.MemCreate(n, prop); return r })
	return h, r
}

func (x timed) MemHostAlloc(n uintptr, flags uint32) (p unsafe.Pointer, r cudadrv.Result) {
	r = x.host(timeline.Driver, "cuMemHostAlloc", n, func() (r cudadrv.Result) { p, r = x.Driver.MemHostAlloc(n, flags); return r })
	return p, r
}

func (x timed) MemFreeHost(p unsafe.Pointer) cudadrv.Result {
	return x.host(timeline.Driver, "cuMemFreeHost", 0, func() cudadrv.Result { return x.Driver.MemFreeHost(p) })
}

// Until waits until ready returns true or an error, or ctx ends, as poll.Until does. The timeline has
// the wait by the given name.
func (d *Device) Until(ctx context.Context, name string, ready func() (bool, error)) (err error) {
	if t := timeline.Current(); t != nil {
		t.Host(timeline.Wait, name, d.ordinal, 0, func() { err = poll.Until(ctx, ready) })
		return err
	}
	return poll.Until(ctx, ready)
}

// A Span is an operation of a library that is being enqueued on a stream. A nil Span records
// nothing.
type Span struct {
	s *Stream
	t *timing
	p *eventPair
}

// Span begins an operation that a library enqueues without the driver's calls. It returns nil
// unless a timeline of CUDA is recorded.
func (s *Stream) Span(kind, name string) *Span {
	rec := timeline.Current()
	if rec == nil || s.dev.sys.Machine != nil {
		return nil
	}
	x := &Span{s: s, t: s.dev.timingOf(rec)}
	if x.t == nil {
		return nil
	}
	_ = s.dev.quietly(func(drv cudadrv.Driver) cudadrv.Result {
		x.p = x.t.begin(drv, kind, name, s.h, 0)
		return cudadrv.Success
	})
	return x
}

// End ends the operation, which the library has refused if err is not nil.
func (x *Span) End(err error) {
	if x != nil {
		_ = x.s.dev.quietly(func(drv cudadrv.Driver) cudadrv.Result {
			x.t.end(drv, x.p, err == nil)
			return cudadrv.Success
		})
	}
}

// Place names the stream in timelines.
func (s *Stream) Place() timeline.Stream {
	return timeline.Stream{Device: s.dev.ordinal, Handle: uint64(s.h)}
}

// OpenCollective begins a collective in the timeline, or adds it to the batch that is being
// enqueued on the stream.
func (s *Stream) OpenCollective(rec *timeline.Recorder, op timeline.Op) {
	if began := rec.Open(s.Place(), op); began {
		s.timeCollective(rec, func(t *timing, drv cudadrv.Driver) { t.beginWhole(drv, s) })
	}
}

// ShutCollective ends the collective of OpenCollective: its operations are enqueued.
func (s *Stream) ShutCollective(rec *timeline.Recorder) {
	s.timeCollective(rec, func(t *timing, drv cudadrv.Driver) { t.endWhole(drv, s.h) })
	rec.Shut(s.Place())
}

// timeCollective records the events for the times of a collective, if the device needs them.
func (s *Stream) timeCollective(rec *timeline.Recorder, calls func(*timing, cudadrv.Driver)) {
	if s.dev.sys.Machine != nil {
		return
	}
	if t := s.dev.timingOf(rec); t != nil {
		_ = s.dev.quietly(func(drv cudadrv.Driver) cudadrv.Result {
			calls(t, drv)
			return cudadrv.Success
		})
	}
}
