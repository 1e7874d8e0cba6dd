package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Tiny is gpt2 with sizes that virtual devices compute in time.
func init() {
	p := *presets["gpt2"]
	p.Sizes, p.layers, p.batch = kernels.Sizes{Vocab: 300, Context: 64, Width: 128, Heads: 2}, 2, 4
	p.warmup, p.bucket = 2, 400<<10
	presets["tiny"] = &p
}

// lossOf is the model in float64: the mean loss of sequences.
func lossOf(of *preset, params [][]float64, text []int32) (loss float64) {
	w, head := of.Width, params[of.head()]
	for at := 0; at < len(text); at += of.Line() {
		h := make([][]float64, of.Context)
		for t := range h {
			for c := range w {
				h[t] = append(h[t], params[tok][int(text[at+t])*w+c]+params[pos][t*w+c])
			}
		}
		norm := func(i int) [][]float64 {
			out := make([][]float64, len(h))
			for t, row := range h {
				out[t] = normOf(row, params[i], params[i+1])
			}
			return out
		}
		for l := range of.layers {
			i := firstNorm + 8*l
			qkv := times(norm(i), params[i+2])
			attended := make([][]float64, of.Context)
			for t := range attended {
				for n := range of.Heads {
					attended[t] = append(attended[t], attendOf(qkv, t, n*w/of.Heads, w/of.Heads, w)...)
				}
			}
			plus(h, times(attended, params[i+3]))
			up := times(norm(i+4), params[i+6])
			for _, row := range up {
				for c, x := range row {
					row[c] = 0.5 * x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
				}
			}
			plus(h, times(up, params[i+7]))
		}
		for t, row := range times(norm(firstNorm+8*of.layers), head) {
			sum := 0.
			for _, x := range row {
				sum += math.Exp(x)
			}
			loss += math.Log(sum) - row[text[at+t+1]]
		}
	}
	return loss / float64(len(text)/of.Line()*of.Context)
}

func normOf(row, w, b []float64) []float64 {
	mean, variance, out := 0., 0., make([]float64, len(row))
	for _, x := range row {
		mean += x / float64(len(row))
	}
	for _, x := range row {
		variance += (x - mean) * (x - mean) / float64(len(row))
	}
	for i, x := range row {
		out[i] = (x-mean)/math.Sqrt(variance+1e-5)*w[i] + b[i]
	}
	return out
}

// times returns x·wᵀ.
func times(x [][]float64, w []float64) [][]float64 {
	in, out := len(x[0]), make([][]float64, len(x))
	for t, row := range x {
		for o := 0; o < len(w); o += in {
			sum := 0.
			for i, v := range w[o : o+in] {
				sum += v * row[i]
			}
			out[t] = append(out[t], sum)
		}
	}
	return out
}

func plus(h, x [][]float64) {
	for t, row := range x {
		for c, v := range row {
			h[t][c] += v
		}
	}
}

// attendOf returns the output of position t of the head whose query begins at column.
func attendOf(qkv [][]float64, t, column, head, width int) []float64 {
	out, sum := make([]float64, head), 0.
	for j := range t + 1 {
		s := 0.
		for d := range head {
			s += qkv[t][column+d] * qkv[j][width+column+d]
		}
		p := math.Exp(s / math.Sqrt(float64(head)))
		sum += p
		for d := range head {
			out[d] += p * qkv[j][2*width+column+d]
		}
	}
	for d := range out {
		out[d] /= sum
	}
	return out
}

// The loss is that of the model in float64, and gradients are its slopes: in a random direction
// of each parameter. Two micro-batches add up.
func TestGradients(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		t.Run("float32", func(t *testing.T) { checkGradients[float32](t, presets["tiny"], devs[0], 2e-4) })
		t.Run("bfloat16", func(t *testing.T) { checkGradients[memory.BFloat16Bits](t, presets["tiny"], devs[0], 0.1) })
	})
}

func checkGradients[T kernels.Float](t *testing.T, of *preset, dev *device.Device, bound float64) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	defer s.Close()
	p, _, err := newReplicated[T](s, of)
	require.NoError(t, err)
	defer func() { require.NoError(t, p.close()) }()
	exact := make([][]float64, len(p.shapes))
	for i, x := range p.shapes {
		host := make([]float32, x.len())
		for e := range host {
			host[e] = float32(0.08 * r.NormFloat64())
			if x.in == 0 {
				host[e] += 0.5
			}
			exact[i] = append(exact[i], float64(host[e]))
		}
		require.NoError(t, p.values[i].CopyFrom(s, host))
	}
	require.NoError(t, p.refresh(s))
	m, err := newModel(s, of, p, of.Context)
	require.NoError(t, err)
	defer func() { require.NoError(t, m.close()) }()
	var text []int32
	for range 2 * of.Line() {
		text = append(text, int32(r.IntN(of.Vocab)))
	}
	tokens, err := memory.MakeFrom(s, text)
	require.NoError(t, err)
	defer tokens.Close()
	for i := range 2 {
		m.begin(tokens.Slice(i*of.Line(), (i+1)*of.Line()), 2*of.Context, pass{add: i > 0, addLoss: i > 0})
		for k := range m.units() {
			require.NoError(t, m.forward(k))
		}
		for k := m.units() - 1; k >= 0; k-- {
			require.NoError(t, m.backward(k))
		}
	}
	var loss [1]float32
	require.NoError(t, p.loss.CopyTo(s, loss[:]))
	require.InEpsilon(t, lossOf(of, exact, text), loss[0], bound/20)
	worst := 0.
	for i, x := range p.shapes {
		host, direction := make([]float32, x.len()), make([]float64, x.len())
		require.NoError(t, p.grads[i].CopyTo(s, host))
		along, size := 0., 0.
		for e, g := range host {
			direction[e] = r.NormFloat64()
			along += float64(g) * direction[e]
			size += float64(g) * float64(g)
		}
		const step = 1e-5
		moved := func(by float64) float64 {
			was := exact[i]
			exact[i] = make([]float64, len(was))
			for e := range was {
				exact[i][e] = was[e] + by*direction[e]
			}
			defer func() { exact[i] = was }()
			return lossOf(of, exact, text)
		}
		require.Positive(t, size, x.name)
		want := (moved(step) - moved(-step)) / (2 * step)
		worst = max(worst, math.Abs(want-along)/math.Sqrt(size))
		require.InDelta(t, want, along, bound*math.Sqrt(size), fmt.Sprintf("gradient of %s", x.name))
	}
	t.Logf("largest difference of slopes: %.1e", worst)
}
