package fabric_test

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/memory"
)

// A kit makes elements of small whole numbers, and reduces these on its own: nil
// where the type cannot be reduced.
type kit[T memory.Element] struct {
	of     func(int) T
	reduce func(op collective.Reduction, xs []int) T
}

type integer interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64
}

func integers[T integer]() kit[T] {
	return kit[T]{func(x int) T { return T(x) }, func(op collective.Reduction, xs []int) T {
		if op == collective.Avg {
			return T(fold(collective.Sum, xs)) / T(len(xs))
		}
		return T(fold(op, xs)) // what is too large loses its upper bits
	}}
}

// floats reduces in A, in which everything but an average is exact.
func floats[T memory.Element, A float32 | float64](narrow func(A) T) kit[T] {
	return kit[T]{func(x int) T { return narrow(A(x)) }, func(op collective.Reduction, xs []int) T {
		if op == collective.Avg {
			return narrow(A(fold(collective.Sum, xs)) / A(len(xs)))
		}
		return narrow(A(fold(op, xs)))
	}}
}

func fold(op collective.Reduction, xs []int) int {
	acc := xs[0]
	for _, x := range xs[1:] {
		switch op {
		case collective.Sum:
			acc += x
		case collective.Prod:
			acc *= x
		case collective.Max:
			acc = max(acc, x)
		case collective.Min:
			acc = min(acc, x)
		}
	}
	return acc
}

func bytesOf[T memory.Element](x []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(z)))
}

func sizeOf[T memory.Element]() int {
	var z T
	return int(unsafe.Sizeof(z))
}

func viewOf[T memory.Element](b []byte) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/sizeOf[T]())
}
