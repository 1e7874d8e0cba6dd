package rng

import (
	"math"
	"slices"
	"sort"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below are the Go implementation of draws.cu for virtual devices.

// drawTypes are the first arguments of the kernels that draw: the slice, its length, the seed,
// the offset, and the place of a graph's launch.
var drawTypes = []kernel.Param{kernel.Pointer, kernel.U64, kernel.U64, kernel.U64, kernel.Pointer}

// drawKernels returns the kernels of draws.cu for an element type.
func drawKernels[T memory.Element](f *format) []kernel.Def {
	join := func(ps ...[]kernel.Param) (all []kernel.Param) {
		for _, p := range ps {
			all = append(all, p...)
		}
		return all
	}
	if !f.IsFloat() {
		return []kernel.Def{{Name: "bernoulli_kernel", Params: join(drawTypes, paramTypes), Go: bernoulliStandIn[T](f)}}
	}
	return []kernel.Def{
		{Name: "bernoulli_kernel", Params: join(drawTypes, paramTypes), Go: bernoulliStandIn[T](f)},
		{Name: "poisson_kernel", Params: join(drawTypes, paramTypes), Go: poissonStandIn[T]()},
		{Name: "normal_kernel", Params: join(drawTypes[:2], paramTypes, paramTypes), Go: normalStandIn[T](f)},
		{Name: "cauchy_kernel", Params: params, Go: standIn[T](cauchy, f)},
	}
}

// drawn returns the seed and the offset of a kernel's draws, from argument i and the
// next two.
func drawn(c *kernel.Call, i int) (seed, offset uint64) {
	seed, offset = kernel.Get[uint64](c, i), kernel.Get[uint64](c, i+1)
	if c.Address(i+2) != 0 {
		place := kernel.Read[uint64](c, i+2, 2)
		return place[0], offset + place[1]
	}
	return seed, offset
}

func bernoulliStandIn[T memory.Element](f *format) func(*kernel.Call) {
	cast := caster[T]()
	return func(c *kernel.Call) {
		n := int(kernel.Get[uint64](c, 1))
		seed, offset := drawn(c, 2)
		p, out := readParam(c, 5, n), kernel.Update[T](c, 0, n)
		for i := range out {
			limit := p.at(i)
			if !f.wide {
				limit = float64(float32(limit))
			}
			w := words(seed, offset, uint32(i/4), 0)
			out[i] = cast(one(float64(unit32(w[i%4])) <= limit))
		}
	}
}

func normalStandIn[T memory.Element](f *format) func(*kernel.Call) {
	cast, value := caster[T](), valuer[T]()
	return func(c *kernel.Call) {
		n := int(kernel.Get[uint64](c, 1))
		mean, std, out := readParam(c, 2, n), readParam(c, 6, n), kernel.Update[T](c, 0, n)
		for i := range out {
			if !std.number {
				out[i] = cast(std.combine(f, value(out[i]), std.at(i), true))
			}
			out[i] = cast(mean.combine(f, value(out[i]), mean.at(i), false))
		}
	}
}

// combine returns the product or the sum, in double if one of the types is double.
func (p *hostParam) combine(f *format, a, b float64, times bool) float64 {
	switch inDouble := f.wide || !p.number && p.dtype == memory.Float64; {
	case inDouble && times:
		return a * b
	case inDouble:
		return a + b
	case times:
		return float64(float32(a) * float32(b))
	}
	return float64(float32(a) + float32(b))
}

// valuer returns the conversion of a floating-point element to its value.
func valuer[T memory.Element]() func(T) float64 {
	var f any
	var z T
	switch any(z).(type) {
	case memory.Float16Bits:
		f = fromHalf
	case memory.BFloat16Bits:
		f = fromBFloat
	case float32:
		f = func(v float32) float64 { return float64(v) }
	case float64:
		f = func(v float64) float64 { return v }
	default:
		return nil
	}
	return f.(func(T) float64)
}

func poissonStandIn[T memory.Element]() func(*kernel.Call) {
	cast := caster[T]()
	return func(c *kernel.Call) {
		n := int(kernel.Get[uint64](c, 1))
		seed, offset := drawn(c, 2)
		rate, out := readParam(c, 5, n), kernel.Update[T](c, 0, n)
		for i := range out {
			out[i] = cast(poisson(seed, offset, uint32(i), rate.at(i)))
		}
	}
}

// A sequence is the sequence of 32-bit numbers of one thread.
type sequence struct {
	seed, offset uint64
	thread       uint32
	used         int
	w            [4]uint32
}

func (s *sequence) next() uint32 {
	if s.used%4 == 0 {
		s.w = words(s.seed, s.offset, s.thread, s.used/4)
	}
	s.used++
	return s.w[(s.used-1)%4]
}

func poisson(seed, offset uint64, thread uint32, rate float64) float64 {
	s := &sequence{seed: seed, offset: offset, thread: thread}
	switch {
	case !(rate >= 0):
		return math.Float64frombits(0x7ff8 << 48) // NaN, as in draws.cu
	case rate < 64:
		return float64(poissonSmall(s, float32(rate)))
	case rate > 4000:
		var v [4]float64
		gauss64(words(seed, offset, thread, 0), &v)
		x := math.FMA(math.Sqrt(rate), v[0], rate) + 0.5
		if x != x {
			return 0 // the rate is infinite
		}
		return math.Trunc(min(x, math.MaxUint32))
	}
	return poissonMiddle(s, float32(rate))
}

func poissonSmall(s *sequence, rate float32) uint32 {
	for k, p := uint32(0), float32(math.Exp(float64(rate))); ; k++ {
		if p *= unit32(s.next()); !(p > 1) {
			return k
		}
	}
}

func poissonMiddle(s *sequence, rate float32) float64 {
	g := newGamma(rate)
	logRate := log32(rate)
	for {
		x := float32(math.Floor(float64(g.inverse(unit32(s.next())))))
		z := unit32(s.next())
		v := float32(g.value(x+1)-g.value(x)) * 1.3
		lgamma, _ := math.Lgamma(float64(1 + x))
		t := exp32(dtype.FMA(x, logRate, -rate) - float32(lgamma))
		if float32(z*v) < t && float64(v) >= 1e-20 {
			return float64(x)
		}
	}
}

// A gamma approximates the regularised incomplete gamma function of order a, as in draws.cu.
type gamma struct{ a, slope, shift float32 }

func newGamma(a float32) gamma {
	return gamma{a,
		dtype.FMA(1.43248035075540910, rsqrt32(a-0.12400979329415655), 0.00025361074907033),
		dtype.FMA(0.21096734870196546, rsqrt32(a-1.97381164089999420), 0.94201734077887530)}
}

func (g gamma) value(x float32) float32 {
	t := 1 + exp32(dtype.FMA(g.slope, g.a-x, -g.shift))
	return 1 / float32(t*t)
}

func (g gamma) inverse(y float32) float32 {
	t := g.shift + log32(rsqrt32(y)-1)
	return dtype.FMA(-t, 1/g.slope, g.a)
}

func rsqrt32(x float32) float32 { return float32(1 / math.Sqrt(float64(x))) }
func exp32(x float32) float32   { return float32(math.Exp(float64(x))) }
func log32(x float32) float32   { return float32(math.Log(float64(x))) }

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
