package rng

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// Param is the type of a parameter for elements of T: one number for all elements, or a slice of
// floating-point numbers in device memory. A slice has a number for each element, or one number
// for all elements. The fill reads it in the order of the stream. The package documentation says
// when a slice may share memory with the filled slice.
type Param[T memory.Element] interface {
	int | float64 | memory.Slice[T] | // if T is Float
		memory.Slice[memory.Float16Bits] | memory.Slice[memory.BFloat16Bits] | memory.Slice[float32] | memory.Slice[float64]
}

// A param is a number or a slice.
type param struct {
	number float64
	at     kernel.Arg
	dtype  memory.DType // of the slice; Invalid for a number
	n      int
	ptr    uint64
	buffer *memory.Buffer
}

func (p *param) isSlice() bool { return p.dtype != memory.Invalid }

func paramOf[T memory.Element, P Param[T]](v P) param {
	switch v := any(v).(type) {
	case int:
		return param{number: float64(v), at: kernel.Address(0)}
	case float64:
		return param{number: v, at: kernel.Address(0)}
	case memory.Slice[memory.Float16Bits]:
		return sliceParam(v)
	case memory.Slice[memory.BFloat16Bits]:
		return sliceParam(v)
	case memory.Slice[float32]:
		return sliceParam(v)
	case memory.Slice[float64]:
		return sliceParam(v)
	}
	return sliceParam(any(v).(memory.Slice[T])) // not of floating-point numbers: check returns an error
}

func sliceParam[T memory.Element](x memory.Slice[T]) param {
	return param{at: kernel.Ptr(x), dtype: memory.DTypeOf[T](), n: x.Len(), ptr: x.Ptr(), buffer: x.Buffer()}
}

// check validates a slice as the parameter of a fill of out on a device. inPlace says whether the
// slice may be out itself.
func (p *param) check(op, name string, out region, inPlace bool, dev *device.Device) error {
	if !p.isSlice() {
		return nil
	}
	if formats[p.dtype].digits == 0 {
		return fmt.Errorf("%s: %s is a slice of %s: want a slice of floating-point numbers", op, name, p.dtype)
	}
	if p.n != out.n && p.n != 1 {
		return fmt.Errorf("%s: %s has %d elements: want 1, or %d as the result", op, name, p.n, out.n)
	}
	if err := mem.Check(op, p.buffer, p.n, dev); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return apart(op, region{name, p.dtype, p.ptr, p.n}, out, inPlace)
}

// step returns the distance of the numbers of adjacent elements.
func (p *param) step() int32 {
	if p.isSlice() && p.n != 1 {
		return 1
	}
	return 0
}

// paramTypes are the four arguments of a kernel that are a parameter.
var paramTypes = []kernel.Param{kernel.Pointer, kernel.F64, kernel.I32, kernel.I32}

func (p *param) type32() kernel.Arg { return kernel.Scalar(int32(p.dtype)) }

// A hostParam is a parameter in a stand-in.
type hostParam struct {
	at     func(i int) float64
	dtype  memory.DType
	number bool
}

// readParam reads the parameter of n elements from argument i and the next three.
func readParam(c *kernel.Call, i, n int) hostParam {
	p := hostParam{dtype: memory.DType(kernel.Get[int32](c, i+2))}
	step := int(kernel.Get[int32](c, i+3))
	if step == 0 {
		n = 1
	}
	switch {
	case c.Address(i) == 0:
		v := kernel.Get[float64](c, i+1)
		p.number, p.at = true, func(int) float64 { return v }
	case p.dtype == memory.Float16:
		x := kernel.Read[memory.Float16Bits](c, i, n)
		p.at = func(k int) float64 { return fromHalf(x[k*step]) }
	case p.dtype == memory.BFloat16:
		x := kernel.Read[memory.BFloat16Bits](c, i, n)
		p.at = func(k int) float64 { return fromBFloat(x[k*step]) }
	case p.dtype == memory.Float32:
		x := kernel.Read[float32](c, i, n)
		p.at = func(k int) float64 { return float64(x[k*step]) }
	default:
		x := kernel.Read[float64](c, i, n)
		p.at = func(k int) float64 { return x[k*step] }
	}
	return p
}
