package kernel

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/memory"
)

// standIn returns the Go function that implements a variant on virtual devices.
func (e *Elementwise) standIn(v *variant, common memory.DType) (func(*Call), error) {
	fn, name := func(*Call) {}, ""
	switch {
	case dtype.Of(common).IsFloat():
		name = "Floats"
		if e.cfg.Floats != nil {
			fn = func(c *Call) { apply(e, v, c, e.cfg.Floats, floatCells(common)) }
			name = ""
		}
	default:
		name = "Ints"
		if e.cfg.Ints != nil {
			fn = func(c *Call) { apply(e, v, c, e.cfg.Ints, intCells(common)) }
			name = ""
		}
	}
	if name != "" {
		return nil, fmt.Errorf("%s is a virtual device and there is no Go function for %s to stand in: give ElementwiseConfig.%s", v.dev, common, name)
	}
	return fn, nil
}

// cellsOf converts between elements and the values of the Go functions.
type cellsOf[N int64 | float64] struct {
	load   func(t memory.DType, b []byte, i int) N // in the common type
	scalar func(t memory.DType, bits uint64) N     // in the type of the computation
	store  func(t memory.DType, b []byte, i int, v N)
}

// apply computes the whole grid, element by element.
func apply[N int64 | float64](e *Elementwise, v *variant, c *Call, fn func(in, out []N), cells cellsOf[N]) {
	n, ones := int(Get[uint64](c, 0)), Get[uint32](c, 1)
	var data [maxArgs][]byte
	var in, out []N
	var at []int // index of the kernel's parameter for each value of in
	for i := range e.arity() {
		a := v.args[i]
		switch a.role {
		case input:
			length := n
			if ones>>i&1 != 0 {
				length = 1
			}
			data[i] = ReadAddress[uint8](c, c.Address(i+2), length*a.dtype.Size())
		case output:
			data[i] = UpdateAddress[uint8](c, c.Address(i+2), n*a.dtype.Size())
			out = append(out, 0)
			continue
		}
		in, at = append(in, 0), append(at, i)
	}
	for nth := range n {
		for j, i := range at {
			in[j] = cells.input(v, c, data[i], i, nth, ones)
		}
		clear(out)
		fn(in, out)
		j := 0
		for i := range e.arity() {
			if v.args[i].role == output {
				cells.store(v.args[i].dtype, data[i], nth, out[j])
				j++
			}
		}
	}
}

// input returns the value of a parameter that is not an output.
func (cells cellsOf[N]) input(v *variant, c *Call, data []byte, i, nth int, ones uint32) N {
	a := v.args[i]
	if a.role == input {
		if ones>>i&1 != 0 {
			nth = 0
		}
		return cells.load(a.dtype, data, nth)
	}
	bits := uint64(0)
	if a.dtype == memory.Float64 {
		bits = math.Float64bits(Get[float64](c, i+2))
	} else {
		bits = uint64(Get[int64](c, i+2))
	}
	if a.role == number { // converted like an element
		return cells.load(a.dtype, unsafe.Slice((*byte)(unsafe.Pointer(&bits)), 8), 0)
	}
	return cells.scalar(a.dtype, bits)
}

// floatCells is for computations in floats.
func floatCells(common memory.DType) cellsOf[float64] {
	to, compute := dtype.Of(common), dtype.Of(computeType(common))
	return cellsOf[float64]{
		load: func(t memory.DType, b []byte, i int) float64 { return to.Round(dtype.Of(t).Load(b, i)) },
		scalar: func(t memory.DType, bits uint64) float64 {
			if t == memory.Float64 {
				return compute.Round(dtype.FloatValue(math.Float64frombits(bits)))
			}
			return compute.Round(dtype.IntValue(int64(bits)))
		},
		store: func(t memory.DType, b []byte, i int, v float64) {
			dtype.Of(t).Store(b, i, dtype.FloatValue(to.Round(dtype.FloatValue(compute.Round(dtype.FloatValue(v))))))
		},
	}
}

// intCells is for computations in integers and bool.
func intCells(common memory.DType) cellsOf[int64] {
	return cellsOf[int64]{
		load: func(t memory.DType, b []byte, i int) int64 {
			return dtype.Of(common).Wrap(dtype.Of(t).Load(b, i).Int64())
		},
		scalar: func(t memory.DType, bits uint64) int64 {
			if t == memory.Float64 { // the conversion of C
				return dtype.Of(common).Wrap(int64(math.Float64frombits(bits)))
			}
			return dtype.Of(common).Wrap(int64(bits))
		},
		store: func(t memory.DType, b []byte, i int, v int64) {
			v = dtype.Of(common).Wrap(v)
			w := dtype.IntValue(v)
			if common == memory.Uint64 {
				w = dtype.UintValue(v)
			}
			dtype.Of(t).Store(b, i, w)
		},
	}
}
