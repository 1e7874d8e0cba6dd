package main

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// bound is the largest difference between the results of several ranks and of one rank: some
// units of bfloat16, because the ranks round partial sums.
const bound = 0.1

// A matrix has rows of so many columns, in float64.
type matrix struct {
	cols int
	x    []float64
}

func (m matrix) row(i int) []float64 { return m.x[i*m.cols:][:m.cols] }

// read copies a matrix from the device.
func read(t *testing.T, m *shard, x bfloats, cols int) matrix {
	host := make([]memory.BFloat16Bits, x.Len())
	require.NoError(t, x.CopyTo(m.s, host))
	to := matrix{cols, make([]float64, len(host))}
	for i, v := range host {
		to.x[i] = float64(v.Float32())
	}
	return to
}

// times returns a · weightᵀ.
func times(a, weight matrix) matrix {
	n := len(weight.x) / weight.cols
	c := matrix{n, make([]float64, tokens*n)}
	for i := range tokens {
		for j := range n {
			for k, v := range a.row(i) {
				c.x[i*n+j] += v * weight.row(j)[k]
			}
		}
	}
	return c
}

// norm adds x to the residual and returns the RMS norm.
func norm(residual, x, weight matrix) matrix {
	y := matrix{width, make([]float64, len(x.x))}
	for i := range tokens {
		squares := 0.0
		for k, v := range x.row(i) {
			residual.row(i)[k] += v
			squares += residual.row(i)[k] * residual.row(i)[k]
		}
		for k, v := range residual.row(i) {
			y.row(i)[k] = v / math.Sqrt(squares/width+eps) * weight.x[k]
		}
	}
	return y
}

// attend returns causal attention.
func attend(qkv matrix) matrix {
	y := matrix{width, make([]float64, tokens*width)}
	for i := range tokens {
		for h := range heads {
			part := func(t, which int) []float64 { return qkv.row(t)[which*width+h*headWidth:][:headWidth] }
			weights, total := make([]float64, i+1), 0.0
			for t := range weights {
				for d, q := range part(i, 0) {
					weights[t] += q * part(t, 1)[d]
				}
				weights[t] = math.Exp(weights[t] / math.Sqrt(headWidth))
				total += weights[t]
			}
			for t, w := range weights {
				for d, v := range part(t, 2) {
					y.row(i)[h*headWidth+d] += w / total * v
				}
			}
		}
	}
	return y
}

func gelu(a matrix) matrix {
	for i, v := range a.x {
		a.x[i] = v / 2 * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(v+0.044715*v*v*v)))
	}
	return a
}

// TestReference compares one rank with a computation in float64.
func TestReference(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		defer g.Close()
		got, _, err := serve(testgpu.Context(t), g, 1)
		require.NoError(t, err)
		m, err := newShard(g, 0)
		require.NoError(t, err)
		defer m.close()
		residual := matrix{width, make([]float64, tokens*width)}
		a := norm(residual, read(t, m, m.embed, width), read(t, m, m.first, width))
		for i := range m.blocks {
			b := &m.blocks[i]
			a = norm(residual, times(attend(times(a, read(t, m, b.qkv.weight, width))), read(t, m, b.proj.weight, width)), read(t, m, b.norms[0], width))
			a = norm(residual, times(gelu(times(a, read(t, m, b.up.weight, width))), read(t, m, b.down.weight, inner)), read(t, m, b.norms[1], width))
		}
		sum := 0.0
		for i, want := range a.x {
			require.InDelta(t, want, got[i], 2*bound, "element %d", i)
			sum += math.Abs(want - float64(got[i]))
		}
		require.Less(t, sum/float64(len(got)), bound/10, "the mean difference")
	})
}
