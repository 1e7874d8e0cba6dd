package memory

import (
	"fmt"

	"github.com/gochorus/chorus/device"
)

// ChangeAllocator makes a the allocator of all memory of the device that is neither in
// a Pool nor allocated by a capture. Each block is one call of a, and freed memory is
// not cached (torch.cuda.memory.change_current_allocator). ChangeAllocator fails after
// the first allocation on the device. It may be called by any goroutine.
func ChangeAllocator(d *device.Device, a Allocator) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	if a == nil {
		return fmt.Errorf("memory: change the allocator of %s: no allocator given", d)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.used {
		return fmt.Errorf("memory: change the allocator of %s: memory was allocated already: change it before the first allocation", d)
	}
	h.cached = h.uncached(a)
	h.engine.Store(h.cached)
	return nil
}

// EnableCaching switches the caching of freed memory off or on, for memory that is not
// in a Pool (torch.cuda.caching_allocator_enable). Without caching, each block is an
// allocation of the driver and freeing it waits for the device, which helps to find
// memory errors. Memory allocated before the call is freed as it was allocated.
func EnableCaching(d *device.Device, on bool) error {
	h, err := heapOf(d)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if on {
		h.engine.Store(h.cached)
		return nil
	}
	if h.plain == nil {
		h.plain = h.uncached(Driver)
	}
	h.engine.Store(h.plain)
	return nil
}
