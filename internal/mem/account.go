package mem

import (
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
)

// A Use is memory of a device that a part of Chorus uses, or a library that it calls.
type Use struct {
	Owner  string
	Bytes  uint64
	Inside bool // the caching allocator has allocated it, and counts it too
}

// accounts are the functions that Account has added for a device.
type accounts struct {
	mu   sync.Mutex
	list []*func() (Use, bool)
}

var accountsKey kept.Key

func accountsOf(dev *device.Device) *accounts {
	return gpu.DeviceOf(dev).Local(&accountsKey, func() any { return &accounts{} }).(*accounts)
}

// Account lets Uses call fn until stop is called. An allocation that has failed may be the
// caller, so fn must not wait for the device or for locks that are held meanwhile, and must not
// allocate device memory. If fn cannot tell the use without waiting, it returns false.
func Account(dev *device.Device, fn func() (Use, bool)) (stop func()) {
	a, entry := accountsOf(dev), &fn
	a.mu.Lock()
	defer a.mu.Unlock()
	a.list = append(a.list, entry)
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.list = slices.DeleteFunc(a.list, func(e *func() (Use, bool)) bool { return e == entry })
	}
}

// Uses returns what the functions of Account tell of a device, in their order.
func Uses(dev *device.Device) (list []Use) {
	a := accountsOf(dev)
	a.mu.Lock()
	fns := slices.Clone(a.list)
	a.mu.Unlock()
	for _, fn := range fns {
		if u, ok := (*fn)(); ok && u.Bytes > 0 {
			list = append(list, u)
		}
	}
	return list
}
