package mem

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/stream"
)

// A Buffer is one allocation of device memory.
type Buffer struct {
	Owner  handle.Owner
	Stream *stream.Stream // orders the allocation and the free
}

// A BufferRef has a Buffer. The public type embeds it.
type BufferRef struct{ b Buffer }

func (r *BufferRef) buffer() *Buffer { return &r.b }

// HasBuffer is implemented by the public type that embeds a BufferRef.
type HasBuffer interface{ buffer() *Buffer }

// BufferOf returns the Buffer of a public one, which is not nil.
func BufferOf(x HasBuffer) *Buffer { return x.buffer() }

// A Pointer is a pointer to a public buffer, which may be nil.
type Pointer interface {
	comparable
	HasBuffer
}

// OpenOn reports whether x is an open buffer in the memory of dev.
func OpenOn[P Pointer](x P, dev *device.Device) bool {
	var none P
	if x == none {
		return false
	}
	b := x.buffer()
	return b.Stream.Device() == dev && !b.Owner.Closed()
}

// Check returns an error if an operation on dev cannot use n elements of x: the buffer is
// closed, or dev is not nil and another device. A slice of 0 elements needs no buffer.
func Check[P Pointer](op string, x P, n int, dev *device.Device) error {
	var none P
	if x == none {
		if n == 0 {
			return nil
		}
		return fmt.Errorf("%s: a slice without memory", op)
	}
	b := x.buffer()
	on := b.Stream.Device()
	if b.Owner.Closed() {
		return fmt.Errorf("%s: %d elements on %s: %w", op, n, on, device.ErrClosed)
	}
	if dev != nil && on != dev {
		return fmt.Errorf("%s: the buffer is of %s, the operation runs on %s", op, on, dev)
	}
	return nil
}
