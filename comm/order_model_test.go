package comm_test

import (
	"math"
	"math/rand/v2"
	"unsafe"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
)

// An orderKit makes elements, and reduces them as comm.Order documents. It shares no code with the
// stand-ins of the kernels.
type orderKit[T memory.Element, A orderNumber] struct {
	random func(*rand.Rand) T
	wide   func(T) A
	narrow func(A) T
}

type orderNumber interface {
	int8 | uint8 | int32 | uint32 | int64 | uint64 | float32 | float64
}

// anyFloat returns a number with random digits, so that sums depend on their order.
func anyFloat(r *rand.Rand) float64 {
	return math.Ldexp(1+r.Float64(), r.IntN(5)-2) * float64(1-2*r.IntN(2))
}

func orderInts[T int8 | uint8 | int32 | uint32 | int64 | uint64]() orderKit[T, T] {
	same := func(x T) T { return x }
	return orderKit[T, T]{func(r *rand.Rand) T { return T(r.Uint64()) }, same, same}
}

func orderFloats[T memory.Element, A float32 | float64](wide func(T) A, narrow func(A) T) orderKit[T, A] {
	return orderKit[T, A]{func(r *rand.Rand) T { return narrow(A(anyFloat(r))) }, wide, narrow}
}

// reduce reduces one element of each rank.
func (k orderKit[T, A]) reduce(op comm.Op, block int, xs []T) T {
	if block == 0 {
		block = len(xs)
	}
	var blocks []A
	for from := 0; from < len(xs); from += block {
		var part []A
		for _, x := range xs[from:min(from+block, len(xs))] {
			part = append(part, k.wide(x))
		}
		blocks = append(blocks, chain(op, part))
	}
	all := chain(op, blocks)
	if op == comm.Avg {
		all /= A(len(xs))
	}
	return k.narrow(all)
}

// chain combines numbers from the first to the last.
func chain[A orderNumber](op comm.Op, xs []A) A {
	first, rest := xs[0], xs[1:]
	for len(rest) > 0 {
		next := rest[0]
		switch op {
		case comm.Prod:
			first *= next
		case comm.Max:
			first = max(first, next)
		case comm.Min:
			first = min(first, next)
		default:
			first += next
		}
		rest = rest[1:]
	}
	return first
}

// scaled returns the products of the elements and their ranks' factors.
func (k orderKit[T, A]) scaled(xs, factors []T) []T {
	out := make([]T, len(xs))
	for r := range xs {
		out[r] = k.narrow(k.wide(xs[r]) * k.wide(factors[r]))
	}
	return out
}

// rawBytes returns the memory of elements.
func rawBytes[T any](xs []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(xs))), len(xs)*int(unsafe.Sizeof(z)))
}
