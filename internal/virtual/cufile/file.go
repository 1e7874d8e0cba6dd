package cufile

import (
	"fmt"
	"os"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"golang.org/x/sys/unix"
)

// A file is a registered file descriptor.
type file struct {
	fd       int32
	dev, ino uint64   // identity of the file at registration
	file     *os.File // reopened without O_DIRECT, because transfers may be unaligned
	mode     int      // O_RDONLY, O_WRONLY or O_RDWR
	busy     int      // unfinished transfers
	gone     bool     // deregistered
}

func (l *lib) HandleRegister(d *cufileapi.Descr) (cufileapi.Handle, cufileapi.Result) {
	_, _, r := l.begin(cufileapi.FuncHandleRegister)
	if r != cufileapi.Success {
		return 0, r
	}
	defer l.leave()
	f, r := l.openFile(d)
	l.stats.count(&l.stats.l1.HandleRegisterOps, r == cufileapi.Success)
	if r != cufileapi.Success {
		return 0, r
	}
	h := cufileapi.Handle(l.m.Handle())
	l.files[h] = f
	return h, cufileapi.Success
}

func (l *lib) openFile(d *cufileapi.Descr) (*file, cufileapi.Result) {
	if d == nil || d.FD < 0 {
		return nil, cufileapi.InvalidValue
	}
	if d.Type != cufileapi.OpaqueFD || !l.running.bools[cufileapi.ParamAllowCompatMode] && !l.running.bools[cufileapi.ParamForceCompatMode] {
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

// use counts a transfer in or out. A deregistered file is closed after its last transfer.
func (f *file) use(delta int) {
	if f.busy += delta; f.gone && f.busy == 0 {
		f.file.Close()
	}
}

// registered returns the file of a handle. The machine is locked.
func (l *lib) registered(name string, h cufileapi.Handle) (*file, cufileapi.Result) {
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

func (l *lib) HandleDeregister(h cufileapi.Handle) {
	_, r := l.enterOpen(cufileapi.FuncHandleDeregister)
	if r != cufileapi.Success {
		return
	}
	defer l.leave()
	f, r := l.registered(cufileapi.FuncHandleDeregister.Name(), h)
	if f == nil && l.files[h] == nil {
		l.report("cuFileHandleDeregister of %#x, which is not a handle", uintptr(h))
	}
	l.stats.count(&l.stats.l1.HandleDeregisterOps, r == cufileapi.Success)
	l.forgetFile(cufileapi.FuncHandleDeregister, h)
}

// forgetFile removes a handle. The machine is locked.
func (l *lib) forgetFile(by cufileapi.Func, h cufileapi.Handle) {
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
	dev   *machine.Device
	size  uint64
	block *machine.Block
	busy  int
}

func (l *lib) BufRegister(p cudadrv.DevicePtr, bytes uintptr, flags int32) cufileapi.Result {
	dev, _, r := l.begin(cufileapi.FuncBufRegister)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	b, r := l.registrable(dev, p, bytes, flags)
	l.stats.registered(dev, uint64(bytes), r == cufileapi.Success)
	if r != cufileapi.Success {
		return r
	}
	b.block.Register(1)
	l.buffers[p] = b
	return cufileapi.Success
}

func (l *lib) registrable(dev *machine.Device, p cudadrv.DevicePtr, bytes uintptr, flags int32) (*buffer, cufileapi.Result) {
	if p == 0 || bytes == 0 || flags&^(cufileapi.RDMARegister|cufileapi.RDMARelaxedOrdering) != 0 {
		return nil, cufileapi.InvalidValue
	}
	if l.buffers[p] != nil {
		return nil, cufileapi.MemoryAlreadyRegistered
	}
	b, near := l.m.Find(p)
	switch {
	case b == nil && near != nil && !machine.InHostMemory(p):
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
func (l *lib) noMemory(p cudadrv.DevicePtr) cufileapi.Result {
	if machine.InHostMemory(p) {
		return cufileapi.CUDAMemoryTypeInvalid // host memory that is not page-locked
	}
	return cufileapi.CUDAPointerInvalid
}

// usable returns whether transfers in the device's context may use the kind of
// memory at p. Whether the memory exists is checked when it is touched.
func (l *lib) usable(dev *machine.Device, p cudadrv.DevicePtr) cufileapi.Result {
	if machine.InHostMemory(p) {
		if b, _ := l.m.Find(p); b == nil || !l.running.bools[cufileapi.AllowSystemMemory] {
			return cufileapi.CUDAMemoryTypeInvalid
		}
	}
	if !l.m.Belongs(p, dev) {
		return cufileapi.CUDAContextMismatch
	}
	return cufileapi.Success
}

func (l *lib) BufDeregister(p cudadrv.DevicePtr) cufileapi.Result {
	dev, _, r := l.begin(cufileapi.FuncBufDeregister)
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
	l.stats.deregistered(dev, b)
	if r == cufileapi.Success {
		l.forgetBuffer(cufileapi.FuncBufDeregister, p)
	}
	return r
}

// forgetBuffer removes a registration. The machine is locked.
func (l *lib) forgetBuffer(by cufileapi.Func, p cudadrv.DevicePtr) {
	b := l.buffers[p]
	if b.busy > 0 {
		l.report("%s deregistered memory at %#x with %d unfinished transfers: wait for them first", by.Name(), uint64(p), b.busy)
	}
	delete(l.buffers, p)
	b.block.Register(-1)
}
