package strided

import "slices"

// RowMajor returns the strides of a contiguous array.
func RowMajor(shape []int) []int {
	strides := make([]int, len(shape))
	stride := 1
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = stride
		stride *= max(1, shape[i])
	}
	return strides
}

// Contiguous reports whether the elements are in row-major order without gaps.
func (t *Array) Contiguous() bool { return contiguous(t.Shape, t.Strides) }

func contiguous(shape, strides []int) bool {
	want, gaps := 1, false
	for i := len(shape) - 1; i >= 0; i-- {
		n := shape[i]
		if n == 0 {
			return true
		}
		gaps = gaps || n > 1 && strides[i] != want
		want *= n
	}
	return !gaps
}

// dense reports whether the elements fill their memory without gaps or overlaps, in any
// order (torch's is_non_overlapping_and_dense).
func dense(shape, strides []int) bool {
	if contiguous(shape, strides) {
		return true
	}
	var dims []int
	for i, n := range shape {
		if n > 1 {
			dims = append(dims, i)
		}
	}
	slices.SortFunc(dims, func(a, b int) int { return strides[a] - strides[b] })
	want := 1
	for _, d := range dims {
		if strides[d] != want {
			return false
		}
		want *= shape[d]
	}
	return true
}

// LikeStrides returns the strides of a new array like another one: the same strides if it
// is dense, and otherwise dense strides with the dimensions in the same order. The order
// is torch's: a dimension of stride 0 keeps its place.
func LikeStrides(shape, strides []int) []int {
	if dense(shape, strides) {
		return strides
	}
	order := make([]int, len(shape)) // from the innermost dimension
	for i := range order {
		order[i] = len(shape) - 1 - i
	}
	for i := 1; i < len(order); i++ {
		at := i
		for j := i - 1; j >= 0; j-- {
			c := outerness(shape, strides, order[j], order[at])
			if c < 0 {
				break
			}
			if c > 0 {
				order[j], order[at] = order[at], order[j]
				at = j
			}
		}
	}
	like := make([]int, len(shape))
	stride := 1
	for _, d := range order {
		like[d] = stride
		stride *= max(1, shape[d])
	}
	return like
}

// outerness is positive if dimension a lies outside of b in memory, negative if inside,
// and 0 if the strides do not determine it.
func outerness(shape, strides []int, a, b int) int {
	switch {
	case strides[a] == 0 || strides[b] == 0:
		return 0
	case strides[a] != strides[b]:
		return strides[a] - strides[b]
	case shape[a] > shape[b]:
		return 1
	}
	return 0
}

// A loop is an iteration over one dimension of two tensors.
type loop struct{ n, dst, src int } // iterations, and the strides in elements

// loopsOf returns the smallest list of loops, from the outermost in dst, that go over all
// elements of two tensors of one shape. The list is empty if the tensors have one element;
// empty reports that they have none.
func loopsOf(shape, dst, src []int) (loops []loop, empty bool) {
	for i, n := range shape {
		if n == 0 {
			return nil, true
		}
		if n > 1 {
			loops = append(loops, loop{n, dst[i], src[i]})
		}
	}
	slices.SortStableFunc(loops, func(a, b loop) int {
		if a.dst != b.dst {
			return b.dst - a.dst
		}
		return b.src - a.src
	})
	out := loops[:0]
	for _, l := range loops {
		if k := len(out) - 1; k >= 0 && out[k].dst == l.n*l.dst && out[k].src == l.n*l.src {
			out[k] = loop{out[k].n * l.n, l.dst, l.src}
			continue
		}
		out = append(out, l)
	}
	return out, false
}

// sameOrder reports whether the elements of an array with these strides are in the order
// of other, dense strides.
func sameOrder(shape, strides, as []int) bool {
	loops, empty := loopsOf(shape, as, strides)
	return empty || flat(loops)
}

// flat reports whether the loops are one contiguous run in both tensors.
func flat(loops []loop) bool {
	return len(loops) == 0 || len(loops) == 1 && loops[0].dst == 1 && loops[0].src == 1
}

// Repeats reports whether several elements share an address. Such an array is read-only.
func (t *Array) Repeats() bool {
	if t.Len() == 0 {
		return false
	}
	for i, n := range t.Shape {
		if n > 1 && t.Strides[i] == 0 {
			return true
		}
	}
	return false
}

// overlaps reports whether two arrays share memory. Like torch, it returns false for
// arrays that are not dense.
func overlaps(a, b *Array) bool {
	if a.Len() == 0 || b.Len() == 0 || a.Device() != b.Device() || !dense(a.Shape, a.Strides) || !dense(b.Shape, b.Strides) {
		return false
	}
	p, q := a.Ptr(), b.Ptr()
	return p < q+uint64(b.Bytes()) && q < p+uint64(a.Bytes())
}

// same reports whether two arrays have the same elements in the same order.
func same(a, b *Array) bool {
	return a.Ptr() == b.Ptr() && a.Device() == b.Device() && a.DType == b.DType &&
		slices.Equal(a.Shape, b.Shape) && slices.Equal(a.Strides, b.Strides)
}
