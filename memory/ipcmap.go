package memory

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// An ipcKey identifies mapped memory: a segment by its handle, or the pages of one
// export.
type ipcKey struct {
	dev     *device.Device
	segment cudadrv.IpcMemHandle
	socket  string
	export  uint64
}

// An ipcMapped is a mapping of another process's memory.
type ipcMapped struct {
	key   ipcKey
	base  cudadrv.DevicePtr
	bytes uintptr
	pages bool // the bytes are mapped pages, not a segment
	uses  int
}

// mapHandle maps the memory of a handle. All openings of the same memory share one mapping.
func (x *ipc) mapHandle(dev *device.Device, l *ipcLink, h *IPCHandle, a *ipcAnswer) (*ipcMapped, error) {
	key := ipcKey{dev: dev}
	if a.Pages == 0 {
		key.segment = cudadrv.IpcMemHandle(h.Segment)
	} else {
		key.socket, key.export = h.Socket, h.Export
	}
	x.mapping.Lock()
	defer x.mapping.Unlock()
	m := x.mappings[key]
	if m == nil {
		m = &ipcMapped{key: key, pages: a.Pages > 0}
		if err := m.mapMemory(x, l, a); err != nil {
			return nil, err
		}
	}
	if uintptr(a.High) > m.bytes {
		err := fmt.Errorf("it sent an invalid answer: the memory would have at least %d bytes, and has %d", a.High, m.bytes)
		if m.uses == 0 {
			err = errors.Join(err, m.close())
		}
		return nil, err
	}
	m.uses++
	x.mappings[key] = m
	return m, nil
}

func (m *ipcMapped) mapMemory(x *ipc, l *ipcLink, a *ipcAnswer) error {
	if m.pages {
		return m.openPages(x, l, a)
	}
	return m.openSegment()
}

// close unmaps the memory.
func (m *ipcMapped) close() error {
	if m.pages {
		return m.unmap(m.bytes)
	}
	return gpu.DeviceOf(m.key.dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.IpcCloseMemHandle(m.base) })
}

// exit undoes enter. All operations that used the memory have completed.
func (x *ipc) exit(m *ipcMapped) error {
	x.mapping.Lock()
	defer x.mapping.Unlock()
	if m.uses--; m.uses > 0 {
		return nil
	}
	delete(x.mappings, m.key)
	return m.close()
}

func (m *ipcMapped) openSegment() error {
	err := gpu.DeviceOf(m.key.dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		m.base, r = drv.IpcOpenMemHandle(m.key.segment, cudadrv.IpcMemLazyEnablePeerAccess)
		return r
	})
	if err != nil {
		return err
	}
	err = gpu.DeviceOf(m.key.dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		_, m.bytes, r = drv.MemGetAddressRange(m.base)
		return r
	})
	if err != nil {
		return errors.Join(err, m.close())
	}
	return nil
}

// openPages maps the pages at consecutive addresses.
func (m *ipcMapped) openPages(x *ipc, l *ipcLink, a *ipcAnswer) error {
	dev := m.key.dev
	m.bytes = uintptr(a.PageBytes) * uintptr(a.Pages)
	err := gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		m.base, r = drv.MemAddressReserve(m.bytes, 0, 0)
		return r
	})
	if err != nil {
		return err
	}
	done, err := m.askPages(x, l, a)
	if err == nil {
		err = gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.MemSetAccess(m.base, m.bytes, cudadrv.MemAccessReadWrite, gpu.DeviceOf(dev).Handle())
		})
	}
	if err != nil {
		return errors.Join(err, m.unmap(done))
	}
	return nil
}

// askPages gets the pages as files and maps them. It returns the number of mapped bytes.
func (m *ipcMapped) askPages(x *ipc, l *ipcLink, a *ipcAnswer) (done uintptr, err error) {
	page := uintptr(a.PageBytes)
	for n := 0; n < a.Pages && err == nil; {
		var files []int
		if _, files, err = x.ask(l, &ipcRequest{Op: "pages", Export: m.key.export, From: n}, x.patience); err != nil {
			break
		}
		if len(files) == 0 || len(files) > a.Pages-n {
			err = fmt.Errorf("it sent %d pages of %d", len(files), a.Pages-n)
		}
		for i := 0; i < len(files) && err == nil; i++ {
			if err = m.mapPage(done, page, files[i]); err == nil {
				done += page
			}
		}
		closeFiles(files)
		n += len(files)
	}
	return done, err
}

// mapPage maps one page. The mapping alone keeps the physical memory alive.
func (m *ipcMapped) mapPage(at, bytes uintptr, file int) error {
	dev := m.key.dev
	var h cudadrv.MemHandle
	err := gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		h, r = drv.MemImportFromShareableHandle(int32(file), cudadrv.MemHandlePosixFD)
		return r
	})
	if err != nil {
		return err
	}
	err = gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemMap(m.base+cudadrv.DevicePtr(at), bytes, 0, h)
	})
	return errors.Join(err, gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemRelease(h) }))
}

// unmap unmaps the first bytes and frees the address range.
func (m *ipcMapped) unmap(bytes uintptr) error {
	dev := m.key.dev
	var err error
	if bytes > 0 {
		err = gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemUnmap(m.base, bytes) })
	}
	if err != nil {
		return err
	}
	return gpu.DeviceOf(dev).DoInTime(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemAddressFree(m.base, m.bytes) })
}
