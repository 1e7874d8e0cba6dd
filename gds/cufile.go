package gds

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
)

// A cuFile is the library for one System. Its driver is opened on first use, which takes
// half a second, and closed with the System.
type cuFile struct {
	sys *device.System

	mu      sync.Mutex
	tried   bool
	api     cufileapi.API // nil if it does not work
	err     error         // why not
	buffers []*buffer
}

var cuFileKey handle.Key

func cuFileOf(dev *device.Device) *cuFile {
	sys := dev.System()
	return gpu.SystemOf(sys).Local(&cuFileKey, func() any { return &cuFile{sys: sys} }).(*cuFile)
}

// open returns the library with its driver open.
func (c *cuFile) open() (cufileapi.API, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.tried {
		c.tried = true
		if c.api, c.err = c.start(); c.err != nil {
			c.api = nil
		}
	}
	return c.api, c.err
}

func (c *cuFile) start() (cufileapi.API, error) {
	api, err := gpu.SystemOf(c.sys).CuFile()
	if err != nil {
		return nil, err
	}
	if _, set := env.Lookup("CUFILE_LOGFILE_PATH"); !set {
		// cuFile would write its log into the working directory. A library without the
		// parameter still does.
		if folder, err := logFolder(); err == nil {
			_ = api.SetParameterString(cufileapi.LogDir, folder)
		}
	}
	opened := make(chan cufileapi.Result, 1)
	go func() { opened <- api.DriverOpen() }()
	select {
	case r := <-opened:
		return api, failed("cuFileDriverOpen", r)
	case <-time.After(openTimeout):
		return nil, fmt.Errorf("cuFileDriverOpen has not returned for %v", openTimeout)
	}
}

// logFolder returns a directory of this user for cuFile's log. It opens the directory to
// validate it: in the temporary directory another user could have planted a link.
func logFolder() (string, error) {
	cache, err := env.UserCacheDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(cache, "chorus", "cufile")
	d, err := safe.OutputFolder(path)
	if err != nil {
		return "", err
	}
	return path, d.Close()
}

// openTimeout is the maximum time that cuFile may take to examine the machine.
var openTimeout = 10 * time.Second

// Close closes the driver.
func (c *cuFile) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.api == nil {
		return nil
	}
	api := c.api
	c.api, c.err = nil, fmt.Errorf("the driver of cuFile: %w", device.ErrClosed)
	if r := api.DriverClose(); r != cufileapi.Success {
		return fmt.Errorf("gds: cuFileDriverClose: %w", r)
	}
	return nil
}

// A registration is a file that is registered with cuFile.
type registration struct {
	lib *cuFile
	api cufileapi.API
	h   cufileapi.Handle
}

