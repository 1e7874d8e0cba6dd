package virtual

import (
	"errors"
	"io"
	"math"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"golang.org/x/sys/unix"
)

// A fileTransfer moves bytes between a file and memory.
type fileTransfer struct {
	file       *cufileFile
	buffer     *cufileBuffer // where the memory is registered; nil elsewhere
	base       cudadrv.DevicePtr
	size       uint64
	fileOffset int64
	devOffset  int64
	write      bool
	plan       fault // what befalls it: an error, or that it ends early
}

func (l *cufileLib) Read(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	return l.transfer(cufileapi.FuncRead, h, &fileTransfer{base: base, size: uint64(bytes), fileOffset: fileOffset, devOffset: devOffset})
}

func (l *cufileLib) Write(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	return l.transfer(cufileapi.FuncWrite, h, &fileTransfer{base: base, size: uint64(bytes), fileOffset: fileOffset, devOffset: devOffset, write: true})
}

func (l *cufileLib) transfer(f cufileapi.Func, h cufileapi.Handle, t *fileTransfer) (int64, error) {
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
	o := l.m.hostOp(dev, f.Name())
	l.leave()
	n, err := l.move(o, t)
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	t.use(-1)
	l.m.hostDone(o)
	return n, err
}

// prepare checks what is known when a transfer is asked for, and finds its file
// and memory. m.mu is held.
func (l *cufileLib) prepare(f cufileapi.Func, dev *device, h cufileapi.Handle, t *fileTransfer) (r cufileapi.Result) {
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

// check checks the size and the offsets. m.mu is held.
func (l *cufileLib) check(t *fileTransfer) cufileapi.Result {
	switch {
	case t.fileOffset < 0 || t.devOffset < 0 || t.size > math.MaxInt64:
		return cufileapi.InvalidValue
	case t.buffer != nil && (uint64(t.devOffset) > t.buffer.size || t.size > t.buffer.size-uint64(t.devOffset)):
		return cufileapi.InvalidMappingRange
	}
	return cufileapi.Success
}

// use counts the transfer in or out where it is at work. m.mu is held.
func (t *fileTransfer) use(delta int) {
	t.file.use(delta)
	if t.buffer != nil {
		t.buffer.busy += delta
	}
}

// move carries the transfer out, for a running operation.
func (l *cufileLib) move(o *op, t *fileTransfer) (n int64, err error) {
	begin := time.Now()
	defer func() {
		l.m.mu.Lock()
		defer l.m.mu.Unlock()
		l.stats.transferred(o.s.dev, t, n, err, time.Since(begin))
	}()
	if t.plan.status != 0 {
		return 0, asError(cufileapi.Result(t.plan.status))
	}
	want := t.size
	if t.plan.short && want > 1 {
		want /= 2
	}
	l.m.mu.Lock()
	bytes, trouble := o.touch(t.base+cudadrv.DevicePtr(t.devOffset), t.size, !t.write)
	l.m.mu.Unlock()
	if trouble != nil {
		o.fail(trouble)
		return 0, cufileapi.CUDAFailed(trouble.status)
	}
	if n, err = t.copy(bytes[:want]); !t.write {
		poison(bytes[n:]) // cuFile copies what it had read ahead of the end
	}
	return n, err
}

// copy makes the system calls. An error behind the first bytes is one of the next
// transfer.
func (t *fileTransfer) copy(bytes []byte) (int64, error) {
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

// theHost stands for a stream where the host itself uses memory.
const theHost = ^cudadrv.Stream(0)

// hostOp is an operation of the host, which comes after what the host has waited
// for and nothing else. m.mu is held.
func (m *Machine) hostOp(dev *device, name string) *op {
	s := &stream{dev: dev, handle: theHost, now: m.slots.take()}
	s.now.seen = m.host
	s.now.epoch++
	return &op{name: name, s: s, host: m.host}
}

// hostDone is called when the host knows that its operation has ended. m.mu is held.
func (m *Machine) hostDone(o *op) {
	m.host = m.host.joinStamp(o.s.now)
	m.slots.put(o.s.now)
}
