package strided

import "slices"

// A Sharing says whether two arrays on a device, or on the host, have a byte in common.
type Sharing uint8

// The answers.
const (
	Apart   Sharing = iota
	Unknown         // the arrays interleave in more dimensions than SharingOf compares
	Shared
)

// A reach is a dimension of an array in memory.
type reach struct{ step, n int64 } // step in bytes

// maxReach is the number of dimensions of two arrays that are compared.
const maxReach = 6

// SharingOf compares addresses, because several buffers may have the same memory
// (FromDLPack, memory.Adopt). Dimensions that make up one count as one. The answer is not
// Unknown if there are at most three and the elements of one step do not reach beyond the
// next, as in blocks of columns of one matrix.
func SharingOf(x, y *Array) Sharing {
	if x.Len() == 0 || y.Len() == 0 {
		return Apart
	}
	return sharing(x, y, int64(y.Ptr()-x.Ptr()))
}

// sharing is SharingOf for arrays that are not empty and a distance in bytes from x to y.
func sharing(x, y *Array, distance int64) Sharing {
	var inX, inY [maxReach]reach
	wa, a := reachOf(x, inX[:0])
	wb, b := reachOf(y, inY[:0])
	switch {
	case distance >= extent(a, wa) || -distance >= extent(b, wb):
		return Apart
	case max(len(a), len(b)) > maxReach/2:
		return Unknown
	}
	a, b = joinEqual(a), joinEqual(b)
	a = addSteps(a, b)
	b = addSteps(b, a)
	return meet(a, b, wa, wb, distance)
}

// SharesWithin reports whether elements of a tensor may share memory: the stride of a dimension
// is smaller than the extent of its inner dimensions.
func SharesWithin(t *Array) bool {
	if t.Repeats() {
		return true
	}
	if t.Len() == 0 {
		return false
	}
	var in [maxReach]reach
	width, dims := reachOf(t, in[:0])
	for _, d := range slices.Backward(dims) {
		if d.step < width {
			return true
		}
		width += d.step * (d.n - 1)
	}
	return false
}

// reachOf returns the contiguous width in bytes, and the other dimensions by descending steps, in the room of dims if they
// fit. If there are more than three, those that make up one are joined.
func reachOf(t *Array, dims []reach) (width int64, _ []reach) {
	size := int64(t.DType.Size())
	width = size
	for i, d := range t.Shape {
		switch {
		case d <= 1 || t.Strides[i] == 0:
		case t.Strides[i] == 1 && width == size:
			width = size * int64(d)
		default:
			dims = insert(dims, reach{int64(t.Strides[i]) * size, int64(d)})
		}
	}
	if len(dims) <= maxReach/2 {
		return width, dims
	}
	for n := len(dims); n > 0 && dims[n-1].step == width; n-- {
		width *= dims[n-1].n
		dims = dims[:n-1]
	}
	for i := len(dims) - 2; i >= 0; i-- {
		if inner := &dims[i+1]; dims[i].step == inner.step*inner.n {
			inner.n *= dims[i].n
			dims = slices.Delete(dims, i, i+1)
		}
	}
	return width, dims
}

// insert keeps the descending order.
func insert(to []reach, r reach) []reach {
	to = append(to, r)
	n := len(to) - 1
	for ; n > 0 && to[n-1].step < r.step; n-- {
		to[n] = to[n-1]
	}
	to[n] = r
	return to
}

// joinEqual joins dimensions with equal steps, as windows that overlap have them: they reach the same places as a longer one.
func joinEqual(dims []reach) []reach {
	for i := len(dims) - 2; i >= 0; i-- {
		if dims[i].step == dims[i+1].step {
			dims[i].n += dims[i+1].n - 1
			dims = slices.Delete(dims, i+1, i+2)
		}
	}
	return dims
}

// addSteps adds dimensions of length 1 for the steps that only other has.
func addSteps(to, other []reach) []reach {
	for _, o := range other {
		if !slices.ContainsFunc(to, func(r reach) bool { return r.step == o.step }) {
			to = insert(to, reach{o.step, 1})
		}
	}
	return to
}

// extent returns the bytes from the first to the last.
func extent(dims []reach, width int64) int64 {
	for _, d := range dims {
		width += d.step * (d.n - 1)
	}
	return width
}

// meet says whether two sets of runs share a byte. The runs of a have wa
// bytes and begin at Σ aᵢ·step, for 0 ≤ aᵢ < a[i].n. The runs of b have wb
// bytes and begin at distance + Σ bᵢ·step, for 0 ≤ bᵢ < b[i].n, with equal
// steps.
func meet(a, b []reach, wa, wb, distance int64) Sharing {
	if len(a) == 0 {
		if distance < wa && -distance < wb {
			return Shared
		}
		return Apart
	}
	step := a[0].step
	// aᵢ - bᵢ = d moves the rest closer by d steps; only the nearest values can meet, if the
	// inner dimensions do not reach beyond a step.
	rest := max(extent(a[1:], wa), extent(b[1:], wb))
	low, high := floorDiv(distance-rest, step), floorDiv(distance+rest, step)+1
	low, high = max(low, -(b[0].n-1)), min(high, a[0].n-1)
	found := Apart
	if high-low > 8 { // the dimensions interleave: only the nearest few are compared
		near := floorDiv(distance, step)
		low = max(low, min(near-4, high-8))
		high, found = min(high, low+8), Unknown
	}
	for d := low; d <= high; d++ {
		switch meet(a[1:], b[1:], wa, wb, distance-d*step) {
		case Shared:
			return Shared
		case Unknown:
			found = Unknown
		}
	}
	return found
}

func floorDiv(x, y int64) int64 {
	q := x / y
	if x%y < 0 {
		q--
	}
	return q
}
