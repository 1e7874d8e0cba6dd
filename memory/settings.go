package memory

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/alloc"
	"github.com/gochorus/chorus/internal/env"
)

// The names of the backends, in the options.
const (
	backendNative = "native"
	backendAsync  = "cudaMallocAsync"
)

// options are those of all devices. They are not there before the first use.
var options = new(atomic.Pointer[alloc.Settings])

// optionsText is what they were read from. It is there before they are.
var optionsText atomic.Pointer[string]

// environment takes the options that the process was started with, unless others
// were set before.
var environment = sync.OnceValue(func() error {
	v := env.AllocConf
	if !v.IsSet() {
		v = env.TorchAllocConf
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

// settings returns the options. The error is a mistake in the environment.
func settings() (alloc.Settings, error) {
	if s := options.Load(); s != nil {
		return *s, nil
	}
	if err := environment(); err != nil {
		return alloc.Settings{}, err
	}
	return *options.Load(), nil
}

// SetAllocatorSettings changes the options of the allocators, in torch's form, such
// as "max_split_size_mb:128,expandable_segments:True", for all that is allocated
// from then on (torch.cuda.memory._set_allocator_settings). What the text does not
// name has its default. The backend changes only for devices that this package was
// not used on yet. After an error the options are as they were. It may be called at
// any time.
func SetAllocatorSettings(conf string) error {
	s, err := alloc.ParseSettings(conf)
	if err != nil {
		return fmt.Errorf("memory: set the allocator's options: %w", err)
	}
	optionsText.Store(&conf)
	options.Store(&s)
	return nil
}

// Backend returns the name of the allocator that the device's memory comes from:
// "native", "cudaMallocAsync", or "pluggable" for one of ChangeAllocator
// (torch.cuda.get_allocator_backend).
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
