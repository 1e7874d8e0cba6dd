package optim

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A Param is a parameter and its gradient: contiguous tensors of the same length on one
// device. No other tensor of the optimiser shares memory with a value or a copy. The gradient
// has the type of the value, or is float16 or bfloat16 beside a float32 value.
type Param struct {
	Value, Grad tensor.Tensor
	// Copy is a float16 or bfloat16 tensor of the same length for models that compute with it:
	// the constructor of the optimiser and every step set it to the rounded value. The zero
	// Tensor means none.
	Copy tensor.Tensor

	err error // of Of
}

// Of returns the parameter of two slices. If their lengths differ or a slice is closed,
// the constructor of the optimiser returns the error.
func Of[T memory.Element](value, grad memory.Slice[T]) Param {
	v, errV := tensor.Of(value, value.Len())
	if errV != nil {
		errV = fmt.Errorf("value: %w", errV)
	}
	g, errG := tensor.Of(grad, grad.Len())
	if errG != nil {
		errG = fmt.Errorf("gradient: %w", errG)
	}
	return Param{Value: v, Grad: g, err: errors.Join(errV, errG)}
}

// A Group is parameters with the same options (torch's param_groups).
type Group struct {
	Params      []Param
	LR          float64  // 0 means the configuration's
	WeightDecay *float64 // nil means the configuration's
}

// check returns an error if the parameter cannot be updated on dev.
func (p *Param) check(op string, group, i int, dev *device.Device) error {
	fail := func(format string, args ...any) error {
		return refuse(op, "parameter %d of group %d: "+format, append([]any{i, group}, args...)...)
	}
	if p.err != nil {
		return fail("%w", p.err)
	}
	if err := checkTensor(p.Value, dev); err != nil {
		return fail("value: %w", err)
	}
	if err := checkTensor(p.Grad, dev); err != nil {
		return fail("gradient: %w", err)
	}
	n, v, g := p.Value.Len(), p.Value.DType(), p.Grad.DType()
	switch {
	case p.Grad.Len() != n:
		return fail("%d elements with a gradient of %d: want as many", n, p.Grad.Len())
	case g != v && (v != memory.Float32 || g != memory.Float16 && g != memory.BFloat16):
		return fail("%s with a gradient of %s: want the same type, or float16 or bfloat16 beside float32", v, g)
	case p.Copy.DType() == memory.Invalid:
		return nil
	}
	if err := checkTensor(p.Copy, dev); err != nil {
		return fail("copy: %w", err)
	}
	if c := p.Copy.DType(); c != memory.Float16 && c != memory.BFloat16 || p.Copy.Len() != n {
		return fail("a copy of %d %s elements beside %d: want as many of float16 or bfloat16", p.Copy.Len(), c, n)
	}
	return nil
}

// checkTensor returns an error if kernels on dev cannot work on x.
func checkTensor(x tensor.Tensor, dev *device.Device) error {
	switch {
	case x.DType() == memory.Invalid:
		return fmt.Errorf("there is no tensor")
	case x.IsHost():
		return fmt.Errorf("%s: want memory of a device", x)
	case !x.Contiguous():
		return fmt.Errorf("%s has gaps between its elements: want contiguous memory", x)
	}
	switch x.DType() {
	case memory.Float16, memory.BFloat16, memory.Float32, memory.Float64:
		return mem.Check("optim", x.Buffer(), x.Len(), dev)
	}
	return fmt.Errorf("%s: want float16, bfloat16, float32 or float64", x)
}
