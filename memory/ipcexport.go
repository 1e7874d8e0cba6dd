package memory

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// An ipcExport is the state of a buffer that has IPC handles.
type ipcExport struct {
	server *ipcServer
	id     uint64
	token  []byte
	buf    *Buffer

	low     int                  // offset of the buffer in the mapped memory
	segment cudadrv.IpcMemHandle // of plain memory
	pages   []cudadrv.MemHandle  // of mapped memory
	page    int                  // size of each in bytes
	event   *stream.Event        // after the preceding operations; nil if the host waits for them

	// server.mu guards these.
	receivers int  // open openings
	opened    int  // openings in total
	closed    bool // by the owner, while receivers > 0
	changed   chan struct{}
}

// share returns a handle for the whole buffer. The operations that are already enqueued
// on its stream come before the receivers' operations.
func (b *Buffer) share() (IPCHandle, error) {
	if err := gpu.StreamOf(b.in().Stream).RefuseCapture("share", "make the handle before the capture"); err != nil {
		return IPCHandle{}, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.in().Owner.Closed() {
		return IPCHandle{}, device.ErrClosed
	}
	if b.export == nil {
		e, err := newExport(b)
		if err != nil {
			return IPCHandle{}, err
		}
		b.export = e
	}
	return b.export.handle()
}

// newExport determines how the buffer's memory is shared. b.mu is held.
func newExport(b *Buffer) (*ipcExport, error) {
	if b.imported {
		return nil, errors.New("the memory belongs to another process: ask that for a handle")
	}
	e := &ipcExport{buf: b, token: make([]byte, tokenBytes), changed: make(chan struct{})}
	_, _ = rand.Read(e.token) // crypto/rand.Read never fails
	if err := e.find(); err != nil {
		return nil, err
	}
	if gpu.DeviceOf(b.Device()).System().Machine == nil { // virtual events cannot be shared with another process
		var err error
		if e.event, err = stream.NewEvent(b.Device(), &stream.EventConfig{Interprocess: true}); err != nil {
			return nil, err
		}
	}
	server, err := ipcOf(b.Device()).serve()
	if err == nil {
		e.server = server
		server.add(e)
		return e, nil
	}
	return nil, errors.Join(err, e.event.Close())
}

// find finds the segment, or the pages, that the buffer lies in.
func (e *ipcExport) find() error {
	b := e.buf
	if base, page, handles := pagesOf(b.Device()).find(uint64(b.ptr), uint64(b.bytes)); len(handles) > 0 {
		e.low, e.page, e.pages = int(uint64(b.ptr)-base), int(page), handles
		return nil
	}
	var base cudadrv.DevicePtr
	err := gpu.DeviceOf(b.Device()).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		base, _, r = drv.MemGetAddressRange(b.ptr)
		return r
	})
	if err == nil {
		err = gpu.DeviceOf(b.Device()).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
			e.segment, r = drv.IpcGetMemHandle(b.ptr)
			return r
		})
	}
	if errors.Is(err, device.ErrorInvalidValue) {
		return fmt.Errorf("the memory is not of a kind that processes share, as that of backend:cudaMallocAsync is not: %w", err)
	}
	e.low = int(b.ptr - base)
	return err
}

// handle records the preceding operations and returns the handle.
func (e *ipcExport) handle() (IPCHandle, error) {
	b := e.buf
	uuid, err := gpu.DeviceOf(b.Device()).UUID()
	if err != nil {
		return IPCHandle{}, err
	}
	h := IPCHandle{Device: uuid, Offset: e.low, PID: os.Getpid(), Socket: e.server.name, Export: e.id, Token: e.token}
	if len(e.pages) == 0 {
		h.Segment = e.segment[:]
	}
	if e.event == nil {
		if err := gpu.DeviceOf(b.Device()).Blocking("memory: ipc handle"); err != nil {
			return IPCHandle{}, err
		}
		return h, syncBeside(b.in().Stream)
	}
	event, err := e.event.IPCHandle()
	if err == nil {
		err = gpu.DeviceOf(b.Device()).RecordEvent(gpu.EventOf(e.event), gpu.StreamOf(b.in().Stream).Raw())
	}
	h.Event = event[:]
	return h, err
}

// keep records that the owner has closed the buffer, and reports whether the memory
// must stay for the receivers. Buffer.mu is held.
func (e *ipcExport) keep() bool {
	if e == nil {
		return false
	}
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	if e.receivers > 0 {
		e.closed = true
		return true
	}
	e.server.remove(e)
	_ = e.event.Close() // an event that cannot be destroyed does no harm
	return false
}

// await waits until there were n openings.
func (e *ipcExport) await(ctx context.Context, n int) error {
	for {
		e.server.mu.Lock()
		opened, changed := e.opened, e.changed
		e.server.mu.Unlock()
		if opened >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("opened %d times, not %d: %w", opened, n, context.Cause(ctx))
		}
	}
}

// finish frees memory that the owner has closed, after the last receiver. It fails
// while a stream that used the memory is captured.
func (e *ipcExport) finish() (done bool, err error) {
	b := e.buf
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.refuseCapture(); err != nil {
		return false, err
	}
	return true, errors.Join(b.giveBack(), e.event.Close())
}
