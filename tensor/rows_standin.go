package tensor

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below implement rows.cu in Go, for virtual devices. They round where the
// kernels round.

// indexOf returns the rows that an index names, and stops the kernel at an
// entry that names no row.
func indexOf(c *kernel.Call, arg int, n, rows uint64, wide uint32) []int {
	index := make([]int, n)
	if wide == 1 {
		for i, row := range kernel.Read[int64](c, arg, int(n)) {
			index[i] = int(row)
		}
	} else {
		for i, row := range kernel.Read[int32](c, arg, int(n)) {
			index[i] = int(row)
		}
	}
	for i, row := range index {
		if row < 0 || uint64(row) >= rows {
			panic(fmt.Sprintf("entry %d of the index names row %d: want 0 to %d", i, row, rows-1))
		}
	}
	return index
}

func standInSelect(width int) func(*kernel.Call) {
	return func(c *kernel.Call) {
		n, row, rows := int(kernel.Get[uint64](c, 3)), width*int(kernel.Get[uint64](c, 4)), kernel.Get[uint64](c, 5)
		index := indexOf(c, 2, uint64(n), rows, kernel.Get[uint32](c, 6))
		dst, at := kernel.Update[byte](c, 0, n*row), c.Address(1)
		for i, from := range index {
			copy(dst[i*row:(i+1)*row], kernel.ReadAddress[byte](c, at+uint64(from*row), row))
		}
	}
}

func standInNone(c *kernel.Call) {
	words := kernel.Update[uint32](c, 0, int(kernel.Get[uint64](c, 1)))
	for i := range words {
		words[i] = math.MaxUint32
	}
}

func standInEnds(c *kernel.Call) {
	n, rows := kernel.Get[uint64](c, 3), kernel.Get[uint64](c, 4)
	first, last := kernel.Update[uint32](c, 0, int(rows)), kernel.Update[int32](c, 1, int(rows))
	for i, row := range indexOf(c, 2, n, rows, kernel.Get[uint32](c, 5)) {
		first[row], last[row] = min(first[row], uint32(i)), max(last[row], int32(i))
	}
}

func standInChain(c *kernel.Call) {
	n, rows := kernel.Get[uint64](c, 3), kernel.Get[uint64](c, 4)
	next, last := kernel.Update[int32](c, 0, int(n)), kernel.Read[int32](c, 1, int(rows))
	before := map[int]int{} // the entry that named a row before
	for i, row := range indexOf(c, 2, n, rows, kernel.Get[uint32](c, 5)) {
		if at, ok := before[row]; ok {
			next[at] = int32(i)
		}
		if before[row] = i; last[row] == int32(i) {
			next[i] = -1
		}
	}
}

func standInAdd(t memory.DType) func(*kernel.Call) {
	elem := dtype.Of(t)
	return func(c *kernel.Call) {
		rows, width := int(kernel.Get[uint64](c, 5)), int(kernel.Get[uint64](c, 6))
		kind := memory.DType(kernel.Get[uint32](c, 7))
		bytes := width * t.Size()
		to, from, next, weights := c.Address(0), c.Address(1), c.Address(3), c.Address(4)
		for row, begin := range kernel.Read[uint32](c, 2, rows) {
			if begin == math.MaxUint32 {
				continue
			}
			dst := kernel.UpdateAddress[byte](c, to+uint64(row*bytes), bytes)
			sums := make([]dtype.Value, width)
			for j := range sums {
				sums[j] = elem.Load(dst, j)
			}
			for i := int32(begin); i >= 0; i = kernel.ReadAddress[int32](c, next+uint64(i)*4, 1)[0] {
				src, w := kernel.ReadAddress[byte](c, from+uint64(int(i)*bytes), bytes), 1.0
				if weights != 0 {
					w = dtype.Of(kind).Load(kernel.ReadAddress[byte](c, weights+uint64(int(i)*kind.Size()), kind.Size()), 0).Float64()
				}
				for j := range sums {
					sums[j] = times(elem, w, elem.Load(src, j), sums[j])
				}
			}
			for j := range sums {
				elem.Store(dst, j, sums[j])
			}
		}
	}
}

// times returns w·x + sum in the type that sums of elements have.
func times(elem *dtype.Type, w float64, x, sum dtype.Value) dtype.Value {
	switch {
	case !elem.IsFloat():
		return dtype.IntValue(sum.Int64() + x.Int64())
	case elem.Size == 8:
		return dtype.FloatValue(math.FMA(w, x.Float64(), sum.Float64()))
	}
	return dtype.FloatValue(float64(dtype.FMA(float32(w), x.Float32(), sum.Float32())))
}

func standInTop(c *kernel.Call) {
	rows, n, k := int(kernel.Get[uint64](c, 3)), int(kernel.Get[uint32](c, 4)), int(kernel.Get[uint32](c, 5))
	t := memory.DType(kernel.Get[uint32](c, 6))
	size := t.Size()
	values, src := kernel.Update[byte](c, 0, rows*k*size), kernel.Read[byte](c, 2, rows*n*size)
	places := memory.Int32
	if kernel.Get[uint32](c, 7) == 1 {
		places = memory.Int64
	}
	put := kernel.Update[byte](c, 1, rows*k*places.Size())
	order := make([]int, n)
	for row := range rows {
		for i := range order {
			order[i] = i
		}
		slices.SortStableFunc(order, func(a, b int) int {
			return compare(dtype.Of(t).Load(src, row*n+b), dtype.Of(t).Load(src, row*n+a))
		})
		for j, at := range order[:k] {
			copy(values[(row*k+j)*size:][:size], src[(row*n+at)*size:])
			dtype.Of(places).Store(put, row*k+j, dtype.IntValue(int64(at)))
		}
	}
}

// compare orders numbers; NaN is the greatest.
func compare(a, b dtype.Value) int {
	x, y := a.Float64(), b.Float64()
	switch {
	case x != x || y != y:
		return cmp.Compare(y, x) // for Go, NaN is the least
	case x == y:
		return cmp.Compare(a.Int64(), b.Int64())
	}
	return cmp.Compare(x, y)
}
