package kernels

import (
	"math"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

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
