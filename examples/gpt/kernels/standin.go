package kernels

import (
	"math"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below are the kernels of kernels.cu in Go, for virtual devices. They round the
// same numbers to T as the kernels, but may add up in another order.

// read returns n numbers at argument i as float32.
func read[T Float](c *kernel.Call, i, n int) []float32 { return wide(kernel.Read[T](c, i, n)) }

func wide[T Float](xs []T) []float32 {
	if same, ok := any(xs).([]float32); ok {
		return same
	}
	out := make([]float32, len(xs))
	for i, x := range xs {
		out[i] = memory.BFloat16Bits(x).Float32()
	}
	return out
}

// narrow returns x as an activation.
func narrow[T Float](x float32) T {
	var z T
	switch p := any(&z).(type) {
	case *float32:
		*p = x
	case *memory.BFloat16Bits:
		*p = memory.BFloat16Of(x)
	}
	return z
}

// rounder returns the function that rounds a number as an activation would hold it.
func rounder[T Float]() func(float32) float32 {
	if memory.DTypeOf[T]() == memory.Float32 {
		return func(x float32) float32 { return x }
	}
	return func(x float32) float32 { return memory.BFloat16Of(x).Float32() }
}

// put writes or adds to a gradient of a parameter.
func put(to []float32, i int, x float32, flags int32) {
	if flags&accumulate != 0 {
		x += to[i]
	}
	to[i] = x
}

// line returns the place of a row's token.
func line(row int) int { return row/Context*Line + row%Context }

// texts returns the tokens of a batch of rows.
func texts(c *kernel.Call, i, rows int) []int32 { return kernel.Read[int32](c, i, rows/Context*Line) }

// standardize writes a row with mean 0 and variance 1, and returns 1/sigma.
func standardize(x, row []float32) float32 {
	sum, squares := 0.0, 0.0
	for _, v := range row {
		sum += float64(v)
	}
	mean := float32(sum / Width)
	for i, v := range row {
		x[i] = v - mean
		squares += float64(x[i]) * float64(x[i])
	}
	inverse := float32(1 / math.Sqrt(squares/Width+1e-5))
	for i := range x {
		x[i] *= inverse
	}
	return inverse
}

// norm writes layer_norm(row) to a.
func norm[T Float](row, w, b []float32, a []T) {
	var x [Width]float32
	standardize(x[:], row)
	for i, v := range x {
		a[i] = narrow[T](v*w[i] + b[i])
	}
}

func embedNorm[T Float](c *kernel.Call) {
	rows := int(kernel.Get[int32](c, 7))
	text, h, a := texts(c, 0, rows), kernel.Update[float32](c, 3, rows*Width), kernel.Update[T](c, 6, rows*Width)
	tok, pos := kernel.Read[float32](c, 1, Vocab*Width), kernel.Read[float32](c, 2, Context*Width)
	w, b := kernel.Read[float32](c, 4, Width), kernel.Read[float32](c, 5, Width)
	for r := range rows {
		row, word, place := h[r*Width:][:Width], tok[text[line(r)]*Width:], pos[r%Context*Width:]
		for i := range row {
			row[i] = word[i] + place[i]
		}
		norm(row, w, b, a[r*Width:])
	}
}

func addNorm[T Float](c *kernel.Call) {
	rows := int(kernel.Get[int32](c, 6))
	before, y, h := kernel.Read[float32](c, 0, rows*Width), read[T](c, 1, rows*Width), kernel.Update[float32](c, 2, rows*Width)
	w, b, a := kernel.Read[float32](c, 3, Width), kernel.Read[float32](c, 4, Width), kernel.Update[T](c, 5, rows*Width)
	for i := range h {
		h[i] = before[i] + y[i]
	}
	for r := range rows {
		norm(h[r*Width:][:Width], w, b, a[r*Width:])
	}
}

func normBack[T Float](c *kernel.Call) {
	rows, flags := int(kernel.Get[int32](c, 9)), kernel.Get[int32](c, 10)
	da, h, w := read[T](c, 0, rows*Width), kernel.Read[float32](c, 1, rows*Width), kernel.Read[float32](c, 2, Width)
	dh, dy := kernel.Update[float32](c, 3, rows*Width), kernel.Update[T](c, 4, rows*Width)
	dw, db := kernel.Update[float32](c, 5, Width), kernel.Update[float32](c, 6, Width)
	kernel.Update[float32](c, 7, int(c.Grid().Blocks[0])*2*Width)
	kernel.Update[uint32](c, 8, 1)
	var sw, sb, x, g [Width]float32
	for r := range rows {
		at := r * Width
		inverse := standardize(x[:], h[at:][:Width])
		mean, along := float32(0), float32(0)
		for i, d := range da[at:][:Width] {
			sw[i] += d * x[i]
			sb[i] += d
			g[i] = d * w[i]
			mean += g[i]
			along += g[i] * x[i]
		}
		mean, along = mean/Width, along/Width
		for i := range x {
			d := inverse * (g[i] - mean - x[i]*along)
			if flags&residual != 0 {
				d += dh[at+i]
			}
			dh[at+i], dy[at+i] = d, narrow[T](d)
		}
	}
	for i := range sw {
		put(dw, i, sw[i], flags)
		put(db, i, sb[i], flags)
	}
}

func embedBack(c *kernel.Call) {
	rows, flags := int(kernel.Get[int32](c, 4)), kernel.Get[int32](c, 5)
	text, dh := texts(c, 0, rows), kernel.Read[float32](c, 1, rows*Width)
	dtok, dpos := kernel.Update[float32](c, 2, Vocab*Width), kernel.Update[float32](c, 3, Context*Width)
	if flags&accumulate == 0 {
		clear(dtok)
		clear(dpos)
	}
	for r := range rows {
		word, place := dtok[text[line(r)]*Width:], dpos[r%Context*Width:]
		for i, d := range dh[r*Width:][:Width] {
			word[i] += d
			place[i] += d
		}
	}
}

func gelu[T Float](c *kernel.Call) {
	n := int(kernel.Get[int32](c, 2))
	x, y := read[T](c, 0, n), kernel.Update[T](c, 1, n)
	for i, v := range x {
		y[i] = narrow[T](0.5 * v * (1 + tanh(v)))
	}
}

func geluBack[T Float](c *kernel.Call) {
	n := int(kernel.Get[int32](c, 2))
	x, d := read[T](c, 0, n), kernel.Update[T](c, 1, n)
	ds := wide(d)
	for i, v := range x {
		t := tanh(v)
		slope := 0.5*(1+t) + 0.5*v*(1-t*t)*geluFactor*(1+3*geluCube*v*v)
		d[i] = narrow[T](ds[i] * slope)
	}
}

const geluFactor, geluCube = 0.7978845608, 0.044715

// tanh returns the hyperbolic tangent in GELU.
func tanh(v float32) float32 { return float32(math.Tanh(float64(geluFactor * (v + geluCube*v*v*v)))) }

func widen[T Float](c *kernel.Call) {
	n := int(kernel.Get[int32](c, 2))
	x, sum := read[T](c, 0, n), kernel.Update[float32](c, 1, n)
	for i, v := range x {
		put(sum, i, v, kernel.Get[int32](c, 3))
	}
}

func crossEntropy[T Float](c *kernel.Call) {
	scale, rows := kernel.Get[float32](c, 5), int(kernel.Get[int32](c, 6))
	z, text, loss := kernel.Update[T](c, 0, rows*Vocab), texts(c, 1, rows), kernel.Update[float32](c, 2, 1)
	kernel.Update[float32](c, 3, int(c.Grid().Blocks[0]))
	kernel.Update[uint32](c, 4, 1)
	total := 0.0
	for r := range rows {
		at, want := z[r*Vocab:][:Vocab], int(text[line(r)+1])
		var e [Vocab]float64
		x, top, sum := wide(at), math.Inf(-1), 0.0
		for _, v := range x {
			top = max(top, float64(v))
		}
		total += top - float64(x[want])
		for i, v := range x {
			e[i] = math.Exp(float64(v) - top)
			sum += e[i]
		}
		total += math.Log(sum)
		for i := range at {
			p := float32(e[i] / sum)
			if i == want {
				p--
			}
			at[i] = narrow[T](scale * p)
		}
	}
	put(loss, 0, scale*float32(total), kernel.Get[int32](c, 7))
}

func endStep(c *kernel.Call) {
	n, peak, warmup := int(kernel.Get[int32](c, 4)), kernel.Get[float64](c, 6), kernel.Get[int32](c, 7)
	step, rate := kernel.Update[int32](c, 2, 1), kernel.Update[float64](c, 5, 1)
	if s := int(step[0]); s < n {
		log := kernel.UpdateAddress[float32](c, c.Address(3)+uint64(8*s), 2)
		log[0], log[1] = kernel.Read[float32](c, 0, 1)[0], kernel.Read[float32](c, 1, 1)[0]
	}
	step[0]++
	rate[0] = peak * min(1, float64(step[0]+1)/float64(warmup))
}
