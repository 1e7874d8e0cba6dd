package gds

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
)

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
	if err := mem.Check(op, x.Buffer(), x.Len(), nil); err != nil || x.Len() == 0 {
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

// within returns how cuFile names a part of a file's bytes in device memory: by the
// buffer that it lies in, if there is one, and an offset. The caller leaves that.
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
