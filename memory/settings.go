package memory

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// The names of the backends in the options.
const (
	backendNative = "native"
	backendAsync  = "cudaMallocAsync"
)

// options are the options of all devices, nil before their first use.
var options = new(atomic.Pointer[alloc.Settings])

// optionsText is the text of the options. It is stored before them.
var optionsText atomic.Pointer[string]

// environment reads the options from the environment, unless SetAllocatorSettings was
// called before.
var environment = sync.OnceValue(func() error {
	v := env.AllocConf
	if !v.IsSet() {
		if v = env.TorchAcceleratorAllocConf; !v.IsSet() {
			v = env.TorchAllocConf
		}
	}
	text := v.Value()
	s, err := alloc.ParseSettings(text)
	if err != nil {
		return fmt.Errorf("memory: %s: %w", v.Name, err)
	}
	optionsText.CompareAndSwap(nil, &text)
	options.CompareAndSwap(nil, &s)
	return nil
})

// settings returns the options. The error reports invalid options in the environment.
func settings() (alloc.Settings, error) {
	if s := options.Load(); s != nil {
		return *s, nil
	}
	if err := environment(); err != nil {
		return alloc.Settings{}, err
	}
	return *options.Load(), nil
}

// SetAllocatorSettings changes the options of the allocators, in torch's format, such
// as "max_split_size_mb:128,expandable_segments:True", for later allocations
// (torch.cuda.memory._set_allocator_settings). Options that the text does not name get
// their defaults. The backend changes only for devices that this package has not used
// yet. If it fails, the options do not change. It may be called at any time.
func SetAllocatorSettings(conf string) error {
	s, err := alloc.ParseSettings(conf)
	if err != nil {
		return fmt.Errorf("memory: set the allocator's options: %w", err)
	}
	optionsText.Store(&conf)
	options.Store(&s)
	return nil
}

// Backend returns the name of the device's allocator: "native", "cudaMallocAsync", or
// "pluggable" for an allocator of ChangeAllocator (torch.cuda.get_allocator_backend).
func Backend(d *device.Device) (string, error) {
	h, err := heapOf(d)
	if err != nil {
		return "", err
	}
	if _, ok := h.async(); ok {
		return backendAsync, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.cached != nil {
		return "pluggable", nil
	}
	return backendNative, nil
}
