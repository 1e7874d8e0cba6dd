package ddp

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
)

// A Gradient is the memory of a gradient: a memory.Slice, or a contiguous tensor.Tensor, whose
// shape a [Hook] can use.
type Gradient interface {
	Buffer() *memory.Buffer
	Offset() int
	Len() int
	DType() memory.DType
}

// A gradient is a Gradient as the reducer keeps it.
type gradient struct {
	buffer  *memory.Buffer
	offset  int // in bytes
	len     int
	dtype   memory.DType
	shape   []int
	dense   bool // without gaps
	address uint64
}

func gradientOf[G Gradient](x G) gradient {
	own := gradient{buffer: x.Buffer(), offset: x.Offset(), len: x.Len(), dtype: x.DType(), shape: []int{x.Len()}, dense: true}
	if t, ok := any(x).(interface {
		Shape() []int
		Contiguous() bool
	}); ok {
		own.shape, own.dense = t.Shape(), t.Contiguous()
	}
	if p, ok := any(x).(interface{ Ptr() uint64 }); ok {
		own.address = p.Ptr()
	}
	return own
}

// sliceOf returns the elements of x, whose type is T.
func sliceOf[T memory.Element](x *gradient) (memory.Slice[T], error) {
	if x.buffer == nil {
		return memory.Slice[T]{}, nil
	}
	return memory.View[T](x.buffer, x.offset, x.len)
}

func (x *gradient) bytes() int { return x.len * x.dtype.Size() }

// gradientsOf checks the gradients of the local ranks.
func gradientsOf[G Gradient](op string, g *comm.Group, grads [][]G) ([][]gradient, error) {
	if len(grads) != g.Locals() || len(grads[0]) == 0 {
		return nil, fmt.Errorf("ddp: %s: %d lists of gradients for %d local ranks: want one list with at least one gradient for each: %w",
			op, len(grads), g.Locals(), comm.ErrMismatch)
	}
	all := make([][]gradient, len(grads))
	for i, list := range grads {
		for _, x := range list {
			all[i] = append(all[i], gradientOf(x))
		}
		if err := checkGradients(op, g, i, all); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// checkGradients checks the gradients of a local rank.
func checkGradients(op string, g *comm.Group, local int, all [][]gradient) error {
	list := all[local]
	if !slices.Equal(lengths(list), lengths(all[0])) {
		return fmt.Errorf("ddp: %s: the gradients of local ranks 0 and %d have different lengths: %w", op, local, comm.ErrMismatch)
	}
	for j, x := range list {
		if err := mem.Check("ddp: "+op, x.buffer, x.len, g.Device(local)); err != nil {
			return unfit(fmt.Errorf("%w (gradient %d of local rank %d)", err, j, local))
		}
		switch first := &all[0][j]; {
		case x.dtype != first.dtype:
			return refuse(op, "gradient %d is %s on local rank 0 and %s on local rank %d: want the same type", j, first.dtype, x.dtype, local)
		case !slices.Equal(x.shape, first.shape):
			return refuse(op, "gradient %d has shape %v on local rank 0 and %v on local rank %d: want the same shape", j, first.shape, x.shape, local)
		case !x.dense:
			return refuse(op, "gradient %d of local rank %d has gaps between its elements: want contiguous memory", j, local)
		}
	}
	if a, b, shared := sharing(list); shared {
		return refuse(op, "gradients %d and %d of local rank %d share some memory: want each to be reduced once", a, b, local)
	}
	return nil
}

// sharing returns two gradients that share some memory, if there are any.
func sharing(xs []gradient) (a, b int, found bool) {
	var order []int
	for i, x := range xs {
		if x.len > 0 {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(xs[i].address, xs[j].address) })
	for k := 1; k < len(order); k++ {
		a, b = order[k-1], order[k]
		if xs[a].address+uint64(xs[a].bytes()) > xs[b].address {
			return min(a, b), max(a, b), true
		}
	}
	return 0, 0, false
}

func lengths(xs []gradient) []int {
	n := make([]int, len(xs))
	for i, x := range xs {
		n[i] = x.len
	}
	return n
}

func dtypes(xs []gradient) []memory.DType {
	ts := make([]memory.DType, len(xs))
	for i, x := range xs {
		ts[i] = x.dtype
	}
	return ts
}

func shapes(xs []gradient) [][]int {
	all := make([][]int, len(xs))
	for i, x := range xs {
		all[i] = x.shape
	}
	return all
}

// isFloat reports whether t is a float of 16 bits or more.
func isFloat(t memory.DType) bool { return element.IsFloat(t) && !element.IsFloat8(t) }

// compressible reports whether ReducerConfig.Compress applies to gradients of type t.
func compressible(t memory.DType) bool { return t == memory.Float32 || t == memory.Float64 }
