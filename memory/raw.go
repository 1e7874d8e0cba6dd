package memory

import (
	"errors"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// AllocRaw is Alloc without a Buffer: it returns the address of at least that many
// bytes, rounded up to a multiple of 512, for operations that are enqueued on s from
// now on (torch.cuda.caching_allocator_alloc). If memory of that size was freed on s
// before, it neither calls the driver nor allocates Go memory. The caller frees it
// with FreeRaw and keeps s open until then. For 0 bytes it returns 0.
//
// It may be called by several goroutines. Goroutines that use different streams do not
// wait for each other.
func AllocRaw(s *stream.Stream, bytes int) (ptr uint64, err error) {
	l, err := laneOf("memory: allocate", s)
	if err != nil {
		return 0, err
	}
	if a := l.plain(); a != nil && bytes > 0 {
		if ptr, err = a.Alloc(uint64(bytes)); err != nil {
			return 0, l.heap.explain(bytes, err)
		}
		return ptr, nil
	}
	if !gpu.StreamOf(s).Retain() { // the following calls query the stream
		return 0, gpu.CheckStream("memory: allocate", s, nil)
	}
	g, err := l.alloc(bytes)
	return g.addr, errors.Join(err, gpu.StreamOf(s).Release())
}

// FreeRaw frees memory that AllocRaw has returned on a stream of the device, in the
// order of that stream: operations already enqueued on it may still use the memory
// (torch.cuda.caching_allocator_delete). The host does not wait. FreeRaw of 0 does
// nothing. If the address is not allocated, the error is a *PointerError.
func FreeRaw(d *device.Device, ptr uint64) error {
	h, err := heapOf(d)
	if err != nil || ptr == 0 {
		return err
	}
	if err := h.free(ptr); err != nil {
		return h.pointer("free", ptr, err)
	}
	return nil
}

// RecordStreamRaw is Buffer.RecordStream for memory of AllocRaw. ptr may be any address
// within the memory. s may be on another device.
func RecordStreamRaw(ptr uint64, s *stream.Stream) error {
	l, err := laneOf("memory: record stream", s)
	if err != nil {
		return err
	}
	defer l.heap.tidy()
	err = l.heap.owner(ptr).RecordStream(ptr, l)
	if err == nil {
		return nil
	}
	for _, h := range l.heap.others() {
		if h.owner(ptr).RecordStream(ptr, l) == nil {
			return nil
		}
	}
	return l.heap.pointer("record stream", ptr, err)
}

// others returns the heaps of the System's other devices.
func (h *heap) others() []*heap {
	all := gpu.DeviceOf(h.dev).System().Local(&heapsKey, func() any { return &heaps{} }).(*heaps)
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(all.list), func(o *heap) bool { return o == h })
}

// free frees an address through the engine that allocated it.
func (h *heap) free(ptr uint64) error {
	err := h.native.Free(ptr)
	h.tidy()
	if err == nil {
		return nil
	}
	if o := h.owner(ptr); o != freer(h.native) {
		return o.Free(ptr)
	}
	return err
}
