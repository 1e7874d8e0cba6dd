package memory

import (
	"fmt"

	"github.com/gochorus/chorus/device"
)

// ChangeAllocator makes a the one that all memory of the device comes from which is
// in no pool and not captured, block by block: nothing is cached any more
// (torch.cuda.memory.change_current_allocator). It is an error after the first
// allocation. It may be called by any goroutine.
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

// EnableCaching turns the caching of freed memory off and on again, for what is in
// no pool (torch.cuda.caching_allocator_enable). Without it each block is one of
// the driver's, and freeing it waits for the device: for finding faults. What was
// allocated before is freed as it was allocated.
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
