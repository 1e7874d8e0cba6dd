package kernels

import (
	"math"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below are the kernels of kernels.cu in Go, for virtual devices, with a struct
// of the arguments before each. They round the same numbers to T as the kernels, but may add up
// in another order.

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

type embedNormArgs[T Float] struct {
	Tokens            tokens
	Tok, Pos, H, W, B floats
	A                 memory.Slice[T]
	Rows              int32
}

func embedNorm[T Float](c *kernel.Call, p embedNormArgs[T]) {
	text, tok, pos := kernel.Data(c, p.Tokens), kernel.Data(c, p.Tok), kernel.Data(c, p.Pos)
	h, w, b, a := kernel.Data(c, p.H), kernel.Data(c, p.W), kernel.Data(c, p.B), kernel.Data(c, p.A)
	for r := range int(p.Rows) {
		row, word, place := h[r*Width:][:Width], tok[text[line(r)]*Width:], pos[r%Context*Width:]
		for i := range row {
			row[i] = word[i] + place[i]
		}
		norm(row, w, b, a[r*Width:])
	}
}

type addNormArgs[T Float] struct {
	Before  floats
	Y       memory.Slice[T]
	H, W, B floats
	A       memory.Slice[T]
	Rows    int32
}

func addNorm[T Float](c *kernel.Call, p addNormArgs[T]) {
	before, y, h := kernel.Data(c, p.Before), wide(kernel.Data(c, p.Y)), kernel.Data(c, p.H)
	w, b, a := kernel.Data(c, p.W), kernel.Data(c, p.B), kernel.Data(c, p.A)
	for i := range h {
		h[i] = before[i] + y[i]
	}
	for r := range int(p.Rows) {
		norm(h[r*Width:][:Width], w, b, a[r*Width:])
	}
}

type normBackArgs[T Float] struct {
	DA            memory.Slice[T]
	H, W, DH      floats
	DY            memory.Slice[T]
	DW, DB, Parts floats
	Count         counter
	Rows, Flags   int32
}

func normBack[T Float](c *kernel.Call, p normBackArgs[T]) {
	da, h, w := wide(kernel.Data(c, p.DA)), kernel.Data(c, p.H), kernel.Data(c, p.W)
	dh, dy, dw, db := kernel.Data(c, p.DH), kernel.Data(c, p.DY), kernel.Data(c, p.DW), kernel.Data(c, p.DB)
	kernel.Data(c, p.Parts)
	kernel.Data(c, p.Count)
	var sw, sb, x, g [Width]float32
	for r := range int(p.Rows) {
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
			if p.Flags&residual != 0 {
				d += dh[at+i]
			}
			dh[at+i], dy[at+i] = d, narrow[T](d)
		}
	}
	for i := range sw {
		put(dw, i, sw[i], p.Flags)
		put(db, i, sb[i], p.Flags)
	}
}

type embedBackArgs struct {
	Tokens         tokens
	DH, DTok, DPos floats
	Rows, Flags    int32
}

func embedBack(c *kernel.Call, p embedBackArgs) {
	text, dh, dtok, dpos := kernel.Data(c, p.Tokens), kernel.Data(c, p.DH), kernel.Data(c, p.DTok), kernel.Data(c, p.DPos)
	if p.Flags&accumulate == 0 {
		clear(dtok)
		clear(dpos)
	}
	for r := range int(p.Rows) {
		word, place := dtok[text[line(r)]*Width:], dpos[r%Context*Width:]
		for i, d := range dh[r*Width:][:Width] {
			word[i] += d
			place[i] += d
		}
	}
}

type geluArgs[T Float] struct {
	X, Y memory.Slice[T]
	N    int32
}

func gelu[T Float](c *kernel.Call, p geluArgs[T]) {
	y := kernel.Data(c, p.Y)
	for i, v := range wide(kernel.Data(c, p.X)) {
		y[i] = narrow[T](0.5 * v * (1 + tanh(v)))
	}
}

type geluBackArgs[T Float] struct {
	X, D memory.Slice[T]
	N    int32
}

func geluBack[T Float](c *kernel.Call, p geluBackArgs[T]) {
	d := kernel.Data(c, p.D)
	ds := wide(d)
	for i, v := range wide(kernel.Data(c, p.X)) {
		t := tanh(v)
		slope := 0.5*(1+t) + 0.5*v*(1-t*t)*geluFactor*(1+3*geluCube*v*v)
		d[i] = narrow[T](ds[i] * slope)
	}
}

const geluFactor, geluCube = 0.7978845608, 0.044715

// tanh returns the hyperbolic tangent in GELU.
func tanh(v float32) float32 { return float32(math.Tanh(float64(geluFactor * (v + geluCube*v*v*v)))) }

type widenArgs[T Float] struct {
	X        memory.Slice[T]
	Sum      floats
	N, Flags int32
}

func widen[T Float](c *kernel.Call, p widenArgs[T]) {
	sum := kernel.Data(c, p.Sum)
	for i, v := range wide(kernel.Data(c, p.X)) {
		put(sum, i, v, p.Flags)
	}
}

type crossEntropyArgs[T Float] struct {
	Z           memory.Slice[T]
	Tokens      tokens
	Loss, Parts floats
	Count       counter
	Scale       float32
	Rows, Flags int32
}

