package machine

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

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A Fault is an error or a delay that is injected into the nth call of one function.
type Fault struct {
	Status int32 // status to fail with, unless Hang or lose is set
	Hang   bool
	lose   bool
	Zero   bool          // a copy between two devices delivers zeros
	Wrong  bool          // a copy or an operation of NCCL delivers a wrong byte
	Slow   time.Duration // an operation begins later by this time
	Short  bool          // its file transfers stop half-way
	Async  bool          // the call succeeds, and its communicator fails later with Status
}

// A faultPlan injects faults into calls of the virtual devices' libraries, by C names and call numbers, and counts
// the calls. Each library call consults it once, by its C name.
type faultPlan struct {
	plan   map[string]map[int]Fault // by the C name, or the name with the number of a device
	scoped bool                     // a fault has a device

	counts atomic.Pointer[callCount] // of CountCalls
	hang   atomic.Pointer[string]    // of HangNext

	mu    sync.Mutex
	count map[string]int
	over  chan struct{} // closed by EndHangs
}

// A callCount counts the calls of each function.
type callCount struct {
	mu sync.Mutex
	n  map[string]int
}

// CountCalls starts counting library calls by their C names and replaces a
// count in progress; stop ends the count and returns it.
func (f *faultPlan) CountCalls() (stop func() map[string]int) {
	c := &callCount{n: map[string]int{}}
	f.counts.Store(c)
	return func() map[string]int {
		f.counts.CompareAndSwap(c, nil)
		c.mu.Lock()
		defer c.mu.Unlock()
		return maps.Clone(c.n)
	}
}

// HangNext lets the next call of a function hang, whatever the plan says.
func (f *faultPlan) HangNext(name string) { f.hang.Store(&name) }

func (c *callCount) add(name string) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n[name]++
}

// Hit counts a call and returns its planned fault. A call with an asynchronous
// operation handles Hang itself; any other call hangs here.
func (f *faultPlan) Hit(name string) (status int32, hang bool) {
	x := f.Next(name)
	return x.Status, x.Hang
}

// Scoped reports whether the plan has faults of single devices, which [faultPlan.NextOn] needs the device for.
func (f *faultPlan) Scoped() bool { return f.scoped }

// Next is Hit for calls that support more kinds of faults.
func (f *faultPlan) Next(name string) Fault { return f.NextOn(name, noDevice) }

// noDevice is the device of a call that belongs to none.
const noDevice = -1

// NextOn is Next for a call on a device. A fault of this device has its own count of calls, and comes first.
func (f *faultPlan) NextOn(name string, device int32) Fault {
	f.counts.Load().add(name)
	if p := f.hang.Load(); p != nil && *p == name && f.hang.CompareAndSwap(p, nil) {
		if !streamOps[name] {
			f.Hang()
		}
		return Fault{Hang: true}
	}
	if f.plan == nil {
		return Fault{}
	}
	f.mu.Lock()
	x, ok := f.planned(name)
	if device != noDevice && f.scoped {
		if y, on := f.planned(onDevice(name, device)); on {
			x, ok = y, on
		}
	}
	f.mu.Unlock()
	if !ok {
		return Fault{}
	}
	switch {
	case x.lose:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		Forever(nil)
	case x.Hang && !streamOps[name]:
		f.Hang()
	}
	return x
}

// planned counts a call and returns its planned fault. f.mu is held.
func (f *faultPlan) planned(key string) (x Fault, ok bool) {
	f.count[key]++
	if x, ok = f.plan[key][f.count[key]]; !ok {
		x, ok = f.plan[key][everyCall]
	}
	return x, ok
}

// onDevice returns the key of a call on a device.
func onDevice(name string, device int32) string { return fmt.Sprintf("%s:%d", name, device) }

// everyCall represents * instead of a number.
const everyCall = 0

// Hang returns at EndHangs, or never.
func (f *faultPlan) Hang() { Forever(f.end()) }

// EndHangs ends all that hangs: it goes on as if it had been slow. Tests in virtual time need it, because their
// goroutines must end.
func (f *faultPlan) EndHangs() { close(f.end()) }

func (f *faultPlan) end() chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over == nil {
		f.over = make(chan struct{})
	}
	return f.over
}

// Forever returns when stop is closed, or never if it is nil. It also waits on a
// timer: if all other goroutines sleep, the runtime would otherwise report a
// deadlock and exit.
func Forever(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Hour):
		}
	}
}

