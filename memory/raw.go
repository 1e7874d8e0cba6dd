package memory

import (
	"errors"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/stream"
)

// AllocRaw is Alloc without a Buffer: it returns the address of at least that many
// bytes, a multiple of 512, for work that is enqueued on s from now on
// (torch.cuda.caching_allocator_alloc). Where memory of that size was freed on s
// before, it asks neither the driver nor the garbage collector. The caller frees it
// with FreeRaw, and keeps s open until then. No bytes are no allocation: 0.
//
// It may be called by several goroutines; those with different streams do not wait
// for each other.
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
	if !s.Retain() { // the rest asks the driver about the stream
		return 0, s.Check("memory: allocate", nil)
	}
	g, err := l.alloc(bytes)
	return g.addr, errors.Join(err, s.Release())
}

// FreeRaw gives back what AllocRaw has returned on a stream of the device, in the
// order of that stream: what is on it by now may still use the memory
// (torch.cuda.caching_allocator_delete). The host does not wait. 0 is nothing to
// free. An address that was not allocated, or was freed, is a *PointerError.
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

// RecordStreamRaw is Buffer.RecordStream for memory of AllocRaw, of which ptr may
// be any address; s may be of another device.
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
	all := h.dev.System().Local(&heapsKey, func() any { return &heaps{} }).(*heaps)
	all.mu.Lock()
	defer all.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(all.list), func(o *heap) bool { return o == h })
}

// free gives an address back to who has given it out.
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
