package kern

import (
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
)

// A PerDevice has one value for each device, such as a struct of kernels. The zero PerDevice
// is ready to use.
type PerDevice[T any] struct{ key kept.Key }

type loading[T any] struct {
	once  sync.Once
	value T
	err   error
}

// Of returns the value of dev. The first call loads it, and all calls return its error.
func (p *PerDevice[T]) Of(dev *device.Device, load func(*T, *device.Device) error) (*T, error) {
	l := gpu.DeviceOf(dev).Local(&p.key, func() any { return new(loading[T]) }).(*loading[T])
	l.once.Do(func() { l.err = load(&l.value, dev) })
	return &l.value, l.err
}
