package memory

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/stream"
)

// The sizes are those of torch's allocator.
const (
	minBlock     = 512
	smallMost    = 1 << 20  // blocks up to this come from small segments
	smallSegment = 2 << 20  //
	largeSegment = 20 << 20 // for blocks that are not huge
	hugeLeast    = 10 << 20 // blocks from this on have a segment of their own
	hugeRound    = 2 << 20
)

func roundUp(n, to uintptr) uintptr { return (n + to - 1) / to * to }

// segmentFor returns the size of the segment that is made for n bytes.
func segmentFor(n uintptr) uintptr {
	switch {
	case n <= smallMost:
		return smallSegment
	case n < hugeLeast:
		return largeSegment
	}
	return roundUp(n, hugeRound)
}

// A segment is one allocation of the driver, divided into blocks.
type segment struct {
	pool  *Pool
	dev   *device.Device
	ptr   cudadrv.DevicePtr
	bytes uintptr
	first *block
}

func newSegment(p *Pool, dev *device.Device, bytes uintptr) (*segment, error) {
	s := &segment{pool: p, dev: dev, bytes: bytes}
	err := dev.DoRelaxed("cuMemAlloc", func(drv cudadrv.Driver) (r cudadrv.Result) {
		s.ptr, r = drv.MemAlloc(bytes)
		return r
	})
	if errors.Is(err, device.ErrorOutOfMemory) {
		return nil, outOfMemory(dev, bytes, err)
	}
	if err != nil {
		return nil, fmt.Errorf("memory: allocate a segment of %d bytes: %w", bytes, err)
	}
	s.first = &block{segment: s, ptr: s.ptr, bytes: bytes}
	return s, nil
}

func (s *segment) small() bool { return s.bytes == smallSegment }

// forgetStreams lets every stream use what is free.
func (s *segment) forgetStreams() {
	for b := s.first; b != nil; b = b.next {
		if !b.used {
			b.stream = nil
		}
	}
	for b := s.first; b != nil; b = b.next {
		for b.joins(b.next) {
			b.swallow()
		}
	}
}

// A block is a part of a segment: the memory of a Buffer, or free.
type block struct {
	segment    *segment
	ptr        cudadrv.DevicePtr
	bytes      uintptr
	used       bool
	stream     *stream.Stream // the only one that may use it while it is free; nil is any
	prev, next *block         // its neighbours in the segment
}

func (b *block) usable(s *stream.Stream, n uintptr) bool {
	return !b.used && b.bytes >= n && (b.stream == nil || b.stream == s)
}

// split cuts b down to n bytes where the rest is worth a block.
func (b *block) split(n uintptr) {
	least := uintptr(minBlock)
	if !b.segment.small() {
		least = smallMost + 1
	}
	if b.bytes-n < least {
		return
	}
	rest := &block{segment: b.segment, ptr: b.ptr + cudadrv.DevicePtr(n), bytes: b.bytes - n, stream: b.stream, prev: b, next: b.next}
	if b.next != nil {
		b.next.prev = rest
	}
	b.next, b.bytes = rest, n
}

// merge joins b with the neighbours that are free for the same stream.
func (b *block) merge() {
	if b.prev != nil && b.prev.joins(b) {
		b = b.prev
		b.swallow()
	}
	if b.joins(b.next) {
		b.swallow()
	}
}

func (b *block) joins(o *block) bool {
	return o != nil && !b.used && !o.used && b.stream == o.stream
}

// swallow makes the next block part of b.
func (b *block) swallow() {
	b.bytes += b.next.bytes
	b.next = b.next.next
	if b.next != nil {
		b.next.prev = b
	}
}
