package ddp

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// contents are the memory of a bucket on the local ranks: its gradients, and the wire that the
// ranks reduce. nth counts the gradients of the bucket. The methods enqueue.
type contents interface {
	// put brings one gradient into the wire.
	put(s *stream.Stream, local, nth int) error
	// load brings the seen gradients into the wire, unless each is put by itself.
	load(s *stream.Stream, local int, seen []bool) error
	// unload brings the wire into the seen gradients, or into all if seen is nil.
	unload(s *stream.Stream, local int, seen []bool) error
	zero(s *stream.Stream, local, nth int) error
	// save copies a gradient that the wire is about to overwrite. It returns nil if the wire
	// is not the memory of the gradients.
	save(s *stream.Stream, local, nth int) (*memory.Buffer, error)
	// choose sets a gradient to the wire if used is not 0, and to the saved value if it is.
	choose(s *stream.Stream, local, nth int, used memory.Slice[uint8], saved *memory.Buffer) error
	scale(g *comm.Group, factors comm.Shards[float32]) error
	divide(g *comm.Group, by int) error
	reduce(g *comm.Group, op comm.Op) error
	// tensors returns the memory of the wire, by local rank.
	tensors() ([]tensor.Tensor, error)
	apart(local int) bool // each gradient is put by itself
	close() error
}

// holding are the contents of a bucket of type T.
type holding[T memory.Element] struct {
	bucket *bucket
	grads  [][]memory.Slice[T] // by local rank
	wholes []memory.Slice[T]   // by local rank: the memory over the gradients, or none if they lie apart
	wire   wire[T]
}

// newContents makes the contents of a bucket of the type T.
func newContents[T memory.Element](g *comm.Group, c *ReducerConfig, b *bucket, grads [][]gradient) (contents, error) {
	h := &holding[T]{bucket: b, wholes: make([]memory.Slice[T], len(grads)), grads: make([][]memory.Slice[T], len(grads))}
	for i, list := range grads {
		for _, j := range b.grads {
			x, err := sliceOf[T](&list[j])
			if err != nil {
				return nil, err
			}
			h.grads[i] = append(h.grads[i], x)
		}
		h.wholes[i], _ = adjacent[T](b, list)
	}
	var err error
	h.wire, err = newWire(g, c, h.wholes, b.len)
	return h, err
}

// contentsOf makes the contents of a bucket.
func contentsOf(g *comm.Group, c *ReducerConfig, b *bucket, grads [][]gradient) (contents, error) {
	switch b.dtype {
	case memory.Float32:
		return newContents[float32](g, c, b, grads)
	case memory.Float64:
		return newContents[float64](g, c, b, grads)
	case memory.Float16:
		return newContents[memory.Float16Bits](g, c, b, grads)
	case memory.BFloat16:
		return newContents[memory.BFloat16Bits](g, c, b, grads)
	case memory.Float8E4M3:
		return newContents[memory.Float8E4M3Bits](g, c, b, grads)
	case memory.Float8E5M2:
		return newContents[memory.Float8E5M2Bits](g, c, b, grads)
	case memory.Int8:
		return newContents[int8](g, c, b, grads)
	case memory.Uint8:
		return newContents[uint8](g, c, b, grads)
	case memory.Int16:
		return newContents[int16](g, c, b, grads)
	case memory.Uint16:
		return newContents[uint16](g, c, b, grads)
	case memory.Int32:
		return newContents[int32](g, c, b, grads)
	case memory.Uint32:
		return newContents[uint32](g, c, b, grads)
	case memory.Int64:
		return newContents[int64](g, c, b, grads)
	case memory.Uint64:
		return newContents[uint64](g, c, b, grads)
	case memory.Bool:
		return newContents[bool](g, c, b, grads)
	}
	return nil, fmt.Errorf("gradients of %s: want another type", b.dtype)
}

func (h *holding[T]) apart(local int) bool { return h.wholes[local].Buffer() == nil }

func (h *holding[T]) put(s *stream.Stream, local, nth int) error {
	if err := h.wire.record(s, local); err != nil {
		return err
	}
	return h.wire.put(s, local, h.bucket.at[nth], h.grads[local][nth])
}

func (h *holding[T]) load(s *stream.Stream, local int, seen []bool) error {
	if !h.apart(local) {
		if err := h.wholes[local].RecordStream(s); err != nil {
			return err
		}
		return h.runs(local, seen, func(at int, x memory.Slice[T]) error { return h.wire.put(s, local, at, x) })
	}
	for _, x := range h.grads[local] {
		if err := x.RecordStream(s); err != nil {
			return err
		}
	}
	return nil
}

func (h *holding[T]) unload(s *stream.Stream, local int, seen []bool) error {
	return h.runs(local, seen, func(at int, x memory.Slice[T]) error { return h.wire.get(s, local, at, x) })
}

// runs calls fn for the seen gradients, nil is all: for as many at once as lie together, in the
// memory and in the wire.
func (h *holding[T]) runs(local int, seen []bool, fn func(at int, x memory.Slice[T]) error) error {
	b, whole := h.bucket, h.wholes[local]
	for j := 0; j < len(b.grads); j++ {
		if seen != nil && !seen[b.grads[j]] {
			continue
		}
		at, x := b.at[j], h.grads[local][j]
		if !h.apart(local) {
			for j+1 < len(b.grads) && (seen == nil || seen[b.grads[j+1]]) {
				j++
			}
			x = whole.Slice(at, b.at[j]+h.grads[local][j].Len())
		}
		if err := fn(at, x); err != nil {
			return err
		}
	}
	return nil
}

func (h *holding[T]) zero(s *stream.Stream, local, nth int) error {
	return h.wire.zero(s, local, h.bucket.at[nth], h.grads[local][nth].Len())
}

func (h *holding[T]) save(s *stream.Stream, local, nth int) (*memory.Buffer, error) {
	if !h.wire.inPlace(local) {
		return nil, nil
	}
	x := h.grads[local][nth]
	old, err := memory.Make[T](s, x.Len())
	if err != nil {
		return nil, err
	}
	if err := memory.Copy(s, old, x); err != nil {
		return nil, errors.Join(err, old.Close())
	}
	return old.Buffer(), nil
}

func (h *holding[T]) choose(s *stream.Stream, local, nth int, used memory.Slice[uint8], saved *memory.Buffer) error {
	x := h.grads[local][nth]
	old := x
	if saved != nil {
		var err error
		if old, err = memory.View[T](saved, 0, x.Len()); err != nil {
			return err
		}
	}
	return h.wire.choose(s, local, h.bucket.at[nth], x, used, old)
}

func (h *holding[T]) scale(g *comm.Group, factors comm.Shards[float32]) error {
	return h.wire.scale(g, factors)
}

func (h *holding[T]) divide(g *comm.Group, by int) error { return h.wire.divide(g, by) }

func (h *holding[T]) reduce(g *comm.Group, op comm.Op) error { return h.wire.reduce(g, op) }

func (h *holding[T]) tensors() ([]tensor.Tensor, error) { return h.wire.tensors() }

func (h *holding[T]) close() error {
	if h.wire == nil {
		return nil
	}
	return h.wire.close()
}
