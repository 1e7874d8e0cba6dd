// Package cufile implements the interface of cuFile over the memory of virtual devices
// and real files, like cuFile without nvidia-fs.
package cufile

import (
	"fmt"
	"syscall"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// version is the version of the virtual cuFile, as in CUDA 13.0.
const version = 1150

// lib implements cufileapi.API over virtual device memory and real files
// with system calls, like cuFile without nvidia-fs. It rejects or reports
// mistakes that cuFile sometimes tolerates: a driver that was not opened, memory
// that a stream still uses, and files that are closed or deregistered while in use. The lock of the machine guards it.
type lib struct {
	m       *machine.Machine
	uses    int64
	files   map[cufileapi.Handle]*file
	buffers map[cudadrv.DevicePtr]*buffer
}

// New returns the cuFile of a machine, version 1.15.
func New(m *machine.Machine) cufileapi.API {
	return &lib{
		m: m, files: map[cufileapi.Handle]*file{}, buffers: map[cudadrv.DevicePtr]*buffer{},
	}
}

// enter consults the fault plan. If it succeeds, the machine is locked until
// lib.leave.
func (l *lib) enter(f cufileapi.Func) (machine.Fault, cufileapi.Result) {
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
func (l *lib) enterOpen(f cufileapi.Func) (machine.Fault, cufileapi.Result) {
	x, r := l.enter(f)
	if r == cufileapi.Success && l.uses == 0 {
		l.leave()
		r = cufileapi.DriverNotInitialized
	}
	return x, r
}

// begin is enterOpen for calls that need a context, which it unbinds.
func (l *lib) begin(f cufileapi.Func) (*machine.Device, machine.Fault, cufileapi.Result) {
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
	l.uses++
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
	return cufileapi.Success
}

// SetParameterString accepts the parameters while the driver is closed. None of them changes
// what the virtual cuFile does.
func (l *lib) SetParameterString(p cufileapi.StringParam, _ string) cufileapi.Result {
	_, r := l.enter(cufileapi.FuncSetParameterString)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	switch {
	case l.uses > 0:
		return cufileapi.DriverAlreadyOpen
	case p < 0 || p >= cufileapi.NumStringParams:
		return cufileapi.InvalidValue
	}
	return cufileapi.Success
}
