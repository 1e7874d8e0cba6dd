package nvtx

import (
	"sync/atomic"

	"github.com/gochorus/chorus/internal/dl"
)

// NoTracking is what RangePush and RangePop return where no profiler counts the
// nesting (NVTX_NO_PUSH_POP_TRACKING).
const NoTracking = -2

// Attached reports whether a profiler takes what this package tells, and the
// error if one was named and could not be attached. The first call of any
// function attaches it.
func Attached() (bool, error) {
	attachOnce()
	return state.Load() == attached, attachError
}

// Mark names a moment (nvtxMarkA, torch.cuda.nvtx.mark).
func Mark(name string) {
	if state.Load() == detached {
		return
	}
	if f := function(markA); f != 0 {
		call := dl.Get().String(name)
		call.Call(f)
		call.Put()
	}
}

// A Span is a range of time that has begun. Its zero value is one that no
// profiler knows.
type Span struct{ id uint64 }

// Start begins a range (nvtxRangeStartA, torch.cuda.nvtx.range_start). Ranges
// may overlap in any way, and End may be called on another thread or goroutine.
func Start(name string) Span {
	if state.Load() == detached {
		return Span{}
	}
	f := function(rangeStartA)
	if f == 0 {
		return Span{}
	}
	call := dl.Get().String(name)
	id := call.Call(f)
	call.Put()
	return Span{uint64(id)}
}

// End ends the range (nvtxRangeEnd, torch.cuda.nvtx.range_end). It is called
// once.
func (s Span) End() {
	if state.Load() == detached || s == (Span{}) {
		return
	}
	if f := function(rangeEnd); f != 0 {
		call := dl.Get().In(uintptr(s.id))
		call.Call(f)
		call.Put()
	}
}

// Range calls fn within a range (torch.cuda.nvtx.range), which ends also when fn
// panics.
func Range(name string, fn func()) {
	defer Start(name).End()
	fn()
}

// RangePush begins a range within the one that the OS thread has begun last
// (nvtxRangePushA, torch.cuda.nvtx.range_push), and returns its depth from 0. A
// goroutine may be on another thread at RangePop, unless it has called
// runtime.LockOSThread before: Start is right in every case.
func RangePush(name string) int {
	if state.Load() == detached {
		return NoTracking
	}
	f := function(rangePushA)
	if f == 0 {
		return NoTracking
	}
	return int(dl.Get().String(name).Do(f))
}

// RangePop ends the range that the OS thread has begun last (nvtxRangePop,
// torch.cuda.nvtx.range_pop), and returns its depth.
func RangePop() int {
	if state.Load() == detached {
		return NoTracking
	}
	f := function(rangePop)
	if f == 0 {
		return NoTracking
	}
	return int(dl.Get().Do(f))
}

// function attaches a profiler on first use and returns its function, or 0. One
// that could not be attached may have left functions nevertheless.
func function(id int) uintptr {
	attachOnce()
	if state.Load() != attached {
		return 0
	}
	return atomic.LoadUintptr(&slots[core][id])
}
