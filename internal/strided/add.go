package strided

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Add enqueues dst = a + b on s, for arrays of one shape on the device of s; see
// tensor.Add.
func Add(s *stream.Stream, dst, a, b Array) error {
	const op = "tensor: add"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	for _, x := range []*Array{&dst, &a, &b} {
		if err := x.Check(op, s.Device()); err != nil {
			return err
		}
		if !slices.Equal(x.Shape, dst.Shape) {
			return fmt.Errorf("%s: %s and %s to %s: want one shape", op, a, b, dst)
		}
	}
	sum, err := kernel.Promote(a.DType, b.DType)
	if err == nil && !kernel.CanCast(sum, dst.DType) {
		err = fmt.Errorf("the sum is of %s and cannot be cast to %s", sum, dst.DType)
	}
	if err == nil && dst.Repeats() {
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

// add adds arrays with one common dense layout; it packs arrays with other layouts.
func add(s *stream.Stream, dst, a, b Array) (err error) {
	strides := LikeStrides(dst.Shape, dst.Strides)
	pack := func(x Array, fill bool) (p Array, packed bool, err error) {
		as := x.DType
		if element.IsFloat8(as) {
			as = memory.Float32
		}
		if as == x.DType && sameOrder(x.Shape, x.Strides, strides) {
			return x.Borrow(), false, nil
		}
		p, err = Make(s, as, x.Shape, strides)
		if err == nil && fill {
			err = Copy(s, p, x)
		}
		return p, true, err
	}
	out, packed, errOut := pack(dst, false)
	x, _, errX := pack(a, true)
	y, _, errY := pack(b, true)
	defer func() { err = errors.Join(err, out.Close(), x.Close(), y.Close()) }()
	if err := errors.Join(errOut, errX, errY); err != nil {
		return err
	}
	f, err := adder()
	if err != nil {
		return err
	}
	if err := f.Launch(s, operandsOf[out.DType].out(&out), operandsOf[x.DType].in(&x), operandsOf[y.DType].in(&y)); err != nil {
		return fmt.Errorf("tensor: add: %w", err)
	}
	if packed {
		return Copy(s, dst, out)
	}
	return nil
}

// adder returns the element-wise function, which exists until the process ends.
var adder = sync.OnceValues(func() (*kernel.Elementwise, error) {
	return kernel.NewElementwise("x + y", &kernel.ElementwiseConfig{
		Inputs: []string{"x", "y"},
		Floats: func(in, out []float64) { out[0] = in[0] + in[1] },
		Ints:   func(in, out []int64) { out[0] = in[0] + in[1] },
	})
})

// operandsOf converts dense tensors to operands, for each type that can be added.
var operandsOf = map[memory.DType]operands{
	memory.Bool: typed[bool]{}, memory.Int8: typed[int8]{}, memory.Uint8: typed[uint8]{},
	memory.Int16: typed[int16]{}, memory.Uint16: typed[uint16]{}, memory.Int32: typed[int32]{},
	memory.Uint32: typed[uint32]{}, memory.Int64: typed[int64]{}, memory.Uint64: typed[uint64]{},
	memory.Float16: typed[memory.Float16Bits]{}, memory.BFloat16: typed[memory.BFloat16Bits]{},
	memory.Float32: typed[float32]{}, memory.Float64: typed[float64]{},
}

type operands interface {
	in(x *Array) kernel.Operand
	out(x *Array) kernel.Operand
}

type typed[T memory.Element] struct{}

// The view uses the array's own memory and type, so View cannot fail.
func (typed[T]) in(x *Array) kernel.Operand {
	v, _ := memory.View[T](x.Buffer(), x.Offset, x.Len())
	return kernel.In(v)
}

func (typed[T]) out(x *Array) kernel.Operand {
	v, _ := memory.View[T](x.Buffer(), x.Offset, x.Len())
	return kernel.Out(v)
}
