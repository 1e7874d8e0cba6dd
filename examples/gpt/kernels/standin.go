package kernels

import (
	"math"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The functions below are the kernels of kernels.cu in Go, for virtual devices, with a struct
// of the arguments before each. They round the same numbers to T as the kernels, but may add up
// in another order.

// A standIn has the stand-ins of the kernels for a model of these sizes.
type standIn[T Float] struct{ Sizes }

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
func (z Sizes) line(row int) int { return row/z.Context*z.Line() + row%z.Context }

// standardize writes a row with mean 0 and variance 1, and returns 1/sigma.
func standardize(x, row []float32) float32 {
	sum, squares := 0.0, 0.0
	for _, v := range row {
		sum += float64(v)
	}
	mean := float32(sum / float64(len(row)))
	for i, v := range row {
		x[i] = v - mean
		squares += float64(x[i]) * float64(x[i])
	}
	inverse := float32(1 / math.Sqrt(squares/float64(len(row))+1e-5))
	for i := range x {
		x[i] *= inverse
	}
	return inverse
}

// norm writes layer_norm(row) to a.
func norm[T Float](row, w, b []float32, a []T) {
	x := make([]float32, len(row))
	standardize(x, row)
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

func (z standIn[T]) embedNorm(c *kernel.Call, p embedNormArgs[T]) {
	text, tok, pos := kernel.Data(c, p.Tokens), kernel.Data(c, p.Tok), kernel.Data(c, p.Pos)
	h, w, b, a := kernel.Data(c, p.H), kernel.Data(c, p.W), kernel.Data(c, p.B), kernel.Data(c, p.A)
	for r := range int(p.Rows) {
		row, word, place := h[r*z.Width:][:z.Width], tok[int(text[z.line(r)])*z.Width:], pos[r%z.Context*z.Width:]
		for i := range row {
			row[i] = word[i] + place[i]
		}
		norm(row, w, b, a[r*z.Width:])
	}
}

type addNormArgs[T Float] struct {
	Before  floats
	Y       memory.Slice[T]
	H, W, B floats
	A       memory.Slice[T]
	Rows    int32
}

func (z standIn[T]) addNorm(c *kernel.Call, p addNormArgs[T]) {
	before, y, h := kernel.Data(c, p.Before), wide(kernel.Data(c, p.Y)), kernel.Data(c, p.H)
	w, b, a := kernel.Data(c, p.W), kernel.Data(c, p.B), kernel.Data(c, p.A)
	for i := range h {
		h[i] = before[i] + y[i]
	}
	for r := range int(p.Rows) {
		norm(h[r*z.Width:][:z.Width], w, b, a[r*z.Width:])
	}
}

type normBackArgs[T Float] struct {
	DA            memory.Slice[T]
	H, W, DH      floats
	DY            memory.Slice[T]
	DW, DB, Parts floats
	Count         counter
	Rows, Per     int32
	Flags         int32
}

func (z standIn[T]) normBack(c *kernel.Call, p normBackArgs[T]) {
	da, h, w := wide(kernel.Data(c, p.DA)), kernel.Data(c, p.H), kernel.Data(c, p.W)
	dh, dy, dw, db := kernel.Data(c, p.DH), kernel.Data(c, p.DY), kernel.Data(c, p.DW), kernel.Data(c, p.DB)
	kernel.Data(c, p.Parts)
	kernel.Data(c, p.Count)
	row := func() []float32 { return make([]float32, z.Width) }
	sw, sb, x, g := row(), row(), row(), row()
	for r := range int(p.Rows) {
		at := r * z.Width
		inverse := standardize(x, h[at:][:z.Width])
		mean, along := float32(0), float32(0)
		for i, d := range da[at:][:z.Width] {
			sw[i] += d * x[i]
			sb[i] += d
			g[i] = d * w[i]
			mean += g[i]
			along += g[i] * x[i]
		}
		mean, along = mean/float32(z.Width), along/float32(z.Width)
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

func (z standIn[T]) embedBack(c *kernel.Call, p embedBackArgs) {
	text, dh, dtok, dpos := kernel.Data(c, p.Tokens), kernel.Data(c, p.DH), kernel.Data(c, p.DTok), kernel.Data(c, p.DPos)
	if p.Flags&(accumulate|tied) == 0 {
		clear(dtok)
	}
	if p.Flags&accumulate == 0 {
		clear(dpos)
	}
	for r := range int(p.Rows) {
		word, place := dtok[int(text[z.line(r)])*z.Width:], dpos[r%z.Context*z.Width:]
		for i, d := range dh[r*z.Width:][:z.Width] {
			word[i] += d
			place[i] += d
		}
	}
}

type geluArgs[T Float] struct {
	X, Y memory.Slice[T]
	N    int64
}

func gelu[T Float](c *kernel.Call, p geluArgs[T]) {
	y := kernel.Data(c, p.Y)
	for i, v := range wide(kernel.Data(c, p.X)) {
		y[i] = narrow[T](0.5 * v * (1 + tanh(v)))
	}
}

type geluBackArgs[T Float] struct {
	X, D memory.Slice[T]
	N    int64
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
	X     memory.Slice[T]
	Sum   floats
	N     int64
	Flags int32
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

func (z standIn[T]) crossEntropy(c *kernel.Call, p crossEntropyArgs[T]) {
	logits, text, loss := kernel.Data(c, p.Z), kernel.Data(c, p.Tokens), kernel.Data(c, p.Loss)
	kernel.Data(c, p.Parts)
	kernel.Data(c, p.Count)
	total, e := 0.0, make([]float64, z.Vocab)
	for r := range int(p.Rows) {
		at, want := logits[r*z.Vocab:][:z.Vocab], int(text[z.line(r)+1])
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
	Other      memory.Slice[float64]
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
	next := p.Peak * min(1, float64(step[0]+1)/float64(p.Warmup))
	rate[0], kernel.Data(c, p.Other)[0] = next, next
}

// A matrix has a row of a head for each position.
type matrix [][]float32

// An attended is one head of one sequence.
type attended struct {
	q, k, v matrix
	scale   float32
	rounded func(float32) float32
}

// eachHead calls f for all heads of the launch, with the first row and column of each and
// its part of lse.
func (z standIn[T]) eachHead(c *kernel.Call, qkv []float32, lse []float32, f func(a *attended, row, column int, lse []float32)) {
	n := int(c.Grid().Blocks[0]*c.Grid().Blocks[1]) / blocks(z.Context, z.tile())
	a := attended{scale: float32(1 / math.Sqrt(float64(z.head()))), rounded: rounder[T]()}
	for i := range n {
		row, column := i/z.Heads*z.Context, i%z.Heads*z.head()
		a.q = z.part(qkv, row, column, 3*z.Width)
		a.k = z.part(qkv, row, z.Width+column, 3*z.Width)
		a.v = z.part(qkv, row, 2*z.Width+column, 3*z.Width)
		f(&a, row, column, lse[i*z.Context:][:z.Context])
	}
}

// part returns a head's part of a matrix with that many columns.
func (z Sizes) part(x []float32, row, column, columns int) matrix {
	m := make(matrix, z.Context)
	for i := range m {
		m[i] = x[(row+i)*columns+column:][:z.head()]
	}
	return m
}

// zeros returns a matrix of zeros.
func (z Sizes) zeros() matrix { return z.part(make([]float32, z.Context*z.head()), 0, 0, z.head()) }

func dot(a, b []float32) (sum float32) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

// add adds x times b to a.
func add(a []float32, x float32, b []float32) {
	for i := range a {
		a[i] += x * b[i]
	}
}

// score returns the score of query i and key j.
func (a *attended) score(i, j int) float32 { return a.rounded(dot(a.q[i], a.k[j]) * a.scale) }

type attentionArgs[T Float] struct {
	QKV, O memory.Slice[T]
	LSE    floats
}

func (z standIn[T]) attention(c *kernel.Call, p attentionArgs[T]) {
	o, weights := kernel.Data(c, p.O), make([]float32, z.Context)
	z.eachHead(c, wide(kernel.Data(c, p.QKV)), kernel.Data(c, p.LSE), func(a *attended, row, column int, lse []float32) {
		out := z.zeros()
		for i := range out {
			w, top, sum := weights[:i+1], float32(math.Inf(-1)), float32(0)
			for j := range w {
				w[j] = a.score(i, j)
				top = max(top, w[j])
			}
			for j := range w {
				w[j] = float32(math.Exp(float64(w[j] - top)))
				sum += w[j]
			}
			for j := range w {
				add(out[i], a.rounded(w[j]/sum), a.v[j])
			}
			lse[i] = top + float32(math.Log(float64(sum)))
		}
		set(o, row, column, z.Width, out)
	})
}

// set copies a head to a matrix with that many columns.
func set[T Float](x []T, row, column, columns int, m matrix) {
	for i := range m {
		to := x[(row+i)*columns+column:]
		for d, v := range m[i] {
			to[d] = narrow[T](v)
		}
	}
}

type attentionBackArgs[T Float] struct {
	QKV, O, DOut memory.Slice[T]
	LSE          floats
	DQKV         memory.Slice[T]
}

func (z standIn[T]) attentionBack(c *kernel.Call, p attentionBackArgs[T]) {
	o, g, dqkv := wide(kernel.Data(c, p.O)), wide(kernel.Data(c, p.DOut)), kernel.Data(c, p.DQKV)
	z.eachHeadGradient(c, p.QKV, p.DOut, p.LSE, func(_, row, column int) []float32 {
		return alongOf(z.part(o, row, column, z.Width), z.part(g, row, column, z.Width))
	}, func(row, column int, dq, dk, dv matrix) {
		set(dqkv, row, column, 3*z.Width, dq)
		set(dqkv, row, z.Width+column, 3*z.Width, dk)
		set(dqkv, row, 2*z.Width+column, 3*z.Width, dv)
	})
}

// alongOf returns the products of rows with their gradients: for each query, the sum of its weights times
// their gradients.
func alongOf(o, g matrix) []float32 {
	along := make([]float32, len(o))
	for i := range along {
		along[i] = dot(g[i], o[i])
	}
	return along
}

// eachHeadGradient calls f with the gradients of queries, keys and values of each head. along returns the
// products of alongOf.
func (z standIn[T]) eachHeadGradient(c *kernel.Call, qkv, dout memory.Slice[T], lse floats,
	along func(head, row, column int) []float32, f func(row, column int, dq, dk, dv matrix)) {
	head, douts := 0, wide(kernel.Data(c, dout))
	z.eachHead(c, wide(kernel.Data(c, qkv)), kernel.Data(c, lse), func(a *attended, row, column int, lse []float32) {
		g, along := z.part(douts, row, column, z.Width), along(head, row, column)
		head++
		dq, dk, dv := z.zeros(), z.zeros(), z.zeros()
		for i := range g {
			for j := range i + 1 {
				w := float32(math.Exp(float64(a.score(i, j) - lse[i])))
				ds := a.rounded(w * (a.rounded(dot(g[i], a.v[j])) - along[i]) * a.scale)
				add(dq[i], ds, a.k[j])
				add(dk[j], ds, a.q[i])
				add(dv[j], a.rounded(w), g[i])
			}
		}
		f(row, column, dq, dk, dv)
	})
}
