package virtual

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/ncclapi"
	"golang.org/x/sys/unix"
)

// A fault is what befalls the nth call of one function.
type fault struct {
	status int32 // failed with, unless hang or lose
	hang   bool
	lose   bool
	zero   bool // what it copies between two devices arrives as zeros
	short  bool // the transfers of files that it makes end half-way
	async  bool // the status comes when the operation runs: its communicator or transfer fails
}

// faults is a fault plan and the calls counted so far. Every call of the
// libraries asks it once, under its C name.
type faults struct {
	plan map[string]map[int]fault

	counts atomic.Pointer[callCount] // of CountCalls

	mu    sync.Mutex
	count map[string]int
}

// A callCount has how often each function was called.
type callCount struct {
	mu sync.Mutex
	n  map[string]int
}

// CountCalls counts the calls of the libraries from now on, by their C names; it replaces
// a count that goes on. stop ends it and returns what was counted.
func (m *Machine) CountCalls() (stop func() map[string]int) {
	c := &callCount{n: map[string]int{}}
	m.faults.counts.Store(c)
	return func() map[string]int {
		m.faults.counts.CompareAndSwap(c, nil)
		c.mu.Lock()
		defer c.mu.Unlock()
		return maps.Clone(c.n)
	}
}

func (c *callCount) add(name string) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[name]++
}

// hit counts a call and returns what the plan has for it. A call that has something
// done later carries out hang itself; any other one hangs in here.
func (f *faults) hit(name string) (status int32, hang bool) {
	x := f.next(name)
	return x.status, x.hang
}

// next is hit for calls that more may befall.
func (f *faults) next(name string) fault {
	f.counts.Load().add(name)
	if f.plan == nil {
		return fault{}
	}
	f.mu.Lock()
	f.count[name]++
	x, ok := f.plan[name][f.count[name]]
	if !ok {
		x = f.plan[name][everyCall]
	}
	f.mu.Unlock()
	switch {
	case x.lose:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		forever(nil)
	case x.hang && !streamOps[name]:
		forever(nil)
	}
	return x
}

// everyCall stands for * in place of a number.
const everyCall = 0

// forever returns when stop is closed, and never when it is nil. It waits on a
// timer too: were everything else asleep, the runtime would take a hang for a
// deadlock of the program and end it.
func forever(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Hour):
		}
	}
}

func (f *faults) parse(text string) error {
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		name, n, x, err := parseFault(item)
		if err != nil {
			return fmt.Errorf("virtual: fault %q: %w; want call#n=status, hang@call#n, lose@call#n, zero@call#n, short@call#n or async@call#n=status, separated by commas, * for every n, "+
				"such as cuMemAllocAsync#3=CUDA_ERROR_OUT_OF_MEMORY or hang@ncclAllReduce#2", item, err)
		}
		if f.plan == nil {
			f.plan, f.count = map[string]map[int]fault{}, map[string]int{}
		}
		if f.plan[name] == nil {
			f.plan[name] = map[int]fault{}
		}
		f.plan[name][n] = x
	}
	return nil
}

func parseFault(item string) (name string, n int, x fault, err error) {
	where := item
	if kind, rest, ok := strings.Cut(item, "@"); ok {
		switch kind {
		case "hang":
			x.hang = true
		case "lose":
			x.lose = true
		case "zero":
			x.zero = true
		case "short":
			x.short = true
		case "async":
			x.async = true
		default:
			return "", 0, x, fmt.Errorf("%q is neither hang nor lose nor zero nor short nor async", kind)
		}
		where = rest
	}
	where, status, failing := strings.Cut(where, "=")
	if failing == (x.hang || x.lose || x.zero || x.short) {
		return "", 0, x, fmt.Errorf("it names no status, hang, lose, zero or short, or two of them")
	}
	name, number, _ := strings.Cut(where, "#")
	if number == "*" {
		n = everyCall
	} else if n, err = strconv.Atoi(number); err != nil || n < 1 {
		return "", 0, x, fmt.Errorf("%q is not the number of a call, the first being 1", number)
	}
	if !calls[name] {
		return "", 0, x, fmt.Errorf("%q is not one of %s", name, strings.Join(slices.Sorted(maps.Keys(calls)), " "))
	}
	if x.async && !(streamOps[name] && strings.HasPrefix(name, "nccl")) && !laterTransfers[name] {
		return "", 0, x, fmt.Errorf("%q is no operation of NCCL and makes no transfers later", name)
	}
	if x.short && !transfers[name] && !laterTransfers[name] {
		return "", 0, x, fmt.Errorf("%q transfers nothing between files and memory", name)
	}
	if x.zero && !between[name] {
		return "", 0, x, fmt.Errorf("%q copies nothing between devices", name)
	}
	if failing {
		if x.status, err = statusOf(name, status, x.async); err != nil {
			return "", 0, x, err
		}
	}
	return name, n, x, nil
}

