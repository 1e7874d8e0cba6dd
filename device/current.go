package device

import "context"

type currentKey struct{}

// NewContext returns a context with dev as the current device, for code that uses torch's
// current device (torch.cuda.device). It does not affect the thread and creates no
// CUDA context. stream.NewContext makes its stream's device current too.
func NewContext(ctx context.Context, dev *Device) context.Context {
	return context.WithValue(ctx, currentKey{}, dev)
}

// Current returns the device that NewContext made current, or nil if there is none.
// torch.cuda.current_device would return the first device then.
func Current(ctx context.Context) *Device {
	d, _ := ctx.Value(currentKey{}).(*Device)
	return d
}
