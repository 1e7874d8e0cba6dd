package rng

import (
	"math"

	"github.com/gochorus/chorus/internal/element"
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
	if f.digits == 0 {
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
		t := exp32(element.FMA(x, logRate, -rate) - float32(lgamma))
		if float32(z*v) < t && float64(v) >= 1e-20 {
			return float64(x)
		}
	}
}

// A gamma approximates the regularised incomplete gamma function of order a, as in draws.cu.
type gamma struct{ a, slope, shift float32 }

func newGamma(a float32) gamma {
	return gamma{a,
		element.FMA(1.43248035075540910, rsqrt32(a-0.12400979329415655), 0.00025361074907033),
		element.FMA(0.21096734870196546, rsqrt32(a-1.97381164089999420), 0.94201734077887530)}
}

func (g gamma) value(x float32) float32 {
	t := 1 + exp32(element.FMA(g.slope, g.a-x, -g.shift))
	return 1 / float32(t*t)
}

func (g gamma) inverse(y float32) float32 {
	t := g.shift + log32(rsqrt32(y)-1)
	return element.FMA(-t, 1/g.slope, g.a)
}

func rsqrt32(x float32) float32 { return float32(1 / math.Sqrt(float64(x))) }
func exp32(x float32) float32   { return float32(math.Exp(float64(x))) }
func log32(x float32) float32   { return float32(math.Log(float64(x))) }
