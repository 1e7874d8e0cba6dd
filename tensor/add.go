package tensor

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Add enqueues dst = a + b on s (torch.add with out), for tensors of one shape on the
// device of s. The sum is of the type that torch promotes a and b to, in float for
// the 16-bit floats, and is rounded to the type of dst, which must not be of a lower
// category; bools are or-ed. 8-bit floats, which torch does not add, are added in
// float and rounded. dst may be a or b.
func Add(s *stream.Stream, dst, a, b Tensor) error {
	const op = "tensor: add"
	if err := s.Check(op, nil); err != nil {
		return err
	}
	for _, t := range []Tensor{dst, a, b} {
		if err := t.Check(op, s.Device()); err != nil {
			return err
		}
		if !slices.Equal(t.shape, dst.shape) {
			return fmt.Errorf("%s: %s and %s to %s: want one shape", op, a, b, dst)
		}
	}
	sum, err := kernel.Promote(a.dtype, b.dtype)
	if err == nil && !kernel.CanCast(sum, dst.dtype) {
		err = fmt.Errorf("the sum is of %s and cannot be cast to %s", sum, dst.dtype)
	}
	if err == nil && dst.repeats() {
		err = fmt.Errorf("several elements of the destination have one place")
	}
	if err != nil {
		return fmt.Errorf("%s: %s and %s to %s: %w", op, a, b, dst, err)
	}
	if dst.Len() == 0 {
		return nil
	}
	return add(s, dst, a, b)
}

// add adds what has one dense layout; all else is packed.
func add(s *stream.Stream, dst, a, b Tensor) (err error) {
	strides := likeStrides(dst.shape, dst.strides)
	pack := func(t Tensor, fill bool) (Tensor, error) {
		as := t.dtype
		if element.IsFloat8(as) {
			as = memory.Float32
		}
		if as == t.dtype && oneLayout(t.shape, t.strides, strides) {
			t.ref = nil
			return t, nil
		}
		p, err := makeStrided(s, as, t.shape, strides)
		if err == nil && fill {
			err = local(s, p, t)
		}
		return p, err
	}
	out, errOut := pack(dst, false)
	x, errX := pack(a, true)
	y, errY := pack(b, true)
	defer func() { err = errors.Join(err, out.Close(), x.Close(), y.Close()) }()
	if err := errors.Join(errOut, errX, errY); err != nil {
		return err
	}
	f, err := adder()
	if err != nil {
		return err
	}
	if err := f.Launch(s, operandsOf[out.dtype].out(out), operandsOf[x.dtype].in(x), operandsOf[y.dtype].in(y)); err != nil {
		return fmt.Errorf("tensor: add: %w", err)
	}
	if out.ref == nil {
		return nil
	}
	return local(s, dst, out)
}

// oneLayout reports whether the elements lie in the order of other strides, which
// are dense.
func oneLayout(shape, strides, as []int) bool {
	loops, empty := loopsOf(shape, as, strides)
	return empty || flat(loops)
}

// adder returns the element-wise function, which lives as long as the process.
var adder = sync.OnceValues(func() (*kernel.Elementwise, error) {
	return kernel.NewElementwise("x + y", &kernel.ElementwiseConfig{
		Inputs: []string{"x", "y"},
		Floats: func(in, out []float64) { out[0] = in[0] + in[1] },
		Ints:   func(in, out []int64) { out[0] = in[0] + in[1] },
	})
})

// operandsOf makes operands of dense tensors, for each type that has sums.
var operandsOf = map[memory.DType]operands{
	memory.Bool: typed[bool]{}, memory.Int8: typed[int8]{}, memory.Uint8: typed[uint8]{},
	memory.Int16: typed[int16]{}, memory.Uint16: typed[uint16]{}, memory.Int32: typed[int32]{},
	memory.Uint32: typed[uint32]{}, memory.Int64: typed[int64]{}, memory.Uint64: typed[uint64]{},
	memory.Float16T: typed[memory.Float16]{}, memory.BFloat16T: typed[memory.BFloat16]{},
	memory.Float32: typed[float32]{}, memory.Float64: typed[float64]{},
}

type operands interface {
	in(t Tensor) kernel.Operand
	out(t Tensor) kernel.Operand
}

type typed[T memory.Element] struct{}

// The view is one of the tensor's own memory and type, which View does not refuse.
func (typed[T]) in(t Tensor) kernel.Operand {
	x, _ := memory.View[T](t.mem.buf, t.off, t.Len())
	return kernel.In(x)
}

func (typed[T]) out(t Tensor) kernel.Operand {
	x, _ := memory.View[T](t.mem.buf, t.off, t.Len())
	return kernel.Out(x)
}
