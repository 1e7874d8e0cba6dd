package rng

import (
	"math"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below are the Go implementation of rng.cu for virtual devices.
// The race detector skips the functions that run for each element, because
// virtual devices detect races in device memory themselves, and the detector
// makes a fill six times as slow.

// A call holds the parameters of a stand-in.
type call struct {
	n            int
	seed, offset uint64
	threads      int
	a, b, c      uint64
}

func read(c *kernel.Call) call {
	pair := func(i int) uint64 {
		return uint64(uint32(kernel.Get[int32](c, i))) | uint64(uint32(kernel.Get[int32](c, i+1)))<<32
	}
	x := call{
		n: int(kernel.Get[int32](c, 1)), seed: pair(2), offset: pair(4), a: pair(6), b: pair(8), c: pair(10),
		threads: int(c.Grid().Blocks[0] * c.Grid().Threads[0]),
	}
	if c.Address(12) != 0 {
		place := kernel.Read[uint64](c, 12, 2)
		x.seed = place[0]
		x.offset += place[1]
	}
	return x
}

// standIn returns the stand-in of the kernel for a distribution and an element
// type.
func standIn[T memory.Element](d dist, f *format) func(*kernel.Call) {
	fill := onHost[T](d, f)
	return func(k *kernel.Call) {
		c := read(k)
		fill(c, kernel.Update[T](k, 0, c.n))
	}
}

func onHost[T memory.Element](d dist, f *format) func(call, []T) {
	switch {
	case d == random && d.unroll(f) == 4:
		return compose(bits32, func(call) func(uint64) T { return randomOf[T](f) })
	case d == random:
		return compose(bits64, func(call) func(uint64) T { return randomOf[T](f) })
	case d == randomNear:
		return compose(bits32, rangeOf[T])
	case d == randomFar:
		return compose(bits64, rangeOf[T])
	}
	cast := caster[T]()
	of := func(c call) func(float64) T {
		value := real32(d, f, c)
		if f.wide {
			value = real64(d, c)
		}
		return func(v float64) T { return cast(value(v)) }
	}
	gauss := d == normal || d == logNormal
	switch {
	case gauss && f.wide:
		return compose(gauss64, of)
	case gauss:
		return compose(gauss32, of)
	case f.wide:
		return compose(units64, of)
	}
	return compose(units32, of)
}

// compose returns a function that fills elements. draw converts four words to
// values and returns their number; of converts a value to an element.
func compose[T memory.Element, V any](draw func(w [4]uint32, v *[4]V) int, of func(call) func(V) T) func(call, []T) {
	return func(c call, out []T) { rows(c, out, draw, of(c)) }
}

// rows fills the elements as the threads in rng.cu do: the first draw
// of all threads, then the second, and so on.
//
//go:norace
func rows[T memory.Element, V any](c call, out []T, draw func(w [4]uint32, v *[4]V) int, value func(V) T) {
	var v [4]V
	for at, nth := 0, 0; at < c.n; nth++ {
		count := 0
		for t := 0; t < c.threads && at+t < c.n; t++ {
			count = draw(words(c.seed, c.offset, uint32(t), nth), &v)
			for i := range count {
				if to := at + t + i*c.threads; to < c.n {
					out[to] = value(v[i])
				}
			}
		}
		at += c.threads * count
	}
}

//go:norace
func bits32(w [4]uint32, v *[4]uint64) int {
	v[0], v[1], v[2], v[3] = uint64(w[0]), uint64(w[1]), uint64(w[2]), uint64(w[3])
	return 4
}

//go:norace
func bits64(w [4]uint32, v *[4]uint64) int {
	v[0], v[1] = uint64(w[0])<<32|uint64(w[1]), uint64(w[2])<<32|uint64(w[3])
	return 2
}

//go:norace
func units32(w [4]uint32, v *[4]float64) int {
	for i, x := range w {
		v[i] = float64(unit32(x))
	}
	return 4
}

//go:norace
func units64(w [4]uint32, v *[4]float64) int {
	v[0], v[1] = unit64(w[0], w[1]), unit64(w[2], w[3])
	return 2
}

// gauss32 is the Box-Muller transform. The GPU's fast sine takes turns,
// computed from the angle by a truncated product. The stand-in does the same,
// and so differs only by the error of the sine's table.
//
//go:norace
func gauss32(w [4]uint32, v *[4]float64) int {
	for i := 0; i < 4; i += 2 {
		const turn = float32(0x1.921fb6p-30) // 2 pi / 2^32
		angle := dtype.FMA(float32(w[i+1]), turn, turn/2)
		radius := math.Sqrt(-2 * math.Log(float64(unit32(w[i]))))
		turns := cut(float64(angle) * float64(float32(1/(2*math.Pi))))
		sine, cosine := math.Sincos(2 * math.Pi * turns)
		v[i], v[i+1] = float64(float32(sine*radius)), float64(float32(cosine*radius))
	}
	return 4
}

// cut rounds a non-negative number down to float32.
func cut(v float64) float64 {
	const rest = 1<<29 - 1 // the bits that float32 lacks
	return math.Float64frombits(math.Float64bits(v) &^ rest)
}

//go:norace
func gauss64(w [4]uint32, v *[4]float64) int {
	radius := math.Sqrt(-2 * math.Log(unit64(w[0], w[1])))
	sine, cosine := sincospi(math.FMA(float64(mix(w[2], w[3])), 0x1p-52, 0x1p-53))
	v[0], v[1] = sine*radius, cosine*radius
	return 2
}

// sincospi returns the sine and cosine of x*pi for x from 0 to 2, after
// subtracting whole quarters, which is exact.
func sincospi(x float64) (sine, cosine float64) {
	quarters := math.Round(2 * x)
	s, c := math.Sincos((x - quarters/2) * math.Pi)
	switch int(quarters) & 3 {
	case 1:
		return c, -s
	case 2:
		return -s, -c
	case 3:
		return -c, s
	}
	return s, c
}

// real32 returns the function of a distribution for types that torch computes in
// float32, real64 for float64.
func real32(d dist, f *format, c call) func(float64) float64 {
	a, b, w := float32(math.Float64frombits(c.a)), float32(math.Float64frombits(c.b)), float32(math.Float64frombits(c.c))
	log := func(v float32) float32 { return float32(math.Log(float64(v))) }
	switch d {
	case uniform:
		return func(u float64) float64 {
			if v := f.round(float64(dtype.FMA(float32(u), w, a))); v != float64(b) {
				return v
			}
			return float64(a)
		}
	case normal:
		return func(z float64) float64 { return float64(dtype.FMA(float32(z), b, a)) }
	case logNormal:
		return func(z float64) float64 { return math.Exp(float64(dtype.FMA(float32(z), b, a))) }
	case exponential:
		return func(u float64) float64 {
			if u >= 1-0x1p-24 {
				return float64(a * -0x1p-24)
			}
			return float64(a * log(float32(u)))
		}
	case bernoulli:
		return func(u float64) float64 { return one(float32(u) < a) }
	case cauchy:
		return func(u float64) float64 {
			u = min(max(u, 0x1p-23), 1-0x1p-23)
			return float64(dtype.FMA(b, float32(math.Tan(float64(math.Pi*(float32(u)-0.5)))), a))
		}
	}
	failure := log(1 - a)
	return func(u float64) float64 { return math.Ceil(float64(log(float32(u)) / failure)) }
}

func real64(d dist, c call) func(float64) float64 {
	a, b, w := math.Float64frombits(c.a), math.Float64frombits(c.b), math.Float64frombits(c.c)
	switch d {
	case uniform:
		return func(u float64) float64 {
			if v := math.FMA(u, w, a); v != b {
				return v
			}
			return a
		}
	case normal:
		return func(z float64) float64 { return math.FMA(z, b, a) }
	case logNormal:
		return func(z float64) float64 { return math.Exp(math.FMA(z, b, a)) }
	case exponential:
		return func(u float64) float64 {
			if u >= 1-0x1p-53 {
				return a * -0x1p-53
			}
			return a * math.Log(u)
		}
	case bernoulli:
		return func(u float64) float64 { return one(u < a) }
	case cauchy:
		return func(u float64) float64 { return math.FMA(b, math.Tan(math.Pi*(u-0.5)), a) }
	}
	failure := math.Log1p(-a)
	return func(u float64) float64 { return math.Ceil(math.Log(u) / failure) }
}

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func randomOf[T memory.Element](f *format) func(uint64) T {
	of := counter[T]()
	if !f.IsFloat() {
		return func(v uint64) T { return of(int64(v & f.top)) }
	}
	values := uint64(1)<<f.Digits + 1
	return func(v uint64) T { return of(int64(v % values)) }
}

func rangeOf[T memory.Element](c call) func(uint64) T {
	of := counter[T]()
	return func(v uint64) T { return of(int64(v%c.a + c.b)) }
}

// The functions below are the Go implementation of sort.cu for virtual devices.

// sortKernels returns the kernels of sort.cu for an element type.
func sortKernels[T memory.Element]() []kernel.Def {
	p, u32, u64 := kernel.Pointer, kernel.U32, kernel.U64
	return []kernel.Def{
		{Name: "sort_count", Params: []kernel.Param{p, p, u64, u64, u32}, Go: countStandIn},
		{Name: "sort_scan", Params: []kernel.Param{p, p, u32}, Go: scanStandIn},
		{Name: "sort_scatter", Params: []kernel.Param{p, p, p, p, p, p, u64, u64, u32}, Go: scatterStandIn},
		{Name: "permutation_keys", Params: []kernel.Param{p, p, u64, u64}, Go: keysStandIn},
		{Name: "permutation_ties", Params: []kernel.Param{p, p, u64, u64, u64, p}, Go: tiesStandIn},
		{Name: "permutation_store", Params: []kernel.Param{p, p, u64}, Go: func(c *kernel.Call) {
			n, of := int(kernel.Get[uint64](c, 2)), counter[T]()
			out := kernel.Update[T](c, 0, n)
			for i, v := range kernel.Read[uint32](c, 1, n) {
				out[i] = of(int64(v))
			}
		}},
	}
}

func digitOf(key uint64, shift uint32) int { return int(key>>shift) % digits }

func countStandIn(c *kernel.Call) {
	n, part, shift := int(kernel.Get[uint64](c, 2)), int(kernel.Get[uint64](c, 3)), kernel.Get[uint32](c, 4)
	blocks := int(c.Grid().Blocks[0])
	keys, counts := kernel.Read[uint64](c, 0, n), kernel.Update[uint32](c, 1, digits*blocks)
	clear(counts)
	for i, key := range keys {
		counts[digitOf(key, shift)*blocks+i/part]++
	}
}

func scanStandIn(c *kernel.Call) {
	blocks := int(kernel.Get[uint32](c, 2))
	counts, totals := kernel.Update[uint32](c, 0, digits*blocks), kernel.Update[uint32](c, 1, digits)
	for d := range digits {
		sum := uint32(0)
		for b := range blocks {
			at := &counts[d*blocks+b]
			*at, sum = sum, sum+*at
		}
		totals[d] = sum
	}
}

func scatterStandIn(c *kernel.Call) {
	n, part, shift := int(kernel.Get[uint64](c, 6)), int(kernel.Get[uint64](c, 7)), kernel.Get[uint32](c, 8)
	blocks := int(c.Grid().Blocks[0])
	keys, keysOut, valuesOut := kernel.Read[uint64](c, 0, n), kernel.Update[uint64](c, 2, n), kernel.Update[uint32](c, 3, n)
	counts, totals := kernel.Read[uint32](c, 4, digits*blocks), kernel.Read[uint32](c, 5, digits)
	var values []uint32
	if c.Address(1) != 0 {
		values = kernel.Read[uint32](c, 1, n)
	}
	base := make([]uint32, digits*blocks)
	sum := uint32(0)
	for d := range digits {
		for b := range blocks {
			base[d*blocks+b] = sum + counts[d*blocks+b]
		}
		sum += totals[d]
	}
	for i, key := range keys {
		to := &base[digitOf(key, shift)*blocks+i/part]
		keysOut[*to], valuesOut[*to] = key, uint32(i)
		if values != nil {
			valuesOut[*to] = values[i]
		}
		*to++
	}
}

func keysStandIn(c *kernel.Call) {
	n, mask := int(kernel.Get[uint64](c, 2)), kernel.Get[uint64](c, 3)
	keys := kernel.Update[uint64](c, 0, n)
	if c.Address(1) == 0 {
		for i := range keys {
			keys[i] = (keys[i] ^ 1<<63) & mask
		}
		return
	}
	for i, v := range kernel.Read[int32](c, 1, n) {
		keys[i] = uint64(uint32(v)^1<<31) & mask
	}
}

func tiesStandIn(c *kernel.Call) {
	n := int(kernel.Get[uint64](c, 2))
	keys, values := kernel.Read[uint64](c, 0, n), kernel.Update[uint32](c, 1, n)
	seed, offset := drawn(c, 3)
	for first := 0; first < n; {
		end := first + 1
		for end < n && keys[end] == keys[first] {
			end++
		}
		s := &sequence{seed: seed, offset: offset, thread: uint32(first)}
		for k := end - first - 1; k > 0; k-- {
			other := int(s.next() % uint32(k+1))
			values[first+k], values[first+other] = values[first+other], values[first+k]
		}
		first = end
	}
}