// registered returns the file's registration with cuFile for dev's System, and makes it if
// necessary.
func (f *File) registered(dev *device.Device) (*registration, error) {
	c := cuFileOf(dev)
	api, err := c.open()
	if err != nil {
		return nil, err
	}
	fd := f.fd
	if f.directReady() {
		fd = f.direct.fd // cuFile needs it for GPUDirect
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.known {
		if r.lib == c {
			return r, nil
		}
	}
	x := &registration{lib: c, api: api}
	err = gpu.DeviceOf(dev).Bound(func() error {
		var r cufileapi.Result
		x.h, r = api.HandleRegister(&cufileapi.Descr{Type: cufileapi.OpaqueFD, FD: int32(fd)})
		return unregistered(r, fd)
	})
	if err != nil {
		return nil, err
	}
	f.known = append(f.known, x)
	return x, nil
}

// forget removes the registrations with cuFile, which nothing uses. f.mu is
// held.
func (f *File) forget() {
	for _, r := range f.known {
		r.lib.mu.Lock()
		if r.lib.api != nil { // otherwise the handle was destroyed with the driver
			r.api.HandleDeregister(r.h)
		}
		r.lib.mu.Unlock()
	}
	f.known = nil
}

// Register registers the file with cuFile; otherwise that happens on the first use of
// CuFile (torch.cuda.gds.GdsFile.register_handle). dev is any device of the System whose
// memory the file will be used with. Registering again does nothing. The error says why
// cuFile does not support the file; other engines still do.
func (f *File) Register(dev *device.Device) error {
	const op = "register"
	if err := f.use(op); err != nil {
		return err
	}
	defer f.unuse()
	if dev == nil {
		return f.fail(op, errors.New("no device given"))
	}
	if _, err := f.registered(dev); err != nil {
		f.refuse(CuFile, err)
		return f.fail(op, err)
	}
	return nil
}

// Deregister undoes Register, as Close does, too
// (torch.cuda.gds.GdsFile.deregister_handle). Calls that use the file must have
// returned.
func (f *File) Deregister() error {
	const op = "deregister"
	if err := f.use(op); err != nil {
		return err
	}
	defer f.unuse()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users > 1 {
		return f.fail(op, errBusy)
	}
	f.forget()
	return nil
}

// straight returns cuFile's registration for transfers between the file and the device, or nil
// if cuFile is not used.
func (f *File) straight(dev *device.Device) *registration {
	if f.refuses(CuFile) {
		return nil
	}
	r, err := f.registered(dev)
	if err != nil {
		f.refuse(CuFile, err)
		return nil
	}
	return r
}

// straight moves windows between the file and the device with cuFile, without slots. If
// cuFile refuses one, that window and all later ones are left to the other engines.
func (w *worker) straight() error {
	t := w.t
	for !t.f.refuses(CuFile) {
		win, ok := t.claim()
		if !ok {
			return nil
		}
		bytes, err := t.pass(win)
		if t.ctx.Err() != nil {
			return context.Cause(t.ctx)
		}
		if err != nil {
			t.f.refuse(CuFile, err)
			t.leaveToOthers(win)
			return nil
		}
		t.tell(bytes)
	}
	return nil
}

// pass moves the pieces of a window.
func (t *transfer) pass(win window) (bytes int64, err error) {
	for i := win.first; i < win.last; {
		x, next := win.part(t.pieces, i)
		if err := t.passPart(x); err != nil {
			return bytes, err
		}
		bytes += x.bytes
		i = next
	}
	return bytes, nil
}

func (t *transfer) passPart(x part) error {
	b, base, off := t.cu.lib.within(x)
	defer b.endUse()
	count := &t.f.count.by[CuFile]
	for done := int64(0); done < x.bytes && t.ctx.Err() == nil; {
		var n int64
		err := gpu.DeviceOf(t.dev).Bound(func() (err error) {
			if t.writes {
				n, err = t.cu.api.Write(t.cu.h, base, uintptr(x.bytes-done), x.off+done, off+done)
			} else {
				n, err = t.cu.api.Read(t.cu.h, base, uintptr(x.bytes-done), x.off+done, off+done)
			}
			return err
		})
		switch {
		case errors.Is(err, syscall.EINTR):
			t.f.count.retried.Add(1)
			continue
		case err != nil:
			return fmt.Errorf("cuFile moves %d bytes at byte %d: %w", x.bytes-done, x.off+done, err)
		case n == 0:
			return fmt.Errorf("cuFile moves none of %d bytes at byte %d", x.bytes-done, x.off+done)
		}
		count.add(t.writes, n)
		if done += n; done < x.bytes {
			t.f.count.continued.Add(1)
		}
	}
	return nil
}

// failed converts a result of cuFile to an error.
func failed(op string, r cufileapi.Result) error {
	if r == cufileapi.Success {
		return nil
	}
	return fmt.Errorf("%s: %w: %s", op, r, r.Meaning())
}

// errBusy reports that the buffer is in use by a call that has not returned.
var errBusy = errors.New("a call that uses it has not returned: wait for it")

// A buffer is device memory that is registered with cuFile.
type buffer struct {
	lib   *cuFile
	dev   *device.Device
	ptr   cudadrv.DevicePtr
	bytes int64
	refs  int // calls of RegisterBuffer
	busy  int // transfers
}

// RegisterBuffer registers device memory with cuFile, which then reads into it and writes
// from it without a copy if the hardware supports that
// (torch.cuda.gds.gds_register_buffer). Memory that is registered several times must be
// deregistered as often, and before it is closed. If cuFile refuses the memory, the error
// says why; files can be read into it nevertheless.
func RegisterBuffer(x memory.Slice[byte]) error {
	const op = "gds: register buffer"
	c, err := bufferLib(op, x)
	if err != nil || c == nil {
		return err
	}
	api, err := c.open()
	if err != nil {
		return fmt.Errorf("%s of %d bytes on %s: %w", op, x.Len(), x.Device(), err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if b := c.find(x); b != nil {
		b.refs++
		return nil
	}
	b := &buffer{lib: c, dev: x.Device(), ptr: cudadrv.DevicePtr(x.Ptr()), bytes: int64(x.Len()), refs: 1}
	err = gpu.DeviceOf(b.dev).Bound(func() error {
		return failed("cuFileBufRegister", api.BufRegister(b.ptr, uintptr(b.bytes), 0))
	})
	if err != nil {
		return fmt.Errorf("%s of %d bytes on %s: %w", op, b.bytes, b.dev, err)
	}
	c.buffers = append(c.buffers, b)
	return nil
}

// DeregisterBuffer undoes one RegisterBuffer of the same memory
// (torch.cuda.gds.gds_deregister_buffer).
func DeregisterBuffer(x memory.Slice[byte]) error {
	const op = "gds: deregister buffer"
	c, err := bufferLib(op, x)
	if err != nil || c == nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	b := c.find(x)
	switch {
	case b == nil:
		return fmt.Errorf("%s: the %d bytes at %#x on %s were not registered, or not as a whole", op, x.Len(), x.Ptr(), x.Device())
	case b.refs > 1:
		b.refs--
		return nil
	case b.busy > 0:
		return fmt.Errorf("%s of %d bytes on %s: %w", op, b.bytes, b.dev, errBusy)
	}
	err = gpu.DeviceOf(b.dev).Bound(func() error { return failed("cuFileBufDeregister", c.api.BufDeregister(b.ptr)) })
	if err != nil {
		return fmt.Errorf("%s of %d bytes on %s: %w", op, b.bytes, b.dev, err)
	}
	c.buffers = slices.DeleteFunc(c.buffers, func(o *buffer) bool { return o == b })
	return nil
}

// bufferLib returns the library for memory, or nil for none.
func bufferLib(op string, x memory.Slice[byte]) (*cuFile, error) {
	if err := inside.CheckBuffer(op, x.Buffer(), x.Len(), nil); err != nil || x.Len() == 0 {
		return nil, err
	}
	return cuFileOf(x.Device()), nil
}

// find returns the buffer that is just this memory. c.mu is held.
func (c *cuFile) find(x memory.Slice[byte]) *buffer {
	for _, b := range c.buffers {
		if b.ptr == cudadrv.DevicePtr(x.Ptr()) && b.bytes == int64(x.Len()) {
			return b
		}
	}
	return nil
}

// within returns how cuFile names a part of a file's bytes in device memory: by
// the buffer that it lies in, if there is one, and an offset. The buffer counts
// as in use until the caller leaves it.
func (c *cuFile) within(x part) (b *buffer, base cudadrv.DevicePtr, off int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range c.buffers {
		if b.ptr <= x.ptr && x.ptr-b.ptr <= cudadrv.DevicePtr(b.bytes-x.bytes) && b.bytes >= x.bytes {
			b.busy++
			return b, b.ptr, int64(x.ptr - b.ptr)
		}
	}
	return nil, x.ptr, 0
}

// endUse ends what within began.
func (b *buffer) endUse() {
	if b == nil {
		return
	}
	b.lib.mu.Lock()
	defer b.lib.mu.Unlock()
	b.busy--
}

// udevFolder is the directory of udev's device database.
var udevFolder = "/run/udev/data"

// unregistered returns the error of a file that cuFile did not register. cuFile asks udev
// for the file system on the file's disk. Without udev, as in most containers and small
// virtual machines, cuFile only reports that it did not register the file.
func unregistered(r cufileapi.Result, fd int) error {
	err := failed("cuFileHandleRegister", r)
	var st unix.Stat_t
	if r != cufileapi.HandleNotRegistered || unix.Fstat(fd, &st) != nil {
		return err
	}
	if why := unknownDisk(st.Dev); why != "" {
		return fmt.Errorf("%w; %s", err, why)
	}
	return err
}

// unknownDisk explains why udev does not know the disk with that number, or returns "".
func unknownDisk(number uint64) string {
	major, minor := unix.Major(number), unix.Minor(number)
	if major == 0 {
		return "the file is on no disk that udev could know, and this cuFile takes no others"
	}
	entry := fmt.Sprintf("%s/b%d:%d", udevFolder, major, minor)
	if _, err := os.Stat(entry); err == nil {
		return ""
	}
	return fmt.Sprintf("cuFile asks udev for the disk, and there is no %s: in a container, mount the host's /run/udev", entry)
}
