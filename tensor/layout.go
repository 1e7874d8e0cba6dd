package tensor

import "slices"

// rowMajor returns the strides of a contiguous tensor.
func rowMajor(shape []int) []int {
	strides := make([]int, len(shape))
	stride := 1
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = stride
		stride *= max(1, shape[i])
	}
	return strides
}

// Contiguous reports whether the elements lie in row-major order without gaps
// (torch.Tensor.is_contiguous).
func (t Tensor) Contiguous() bool { return contiguous(t.shape, t.strides) }

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

// dense reports whether the elements fill their memory, each place once, in
// whatever order (torch's is_non_overlapping_and_dense).
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

// likeStrides returns the strides of a new tensor like one: its own if it is
// dense, and otherwise dense ones with the dimensions in the same order, as torch
// finds it: a dimension of stride 0 stays where it is.
func likeStrides(shape, strides []int) []int {
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

// outerness is positive if dimension a lies outside of b in memory, negative if
// inside, and 0 if nobody can tell.
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

// ChannelsLast reports whether the strides are those that torch takes for the
// memory format channels_last, of four dimensions, or channels_last_3d, of five.
func (t Tensor) ChannelsLast() bool {
	n := len(t.shape)
	if n != 4 && n != 5 || t.strides[1] == 0 {
		return false
	}
	least := 0
	for _, d := range channelsLastOrder(n) {
		switch {
		case t.shape[d] == 0 || t.strides[d] < least:
			return false
		case d == 0 && least == t.strides[1]:
			return false // ambiguous: all dimensions but the first are 1
		}
		least = t.strides[d] * max(1, t.shape[d])
	}
	return true
}

// channelsLastOrder has the dimensions from the innermost one.
func channelsLastOrder(n int) []int {
	order := []int{1}
	for d := n - 1; d >= 2; d-- {
		order = append(order, d)
	}
	return append(order, 0)
}

// A loop goes over one dimension of two tensors at once.
type loop struct{ n, dst, src int } // steps, and elements from one to the next

// loopsOf returns the loops, from the outermost in dst, that go over all elements of
// two tensors of one shape, as few as there can be. There are none where the
// tensors have one element; empty is for those with none.
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

// flat reports whether the loops are one run of neighbours in both tensors.
func flat(loops []loop) bool {
	return len(loops) == 0 || len(loops) == 1 && loops[0].dst == 1 && loops[0].src == 1
}

// repeats reports whether several elements have one place, so that the tensor
// cannot be written to.
func (t Tensor) repeats() bool {
	if t.Len() == 0 {
		return false
	}
	for i, n := range t.shape {
		if n > 1 && t.strides[i] == 0 {
			return true
		}
	}
	return false
}

// Overlaps reports whether two tensors share some memory, as far as torch finds
// out: of those that are not dense it does not.
func Overlaps(a, b Tensor) bool {
	if a.Len() == 0 || b.Len() == 0 || a.Device() != b.Device() || !dense(a.shape, a.strides) || !dense(b.shape, b.strides) {
		return false
	}
	p, q := a.Ptr(), b.Ptr()
	return p < q+uint64(b.Bytes()) && q < p+uint64(a.Bytes())
}

// SameShape reports whether two tensors have the same dimensions.
func SameShape(a, b Tensor) bool { return slices.Equal(a.shape, b.shape) }

// same reports whether two tensors are of the same elements in the same order.
func same(a, b Tensor) bool {
	return a.Ptr() == b.Ptr() && a.Device() == b.Device() && a.dtype == b.dtype &&
		slices.Equal(a.shape, b.shape) && slices.Equal(a.strides, b.strides)
}
