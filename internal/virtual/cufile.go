package virtual

import (
	"fmt"
	"syscall"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
)

// cufileVersion is the version of the virtual cuFile: that of CUDA 13.0.
const cufileVersion = 1150

// cufileLib implements cufileapi.API over virtual device memory and real files, as
// cuFile works where there is no nvidia-fs: by system calls. What cuFile forgives
// sometimes is refused or reported: a driver that nobody opened, parameters out of
// range, memory that a stream still uses, files that are closed or given up while
// they are in use. m.mu guards it.
type cufileLib struct {
	m       *Machine
	uses    int64
	staged  cufileConfig // from the next opening on
	running cufileConfig
	props   cufileapi.DrvProps
	files   map[cufileapi.Handle]*cufileFile
	buffers map[cudadrv.DevicePtr]*cufileBuffer
	batches map[cufileapi.Batch]*cufileBatch
	streams map[cudadrv.Stream]uint32 // the flags of those that are registered
	stats   cufileStats
}

var _ cufileapi.API = (*cufileLib)(nil)

func newCuFile(m *Machine) *cufileLib {
	return &cufileLib{
		m: m, staged: defaultCuFile(),
		files: map[cufileapi.Handle]*cufileFile{}, buffers: map[cudadrv.DevicePtr]*cufileBuffer{},
		batches: map[cufileapi.Batch]*cufileBatch{}, streams: map[cudadrv.Stream]uint32{},
	}
}

func (l *cufileLib) Has(f cufileapi.Func) bool { return f >= 0 && f < cufileapi.NumFuncs }

// enter consults the fault plan. When it succeeds, the machine is locked until
// cufileLib.leave.
func (l *cufileLib) enter(f cufileapi.Func) (fault, cufileapi.Result) {
	x := l.m.faults.next(f.Name())
	switch {
	case x.status != 0 && !x.async:
		return x, cufileapi.Result(x.status)
	case l.m.threads.hosts.has():
		return x, cufileapi.CUDAFailed(cudadrv.ErrorNotPermitted)
	}
	l.m.mu.Lock()
	if !l.m.initialized {
		l.m.mu.Unlock()
		return x, cufileapi.CUDAFailed(cudadrv.ErrorNotInitialized)
	}
	return x, cufileapi.Success
}

func (l *cufileLib) leave() { l.m.mu.Unlock() }

// enterOpen is enter for calls that want the driver open.
func (l *cufileLib) enterOpen(f cufileapi.Func) (fault, cufileapi.Result) {
	x, r := l.enter(f)
	if r == cufileapi.Success && l.uses == 0 {
		l.leave()
		r = cufileapi.DriverNotInitialized
	}
	return x, r
}

// begin is enterOpen for calls that work in a context, which is consumed.
func (l *cufileLib) begin(f cufileapi.Func) (*device, fault, cufileapi.Result) {
	bound := l.m.threads.take()
	x, r := l.enterOpen(f)
	if r != cufileapi.Success {
		return nil, x, r
	}
	dev := l.m.deviceOf(bound)
	status := cudadrv.ErrorInvalidContext
	if dev != nil && dev.retained > 0 {
		if status = dev.status; status == cudadrv.Success {
			status = l.m.permits(f.Name())
		}
	}
	if status != cudadrv.Success {
		l.leave()
		return nil, x, cufileapi.CUDAFailed(status)
	}
	return dev, x, cufileapi.Success
}

// asError is a result as Read and Write return it, of which a fault plan may make
// an errno.
func asError(r cufileapi.Result) error {
	if r.Code() < cufileapi.DriverNotInitialized {
		return syscall.Errno(r)
	}
	return r
}

// report tells what a program did that cuFile would have let pass. m.mu is held.
func (l *cufileLib) report(format string, args ...any) {
	l.m.report(fmt.Sprintf("virtual cuFile: "+format+" (seed %#x)", append(args, l.m.seed)...))
}

func (l *cufileLib) GetVersion() (int32, cufileapi.Result) {
	_, r := l.enter(cufileapi.FuncGetVersion)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	return cufileVersion, cufileapi.Success
}

func (l *cufileLib) DriverOpen() cufileapi.Result {
	_, r := l.enter(cufileapi.FuncDriverOpen)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if l.uses++; l.uses == 1 {
		l.running, l.staged = l.staged, defaultCuFile()
		l.props = l.running.properties()
		l.stats.open(&l.running)
	}
	return cufileapi.Success
}

// DriverClose gives up with the last use whatever is registered.
func (l *cufileLib) DriverClose() cufileapi.Result {
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

func (l *cufileLib) UseCount() int64 {
	_, r := l.enter(cufileapi.FuncUseCount)
	if r != cufileapi.Success {
		return 0
	}
	defer l.leave()
	return l.uses
}

func (l *cufileLib) DriverGetProperties(p *cufileapi.DrvProps) cufileapi.Result {
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

func (l *cufileLib) DriverSetPollMode(poll bool, thresholdKB uintptr) cufileapi.Result {
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

func (l *cufileLib) DriverSetMaxDirectIOSize(kb uintptr) cufileapi.Result {
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

// Without nvidia-fs there is no cache in device memory and nothing is pinned, so
// there is nothing to limit.

func (l *cufileLib) DriverSetMaxCacheSize(uintptr) cufileapi.Result {
	return l.noLimit(cufileapi.FuncDriverSetMaxCacheSize)
}

func (l *cufileLib) DriverSetMaxPinnedMemSize(uintptr) cufileapi.Result {
	return l.noLimit(cufileapi.FuncDriverSetMaxPinnedMemSize)
}

func (l *cufileLib) noLimit(f cufileapi.Func) cufileapi.Result {
	_, r := l.enterOpen(f)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	return cufileapi.DriverUnsupportedLimit
}

// GetBARSizeInKB says 0: nothing is mapped without nvidia-fs.
func (l *cufileLib) GetBARSizeInKB(gpu int32) (uintptr, cufileapi.Result) {
	_, r := l.enterOpen(cufileapi.FuncGetBARSizeInKB)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	if l.m.device(cudadrv.Device(gpu)) == nil {
		return 0, cufileapi.InvalidValue
	}
	return 0, cufileapi.Success
}
