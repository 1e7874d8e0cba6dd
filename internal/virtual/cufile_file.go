package virtual

import (
	"fmt"
	"os"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"golang.org/x/sys/unix"
)

// A cufileFile is a registered file descriptor.
type cufileFile struct {
	fd       int32
	dev, ino uint64   // of the file that it stood for
	file     *os.File // opened once more, without O_DIRECT, since transfers may lie anywhere
	mode     int      // O_RDONLY, O_WRONLY or O_RDWR
	busy     int      // transfers that have not ended
	gone     bool     // it was deregistered
}

func (l *cufileLib) HandleRegister(d *cufileapi.Descr) (cufileapi.Handle, cufileapi.Result) {
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
	h := cufileapi.Handle(l.m.handle())
	l.files[h] = f
	return h, cufileapi.Success
}

func (l *cufileLib) openFile(d *cufileapi.Descr) (*cufileFile, cufileapi.Result) {
	if d == nil || d.FD < 0 {
		return nil, cufileapi.InvalidValue
	}
	if d.Type != cufileapi.OpaqueFD || !l.running.bools[cufileapi.ParamAllowCompatMode] && !l.running.bools[cufileapi.ParamForceCompatMode] {
		return nil, cufileapi.IONotSupported // there is no nvidia-fs here
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
	case flags&unix.O_APPEND != 0: // writes would not go where they are told
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
	return &cufileFile{fd: d.FD, dev: st.Dev, ino: st.Ino, file: own, mode: mode}, cufileapi.Success
}

// closed reports whether the descriptor does not stand for the file any more.
func (f *cufileFile) closed() bool {
	var st unix.Stat_t
	return unix.Fstat(int(f.fd), &st) != nil || st.Dev != f.dev || st.Ino != f.ino
}

// use counts a transfer in or out. The file is closed when the last one has ended.
func (f *cufileFile) use(delta int) {
	if f.busy += delta; f.gone && f.busy == 0 {
		f.file.Close()
	}
}

// registered returns the file of a handle. m.mu is held.
func (l *cufileLib) registered(name string, h cufileapi.Handle) (*cufileFile, cufileapi.Result) {
	f := l.files[h]
	switch {
	case f == nil:
		return nil, cufileapi.HandleNotRegistered
	case f.closed():
		l.report("%s: file descriptor %d was closed before its handle was deregistered: another file may get its number", name, f.fd)
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
	f, r := l.registered(cufileapi.FuncHandleDeregister.Name(), h)
	if f == nil && l.files[h] == nil {
		l.report("cuFileHandleDeregister of %#x, which is no handle", uintptr(h))
	}
	l.stats.count(&l.stats.l1.HandleDeregisterOps, r == cufileapi.Success)
	l.forgetFile(cufileapi.FuncHandleDeregister, h)
}

// forgetFile takes a handle away. m.mu is held.
func (l *cufileLib) forgetFile(by cufileapi.Func, h cufileapi.Handle) {
	f := l.files[h]
	if f == nil {
		return
	}
	if f.busy > 0 {
		l.report("%s gave up the handle of file descriptor %d while transfers that use it (%d) have not ended: wait for them first",
			by.Name(), f.fd, f.busy)
	}
	delete(l.files, h)
	f.gone = true
	f.use(0)
}

// A cufileBuffer is registered memory.
type cufileBuffer struct {
	dev   *device
	size  uint64
	block *block
	busy  int
}

func (l *cufileLib) BufRegister(p cudadrv.DevicePtr, bytes uintptr, flags int32) cufileapi.Result {
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
	b.block.cufile++
	l.buffers[p] = b
	return cufileapi.Success
}

func (l *cufileLib) registrable(dev *device, p cudadrv.DevicePtr, bytes uintptr, flags int32) (*cufileBuffer, cufileapi.Result) {
	if p == 0 || bytes == 0 || flags&^(cufileapi.RDMARegister|cufileapi.RDMARelaxedOrdering) != 0 {
		return nil, cufileapi.InvalidValue
	}
	if l.buffers[p] != nil {
		return nil, cufileapi.MemoryAlreadyRegistered
	}
	b, near := l.m.find(p)
	switch {
	case b == nil && near != nil && p >= addressBase:
		return nil, cufileapi.CUDAPointerRangeError
	case b == nil || b.freeing:
		return nil, l.noMemory(p)
	case uint64(bytes) > b.size-(uint64(p)-b.addr):
		return nil, cufileapi.CUDAPointerRangeError
	}
	if r := l.usable(dev, p); r != cufileapi.Success {
		return nil, r
	}
	if b.space != nil && b.space.covered(uint64(p)-b.addr, uint64(bytes)) < uint64(bytes) {
		return nil, cufileapi.CUDAPointerRangeError
	}
	return &cufileBuffer{dev: dev, size: uint64(bytes), block: b}, cufileapi.Success
}

// noMemory is the result for an address at which there is nothing.
func (l *cufileLib) noMemory(p cudadrv.DevicePtr) cufileapi.Result {
	if p < addressBase {
		return cufileapi.CUDAMemoryTypeInvalid // host memory that is not page-locked
	}
	return cufileapi.CUDAPointerInvalid
}

// usable says whether transfers in the context of the device may use the kind of
// memory at p, which exists or is found not to when it is touched.
func (l *cufileLib) usable(dev *device, p cudadrv.DevicePtr) cufileapi.Result {
	if p < addressBase {
		if b, _ := l.m.find(p); b == nil || !l.running.bools[cufileapi.AllowSystemMemory] {
			return cufileapi.CUDAMemoryTypeInvalid
		}
	}
	if !l.m.lies(p, dev) {
		return cufileapi.CUDAContextMismatch
	}
	return cufileapi.Success
}

func (l *cufileLib) BufDeregister(p cudadrv.DevicePtr) cufileapi.Result {
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

// forgetBuffer takes a registration away. m.mu is held.
func (l *cufileLib) forgetBuffer(by cufileapi.Func, p cudadrv.DevicePtr) {
	b := l.buffers[p]
	if b.busy > 0 {
		l.report("%s gave up memory at %#x while transfers that use it (%d) have not ended: wait for them first", by.Name(), uint64(p), b.busy)
	}
	delete(l.buffers, p)
	b.block.cufile--
}

// freed finds memory that is given up while it is registered: where nvidia-fs has
// pinned it, that hangs. m.mu is held.
func (l *cufileLib) freed(b *block) {
	if b.cufile > 0 {
		l.report("%v was freed before cuFileBufDeregister: deregister memory first", b)
	}
}
