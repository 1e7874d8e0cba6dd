package stream

import (
	"context"

	"github.com/gochorus/chorus/device"
)

type currentKey struct{ dev *device.Device }

// NewContext returns a context with s as the current stream of its device, and with this
// device as the current device (device.Current), for code that uses torch's current stream
// (torch.cuda.stream). The current streams of other devices, and the parent context, do
// not change. If s is nil, NewContext returns ctx.
func NewContext(ctx context.Context, s *Stream) context.Context {
	if s == nil {
		return ctx
	}
	return context.WithValue(device.NewContext(ctx, s.dev), currentKey{s.dev}, s)
}

// Current returns the stream that NewContext made current for dev, or else its
// Default (torch.cuda.current_stream).
func Current(ctx context.Context, dev *device.Device) *Stream {
	if s, ok := ctx.Value(currentKey{dev}).(*Stream); ok {
		return s
	}
	return Default(dev)
}