func crossEntropy[T Float](c *kernel.Call, p crossEntropyArgs[T]) {
	z, text, loss := kernel.Data(c, p.Z), kernel.Data(c, p.Tokens), kernel.Data(c, p.Loss)
	kernel.Data(c, p.Parts)
	kernel.Data(c, p.Count)
	total := 0.0
	for r := range int(p.Rows) {
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
			q := float32(e[i] / sum)
			if i == want {
				q--
			}
			at[i] = narrow[T](p.Scale * q)
		}
	}
	put(loss, 0, p.Scale*float32(total), p.Flags)
}

type endStepArgs struct {
	Loss, Norm floats
	Step       memory.Slice[int32]
	Log        floats
	N          int32
	Rate       memory.Slice[float64]
	Peak       float64
	Warmup     int32
}

func endStep(c *kernel.Call, p endStepArgs) {
	step, rate := kernel.Data(c, p.Step), kernel.Data(c, p.Rate)
	if s := int(step[0]); s < int(p.N) {
		log := kernel.Data(c, p.Log.Slice(2*s, 2*s+2))
		log[0], log[1] = kernel.Data(c, p.Loss)[0], kernel.Data(c, p.Norm)[0]
	}
	step[0]++
	rate[0] = p.Peak * min(1, float64(step[0]+1)/float64(p.Warmup))
}

type (
	matrix  [Context][head]float32
	squares [Context][Context]float32
)

// An attended is one head of one sequence.
type attended struct {
	q, k, v matrix
	p       squares // weights
}

// place returns the first row of sequence and head number n, and its first column.
func place(n int) (row, column int) { return n / Heads * Context, n % Heads * head }

// copyFrom copies a head out of a matrix with that many columns.
func (m *matrix) copyFrom(x []float32, row, column, columns int) {
	for i := range m {
		copy(m[i][:], x[(row+i)*columns+column:])
	}
}

func dot(a, b *[head]float32) (sum float32) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// add adds x times b to a.
func add(a *[head]float32, x float32, b *[head]float32) {
	for i := range a {
		a[i] += x * b[i]
	}
}

func (a *attended) load(qkv []float32, n int) {
	row, column := place(n)
	a.q.copyFrom(qkv, row, column, 3*Width)
	a.k.copyFrom(qkv, row, Width+column, 3*Width)
	a.v.copyFrom(qkv, row, 2*Width+column, 3*Width)
}

var scale = float32(1 / math.Sqrt(head))

// weights computes the causal softmax of the scores.
func (a *attended) weights(rounded func(float32) float32) {
	for i := range a.q {
		p, top, sum := a.p[i][:i+1], float32(math.Inf(-1)), float32(0)
		for j := range p {
			p[j] = rounded(dot(&a.q[i], &a.k[j]) * scale)
			top = max(top, p[j])
		}
		for j := range p {
			p[j] = float32(math.Exp(float64(p[j] - top)))
			sum += p[j]
		}
		for j := range p {
			p[j] /= sum
		}
	}
}

type attentionArgs[T Float] struct{ QKV, O memory.Slice[T] }

func attention[T Float](c *kernel.Call, p attentionArgs[T]) {
	qkv, o, rounded := wide(kernel.Data(c, p.QKV)), kernel.Data(c, p.O), rounder[T]()
	var a attended
	for i := range int(c.Grid().Blocks[0]) {
		a.load(qkv, i)
		a.weights(rounded)
		var out matrix
		for i := range out {
			for j, p := range a.p[i][:i+1] {
				add(&out[i], rounded(p), &a.v[j])
			}
		}
		store(o, i, 0, Width, &out)
	}
}

// store writes a head to a matrix.
func store[T Float](x []T, n, at, columns int, m *matrix) {
	row, column := place(n)
	for i := range m {
		to := x[(row+i)*columns+at+column:]
		for d, v := range m[i] {
			to[d] = narrow[T](v)
		}
	}
}

type attentionBackArgs[T Float] struct{ QKV, DOut, DQKV memory.Slice[T] }

func attentionBack[T Float](c *kernel.Call, p attentionBackArgs[T]) {
	qkv, do, dqkv := wide(kernel.Data(c, p.QKV)), wide(kernel.Data(c, p.DOut)), kernel.Data(c, p.DQKV)
	rounded := rounder[T]()
	var a attended
	for i := range int(c.Grid().Blocks[0]) {
		a.load(qkv, i)
		a.weights(rounded)
		var g matrix
		row, column := place(i)
		g.copyFrom(do, row, column, Width)
		dq, dk, dv := a.back(&g, rounded)
		store(dqkv, i, 0, 3*Width, dq)
		store(dqkv, i, Width, 3*Width, dk)
		store(dqkv, i, 2*Width, 3*Width, dv)
	}
}

// back returns the gradients of queries, keys and values from g, the gradient of the output.
func (a *attended) back(g *matrix, rounded func(float32) float32) (dq, dk, dv *matrix) {
	dq, dk, dv = new(matrix), new(matrix), new(matrix)
	var dp [Context]float32
	for i := range g {
		along := float32(0)
		for j, p := range a.p[i][:i+1] {
			dp[j] = rounded(dot(&g[i], &a.v[j]))
			along += p * dp[j]
		}
		for j, p := range a.p[i][:i+1] {
			ds := rounded(p * (dp[j] - along) * scale)
			add(&dq[i], ds, &a.k[j])
			add(&dk[j], ds, &a.q[i])
			add(&dv[j], rounded(p), &g[i])
		}
	}
	return dq, dk, dv
}
