package checkpoint

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// Weights are the tensors of a checkpoint on one rank, in one allocation, each at an address
// that is a multiple of 512 bytes.
type Weights struct {
	rank, ranks int
	slab        tensor.Tensor
	parts       map[string]*placed
	order       []*placed // the tensors of all ranks
}

func newWeights(l *local, ranks int, slab tensor.Tensor, tensors []*placed) *Weights {
	w := &Weights{rank: l.rank, ranks: ranks, slab: slab, parts: map[string]*placed{}, order: tensors}
	for _, t := range tensors {
		if t.cut.holds(l.rank) {
			w.parts[t.info.Name] = t
		}
	}
	return w
}

// Names returns the names of the rank's tensors, in the order of the files.
func (w *Weights) Names() []string {
	names := make([]string, 0, len(w.parts))
	for _, t := range w.order {
		if w.parts[t.info.Name] != nil {
			names = append(names, t.info.Name)
		}
	}
	return names
}

// Tensor returns the rank's part of a tensor, in the memory of the weights. To use it after
// Close, keep a Retain of the tensor.
func (w *Weights) Tensor(name string) (tensor.Tensor, error) {
	t, err := w.part(name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	return cutOut(w.slab, t.at[w.rank], t.to, t.cut.shapeOf(w.rank, t.info.Shape)...)
}

// Part returns the rank's part of a tensor: the range of a dimension, or -1 and an empty range
// if the rank has the whole tensor.
func (w *Weights) Part(name string) (dim int, r Range, err error) {
	t, err := w.part(name)
	if err != nil || t.cut.dim < 0 {
		return -1, Range{}, err
	}
	return t.cut.dim, t.cut.ranges[w.rank], nil
}

func (w *Weights) part(name string) (*placed, error) {
	t := w.parts[name]
	if t != nil {
		return t, nil
	}
	for _, o := range w.order {
		if o.info.Name == name {
			return nil, fmt.Errorf("checkpoint: weights: rank %d has no part of tensor %q: the plan gave it to others", w.rank, name)
		}
	}
	return nil, fmt.Errorf("checkpoint: weights: there is no tensor %q", name)
}

// Get returns the rank's part of a tensor as a slice of its elements, in the memory of the
// weights. The elements must be of type T. If a shape is given, the part must have it.
func Get[T memory.Element](w *Weights, name string, shape ...int) (memory.Slice[T], error) {
	x, err := w.Tensor(name)
	if err != nil {
		return memory.Slice[T]{}, err
	}
	if want := memory.DTypeOf[T](); x.DType() != want {
		return memory.Slice[T]{}, fmt.Errorf("checkpoint: weights: tensor %q is of type %s: want %s", name, x.DType(), want)
	}
	if len(shape) > 0 && !slices.Equal(shape, x.Shape()) {
		return memory.Slice[T]{}, fmt.Errorf("checkpoint: weights: tensor %q has shape %v: want %v", name, x.Shape(), shape)
	}
	return tensor.Slice[T](x)
}

// Bytes returns the size of the rank's memory, with its padding.
func (w *Weights) Bytes() int { return w.slab.Bytes() }

// Close frees the memory in the order of the stream that loaded it: the group's, or the stream
// of LoadOn. It is idempotent and safe on nil.
func (w *Weights) Close() error {
	if w == nil {
		return nil
	}
	return w.slab.Close()
}