func (f *faultPlan) Parse(text string) error {
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		name, n, x, err := parseFault(item)
		if err != nil {
			return fmt.Errorf("virtual: fault %q: %w; want call#n=status, hang@call#n, lose@call#n, zero@call#n, wrong@call#n, slow@call#n=duration, short@call#n or async@call#n=status, separated by commas, * for every n, call:device#n for calls on one device, "+
				"such as cuMemAllocAsync#3=CUDA_ERROR_OUT_OF_MEMORY or hang@ncclAllReduce#2", item, err)
		}
		if f.plan == nil {
			f.plan, f.count = map[string]map[int]Fault{}, map[string]int{}
		}
		if f.plan[name] == nil {
			f.plan[name] = map[int]Fault{}
		}
		f.plan[name][n] = x
		f.scoped = f.scoped || strings.Contains(name, ":")
	}
	return nil
}

// parseFault parses one fault of a plan, and returns the call and its number.
func parseFault(item string) (name string, n int, x Fault, err error) {
	where := item
	if kind, rest, ok := strings.Cut(item, "@"); ok {
		if err := x.setKind(kind); err != nil {
			return "", 0, x, err
		}
		where = rest
	}
	where, status, failing := strings.Cut(where, "=")
	if failing == (x.Hang || x.lose || x.Zero || x.Wrong || x.Short) {
		return "", 0, x, fmt.Errorf("want exactly one of a status, hang, lose, zero, wrong, slow and short")
	}
	name, number, _ := strings.Cut(where, "#")
	if number == "*" {
		n = everyCall
	} else if n, err = strconv.Atoi(number); err != nil || n < 1 {
		return "", 0, x, fmt.Errorf("%q is not the number of a call, counted from 1", number)
	}
	call, device, scoped := strings.Cut(name, ":")
	if d, err := strconv.ParseUint(device, 10, 8); scoped && (err != nil || fmt.Sprint(d) != device) {
		return "", 0, x, fmt.Errorf("%q is not the number of a device, counted from 0", device)
	}
	if err := x.suits(call); err != nil {
		return "", 0, x, err
	}
	if scoped && !onDevices(call) {
		return "", 0, x, fmt.Errorf("%q is not a call on one device", call)
	}
	switch {
	case x.Slow > 0:
		if x.Slow, err = time.ParseDuration(status); err != nil || x.Slow <= 0 {
			return "", 0, x, fmt.Errorf("%q is not a duration", status)
		}
	case failing:
		if x.Status, err = statusOf(call, status); err != nil {
			return "", 0, x, err
		}
	}
	return name, n, x, nil
}

// onDevices reports whether a call belongs to one device: it needs a context or a communicator.
func onDevices(call string) bool { return streamOps[call] || contextCalls[call] }

// contextCalls are the calls besides streamOps that need a context.
var contextCalls = callSet(`cuMemAlloc cuMemHostAlloc cuMemCreate cuStreamCreateWithPriority cuStreamSynchronize cuEventCreate cuModuleLoadData
	cublasCreate cublasLtCreate`)

func (x *Fault) setKind(kind string) error {
	switch kind {
	case "hang":
		x.Hang = true
	case "lose":
		x.lose = true
	case "zero":
		x.Zero = true
	case "wrong":
		x.Wrong = true
	case "slow":
		x.Slow = 1 // until the duration is parsed
	case "short":
		x.Short = true
	case "async":
		x.Async = true
	default:
		return fmt.Errorf("%q is not one of hang, lose, zero, wrong, slow, short and async", kind)
	}
	return nil
}

// suits returns an error if the call cannot have such a fault.
func (x *Fault) suits(call string) error {
	switch {
	case !calls[call]:
		return fmt.Errorf("%q is not one of %s", call, strings.Join(slices.Sorted(maps.Keys(calls)), " "))
	case x.Async && !(streamOps[call] && strings.HasPrefix(call, "nccl")):
		return fmt.Errorf("%q is not an operation of NCCL", call)
	case x.Short && !transfers[call]:
		return fmt.Errorf("%q does not transfer between files and memory", call)
	case x.Wrong && !delivers[call]:
		return fmt.Errorf("%q is neither a copy, nor a product, nor an operation of NCCL that delivers data", call)
	case x.Slow > 0 && !delivers[call] && call != "ncclSend":
		return fmt.Errorf("%q is neither a copy, nor a product, nor an operation of NCCL", call)
	case x.Zero && !between[call]:
		return fmt.Errorf("%q does not copy between devices", call)
	}
	return nil
}

