package kernel

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/gochorus/chorus/memory"
)

// standIn makes the Go function that does a variant's work on virtual devices.
func (e *Elementwise) standIn(v *variant, common memory.DType) (func(*Call), error) {
	fn, name := func(*Call) {}, ""
	switch {
	case isFloat(common):
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
	for element := range n {
		for j, i := range at {
			in[j] = cells.input(v, c, data[i], i, element, ones)
		}
		clear(out)
		fn(in, out)
		j := 0
		for i := range e.arity() {
			if v.args[i].role == output {
				cells.store(v.args[i].dtype, data[i], element, out[j])
				j++
			}
		}
	}
}

// input is the value of a parameter that is no output.
func (cells cellsOf[N]) input(v *variant, c *Call, data []byte, i, element int, ones uint32) N {
	a := v.args[i]
	if a.role == input {
		if ones>>i&1 != 0 {
			element = 0
		}
		return cells.load(a.dtype, data, element)
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
		load: func(t memory.DType, b []byte, i int) float64 { return roundTo(common, element(t, b, i)) },
		scalar: func(t memory.DType, bits uint64) float64 {
			if t == memory.Float64 {
				return roundTo(compute, numeralF(math.Float64frombits(bits)))
			}
			return roundTo(compute, numeralI(int64(bits)))
		},
		store: func(t memory.DType, b []byte, i int, v float64) {
			setFloat(t, b, i, roundTo(common, numeralF(roundTo(compute, numeralF(v)))))
		},
	}
}

// intCells is for computations in integers and bool.
func intCells(common memory.DType) cellsOf[int64] {
	return cellsOf[int64]{
		load: func(t memory.DType, b []byte, i int) int64 { return wrapTo(common, element(t, b, i).i) },
		scalar: func(t memory.DType, bits uint64) int64 {
			if t == memory.Float64 { // as C converts it
				return wrapTo(common, int64(math.Float64frombits(bits)))
			}
			return wrapTo(common, int64(bits))
		},
		store: func(t memory.DType, b []byte, i int, v int64) {
			v = wrapTo(common, v)
			if isFloat(t) {
				w := numeralI(v)
				w.unsigned = common == memory.Uint64
				setFloat(t, b, i, roundTo(t, w))
				return
			}
			setInt(t, b, i, v)
		},
	}
}

// A cell is the value of one element.
type cell struct {
	f        float64
	i        int64
	whole    bool // it is i
	unsigned bool // whose bits are those of a uint64
}

func numeralF(f float64) cell { return cell{f: f} }
func numeralI(i int64) cell   { return cell{i: i, whole: true} }

func as[T any](b []byte, i int) *T {
	var z T
	return (*T)(unsafe.Pointer(&b[i*int(unsafe.Sizeof(z))]))
}

// element reads element i of b.
func element(t memory.DType, b []byte, i int) cell {
	switch t {
	case memory.Bool:
		return numeralI(min(1, int64(b[i])))
	case memory.Int8:
		return numeralI(int64(*as[int8](b, i)))
	case memory.Uint8:
		return numeralI(int64(b[i]))
	case memory.Int16:
		return numeralI(int64(*as[int16](b, i)))
	case memory.Uint16:
		return numeralI(int64(*as[uint16](b, i)))
	case memory.Int32:
		return numeralI(int64(*as[int32](b, i)))
	case memory.Uint32:
		return numeralI(int64(*as[uint32](b, i)))
	case memory.Int64:
		return numeralI(*as[int64](b, i))
	case memory.Uint64:
		return cell{i: *as[int64](b, i), whole: true, unsigned: true}
	case memory.Float16T:
		return numeralF(float64(as[memory.Float16](b, i).Float32()))
	case memory.BFloat16T:
		return numeralF(float64(as[memory.BFloat16](b, i).Float32()))
	case memory.Float32:
		return numeralF(float64(*as[float32](b, i)))
	}
	return numeralF(*as[float64](b, i))
}

// roundTo rounds a value to a floating-point type, those of 16 bits by way of a
// float32, as the kernel does.
func roundTo(t memory.DType, c cell) float64 {
	if t == memory.Float64 {
		switch {
		case c.whole && c.unsigned:
			return float64(uint64(c.i))
		case c.whole:
			return float64(c.i)
		}
		return c.f
	}
	var f float32
	switch {
	case c.whole && c.unsigned:
		f = float32(uint64(c.i))
	case c.whole:
		f = float32(c.i)
	default:
		f = float32(c.f)
	}
	switch t {
	case memory.Float16T:
		f = memory.Float16Of(f).Float32()
	case memory.BFloat16T:
		f = memory.BFloat16Of(f).Float32()
	}
	return float64(f)
}

// wrapTo takes the low bits that an integer type has; a bool is whether there
// are any.
func wrapTo(t memory.DType, v int64) int64 {
	switch t {
	case memory.Bool:
		if v != 0 {
			return 1
		}
		return 0
	case memory.Int8:
		return int64(int8(v))
	case memory.Uint8:
		return int64(uint8(v))
	case memory.Int16:
		return int64(int16(v))
	case memory.Uint16:
		return int64(uint16(v))
	case memory.Int32:
		return int64(int32(v))
	case memory.Uint32:
		return int64(uint32(v))
	}
	return v
}

func setInt(t memory.DType, b []byte, i int, v int64) {
	switch v = wrapTo(t, v); t.Size() {
	case 1:
		*as[int8](b, i) = int8(v)
	case 2:
		*as[int16](b, i) = int16(v)
	case 4:
		*as[int32](b, i) = int32(v)
	default:
		*as[int64](b, i) = v
	}
}

func setFloat(t memory.DType, b []byte, i int, v float64) {
	switch t {
	case memory.Float16T:
		*as[memory.Float16](b, i) = memory.Float16Of(float32(v))
	case memory.BFloat16T:
		*as[memory.BFloat16](b, i) = memory.BFloat16Of(float32(v))
	case memory.Float32:
		*as[float32](b, i) = float32(v)
	default:
		*as[float64](b, i) = v
	}
}
