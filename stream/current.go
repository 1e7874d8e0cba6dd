package stream

import (
	"context"

	"github.com/gochorus/chorus/device"
)

type currentKey struct{ dev *device.Device }

// NewContext returns a context in which s is the current stream of its device,
// and that device the current one (device.Current), for code that wants torch's
// current stream (torch.cuda.stream). Other devices keep theirs, and who has the
// old context keeps the old one. A nil stream changes nothing.
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