// statusOf returns the value of a status by its C name in the library of the
// call, or of an errno if the call transfers a file.
func statusOf(call, status string) (int32, error) {
	text := func(v int32) string { return cudadrv.Result(v).Error() }
	first := int32(1)
	switch {
	case transfers[call]:
		if v := errnoOf(status); v != 0 {
			return v, nil
		}
		fallthrough
	case strings.HasPrefix(call, "cuFile"):
		text = func(v int32) string { return cufileapi.Result(v).Error() }
		first = int32(cufileapi.DriverNotInitialized)
		if noStatus[call] {
			return 0, fmt.Errorf("%s does not return a status", call)
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

// errnoOf returns the value of an errno name such as EIO, or 0.
func errnoOf(name string) int32 {
	for v := int32(1); v < 200; v++ {
		if unix.ErrnoName(syscall.Errno(v)) == name {
			return v
		}
	}
	return 0
}

// transfers are the calls that transfer between files and memory.
var transfers = callSet(`cuFileRead cuFileWrite`)

// noStatus lists calls that do not return a status.
var noStatus = callSet(`cuFileHandleDeregister`)

// between lists the copies that may involve two devices.
var between = callSet(`cuMemcpyDtoDAsync cuMemcpyPeerAsync cuMemcpy2DAsync`)

// delivers lists the copies, products and operations of NCCL that write memory.
var delivers = callSet(`cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemcpyDtoDAsync cuMemcpyPeerAsync cuMemcpy2DAsync ncclAllReduce ncclBroadcast
	ncclReduce ncclAllGather ncclReduceScatter ncclAlltoAll ncclGather ncclScatter ncclRecv cublasLtMatmul`)

// streamOps lists the calls that enqueue an asynchronous operation.
var streamOps = callSet(`cuMemAllocAsync cuMemFreeAsync cuMemcpyHtoDAsync cuMemcpyDtoHAsync cuMemcpyDtoDAsync
	cuMemcpyPeerAsync cuMemcpy2DAsync cuMemsetD8Async cuLaunchHostFunc cuStreamWaitEvent cuStreamBatchMemOp cuEventRecord cuEventRecordWithFlags cuLaunchKernel
	cuLaunchCooperativeKernel cublasGemmEx cublasGemmStridedBatchedEx cublasLtMatmul
	ncclAllReduce ncclBroadcast ncclReduce ncclAllGather ncclReduceScatter ncclAlltoAll
	ncclGather ncclScatter ncclSend ncclRecv cuGraphLaunch cuGraphUpload`)

// calls lists all calls that a plan may contain.
var calls = allCalls()

func allCalls() map[string]bool {
	names := callSet(`cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetUuid
	cuDeviceGetAttribute cuDeviceTotalMem cuDeviceGetPCIBusId cuDeviceCanAccessPeer cuDeviceGetDefaultMemPool
	cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuDevicePrimaryCtxGetState cuCtxSetCurrent cuCtxGetCurrent cuDeviceGetP2PAttribute
	cuCtxSynchronize cuCtxGetStreamPriorityRange cuCtxEnablePeerAccess cuProfilerStart cuProfilerStop cuMemGetInfo cuMemAlloc cuMemFree
	cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolSetAccess cuMemPoolTrimTo
	cuMemGetAddressRange cuPointerGetAttribute cuIpcGetMemHandle cuIpcOpenMemHandle cuIpcCloseMemHandle
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
	cublasCreate cublasDestroy cublasSetStream cublasSetWorkspace cublasSetMathMode cublasSetPointerMode cublasSetSmCountTarget
	cublasLtCreate cublasLtDestroy cublasLtMatmulDescCreate cublasLtMatmulDescDestroy cublasLtMatmulDescSetAttribute
	cublasLtMatrixLayoutCreate cublasLtMatrixLayoutDestroy cublasLtMatrixLayoutSetAttribute
	cublasLtMatmulPreferenceCreate cublasLtMatmulPreferenceDestroy cublasLtMatmulPreferenceSetAttribute
	cublasLtMatmulAlgoGetHeuristic cublasLtMatmulAlgoCheck cublasLtMatmulAlgoInit`)
	maps.Copy(names, streamOps)
	for f := range ncclapi.NumFuncs {
		names[f.Name()] = true
	}
	for f := range cufileapi.NumFuncs {
		names[f.Name()] = true
	}
	return names
}

// callSet returns the set of the names in a list.
func callSet(list string) map[string]bool {
	set := map[string]bool{}
	for _, name := range strings.Fields(list) {
		set[name] = true
	}
	return set
}
