package rng

import (
	"math"
	"slices"
	"sort"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below are the Go implementation of samples.cu for virtual devices.

// An arithmetic has the operations on a type of weights. Each result is rounded to the type.
type arithmetic[T memory.Element] struct {
	value func(T) float64
	of    func(float64) T
	wide  bool
}

func arithmeticOf[T memory.Element](f *format) arithmetic[T] {
	return arithmetic[T]{valuer[T](), caster[T](), f.wide}
}

func (a arithmetic[T]) add(x, y T) T {
	if a.wide {
		return a.of(a.value(x) + a.value(y))
	}
	return a.of(float64(float32(a.value(x)) + float32(a.value(y))))
}

func (a arithmetic[T]) divide(x, y T) T {
	if a.wide {
		return a.of(a.value(x) / a.value(y))
	}
	return a.of(float64(float32(a.value(x)) / float32(a.value(y))))
}

// sampleKernels returns the kernels of samples.cu for a type of weights.
func sampleKernels[T memory.Element](f *format) []kernel.Def {
	p, u64, a := kernel.Pointer, kernel.U64, arithmeticOf[T](f)
	return []kernel.Def{
		{Name: "weight_sums", Params: []kernel.Param{p, p, p, u64, u64}, Go: a.sumsStandIn},
		{Name: "weight_scan", Params: []kernel.Param{p, p, u64, u64}, Go: a.scanStandIn},
		{Name: "sample_rows", Params: []kernel.Param{p, p, p, p, u64, u64, u64, u64, u64, u64, p}, Go: a.rowsStandIn},
		{Name: "sample_best", Params: []kernel.Param{p, p, p, p, u64, u64}, Go: a.bestStandIn},
		{Name: "sample_keys", Params: []kernel.Param{p, p, p, u64}, Go: a.keysStandIn},
		{Name: "sample_row_keys", Params: []kernel.Param{p, p, u64, u64}, Go: func(c *kernel.Call) {
			n, columns := int(kernel.Get[uint64](c, 2)), kernel.Get[uint64](c, 3)
			keys := kernel.Update[uint64](c, 0, n)
			for i, v := range kernel.Read[uint32](c, 1, n) {
				keys[i] = uint64(v) / columns
			}
		}},
		{Name: "sample_first", Params: []kernel.Param{p, p, p, u64, u64, u64}, Go: firstStandIn},
	}
}

func size(c *kernel.Call, i int) int { return int(kernel.Get[uint64](c, i)) }

func (a arithmetic[T]) sumsStandIn(c *kernel.Call) {
	rows, columns, threads := size(c, 3), size(c, 4), int(c.Grid().Threads[0])
	weights, bad := kernel.Read[T](c, 0, rows*columns), kernel.Update[uint32](c, 2, rows)
	var parts []T
	if c.Address(1) != 0 {
		parts = kernel.Update[T](c, 1, rows*columns)
	}
	for row := range rows {
		w := weights[row*columns : (row+1)*columns]
		total := a.blockSum(w, threads)
		valid := slices.IndexFunc(w, func(x T) bool { return !(a.value(x) >= 0 && !math.IsInf(a.value(x), 1)) }) < 0
		if bad[row] = 0; !valid || !(a.value(total) > 0) {
			bad[row] = 1
		}
		for i := range w {
			if parts == nil {
				break
			}
			if parts[row*columns+i] = w[i]; a.value(total) > 0 {
				parts[row*columns+i] = a.divide(w[i], total)
			}
		}
	}
}

// blockSum adds the numbers like a block of torch: each thread its own, then each warp, and then
// the warps' sums.
func (a arithmetic[T]) blockSum(w []T, threads int) T {
	x := make([]T, threads)
	for i := range w {
		x[i%threads] = a.add(x[i%threads], w[i])
	}
	var sums [32]T
	for warp := 0; warp < threads/32; warp++ {
		sums[warp] = a.warpSum([32]T(x[warp*32:]))
	}
	return a.warpSum(sums)
}

func (a arithmetic[T]) warpSum(x [32]T) T {
	for d := 16; d > 0; d /= 2 {
		for lane := range d {
			x[lane] = a.add(x[lane], x[lane+d])
		}
	}
	return x[0]
}

func (a arithmetic[T]) scanStandIn(c *kernel.Call) {
	rows, columns, threads := size(c, 2), size(c, 3), int(c.Grid().Threads[0])
	parts, sums := kernel.Read[T](c, 0, rows*columns), kernel.Update[T](c, 1, rows*columns)
	x := make([]T, 2*threads)
	for row := range rows {
		in, out := parts[row*columns:(row+1)*columns], sums[row*columns:(row+1)*columns]
		var before T
		for at := 0; at < columns; at += 2 * threads {
			clear(x[copy(x, in[at:]):])
			x[0] = a.add(x[0], before)
			for s := 1; s <= threads; s *= 2 {
				for t := range threads {
					from := t/s*(2*s) + s
					x[from+t%s] = a.add(x[from+t%s], x[from-1])
				}
			}
			copy(out[at:], x)
			before = x[2*threads-1]
		}
	}
}

func (a arithmetic[T]) rowsStandIn(c *kernel.Call) {
	rows, columns, samples, span := size(c, 4), size(c, 5), size(c, 6), size(c, 7)
	out, sums, parts := kernel.Update[int64](c, 0, rows*samples), kernel.Read[T](c, 1, rows*columns), kernel.Read[T](c, 2, rows*columns)
	bad := kernel.Read[uint32](c, 3, rows)
	seed, offset := drawn(c, 8)
	draws := min(rows, mostRows)
	for i := range out {
		row := i / samples
		w := words(seed, offset, uint32(row%draws*span+i%samples), row/draws)
		u := a.value(a.of(float64(unit32(w[0]))))
		sum, part := sums[row*columns:(row+1)*columns], parts[row*columns:(row+1)*columns]
		start := min(sort.Search(columns, func(k int) bool { return !(a.value(sum[k]) < u) }), columns-1)
		for start > 0 && a.value(part[start]) == 0 {
			start--
		}
		if out[i] = int64(start); bad[row] != 0 {
			out[i] = -1
		}
	}
}

// order returns a number that is larger for a larger value, and largest for NaN.
func (a arithmetic[T]) order(v float64) uint64 {
	if a.wide {
		b := math.Float64bits(v)
		switch {
		case v != v:
			return math.MaxUint64
		case b>>63 != 0:
			return ^b
		}
		return b | 1<<63
	}
	b := math.Float32bits(float32(v))
	switch {
	case v != v:
		return math.MaxUint32
	case b>>31 != 0:
		return uint64(^b)
	}
	return uint64(b | 1<<31)
}

func (a arithmetic[T]) bestStandIn(c *kernel.Call) {
	rows, columns := size(c, 4), size(c, 5)
	weights, waits := kernel.Read[T](c, 1, rows*columns), kernel.Read[T](c, 2, rows*columns)
	out, bad := kernel.Update[int64](c, 0, rows), kernel.Read[uint32](c, 3, rows)
	for row := range rows {
		best, index := uint64(0), -1
		for i := range columns {
			if v := a.order(a.value(a.divide(weights[row*columns+i], waits[row*columns+i]))); index < 0 || v > best {
				best, index = v, i
			}
		}
		if out[row] = int64(index); bad[row] != 0 {
			out[row] = -1
		}
	}
}

func (a arithmetic[T]) keysStandIn(c *kernel.Call) {
	n := size(c, 3)
	keys, weights, waits := kernel.Update[uint64](c, 0, n), kernel.Read[T](c, 1, n), kernel.Read[T](c, 2, n)
	most := uint64(math.MaxUint32)
	if a.wide {
		most = math.MaxUint64
	}
	for i := range keys {
		keys[i] = most - a.order(a.value(a.divide(weights[i], waits[i])))
	}
}

func firstStandIn(c *kernel.Call) {
	rows, columns, samples := size(c, 3), size(c, 4), size(c, 5)
	out, values, bad := kernel.Update[int64](c, 0, rows*samples), kernel.Read[uint32](c, 1, rows*columns), kernel.Read[uint32](c, 2, rows)
	for i := range out {
		row := i / samples
		if out[i] = int64(values[row*columns+i%samples]) - int64(row*columns); bad[row] != 0 {
			out[i] = -1
		}
	}
}
