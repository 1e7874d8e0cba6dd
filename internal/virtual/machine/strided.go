package machine

import (
	"cmp"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Steps is one dimension of a strided layout: the number of elements, and the
// distance between them in elements.
type Steps struct{ N, Step int }

// StridedOf is ReadOf, or WriteOf, for the elements of a strided layout. The first
// element is at p, and each element consists of width Ts. It returns the memory from
// the first to the last element, but records only the elements of the layout; the
// kernel must not touch others.
//
// It records runs of adjacent elements by address, so that a
// transposed matrix is one run and costs as little as a dense one.
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
	b, _ := m.Find(p)
	run, outer := neighbours(width, dims)
	each(outer, 0, func(at int) {
		from := p + cudadrv.DevicePtr(uint64(at)*size)
		found, t := k.op.resolve(from, uint64(run)*size, write)
		if t == nil && found != b {
			t = &Trouble{cudadrv.ErrorIllegalAddress, fmt.Sprintf("%s on %v used %#x, which lies in %v and not in %v like the first element at %#x",
				k.op.Name, k.op.s, uint64(from), found, b, uint64(p))}
		}
		if t == nil {
			t = k.op.order(b, uint64(from)-b.addr, uint64(run)*size, write)
		}
		if t != nil {
			panic(t)
		}
	})
	return View[T](k.op.hold(b, uint64(p)-b.addr, uint64(last)*size))
}

// neighbours merges the dimensions with adjacent elements into one run. It
// returns the length of the run and the other dimensions, the largest step first.
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

// each calls fn with the offset of each element of a layout.
func each(dims []Steps, at int, fn func(at int)) {
	if len(dims) == 0 {
		fn(at)
		return
	}
	for i := range dims[0].N {
		each(dims[1:], at+i*dims[0].Step, fn)
	}
}
