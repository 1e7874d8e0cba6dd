package nvtx

import (
	"sync/atomic"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/timeline"
)

// NoTracking is the result of RangePush and RangePop if neither a profiler nor a
// timeline tracks the nesting (NVTX_NO_PUSH_POP_TRACKING).
const NoTracking = -2

// Attached reports whether a profiler is attached, and returns an error if
// attaching failed. The first call of any function of the package attaches the
// profiler.
func Attached() (bool, error) {
	attachOnce()
	return state.Load() == attached, attachError
}

// Mark marks a point in time (nvtxMarkA, torch.cuda.nvtx.mark).
func Mark(name string) {
	if t := timeline.Current(); t != nil {
		t.Add(timeline.Record{Kind: timeline.Instant, Name: name, Device: timeline.NoDevice, Begin: t.Now()})
	}
	if state.Load() == detached {
		return
	}
	if f := function(markA); f != 0 {
		call := dl.Get().String(name)
		call.Call(f)
		call.Put()
	}
}

// A Span is a started range. The zero value is a range that nothing records.
type Span struct {
	id    uint64
	shown *timeline.Span
}

// Start starts a range (nvtxRangeStartA, torch.cuda.nvtx.range_start). Ranges may
// overlap arbitrarily, and End may be called on another thread or goroutine.
func Start(name string) (s Span) {
	if t := timeline.Current(); t != nil {
		s.shown = t.Start(name)
	}
	if state.Load() == detached {
		return s
	}
	if f := function(rangeStartA); f != 0 {
		call := dl.Get().String(name)
		s.id = uint64(call.Call(f))
		call.Put()
	}
	return s
}

// End ends the range (nvtxRangeEnd, torch.cuda.nvtx.range_end). Call it once.
func (s Span) End() {
	s.shown.End()
	if state.Load() == detached || s.id == 0 {
		return
	}
	if f := function(rangeEnd); f != 0 {
		call := dl.Get().In(uintptr(s.id))
		call.Call(f)
		call.Put()
	}
}

// Range calls fn within a range (torch.cuda.nvtx.range). The range ends even if
// fn panics.
func Range(name string, fn func()) {
	defer Start(name).End()
	fn()
}

// RangePush starts a range nested in the current range of the OS thread
// (nvtxRangePushA, torch.cuda.nvtx.range_push), and returns its depth, starting
// at 0. The depth is the profiler's, or the one of the timeline if no profiler is
// attached. A goroutine may run on another thread at RangePop unless it called
// runtime.LockOSThread. Start does not have this restriction.
func RangePush(name string) int {
	depth := NoTracking
	if t := timeline.Current(); t != nil {
		depth = t.Push(name)
	}
	if state.Load() == detached {
		return depth
	}
	f := function(rangePushA)
	if f == 0 {
		return depth
	}
	return int(dl.Get().String(name).Do(f))
}

// RangePop ends the current range of the OS thread (nvtxRangePop,
// torch.cuda.nvtx.range_pop) and returns its depth. It returns -1 if a timeline has
// no open range of the thread and no profiler is attached.
func RangePop() int {
	depth := NoTracking
	if t := timeline.Current(); t != nil {
		depth = t.Pop()
	}
	if state.Load() == detached {
		return depth
	}
	f := function(rangePop)
	if f == 0 {
		return depth
	}
	return int(dl.Get().Do(f))
}

// function attaches a profiler at the first call and returns its function, or 0.
// It checks the state because a failed attach may have stored functions.
func function(id int) uintptr {
	attachOnce()
	if state.Load() != attached {
		return 0
	}
	return atomic.LoadUintptr(&slots[core][id])
}
