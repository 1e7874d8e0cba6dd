package kernel

import (
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
)

// An Operand is an argument of an Elementwise: an input, an output, a single number for an
// input, or a value for a named parameter.
type Operand struct {
	role  role
	dtype memory.DType // of the elements; for a number: bool, int64 or float64
	raw   uint64
	n     int
	dev   *device.Device
	err   error
	name  string
	bits  uint64 // value of a number, as an int64 or a float64
}

type role uint8

const (
	input role = iota
	output
	number // for an input
	scalar // for a named parameter
)

// In is the next input. A slice with one element is used for every element of the other
// slices.
func In[T memory.Element](x memory.Slice[T]) Operand { return slice(x, input) }

// Out is the next output. It may be one of the inputs, but not a part of one.
func Out[T memory.Element](x memory.Slice[T]) Operand { return slice(x, output) }

func slice[T memory.Element](x memory.Slice[T], r role) Operand {
	return Operand{role: r, dtype: x.DType(), raw: x.Ptr(), n: x.Len(), dev: x.Device(), err: mem.Check("kernel: launch", x.Buffer(), x.Len(), nil)}
}

// A Value is a number on the host.
type Value interface {
	bool | int | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | float32 | float64
}

// Number is the next input: one number for all elements. As in torch it determines the
// type of the computation only if it has a higher category than the slices: bool, then
// integers, then floats.
func Number[T Value](v T) Operand { return value(number, "", v) }

// Set replaces the default of a parameter. It does not affect the type of the computation.
func Set[T Value](name string, v T) Operand { return value(scalar, name, v) }

func value[T Value](r role, name string, v T) Operand {
	a := numberOf(v)
	return Operand{role: r, name: name, dtype: a.dtype, bits: a.bits}
}

type numeral struct {
	dtype memory.DType
	bits  uint64
}

func numberOf[T Value](v T) numeral {
	switch v := any(v).(type) {
	case bool:
		if v {
			return numeral{memory.Bool, 1}
		}
		return numeral{memory.Bool, 0}
	case float32:
		return numeral{memory.Float64, math.Float64bits(float64(v))}
	case float64:
		return numeral{memory.Float64, math.Float64bits(v)}
	case int:
		return integer(v)
	case int8:
		return integer(v)
	case int16:
		return integer(v)
	case int32:
		return integer(v)
	case int64:
		return integer(v)
	case uint8:
		return integer(v)
	case uint16:
		return integer(v)
	case uint32:
		return integer(v)
	}
	return numeral{}
}

func integer[T int | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32](v T) numeral {
	return numeral{memory.Int64, uint64(int64(v))}
}

// arg passes a number as a long long or a double.
func (o *Operand) arg() Arg {
	if o.dtype == memory.Float64 {
		return Arg{kind: F64, bits: o.bits}
	}
	return Arg{kind: I64, bits: o.bits}
}
