package cufile

import (
	"errors"
	"io"
	"math"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/fault"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"golang.org/x/sys/unix"
)

// A transfer moves bytes between a file and memory.
type transfer struct {
	file       *file
	buffer     *buffer // nil if the memory is not registered
	base       cudadrv.DevicePtr
	size       uint64
	fileOffset int64
	devOffset  int64
	write      bool
	plan       fault.Fault // injected fault: an error, or a short transfer
}

func (l *lib) Read(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	return l.transfer(cufileapi.FuncRead, h, &transfer{base: base, size: uint64(bytes), fileOffset: fileOffset, devOffset: devOffset})
}

func (l *lib) Write(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	return l.transfer(cufileapi.FuncWrite, h, &transfer{base: base, size: uint64(bytes), fileOffset: fileOffset, devOffset: devOffset, write: true})
}

func (l *lib) transfer(f cufileapi.Func, h cufileapi.Handle, t *transfer) (int64, error) {
	dev, x, r := l.begin(f)
	if r != cufileapi.Success {
		return 0, asError(r)
	}
	t.plan = x
	if r = l.prepare(f, dev, h, t); r == cufileapi.Success {
		r = l.check(t)
	}
	if r != cufileapi.Success {
		l.stats.transferred(dev, t, 0, r, 0)
		l.leave()
		return 0, asError(r)
	}
	t.use(1)
	o := l.m.HostOp(dev, f.Name())
	l.leave()
	n, err := l.move(o, t)
	l.m.Lock()
	defer l.m.Unlock()
	t.use(-1)
	l.m.HostDone(o)
	return n, err
}

// prepare validates the parameters that are known at submission, and resolves
// file and memory. The machine is locked.
func (l *lib) prepare(f cufileapi.Func, dev *machine.Device, h cufileapi.Handle, t *transfer) (r cufileapi.Result) {
	if t.base == 0 {
		return cufileapi.InvalidValue
	}
	if t.file, r = l.registered(f.Name(), h); r != cufileapi.Success {
		return r
	}
	switch {
	case !t.write && t.file.mode == unix.O_WRONLY:
		return cufileapi.InvalidFileOpenFlag
	case t.write && t.file.mode == unix.O_RDONLY:
		return cufileapi.Result(syscall.EIO)
	}
	t.buffer = l.buffers[t.base]
	return l.usable(dev, t.base)
}

// check validates the size and the offsets. The machine is locked.
func (l *lib) check(t *transfer) cufileapi.Result {
	switch {
	case t.fileOffset < 0 || t.devOffset < 0 || t.size > math.MaxInt64:
		return cufileapi.InvalidValue
	case t.buffer != nil && (uint64(t.devOffset) > t.buffer.size || t.size > t.buffer.size-uint64(t.devOffset)):
		return cufileapi.InvalidMappingRange
	}
	return cufileapi.Success
}

// use counts the transfer in or out at its file and buffer. The machine is locked.
func (t *transfer) use(delta int) {
	t.file.use(delta)
	if t.buffer != nil {
		t.buffer.busy += delta
	}
}

// move performs the transfer for a running operation.
func (l *lib) move(o *machine.Op, t *transfer) (n int64, err error) {
	begin := time.Now()
	defer func() {
		l.m.Lock()
		defer l.m.Unlock()
		l.stats.transferred(o.Device(), t, n, err, time.Since(begin))
	}()
	if t.plan.Status != 0 {
		return 0, asError(cufileapi.Result(t.plan.Status))
	}
	want := t.size
	if t.plan.Short && want > 1 {
		want /= 2
	}
	l.m.Lock()
	bytes, trouble := o.Touch(t.base+cudadrv.DevicePtr(t.devOffset), t.size, !t.write)
	l.m.Unlock()
	if trouble != nil {
		o.Fail(trouble)
		return 0, cufileapi.CUDAFailed(trouble.Status)
	}
	if n, err = t.copy(bytes[:want]); !t.write {
		machine.Poison(bytes[n:]) // cuFile may overwrite the rest with data read beyond the end
	}
	return n, err
}

// copy makes the system calls. If an error follows after some bytes, only the
// next transfer reports it.
func (t *transfer) copy(bytes []byte) (int64, error) {
	call := t.file.file.ReadAt
	if t.write {
		call = t.file.file.WriteAt
	}
	n, err := call(bytes, t.fileOffset)
	if n > 0 || err == nil || errors.Is(err, io.EOF) {
		return int64(n), nil
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		errno = syscall.EIO
	}
	return 0, errno
}
