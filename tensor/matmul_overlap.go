package tensor

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
)

// operandNames are the tensors of a product, in the order of checkOverlap.
var operandNames = [...]string{"c", "BiasGrad", "AMax", "Aux", "a", "b", "Add", "Bias", "DeviceAlpha", "DeviceBeta", "ScaleA", "ScaleB", "ScaleResult"}

// checkOverlap refuses an output that shares memory with another operand. Only Add may be c. The
// names are another array, because tensors beside a string of the error would be on the heap.
func (m *multiplication) checkOverlap(cfg *MatMulConfig) error {
	all := [len(operandNames)]*Tensor{&m.c, &cfg.BiasGrad, &cfg.AMax, &cfg.Aux, &m.a, &m.b, &cfg.Add, &cfg.Bias,
		&cfg.DeviceAlpha, &cfg.DeviceBeta, &cfg.ScaleA, &cfg.ScaleB, &cfg.ScaleResult}
	outputs := 4
	if cfg.Epilogue == ReLUGrad || cfg.Epilogue == GELUGrad { // which read Aux
		outputs = 3
	}
	for i, x := range all[:outputs] {
		if x.at().DType == memory.Invalid {
			continue
		}
		for j, y := range all[i+1:] {
			addIsC := x == &m.c && y == &cfg.Add && !m.Separate
			if !addIsC && shares(x, y) {
				return fmt.Errorf("%s shares memory with %s: an output needs its own memory, except that Add may be c itself", operandNames[i], operandNames[i+1+j])
			}
		}
	}
	return nil
}

// A reach is a dimension of a tensor in memory.
type reach struct{ step, n int64 } // step in bytes

// maxReach is the number of dimensions of two operands of products.
const maxReach = 6

// shares reports whether two tensors of at most three dimensions have a byte in common. It is
// exact if the elements of one step do not reach beyond the next, as in blocks of columns of
// one matrix. Otherwise it may report memory that only interleaves.
func shares(x, y *Tensor) bool {
	if x.Buffer() == nil || x.Buffer() != y.Buffer() || x.Len() == 0 || y.Len() == 0 {
		return false
	}
	var a, b [maxReach]reach
	wa, na := reachOf(x, &a)
	wb, nb := reachOf(y, &b)
	distance := int64(y.Offset() - x.Offset())
	if distance >= extent(a[:na], wa) || -distance >= extent(b[:nb], wb) {
		return false
	}
	na = addSteps(&a, na, b[:nb])
	nb = addSteps(&b, nb, a[:na])
	return meet(a[:na], b[:nb], wa, wb, distance)
}

// sharesWithin reports whether elements of a tensor may share memory: the stride of a dimension
// is smaller than the extent of its inner dimensions.
func sharesWithin(t *Tensor) bool {
	if t.at().Repeats() {
		return true
	}
	var dims [maxReach]reach
	width, n := reachOf(t, &dims)
	for i := n - 1; i >= 0; i-- {
		if dims[i].step < width {
			return true
		}
		width += dims[i].step * (dims[i].n - 1)
	}
	return false
}

// reachOf returns the contiguous width in bytes, and the other dimensions by descending steps.
func reachOf(t *Tensor, to *[maxReach]reach) (width int64, n int) {
	size := int64(t.at().DType.Size())
	width = size
	for i, d := range t.at().Shape {
		switch {
		case d <= 1 || t.at().Strides[i] == 0:
		case t.at().Strides[i] == 1:
			width = size * int64(d)
		case n < maxReach/2:
			insert(to, n, reach{int64(t.at().Strides[i]) * size, int64(d)})
			n++
		}
	}
	return width, n
}

// insert keeps the descending order.
func insert(to *[maxReach]reach, n int, r reach) {
	for n > 0 && to[n-1].step < r.step {
		to[n] = to[n-1]
		n--
	}
	to[n] = r
}

// addSteps adds dimensions of length 1 for the steps that only other has.
func addSteps(to *[maxReach]reach, n int, other []reach) int {
	for _, o := range other {
		known := false
		for _, r := range to[:n] {
			known = known || r.step == o.step
		}
		if !known {
			insert(to, n, reach{o.step, 1})
			n++
		}
	}
	return n
}

// extent returns the bytes from the first to the last.
func extent(dims []reach, width int64) int64 {
	for _, d := range dims {
		width += d.step * (d.n - 1)
	}
	return width
}

// meet reports whether two sets of runs share a byte. The runs of a have wa bytes and begin at
// Σ aᵢ·step, for 0 ≤ aᵢ < a[i].n. The runs of b have wb bytes and begin at distance + Σ bᵢ·step,
// for 0 ≤ bᵢ < b[i].n. The steps are equal.
func meet(a, b []reach, wa, wb, distance int64) bool {
	if len(a) == 0 {
		return distance < wa && -distance < wb
	}
	step := a[0].step
	// aᵢ - bᵢ = d moves the rest closer by d steps; only the nearest values can meet, if the
	// inner dimensions do not reach beyond a step.
	rest := max(extent(a[1:], wa), extent(b[1:], wb))
	low, high := floorDiv(distance-rest, step), floorDiv(distance+rest, step)+1
	low, high = max(low, -(b[0].n-1)), min(high, a[0].n-1)
	if high-low > 8 {
		return true // the dimensions interleave
	}
	for d := low; d <= high; d++ {
		if meet(a[1:], b[1:], wa, wb, distance-d*step) {
			return true
		}
	}
	return false
}

func floorDiv(x, y int64) int64 {
	q := x / y
	if x%y < 0 {
		q--
	}
	return q
}
