package memory

import (
	"maps"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
)

// mappedPages has the physical memory that is mapped at each address of a device, in
// pages of one size. The code that maps and unmaps pages reports to it, so that
// IPCHandle can export the pages. They are created with cudadrv.MemHandlePosixFD.
type mappedPages struct {
	mu    sync.RWMutex
	bytes uint64 // of a page
	at    map[uint64]cudadrv.MemHandle
}

var pagesKey kept.Key

func pagesOf(d *device.Device) *mappedPages {
	return gpu.DeviceOf(d).Local(&pagesKey, func() any { return &mappedPages{at: map[uint64]cudadrv.MemHandle{}} }).(*mappedPages)
}

// mapped records a page of the given size at its address.
func (m *mappedPages) mapped(addr, bytes uint64, h cudadrv.MemHandle) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes = bytes
	m.at[addr] = h
}

// unmapped removes the pages of a range.
func (m *mappedPages) unmapped(addr, bytes uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bytes == 0 {
		return
	}
	for at := addr; at-addr < bytes; at += m.bytes {
		delete(m.at, at)
	}
}

// addresses returns the addresses of all pages.
func (m *mappedPages) addresses() []uint64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return slices.Collect(maps.Keys(m.at))
}

// find returns the consecutive pages that contain a range of addresses, and the address
// of the first page. It returns none if the range is plain memory.
func (m *mappedPages) find(addr, bytes uint64) (first, page uint64, handles []cudadrv.MemHandle) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.bytes == 0 || bytes == 0 {
		return 0, 0, nil
	}
	first = addr &^ (m.bytes - 1)
	for at := first; at < addr+bytes; at += m.bytes {
		h, ok := m.at[at]
		if !ok {
			return 0, 0, nil
		}
		handles = append(handles, h)
	}
	return first, m.bytes, handles
}
