package virtual

import (
	"cmp"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Steps is one dimension of a strided layout: how many elements, and how many elements
// from one to the next.
type Steps struct{ N, Step int }

// StridedOf is ReadOf, or WriteOf, for the elements of a layout. The first element is at p,
// and each element is width Ts. It returns the memory from the first element to the last one, and
// records only the elements of the layout: the kernel must not touch others.
//
// The record is of runs of neighbours, in the order of their addresses: a transposed
// matrix is one run, and so costs no more than a dense one.
func StridedOf[T any](k *KernelCall, p cudadrv.DevicePtr, width int, dims []Steps, write bool) []T {
	var zero T
	checkAligned[T](k, p)
	size := uint64(unsafe.Sizeof(zero))
	last := width
	for _, d := range dims {
		if d.N <= 0 {
			return nil
		}
		last += (d.N - 1) * d.Step
	}
	m := k.op.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	b, _ := m.find(p)
	run, outer := neighbours(width, dims)
	each(outer, 0, func(at int) {
		from := p + cudadrv.DevicePtr(uint64(at)*size)
		found, t := k.op.resolve(from, uint64(run)*size, write)
		if t == nil && found != b {
			t = &trouble{cudadrv.ErrorIllegalAddress, fmt.Sprintf("%s on %v used %#x, which lies in %v and not in %v like the first element at %#x",
				k.op.name, k.op.s, uint64(from), found, b, uint64(p))}
		}
		if t == nil {
			t = k.op.order(b, uint64(from)-b.addr, uint64(run)*size, write)
		}
		if t != nil {
			panic(t)
		}
	})
	return view[T](k.op.hold(b, uint64(p)-b.addr, uint64(last)*size))
}

// neighbours joins the dimensions whose elements touch each other into one run, and
// returns its length and the other dimensions, from the widest step on.
func neighbours(width int, dims []Steps) (run int, outer []Steps) {
	dims = slices.Clone(dims)
	slices.SortFunc(dims, func(a, b Steps) int { return cmp.Compare(a.Step, b.Step) })
	run = width
	for _, d := range dims {
		switch {
		case d.N == 1:
		case d.Step <= run && len(outer) == 0:
			run += (d.N - 1) * d.Step
		default:
			outer = append(outer, d)
		}
	}
	slices.Reverse(outer)
	return run, outer
}

// each calls fn with the place of each element of a layout.
func each(dims []Steps, at int, fn func(at int)) {
	if len(dims) == 0 {
		fn(at)
		return
	}
	for i := range dims[0].N {
		each(dims[1:], at+i*dims[0].Step, fn)
	}
}
