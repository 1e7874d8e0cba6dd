package nvtx

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
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

// state tells whether a profiler is attached. Without a profiler, functions read
// nothing else.
var state atomic.Uint32

const (
	unknown uint32 = iota // before the first call
	detached
	attached
)

var attachError error

var attachOnce = sync.OnceFunc(func() {
	ok, err := attach()
	attachError = err
	if ok {
		state.Store(attached)
	} else {
		state.Store(detached)
	}
})

// attach implements the C header of NVTX 3: it loads the library named by the
// environment and calls its InitializeInjectionNvtx2, which requests tables and
// stores its functions in them.
func attach() (bool, error) {
	if env.NVTXInjection.Value() == "" {
		return false, nil
	}
	lib, err := dl.Open(&dl.Spec{Name: "the NVTX tool", Env: env.NVTXInjection})
	if err != nil {
		return false, fmt.Errorf("nvtx: attach: %w", err)
	}
	const symbol = "InitializeInjectionNvtx2"
	start, ok := lib.Symbol(symbol)
	if !ok {
		return false, fmt.Errorf("nvtx: attach: %s has no %s: it is not an NVTX tool", lib.Path(), symbol)
	}
	if dl.Get().In(export()).Do(start) == 0 {
		return false, fmt.Errorf("nvtx: attach: %s of %s failed: the tool does not report a reason", symbol, lib.Path())
	}
	return true, nil
}

// The modules of NVTX 3. Tools may fill all modules, but this package calls only
// functions of the core.
const (
	core    = 1
	modules = 7
)

// The functions of the core, NvtxCallbackIdCore.
const (
	markA       = 2
	rangeStartA = 5
	rangeEnd    = 7
	rangePushA  = 9
	rangePop    = 11
)

// counts holds the length of each module's table, including the unused first entry.
var counts = [modules]uint32{core: 16, 2: 9, 3: 15, 4: 7, 5: 16, 6: 7} // CUDA, OpenCL, the CUDA runtime, domains, locks

const maxCount = 16

// Memory that tools read and write is in package variables, which never move and
// live as long as the process.
var (
	slots  [modules][maxCount]uintptr      // functions of the tool
	tables [modules][maxCount + 1]*uintptr // addresses for the tool to store its functions

	callbacks   exportCallbacks
	versionInfo exportVersionInfo
)

// exportCallbacks is NvtxExportTableCallbacks.
type exportCallbacks struct {
	size                   uintptr
	getModuleFunctionTable uintptr
}

// exportVersionInfo is NvtxExportTableVersionInfo.
type exportVersionInfo struct {
	size                    uintptr
	version, _              uint32
	setInjectionNvtxVersion uintptr
}

// Ids of the tables, NvtxExportTableID.
const (
	callbacksTable = 1
	versionTable   = 3
)

// export fills the tables and returns the C function that provides them,
// NvtxGetExportTableFunc_t.
func export() uintptr {
	for m := range tables {
		for i := 1; i < int(counts[m]); i++ {
			tables[m][i] = &slots[m][i]
		}
	}
	callbacks = exportCallbacks{size: unsafe.Sizeof(callbacks), getModuleFunctionTable: dl.Callback(getModuleFunctionTable)}
	versionInfo = exportVersionInfo{size: unsafe.Sizeof(versionInfo), version: 3, setInjectionNvtxVersion: dl.Callback(func(uint32) {})}
	return dl.Callback(func(id uint32) uintptr {
		switch id {
		case callbacksTable:
			return uintptr(unsafe.Pointer(&callbacks))
		case versionTable:
			return uintptr(unsafe.Pointer(&versionInfo))
		}
		return 0
	})
}

func getModuleFunctionTable(module uint32, table *uintptr, size *uint32) int32 {
	if module == 0 || module >= modules {
		return 0
	}
	if size != nil {
		*size = counts[module]
	}
	if table != nil {
		*table = uintptr(unsafe.Pointer(&tables[module]))
	}
	return 1
}
