package kernel

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/memory"
)

// standIn makes the Go function that does a variant's work on virtual devices.
func (e *Elementwise) standIn(v *variant, common memory.DType) (func(*Call), error) {
	fn, name := func(*Call) {}, ""
	switch {
	case element.IsFloat(common):
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

// cellsOf converts between elements and the values of a stand-in.
type cellsOf[N int64 | float64] struct {
	load   func(t memory.DType, b []byte, i int) N // in the common type, as it is computed with
	scalar func(t memory.DType, bits uint64) N     // in the type of the computation
	store  func(t memory.DType, b []byte, i int, v N)
}

// apply carries out the whole grid, element by element.
func apply[N int64 | float64](e *Elementwise, v *variant, c *Call, fn func(in, out []N), cells cellsOf[N]) {
	n, ones := int(c.Uint64(0)), c.Uint32(1)
	var data [maxArgs][]byte
	var in, out []N
	var at []int // the kernel's parameter for each value of in
	for i := range e.arity() {
		a := v.args[i]
		switch a.role {
		case input:
			length := n
			if ones>>i&1 != 0 {
				length = 1
			}
			data[i] = c.k.Read(c.k.Ptr(i+2), uintptr(length*a.dtype.Size()))
		case output:
			data[i] = c.k.Write(c.k.Ptr(i+2), uintptr(n*a.dtype.Size()))
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

// input is the value of a parameter that is no output.
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
		bits = math.Float64bits(c.Float64(i + 2))
	} else {
		bits = uint64(c.Int64(i + 2))
	}
	if a.role == number { // an element like others
		return cells.load(a.dtype, unsafe.Slice((*byte)(unsafe.Pointer(&bits)), 8), 0)
	}
	return cells.scalar(a.dtype, bits)
}

// floatCells is for computations in floats.
func floatCells(common memory.DType) cellsOf[float64] {
	compute := computeType(common)
	return cellsOf[float64]{
		load: func(t memory.DType, b []byte, i int) float64 { return element.Load(t, b, i).Round(common) },
		scalar: func(t memory.DType, bits uint64) float64 {
			if t == memory.Float64 {
				return element.Float(math.Float64frombits(bits)).Round(compute)
			}
			return element.Int(int64(bits)).Round(compute)
		},
		store: func(t memory.DType, b []byte, i int, v float64) {
			element.SetFloat(t, b, i, element.Float(element.Float(v).Round(compute)).Round(common))
		},
	}
}

// intCells is for computations in integers and bool.
func intCells(common memory.DType) cellsOf[int64] {
	return cellsOf[int64]{
		load: func(t memory.DType, b []byte, i int) int64 {
			return element.Wrap(common, element.Load(t, b, i).Int64())
		},
		scalar: func(t memory.DType, bits uint64) int64 {
			if t == memory.Float64 { // as C converts it
				return element.Wrap(common, int64(math.Float64frombits(bits)))
			}
			return element.Wrap(common, int64(bits))
		},
		store: func(t memory.DType, b []byte, i int, v int64) {
			v = element.Wrap(common, v)
			if element.IsFloat(t) {
				w := element.Int(v)
				if common == memory.Uint64 {
					w = element.Uint(v)
				}
				element.SetFloat(t, b, i, w.Round(t))
				return
			}
			element.SetInt(t, b, i, v)
		},
	}
}
