package cufile

import (
	"fmt"
	"syscall"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/fault"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// version is the version of the virtual cuFile, as in CUDA 13.0.
const version = 1150

// lib implements cufileapi.API over virtual device memory and real files
// with system calls, like cuFile without nvidia-fs. It rejects or reports
// mistakes that cuFile sometimes tolerates: a driver that was not opened,
// parameters out of range, memory that a stream still uses, and files that are
// closed or deregistered while in use. The lock of the machine guards it.
type lib struct {
	m       *machine.Machine
	uses    int64
	staged  config // used from the next open
	running config
	props   cufileapi.DrvProps
	files   map[cufileapi.Handle]*file
	buffers map[cudadrv.DevicePtr]*buffer
	batches map[cufileapi.Batch]*batch
	streams map[cudadrv.Stream]uint32 // flags of the registered streams
	stats   stats
}

// New returns the cuFile of a machine, version 1.15.
func New(m *machine.Machine) cufileapi.API {
	return &lib{
		m: m, staged: defaults(),
		files: map[cufileapi.Handle]*file{}, buffers: map[cudadrv.DevicePtr]*buffer{},
		batches: map[cufileapi.Batch]*batch{}, streams: map[cudadrv.Stream]uint32{},
	}
}

func (l *lib) Has(f cufileapi.Func) bool { return f >= 0 && f < cufileapi.NumFuncs }

// enter consults the fault plan. If it succeeds, the machine is locked until
// lib.leave.
func (l *lib) enter(f cufileapi.Func) (fault.Fault, cufileapi.Result) {
	x := l.m.Fault(f.Name())
	switch {
	case x.Status != 0 && !x.Async:
		return x, cufileapi.Result(x.Status)
	case l.m.InHostFunction():
		return x, cufileapi.CUDAFailed(cudadrv.ErrorNotPermitted)
	}
	l.m.Lock()
	if !l.m.Initialized() {
		l.m.Unlock()
		return x, cufileapi.CUDAFailed(cudadrv.ErrorNotInitialized)
	}
	return x, cufileapi.Success
}

func (l *lib) leave() { l.m.Unlock() }

// enterOpen is enter for calls that need an open driver.
func (l *lib) enterOpen(f cufileapi.Func) (fault.Fault, cufileapi.Result) {
	x, r := l.enter(f)
	if r == cufileapi.Success && l.uses == 0 {
		l.leave()
		r = cufileapi.DriverNotInitialized
	}
	return x, r
}

// begin is enterOpen for calls that need a context, which it unbinds.
func (l *lib) begin(f cufileapi.Func) (*machine.Device, fault.Fault, cufileapi.Result) {
	bound := l.m.Unbind()
	x, r := l.enterOpen(f)
	if r != cufileapi.Success {
		return nil, x, r
	}
	dev := l.m.Retained(bound)
	status := cudadrv.ErrorInvalidContext
	if dev != nil {
		if status = dev.Status(); status == cudadrv.Success {
			status = l.m.Permits(f.Name())
		}
	}
	if status != cudadrv.Success {
		l.leave()
		return nil, x, cufileapi.CUDAFailed(status)
	}
	return dev, x, cufileapi.Success
}

// asError converts a result to the error that Read and Write return. A fault plan
// may set an errno.
func asError(r cufileapi.Result) error {
	if r.Code() < cufileapi.DriverNotInitialized {
		return syscall.Errno(r)
	}
	return r
}

// report reports a mistake of the program that cuFile would not detect. The machine is locked.
func (l *lib) report(format string, args ...any) {
	l.m.Report(fmt.Sprintf("virtual cuFile: "+format+" (seed %#x)", append(args, l.m.Seed())...))
}

func (l *lib) GetVersion() (int32, cufileapi.Result) {
	_, r := l.enter(cufileapi.FuncGetVersion)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	return version, cufileapi.Success
}

func (l *lib) DriverOpen() cufileapi.Result {
	_, r := l.enter(cufileapi.FuncDriverOpen)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if l.uses++; l.uses == 1 {
		l.running, l.staged = l.staged, defaults()
		l.props = l.running.properties()
		l.stats.open(&l.running)
	}
	return cufileapi.Success
}

// DriverClose deregisters everything with the last use.
func (l *lib) DriverClose() cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncDriverClose)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if l.uses--; l.uses > 0 {
		return cufileapi.Success
	}
	for h := range l.files {
		l.forgetFile(cufileapi.FuncDriverClose, h)
	}
	for p := range l.buffers {
		l.forgetBuffer(cufileapi.FuncDriverClose, p)
	}
	for b := range l.batches {
		l.forgetBatch(cufileapi.FuncDriverClose, b)
	}
	clear(l.streams)
	return cufileapi.Success
}

func (l *lib) UseCount() int64 {
	_, r := l.enter(cufileapi.FuncUseCount)
	if r != cufileapi.Success {
		return 0
	}
	defer l.leave()
	return l.uses
}

func (l *lib) DriverGetProperties(p *cufileapi.DrvProps) cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncDriverGetProperties)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if p == nil {
		return cufileapi.InvalidValue
	}
	*p = l.props
	return cufileapi.Success
}

func (l *lib) DriverSetPollMode(poll bool, thresholdKB uintptr) cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncDriverSetPollMode)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if !inRange(cufileapi.PollThresholdSizeKB, thresholdKB) {
		return cufileapi.DriverUnsupportedLimit
	}
	l.running.bools[cufileapi.ParamUsePollMode], l.running.sizes[cufileapi.PollThresholdSizeKB] = poll, thresholdKB
	l.props = l.running.properties()
	return cufileapi.Success
}

func (l *lib) DriverSetMaxDirectIOSize(kb uintptr) cufileapi.Result {
	_, r := l.enterOpen(cufileapi.FuncDriverSetMaxDirectIOSize)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if !inRange(cufileapi.MaxDirectIOSizeKB, kb) {
		return cufileapi.DriverUnsupportedLimit
	}
	l.running.sizes[cufileapi.MaxDirectIOSizeKB] = kb
	l.props = l.running.properties()
	return cufileapi.Success
}

// Without nvidia-fs there is no cache in device memory and no pinned memory, so
// there is nothing to limit.

func (l *lib) DriverSetMaxCacheSize(uintptr) cufileapi.Result {
	return l.noLimit(cufileapi.FuncDriverSetMaxCacheSize)
}

func (l *lib) DriverSetMaxPinnedMemSize(uintptr) cufileapi.Result {
	return l.noLimit(cufileapi.FuncDriverSetMaxPinnedMemSize)
}

func (l *lib) noLimit(f cufileapi.Func) cufileapi.Result {
	_, r := l.enterOpen(f)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	return cufileapi.DriverUnsupportedLimit
}

// GetBARSizeInKB returns 0: without nvidia-fs nothing is mapped.
func (l *lib) GetBARSizeInKB(gpu int32) (uintptr, cufileapi.Result) {
	_, r := l.enterOpen(cufileapi.FuncGetBARSizeInKB)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	if l.m.Device(cudadrv.Device(gpu)) == nil {
		return 0, cufileapi.InvalidValue
	}
	return 0, cufileapi.Success
}
