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
	arithmetic
}

// formats are the types of the kernels that move data themselves.
var formats = [...]format{
	{memory.Int8, "i8", native[int8]()}, {memory.Uint8, "u8", native[uint8]()},
	{memory.Int32, "i32", native[int32]()}, {memory.Uint32, "u32", native[uint32]()},
	{memory.Int64, "i64", native[int64]()}, {memory.Uint64, "u64", native[uint64]()},
	{memory.Float16, "Half", narrowed[memory.Float16Bits]{memory.Float16Bits.Float32, halfOf}},
	{memory.BFloat16, "BFloat", narrowed[memory.BFloat16Bits]{memory.BFloat16Bits.Float32, bfloatOf}},
	{memory.Float32, "float", native[float32]()}, {memory.Float64, "double", native[float64]()},
}

// formatOf has the index of each type in formats, or -1.
var formatOf = indexOf(formats[:])

// indexOf returns the index of each type in a list, or -1.
func indexOf(list []format) (at [memory.Float8E5M2 + 1]int) {
	for t := range at {
		at[t] = -1
	}
	for i := range list {
		at[list[i].dtype] = i
	}
	return at
}

// A fold reduces words of 8 bytes, one from each rank, in rank order.
type fold func(words []uint64) uint64

// An arithmetic computes on elements of one type, as the kernels do.
type arithmetic interface {
	// words returns the fold of a reduction.
	words(flight.Reduction) fold
	// pieces computes a Fold of the elements of all ranks.
	pieces(x *Fold, dst []byte, ranks [][]byte)
	// accBytes returns the size of a result that is not rounded.
	accBytes() int
	// scale multiplies elements by a factor, which is the first bytes of bits.
	scale(dst, src []byte, bits uint64)
}

// A number is a type that reductions compute in.
type number interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64 | float32 | float64
}

// numbers are elements T that are reduced as A.
type numbers[T any, A number] struct {
	wide   func(T) A
	narrow func(A) T
}

// narrowed are elements that are reduced as float32.
type narrowed[T any] = numbers[T, float32]

func native[T number]() numbers[T, T] {
	same := func(x T) T { return x }
	return numbers[T, T]{same, same}
}

func halfOf(x float32) memory.Float16Bits {
	if x != x {
		return 0x7fff // the NaN of the GPU
	}
	return memory.Float16Of(x)
}

func bfloatOf(x float32) memory.BFloat16Bits {
	if x != x {
		return 0x7fff
	}
	return memory.BFloat16Of(x)
}

func (x numbers[T, A]) words(op flight.Reduction) fold {
	join := joining[A](op)
	return func(words []uint64) (out uint64) {
		ranks := len(words)
		to := elements[T](unsafe.Slice(&out, 1))
		from := elements[T](words)
		for j := range to {
			a := x.wide(from[j])
			for r := 1; r < ranks; r++ {
				a = join(a, x.wide(from[r*len(to)+j]))
			}
			to[j] = x.finish(op, a, ranks)
		}
		return out
	}
}

// finish returns the result of a reduction over all ranks.
func (x numbers[T, A]) finish(op flight.Reduction, a A, ranks int) T {
	if op == flight.Avg {
		a /= A(ranks)
	}
	return x.narrow(a)
}

func (x numbers[T, A]) pieces(f *Fold, dst []byte, ranks [][]byte) {
	same := func(a A) A { return a }
	finish := func(a A) T { return x.finish(f.Op, a, f.All) }
	switch f.Stage {
	case BlockStage:
		foldPieces(f, dst, ranks, x.wide, same)
	case BlocksStage:
		foldPieces(f, dst, ranks, same, finish)
	default:
		foldPieces(f, dst, ranks, x.wide, finish)
	}
}

func (x numbers[T, A]) accBytes() int {
	var a A
	return int(unsafe.Sizeof(a))
}

// foldPieces computes a Fold with elements In and results Out.
func foldPieces[In, Out any, A number](f *Fold, dst []byte, ranks [][]byte, get func(In) A, put func(A) Out) {
	join := joining[A](f.Op)
	to, from := elementsOf[Out](dst), make([][]In, len(ranks))
	for r := range ranks {
		from[r] = elementsOf[In](ranks[r])
	}
	for j := range to {
		var sum, total A
		for r := range from {
			a := get(from[r][j])
			switch {
			case r%f.Block != 0:
				a = join(sum, a)
			case r > f.Block:
				total = join(total, sum)
			default:
				total = sum
			}
			sum = a
		}
		if len(from) > f.Block {
			sum = join(total, sum)
		}
		to[j] = put(sum)
	}
}

func (x numbers[T, A]) scale(dst, src []byte, bits uint64) {
	to, from := elementsOf[T](dst), elementsOf[T](src)
	by := x.wide(elements[T](unsafe.Slice(&bits, 1))[0])
	for j := range to {
		to[j] = x.narrow(x.wide(from[j]) * by)
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

// elementsOf reinterprets bytes as elements.
func elementsOf[T any](b []byte) []T {
	var z T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(z)))
}
