package fabric

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/memory"
)

// A format is an element type that can be reduced.
type format struct {
	dtype memory.DType
	c     string // name of the type in the source
	folds func(flight.Reduction) fold
}

var formats = [...]format{
	{memory.Int8, "i8", native[int8]}, {memory.Uint8, "u8", native[uint8]},
	{memory.Int32, "i32", native[int32]}, {memory.Uint32, "u32", native[uint32]},
	{memory.Int64, "i64", native[int64]}, {memory.Uint64, "u64", native[uint64]},
	{memory.Float16, "Half", halves}, {memory.BFloat16, "BFloat", bfloats},
	{memory.Float32, "float", native[float32]}, {memory.Float64, "double", native[float64]},
}

// formatOf has the index of each type in formats, or -1.
var formatOf = func() (at [memory.Float8E5M2 + 1]int) {
	for t := range at {
		at[t] = -1
	}
	for i := range formats {
		at[formats[i].dtype] = i
	}
	return at
}()

// A fold reduces words of 8 bytes, one from each rank, in rank order.
type fold func(words []uint64) uint64

// A number is a type that reductions compute in.
type number interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64 | float32 | float64
}

func native[T number](op flight.Reduction) fold {
	same := func(x T) T { return x }
	return folding(op, same, same)
}

func halves(op flight.Reduction) fold {
	return folding(op, memory.Float16Bits.Float32, func(x float32) memory.Float16Bits {
		if x != x {
			return 0x7fff // the NaN of the GPU
		}
		return memory.Float16Of(x)
	})
}

func bfloats(op flight.Reduction) fold {
	return folding(op, memory.BFloat16Bits.Float32, func(x float32) memory.BFloat16Bits {
		if x != x {
			return 0x7fff
		}
		return memory.BFloat16Of(x)
	})
}

// folding makes the fold for elements T that are reduced as A.
func folding[T any, A number](op flight.Reduction, wide func(T) A, narrow func(A) T) fold {
	join := joining[A](op)
	return func(words []uint64) (out uint64) {
		ranks := len(words)
		to := elements[T](unsafe.Slice(&out, 1))
		from := elements[T](words)
		for j := range to {
			x := wide(from[j])
			for r := 1; r < ranks; r++ {
				x = join(x, wide(from[r*len(to)+j]))
			}
			if op == flight.Avg {
				x /= A(ranks)
			}
			to[j] = narrow(x)
		}
		return out
	}
}

func joining[A number](op flight.Reduction) func(a, b A) A {
	switch op {
	case flight.Prod:
		return func(a, b A) A { return a * b }
	case flight.Max:
		return func(a, b A) A {
			if a != a || b > a {
				return b
			}
			return a
		}
	case flight.Min:
		return func(a, b A) A {
			if a != a || b < a {
				return b
			}
			return a
		}
	}
	return func(a, b A) A { return a + b }
}

// elements reinterprets words as elements.
func elements[T any](words []uint64) []T {
	var z T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(words))), len(words)*8/int(unsafe.Sizeof(z)))
}
