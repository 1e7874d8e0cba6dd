package machine

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
)

// cufileVersion is the version of the virtual cuFile, as in CUDA 13.0.
const cufileVersion = 1150

// cufileLib implements cufileapi.API over virtual device memory and real files
// with system calls, like cuFile without nvidia-fs. It rejects or reports
// mistakes that cuFile sometimes tolerates: a driver that was not opened, memory
// that a stream still uses, and files that are closed or deregistered while in use. The lock of the machine guards it.
type cufileLib struct {
	m       *Machine
	uses    int64
	files   map[cufileapi.Handle]*file
	buffers map[cudadrv.DevicePtr]*buffer
}

// NewCufile returns the cuFile of a machine, version 1.15.
func NewCufile(m *Machine) cufileapi.API {
	return &cufileLib{
		m: m, files: map[cufileapi.Handle]*file{}, buffers: map[cudadrv.DevicePtr]*buffer{},
	}
}

// enter consults the fault plan and, if it succeeds, locks the machine until
// cufileLib.leave.
func (l *cufileLib) enter(f cufileapi.Func) (Fault, cufileapi.Result) {
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

func (l *cufileLib) leave() { l.m.Unlock() }

// enterOpen is enter for calls that need an open driver.
func (l *cufileLib) enterOpen(f cufileapi.Func) (Fault, cufileapi.Result) {
	x, r := l.enter(f)
	if r == cufileapi.Success && l.uses == 0 {
		l.leave()
		r = cufileapi.DriverNotInitialized
	}
	return x, r
}

// begin is enterOpen for calls that need a context, which it unbinds.
func (l *cufileLib) begin(f cufileapi.Func) (*Device, Fault, cufileapi.Result) {
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

// asError converts a result to the error that Read and Write return, which is
// an errno if a fault plan set one.
func asError(r cufileapi.Result) error {
	if r.Code() < cufileapi.DriverNotInitialized {
		return syscall.Errno(r)
	}
	return r
}

// report reports a mistake of the program that cuFile would not detect. The machine is locked.
func (l *cufileLib) report(format string, args ...any) {
	l.m.Report(fmt.Sprintf("virtual cuFile: "+format+" (seed %#x)", append(args, l.m.Seed())...))
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
	l.uses++
	return cufileapi.Success
}

// DriverClose deregisters everything with the last use.
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
	return cufileapi.Success
}

// SetParameterString accepts the parameters while the driver is closed. None of them changes
// what the virtual cuFile does.
func (l *cufileLib) SetParameterString(p cufileapi.StringParam, _ string) cufileapi.Result {
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

// A file is a registered file descriptor.
type file struct {
	fd       int32
	dev, ino uint64   // identity of the file at registration
	file     *os.File // reopened without O_DIRECT, because transfers may be unaligned
	mode     int      // O_RDONLY, O_WRONLY or O_RDWR
	busy     int      // unfinished transfers
	gone     bool     // deregistered
}

func (l *cufileLib) HandleRegister(d *cufileapi.Descr) (cufileapi.Handle, cufileapi.Result) {
	_, _, r := l.begin(cufileapi.FuncHandleRegister)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	f, r := l.openFile(d)
	if r != cufileapi.Success {
		return 0, r
	}
	h := cufileapi.Handle(l.m.Handle())
	l.files[h] = f
	return h, cufileapi.Success
}

func (l *cufileLib) openFile(d *cufileapi.Descr) (*file, cufileapi.Result) {
	if d == nil || d.FD < 0 {
		return nil, cufileapi.InvalidValue
	}
	if d.Type != cufileapi.OpaqueFD {
		return nil, cufileapi.IONotSupported // nvidia-fs is missing
	}
	var st unix.Stat_t
	if unix.Fstat(int(d.FD), &st) != nil {
		return nil, cufileapi.InvalidValue
	}
	if kind := st.Mode & unix.S_IFMT; kind != unix.S_IFREG && kind != unix.S_IFBLK {
		return nil, cufileapi.InvalidFileType
	}
	flags, err := unix.FcntlInt(uintptr(d.FD), unix.F_GETFL, 0)
	switch {
	case err != nil:
		return nil, cufileapi.InvalidValue
	case flags&unix.O_APPEND != 0: // writes would ignore their offset
		return nil, cufileapi.InvalidFileOpenFlag
	}
	for _, f := range l.files {
		if f.fd == d.FD {
			return nil, cufileapi.HandleAlreadyRegistered
		}
	}
	mode := flags & unix.O_ACCMODE
	own, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", d.FD), mode, 0)
	if err != nil {
		return nil, cufileapi.GetNewFDFailed
	}
	return &file{fd: d.FD, dev: st.Dev, ino: st.Ino, file: own, mode: mode}, cufileapi.Success
}

// closed reports whether the descriptor no longer refers to the file.
func (f *file) closed() bool {
	var st unix.Stat_t
	return unix.Fstat(int(f.fd), &st) != nil || st.Dev != f.dev || st.Ino != f.ino
}

// use counts a transfer in or out, and closes a deregistered file after its
// last transfer.
func (f *file) use(delta int) {
	if f.busy += delta; f.gone && f.busy == 0 {
		f.file.Close()
	}
}

// registered returns the file of a handle, and reports a program that closed
// the file descriptor before it deregistered the handle. The machine is locked.
func (l *cufileLib) registered(name string, h cufileapi.Handle) (*file, cufileapi.Result) {
	f := l.files[h]
	switch {
	case f == nil:
		return nil, cufileapi.HandleNotRegistered
	case f.closed():
		l.report("%s: file descriptor %d was closed before its handle was deregistered: another file may get the same number", name, f.fd)
		return nil, cufileapi.HandleNotRegistered
	}
	return f, cufileapi.Success
}

func (l *cufileLib) HandleDeregister(h cufileapi.Handle) {
	_, r := l.enterOpen(cufileapi.FuncHandleDeregister)
	if r != cufileapi.Success {
		return
	}
	defer l.leave()
	if f, _ := l.registered(cufileapi.FuncHandleDeregister.Name(), h); f == nil && l.files[h] == nil {
		l.report("cuFileHandleDeregister of %#x, which is not a handle", uintptr(h))
	}
	l.forgetFile(cufileapi.FuncHandleDeregister, h)
}

// forgetFile removes a handle, whose file stays open until its last transfer
// ends. The machine is locked.
func (l *cufileLib) forgetFile(by cufileapi.Func, h cufileapi.Handle) {
	f := l.files[h]
	if f == nil {
		return
	}
	if f.busy > 0 {
		l.report("%s deregistered file descriptor %d with %d unfinished transfers: wait for them first",
			by.Name(), f.fd, f.busy)
	}
	delete(l.files, h)
	f.gone = true
	f.use(0)
}

// A buffer is registered memory.
type buffer struct {
	dev   *Device
	size  uint64
	block *Block
	busy  int
}

func (l *cufileLib) BufRegister(p cudadrv.DevicePtr, bytes uintptr, flags int32) cufileapi.Result {
	dev, _, r := l.begin(cufileapi.FuncBufRegister)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	b, r := l.registrable(dev, p, bytes, flags)
	if r != cufileapi.Success {
		return r
	}
	b.block.Register(1)
	l.buffers[p] = b
	return cufileapi.Success
}

func (l *cufileLib) registrable(dev *Device, p cudadrv.DevicePtr, bytes uintptr, flags int32) (*buffer, cufileapi.Result) {
	if p == 0 || bytes == 0 || flags&^(cufileapi.RDMARegister|cufileapi.RDMARelaxedOrdering) != 0 {
		return nil, cufileapi.InvalidValue
	}
	if l.buffers[p] != nil {
		return nil, cufileapi.MemoryAlreadyRegistered
	}
	b, near := l.m.Find(p)
	switch {
	case b == nil && near != nil && !InHostMemory(p):
		return nil, cufileapi.CUDAPointerRangeError
	case b == nil || b.Freed():
		return nil, l.noMemory(p)
	case uint64(bytes) > b.Room(p):
		return nil, cufileapi.CUDAPointerRangeError
	}
	if r := l.usable(dev, p); r != cufileapi.Success {
		return nil, r
	}
	if !b.Covers(p, uint64(bytes)) {
		return nil, cufileapi.CUDAPointerRangeError
	}
	return &buffer{dev: dev, size: uint64(bytes), block: b}, cufileapi.Success
}

// noMemory returns the result for an address without memory.
func (l *cufileLib) noMemory(p cudadrv.DevicePtr) cufileapi.Result {
	if InHostMemory(p) {
		return cufileapi.CUDAMemoryTypeInvalid // host memory that is not page-locked
	}
	return cufileapi.CUDAPointerInvalid
}

// usable returns whether transfers in the device's context may use the kind of
// memory at p. Whether the memory exists is checked when it is touched.
func (l *cufileLib) usable(dev *Device, p cudadrv.DevicePtr) cufileapi.Result {
	if InHostMemory(p) {
		if b, _ := l.m.Find(p); b == nil {
			return cufileapi.CUDAMemoryTypeInvalid
		}
	}
	if !l.m.Belongs(p, dev) {
		return cufileapi.CUDAContextMismatch
	}
	return cufileapi.Success
}

func (l *cufileLib) BufDeregister(p cudadrv.DevicePtr) cufileapi.Result {
	_, _, r := l.begin(cufileapi.FuncBufDeregister)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	b := l.buffers[p]
	switch {
	case p == 0:
		r = cufileapi.InvalidValue
	case b == nil:
		r = cufileapi.MemoryNotRegistered
	}
	if r == cufileapi.Success {
		l.forgetBuffer(cufileapi.FuncBufDeregister, p)
	}
	return r
}

// forgetBuffer removes a registration, and reports a program that does so
// before the transfers of the buffer have ended. The machine is locked.
func (l *cufileLib) forgetBuffer(by cufileapi.Func, p cudadrv.DevicePtr) {
	b := l.buffers[p]
	if b.busy > 0 {
		l.report("%s deregistered memory at %#x with %d unfinished transfers: wait for them first", by.Name(), uint64(p), b.busy)
	}
	delete(l.buffers, p)
	b.block.Register(-1)
}

// A transfer moves bytes between a file and memory.
type transfer struct {
	file       *file
	buffer     *buffer // nil if the memory is not registered
	base       cudadrv.DevicePtr
	size       uint64
	fileOffset int64
	devOffset  int64
	write      bool
	plan       Fault // injected fault: an error, or a short transfer
}

func (l *cufileLib) Read(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	return l.transfer(cufileapi.FuncRead, h, &transfer{base: base, size: uint64(bytes), fileOffset: fileOffset, devOffset: devOffset})
}

func (l *cufileLib) Write(h cufileapi.Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	return l.transfer(cufileapi.FuncWrite, h, &transfer{base: base, size: uint64(bytes), fileOffset: fileOffset, devOffset: devOffset, write: true})
}

func (l *cufileLib) transfer(f cufileapi.Func, h cufileapi.Handle, t *transfer) (int64, error) {
	dev, x, r := l.begin(f)
	if r != cufileapi.Success {
		return 0, asError(r)
	}
	t.plan = x
	if r = l.prepare(f, dev, h, t); r == cufileapi.Success {
		r = l.check(t)
	}
	if r != cufileapi.Success {
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
func (l *cufileLib) prepare(f cufileapi.Func, dev *Device, h cufileapi.Handle, t *transfer) (r cufileapi.Result) {
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
func (l *cufileLib) check(t *transfer) cufileapi.Result {
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
func (l *cufileLib) move(o *Op, t *transfer) (n int64, err error) {
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
		Poison(bytes[n:]) // cuFile may overwrite the rest with data read beyond the end
	}
	return n, err
}

// copy issues the system calls. Like them, it reports an error that follows
// after some bytes only in the next transfer.
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