// statusOf finds the value of a status by its C name among those of the
// library that has the call. Transfers of files can fail with an errno, too.
func statusOf(call, status string, async bool) (int32, error) {
	text := func(v int32) string { return cudadrv.Result(v).Error() }
	first := int32(1)
	switch {
	case transfers[call] || laterTransfers[call] && async:
		if v := errnoOf(status); v != 0 {
			return v, nil
		}
		fallthrough
	case strings.HasPrefix(call, "cuFile"):
		text = func(v int32) string { return cufileapi.Result(v).Error() }
		first = int32(cufileapi.DriverNotInitialized)
		if noStatus[call] {
			return 0, fmt.Errorf("%s returns no status", call)
		}
	case strings.HasPrefix(call, "nccl"):
		text = func(v int32) string { return ncclapi.Result(v).Error() }
	case strings.HasPrefix(call, "cublas"):
		text = func(v int32) string { return cublasapi.Result(v).Error() }
	}
	for v := first; v < first+1000; v++ {
		if text(v) == status {
			return v, nil
		}
	}
	return 0, fmt.Errorf("%q is not a failure that %s can return", status, call)
}

// errnoOf finds an errno by its name, such as EIO, or returns 0.
func errnoOf(name string) int32 {
	for v := int32(1); v < 200; v++ {
		if unix.ErrnoName(syscall.Errno(v)) == name {
			return v
		}
	}
	return 0
}

// transfers are the calls that move bytes between files and memory, laterTransfers
// those that have it done when they have returned.
var (
	transfers      = nameSet(`cuFileRead cuFileWrite`)
	laterTransfers = nameSet(`cuFileReadAsync cuFileWriteAsync cuFileBatchIOSubmit`)
)

// noStatus are calls that return none.
var noStatus = nameSet(`cuFileHandleDeregister cuFileBatchIODestroy cuFileUseCount`)

// between are the copies that may go from one device to another.
var between = nameSet(`cuMemcpyDtoDAsync cuMemcpyPeerAsync cuMemcpy2DAsync`)

// streamOps are the calls that enqueue an operation, or have it done later. Of a
// batch of transfers that hangs, none begins.
var streamOps = nameSet(`cuMemAllocAsync cuMemAllocFromPoolAsync cuMemFreeAsync cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemcpyDtoDAsync
	cuMemcpyPeerAsync cuMemcpy2DAsync cuMemsetD8Async cuLaunchHostFunc cuStreamWaitEvent cuEventRecord cuLaunchKernel
	cuLaunchCooperativeKernel cublasGemmEx
	ncclAllReduce ncclBroadcast ncclBcast ncclReduce ncclAllGather ncclReduceScatter ncclAlltoAll
	ncclGather ncclScatter ncclSend ncclRecv cuGraphLaunch cuGraphUpload
	cuFileReadAsync cuFileWriteAsync cuFileBatchIOSubmit`)

// calls are all calls that a plan may name.
var calls = allCalls()

func allCalls() map[string]bool {
	names := nameSet(`cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid
	cuDeviceGetAttribute cuDeviceTotalMem cuDeviceGetPCIBusId cuDeviceCanAccessPeer cuDeviceGetDefaultMemPool
	cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuDevicePrimaryCtxGetState cuCtxSetCurrent cuCtxGetCurrent cuDeviceGetP2PAttribute
	cuCtxSynchronize cuCtxGetStreamPriorityRange cuCtxEnablePeerAccess cuProfilerStart cuProfilerStop cuMemGetInfo cuMemAlloc cuMemFree
	cuMemPoolCreate cuMemPoolDestroy cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolSetAccess cuMemPoolTrimTo
	cuMemGetAddressRange cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcCloseMemHandle
	cuMemGetAllocationGranularity cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess
	cuMemExportToShareableHandle cuMemImportFromShareableHandle
	cuMemHostAlloc cuMemFreeHost cuMemHostRegister cuMemHostUnregister
	cuStreamCreateWithPriority cuStreamDestroy cuStreamSynchronize cuStreamQuery cuStreamGetPriority cuStreamGetCtx cuEventCreate cuEventDestroy
	cuEventQuery cuEventSynchronize cuEventElapsedTime cuIpcGetEventHandle cuIpcOpenEventHandle cuModuleLoadData cuModuleUnload cuModuleGetFunction
	cuStreamBeginCapture cuStreamEndCapture cuStreamIsCapturing cuStreamGetCaptureInfo
	cuThreadExchangeStreamCaptureMode cuGraphGetNodes cuGraphInstantiateWithFlags cuGraphExecUpdate
	cuGraphExecDestroy cuGraphDestroy cuGraphDebugDotPrint
	cuUserObjectCreate cuUserObjectRelease cuGraphRetainUserObject
	cuFuncGetAttribute cuFuncSetAttribute cuOccupancyMaxActiveBlocksPerMultiprocessor cuOccupancyMaxPotentialBlockSize
	cublasCreate cublasDestroy cublasSetStream`)
	maps.Copy(names, streamOps)
	for f := range ncclapi.NumFuncs {
		names[f.Name()] = true
	}
	for f := range cufileapi.NumFuncs {
		names[f.Name()] = true
	}
	return names
}

func nameSet(list string) map[string]bool {
	set := map[string]bool{}
	for _, name := range strings.Fields(list) {
		set[name] = true
	}
	return set
}
