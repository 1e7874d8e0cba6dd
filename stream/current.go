package stream

import (
	"context"

	"github.com/gochorus/chorus/device"
)

type currentKey struct{ dev *device.Device }

// NewContext returns a context in which s is the current stream of its device,
// and that device the current one (device.Current), for code that wants torch's
// current stream (torch.cuda.stream).
func NewContext(ctx context.Context, s *Stream) context.Context {
	return context.WithValue(device.NewContext(ctx, s.dev), currentKey{s.dev}, s)
}

// Current returns the stream that NewContext made current for dev, or nil.
func Current(ctx context.Context, dev *device.Device) *Stream {
	s, _ := ctx.Value(currentKey{dev}).(*Stream)
	return s
}
