package optim

import (
	"math"
	"unsafe"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below implement the kernels of optim.cu in Go, for virtual devices. They
// round where the kernels round. Only powers of floats may differ from CUDA's powers by a unit
// in the last place.

// rowsOf returns the rows of the table that is argument 0.
func rowsOf[R entry | list](c *kernel.Call, n int) []R {
	var r R
	b := kernel.Read[byte](c, 0, n*int(unsafe.Sizeof(r)))
	return unsafe.Slice((*R)(unsafe.Pointer(unsafe.SliceData(b))), n)
}

// lengthOf returns how many rows a table has whose last block is the last one of the grid.
func lengthOf(c *kernel.Call) int {
	n := int(c.Grid().Blocks[0])
	words := int(unsafe.Sizeof(place{})) / 4
	b := kernel.Read[uint32](c, 1, words*n)
	return int(b[words*(n-1)]) + 1
}

// part is the memory of an element type, as numbers.
type part struct {
	dtype memory.DType
	bytes []byte
}

func (p part) at(i int) float64 { return dtype.Of(p.dtype).Load(p.bytes, i).Float64() }
func (p part) set(i int, x float64) {
	dtype.Of(p.dtype).Store(p.bytes, i, dtype.FloatValue(x))
}

// open returns n elements at an address, for reading or also for writing.
func partAt(c *kernel.Call, t memory.DType, at, n uint64, write bool) part {
	if at == 0 || n == 0 {
		return part{}
	}
	if write {
		return part{t, kernel.UpdateAddress[byte](c, at, int(n)*t.Size())}
	}
	return part{t, kernel.ReadAddress[byte](c, at, int(n)*t.Size())}
}

// arithmetic is the arithmetic of a kernel's wide type.
type arithmetic struct {
	round func(float64) float64
	fused func(a, b, c float64) float64
}

var (
	single = arithmetic{
		round: func(x float64) float64 { return float64(float32(x)) },
		fused: func(a, b, c float64) float64 { return float64(dtype.FMA(float32(a), float32(b), float32(c))) },
	}
	double = arithmetic{round: func(x float64) float64 { return x }, fused: math.FMA}
)

func arithmeticOf(t memory.DType) arithmetic {
	if t == memory.Float64 {
		return double
	}
	return single
}

// A rule updates one element.
type rule func(p, g, m, v, top float64) (p2, m2, v2, top2 float64)

// A job has the arguments of one launch of an optimiser.
type job struct {
	flags       uint32
	scale, coef float64
	scaled      bool
	clipped     bool
}

// standIn returns the stand-in of an optimiser.
func standIn(rules func(a arithmetic, j *job, e *entry, o *options, step float64) rule) func(*kernel.Call) {
	return func(c *kernel.Call) {
		j := job{flags: kernel.Get[uint32](c, 9)}
		groups := int(kernel.Get[uint32](c, 8))
		if c.Address(6) != 0 && kernel.Read[float32](c, 6, 1)[0] != 0 {
			return
		}
		if j.scaled = c.Address(5) != 0; j.scaled {
			j.scale = float64(kernel.Read[float32](c, 5, 1)[0])
		}
		if j.clipped = c.Address(7) != 0; j.clipped {
			j.coef = float64(kernel.Read[float32](c, 7, 1)[0])
		}
		words := kernel.Read[float64](c, 2, groups*optionWords)
		all := unsafe.Slice((*options)(unsafe.Pointer(unsafe.SliceData(words))), groups)
		steps := kernel.Update[float32](c, 3, groups)
		rows := rowsOf[entry](c, lengthOf(c))
		for i := range rows {
			e := &rows[i]
			a := arithmeticOf(memory.DType(e.types & 0xff))
			j.update(c, a, e, rules(a, &j, e, &all[e.group], float64(steps[e.group]+1)))
		}
		for i := range steps {
			steps[i]++
		}
	}
}

// update applies the rule to a parameter.
func (j *job) update(c *kernel.Call, a arithmetic, e *entry, by rule) {
	t, gt, ct := memory.DType(e.types&0xff), memory.DType(e.types>>8&0xff), memory.DType(e.types>>16)
	p, g := partAt(c, t, e.value, e.n, true), partAt(c, gt, e.grad, e.n, false)
	m, v, top := partAt(c, t, e.first, e.n, true), partAt(c, t, e.second, e.n, true), partAt(c, t, e.most, e.n, true)
	copied := partAt(c, ct, e.copied, e.n, true)
	load := func(x part, i int) float64 {
		if x.bytes == nil {
			return 0
		}
		return x.at(i)
	}
	save := func(x part, i int, to float64) {
		if x.bytes != nil {
			x.set(i, to)
		}
	}
	for i := range int(e.n) {
		p2, m2, v2, top2 := by(p.at(i), j.gradient(a, g.at(i)), load(m, i), load(v, i), load(top, i))
		p.set(i, p2)
		save(m, i, m2)
		save(v, i, v2)
		save(top, i, top2)
		save(copied, i, p2)
	}
}

func (j *job) gradient(a arithmetic, g float64) float64 {
	if j.scaled {
		g = a.round(g / j.scale)
	}
	if j.clipped {
		g = a.round(g * j.coef)
	}
	if j.flags&flagMaximize != 0 {
		return -g
	}
	return g
}

var standInAdam = standIn(func(a arithmetic, j *job, e *entry, o *options, step float64) rule {
	r, fma := a.round, a.fused
	lr, b1, b2, eps, decay := r(o.lr), r(o.a), r(o.b), r(o.eps), r(o.decay)
	size := r(lr / r(1-r(math.Pow(b1, step))))
	root := r(math.Sqrt(r(1 - r(math.Pow(b2, step)))))
	return func(p, g, m, v, top float64) (float64, float64, float64, float64) {
		if decay != 0 && j.flags&flagDecoupled != 0 {
			p = fma(-r(lr*decay), p, p)
		} else if decay != 0 {
			g = fma(p, decay, g)
		}
		m = fma(b1, m, fma(-b1, g, g))
		square := r(g * g)
		v = fma(b2, v, fma(-b2, square, square))
		by := v
		if e.most != 0 {
			if !(top > v || top != top) {
				top = v
			}
			by = top
		}
		p = r(p - r(r(size*m)/r(r(r(math.Sqrt(by))/root)+eps)))
		return p, m, v, top
	}
})

var standInSGD = standIn(func(a arithmetic, j *job, e *entry, o *options, step float64) rule {
	r, fma := a.round, a.fused
	lr, momentum, decay := r(o.lr), r(o.a), r(o.decay)
	part := r(1 - r(o.b))
	other := j.flags&flagMaximize != 0 && e.n%lanes == 0
	return func(p, g, m, v, top float64) (float64, float64, float64, float64) {
		if decay != 0 {
			g = fma(decay, p, g)
		}
		if momentum != 0 {
			switch {
			case step == 1:
				m = g
			case other:
				m = fma(momentum, m, r(part*g))
			default:
				m = fma(part, g, r(momentum*m))
			}
			if j.flags&flagNesterov != 0 {
				g = fma(momentum, m, g)
			} else {
				g = m
			}
		}
		return fma(-lr, g, p), m, v, top
	}
})

// A power is the number that a norm of order p adds up for x; p 0 is infinite.
func power(x, p float64) float64 {
	switch x = math.Abs(x); p {
	case 2:
		return x * x
	case 0, 1:
		return x
	}
	return math.Pow(x, p)
}

func rootOf(x, p float64) float64 {
	switch p {
	case 2:
		return math.Sqrt(x)
	case 0, 1:
		return x
	}
	return math.Pow(x, 1/p)
}

// roundTo rounds a float32 to a type.
func roundTo(t memory.DType, x float64) float64 {
	if t == memory.Float64 {
		t = memory.Float32
	}
	return dtype.Of(t).Round(dtype.FloatValue(x))
}

// combine adds two numbers, or returns the larger one if p is 0; NaN is the largest.
func combine(a, b, p float64) float64 {
	if p != 0 {
		return a + b
	}
	if a > b || a != a {
		return a
	}
	return b
}

func standInNorm(c *kernel.Call) {
	p, sum := kernel.Get[float64](c, 6), 0.0
	parts := kernel.Update[float64](c, 2, int(c.Grid().Blocks[0]))
	rows := rowsOf[list](c, int(kernel.Get[uint32](c, 5)))
	for i := range rows {
		l := &rows[i]
		t, x := memory.DType(l.dtype), 0.0
		xs := partAt(c, t, l.at, l.n, false)
		for k := range int(l.n) {
			x = combine(x, power(xs.at(k), p), p)
		}
		parts[l.first] = x
		if n := rootOf(x, p); t == memory.Float64 {
			sum = combine(sum, power(n, p), p)
		} else {
			sum = combine(sum, power(roundTo(t, n), p), p)
		}
	}
	kernel.Update[float32](c, 3, 1)[0] = float32(sum)
	kernel.Update[uint32](c, 4, 1)[0] = 0
}

func standInCoefficient(c *kernel.Call) {
	t := memory.DType(kernel.Get[uint32](c, 5))
	n := roundTo(t, rootOf(float64(kernel.Read[float32](c, 0, 1)[0]), kernel.Get[float64](c, 3)))
	inverse := roundTo(t, 1/roundTo(t, n+float64(float32(1e-6))))
	factor := roundTo(t, inverse*float64(kernel.Get[float32](c, 4)))
	if factor > 1 {
		factor = 1
	}
	kernel.Update[float32](c, 1, 1)[0], kernel.Update[float32](c, 2, 1)[0] = float32(n), float32(factor)
}

// change applies fn to every element of the gradients.
func change(c *kernel.Call, fn func(t memory.DType, x float64) float64) {
	for _, l := range rowsOf[list](c, lengthOf(c)) {
		t := memory.DType(l.dtype)
		xs := partAt(c, t, l.at, l.n, true)
		for i := range int(l.n) {
			xs.set(i, fn(t, xs.at(i)))
		}
	}
}

func standInScale(c *kernel.Call) {
	by := float64(kernel.Read[float32](c, 2, 1)[0])
	change(c, func(t memory.DType, x float64) float64 { return x * roundTo(t, by) })
}

func standInClamp(c *kernel.Call) {
	limit := float64(kernel.Get[float32](c, 2))
	change(c, func(_ memory.DType, x float64) float64 {
		switch {
		case x < -limit:
			return -limit
		case x > limit:
			return limit
		}
		return x
	})
}

func standInUnscale(c *kernel.Call) {
	by := 1.0
	if c.Address(2) != 0 {
		by = float64(kernel.Read[float32](c, 2, 1)[0])
	}
	found := false
	look := func(x float64) { found = found || math.IsInf(x, 0) || math.IsNaN(x) }
	if by == 1 {
		for _, l := range rowsOf[list](c, lengthOf(c)) {
			xs := partAt(c, memory.DType(l.dtype), l.at, l.n, false)
			for i := range int(l.n) {
				look(xs.at(i))
			}
		}
	} else {
		change(c, func(_ memory.DType, x float64) float64 {
			look(x)
			return x * by
		})
	}
	if found {
		kernel.Update[float32](c, 3, 1)[0] = 1
	}
}
