package kernels

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// A case is sizes of a model, and a number of sequences. The last block of each kernel is not full.
type sized struct {
	Sizes
	sequences int
}

func (z sized) rows() int { return z.sequences * z.Context }

var cases = []sized{
	{Sizes{Vocab: 13, Context: 39, Width: 64, Heads: 4}, 7},
	{Sizes{Vocab: 1000, Context: 70, Width: 768, Heads: 12}, 1},
	{Sizes{Vocab: 300, Context: 33, Width: 192, Heads: 2}, 2},
	{Sizes{Vocab: 50, Context: 34, Width: 1600, Heads: 25}, 1},
	{Sizes{Vocab: 50, Context: 128, Width: 64, Heads: 1}, 2}, // attention by tensor cores, of two tiles
}

// The kernels compile for all of GPT-2's sizes. Other sizes are an error.
func TestSizes(t *testing.T) {
	t.Setenv("CHORUS_VIRTUAL_KERNELS", "go") // nothing runs
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		for _, heads := range []int{12, 16, 20, 25} {
			k, err := New[memory.BFloat16Bits](s, Sizes{Vocab: 50304, Context: 1024, Width: 64 * heads, Heads: heads}, 32768)
			require.NoError(t, err)
			require.NoError(t, k.Close())
		}
		for _, x := range []struct {
			Sizes
			want string
		}{
			{Sizes{0, 1, 64, 4}, "want 1 or more of each"},
			{Sizes{1, 1, 48, 4}, "a residual stream of 48 columns: want a multiple of 32, and 2048 or less"},
			{Sizes{1, 1, 64, 3}, "3 heads of 64 columns: want equal heads of at most 128 columns"},
			{Sizes{1, 1, 512, 2}, "2 heads of 512 columns"},
		} {
			_, err := New[float32](s, x.Sizes, 1)
			require.ErrorContains(t, err, x.want)
		}
	})
}

// A rig is a set on a device, and random inputs.
type rig[T Float] struct {
	sized
	t *testing.T
	k *Set[T]
	r *rand.Rand
}

// each runs a test with all sizes and both types of activations, on virtual devices and on CUDA.
func each(t *testing.T, single func(*rig[float32]), brief func(*rig[memory.BFloat16Bits])) {
	t.Setenv("CHORUS_VIRTUAL_KERNELS", "go") // TestSourceAgreesWithGo runs the CUDA source
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for _, z := range cases {
			t.Run(fmt.Sprintf("float32/%d", z.Width), func(t *testing.T) { single(newRig[float32](t, devs[0], z)) })
			t.Run(fmt.Sprintf("bfloat16/%d", z.Width), func(t *testing.T) { brief(newRig[memory.BFloat16Bits](t, devs[0], z)) })
		}
	})
}

func newRig[T Float](t *testing.T, dev *device.Device, z sized) *rig[T] {
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	k, err := New[T](s, z.Sizes, z.rows())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	seed := rand.Uint64()
	t.Log("seed", seed)
	return &rig[T]{z, t, k, rand.New(rand.NewPCG(seed, 0))}
}

// upload copies numbers to the device, and returns them there and as the device has them.
func upload[T Float, E Float](g *rig[T], xs []float64) (memory.Slice[E], []float64) {
	out, exact := make([]E, len(xs)), make([]float64, len(xs))
	for i, x := range xs {
		out[i] = narrow[E](float32(x))
	}
	for i, x := range wide(out) {
		exact[i] = float64(x)
	}
	return send(g, out), exact
}

func send[T Float, E memory.Element](g *rig[T], xs []E) memory.Slice[E] {
	g.t.Helper()
	x, err := memory.MakeFrom(g.k.s, xs)
	require.NoError(g.t, err)
	g.t.Cleanup(func() { require.NoError(g.t, x.Close()) })
	return x
}

// normal returns n random numbers.
func (g *rig[T]) normal(n int) []float64 {
	xs := make([]float64, n)
	for i := range xs {
		xs[i] = g.r.NormFloat64()
	}
	return xs
}

func (g *rig[T]) floats(n int) (floats, []float64)        { return upload[T, float32](g, g.normal(n)) }
func (g *rig[T]) acts(n int) (memory.Slice[T], []float64) { return upload[T, T](g, g.normal(n)) }
func (g *rig[T]) poisoned(n int) floats                   { return first(upload[T, float32](g, nan(n))) }
func (g *rig[T]) poison(n int) memory.Slice[T]            { return first(upload[T, T](g, nan(n))) }
func (g *rig[T]) norm() (n Norm, w, b []float64) {
	n.W, w = g.floats(g.Width)
	n.B, b = g.floats(g.Width)
	return n, w, b
}
func first[A, B any](a A, _ B) A { return a }
func nan(n int) []float64        { return fill(n, math.NaN()) }
func fill(n int, x float64) []float64 {
	xs := make([]float64, n)
	for i := range xs {
		xs[i] = x
	}
	return xs
}

// text returns random lines of tokens.
func (g *rig[T]) text() (tokens, []int32) {
	text := make([]int32, g.sequences*g.Line())
	for i := range text {
		text[i] = int32(g.r.IntN(g.Vocab))
	}
	return send(g, text), text
}

// near compares what is on the device with references. The error is at most that of T times
// the size of the terms that were added up, and the number.
func near[T Float, E Float](g *rig[T], what string, x memory.Slice[E], want []float64, size float64) {
	g.t.Helper()
	host := make([]E, x.Len())
	require.NoError(g.t, x.CopyTo(g.k.s, host))
	require.Len(g.t, host, len(want))
	bound := 2e-6
	if memory.DTypeOf[T]() == memory.BFloat16 {
		bound = 1. / 128
	}
	for i, got := range wide(host) {
		if e := math.Abs(float64(got) - want[i]); !(e <= bound*(size+math.Abs(want[i]))) {
			require.Failf(g.t, what, "element %d is %v: want %v", i, got, want[i])
		}
	}
}

// slope returns the derivative of f with regard to *x.
func slope(x *float64, f func() float64) float64 {
	const step = 1e-4
	was := *x
	*x = was + step
	above := f()
	*x = was - step
	below := f()
	*x = was
	return (above - below) / (2 * step)
}

// layerNorm is the reference of a row.
func layerNorm(row, w, b []float64) []float64 {
	mean, variance, a := 0.0, 0.0, make([]float64, len(row))
	for _, x := range row {
		mean += x / float64(len(row))
	}
	for _, x := range row {
		variance += (x - mean) * (x - mean) / float64(len(row))
	}
	for i, x := range row {
		a[i] = (x-mean)/math.Sqrt(variance+1e-5)*w[i] + b[i]
	}
	return a
}

func inner(a, b []float64) (sum float64) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

func TestEmbedNorm(t *testing.T) { each(t, testEmbedNorm, testEmbedNorm) }

func testEmbedNorm[T Float](g *rig[T]) {
	text, words := g.text()
	tok, toks := g.floats(g.Vocab * g.Width)
	pos, places := g.floats(g.Context * g.Width)
	n, w, b := g.norm()
	h, a := g.poisoned(g.rows()*g.Width), g.poison(g.rows()*g.Width)
	require.NoError(g.t, g.k.EmbedNorm(text, tok, pos, h, n, a))
	var sums, norms []float64
	for r := range g.rows() {
		row := make([]float64, g.Width)
		for c := range row {
			row[c] = toks[int(words[r/g.Context*g.Line()+r%g.Context])*g.Width+c] + places[r%g.Context*g.Width+c]
		}
		sums, norms = append(sums, row...), append(norms, layerNorm(row, w, b)...)
	}
	near(g, "h", h, sums, 0)
	near(g, "layer norm", a, norms, 4)
}

func TestAddNorm(t *testing.T) { each(t, testAddNorm, testAddNorm) }

func testAddNorm[T Float](g *rig[T]) {
	before, xs := g.floats(g.rows() * g.Width)
	y, ys := g.acts(g.rows() * g.Width)
	n, w, b := g.norm()
	h, a := g.poisoned(g.rows()*g.Width), g.poison(g.rows()*g.Width)
	require.NoError(g.t, g.k.AddNorm(before, y, h, n, a))
	var norms []float64
	for i := range xs {
		xs[i] += ys[i]
	}
	for at := 0; at < len(xs); at += g.Width {
		norms = append(norms, layerNorm(xs[at:at+g.Width], w, b)...)
	}
	near(g, "h", h, xs, 1)
	near(g, "layer norm", a, norms, 4)
}

func TestNormBack(t *testing.T) { each(t, testNormBack, testNormBack) }

// The references of gradients are slopes of the references of the forward pass, or simple sums.
func testNormBack[T Float](g *rig[T]) {
	da, das := g.acts(g.rows() * g.Width)
	h, hs := g.floats(g.rows() * g.Width)
	n, w, b := g.norm()
	dhs, dw, db := make([]float64, g.rows()*g.Width), make([]float64, g.Width), make([]float64, g.Width)
	ones, zeros := fill(g.Width, 1), fill(g.Width, 0)
	for at := 0; at < len(hs); at += g.Width {
		row, d := hs[at:at+g.Width], das[at:at+g.Width]
		loss := func() float64 { return inner(d, layerNorm(row, w, b)) }
		for c := range row {
			dhs[at+c] = slope(&row[c], loss)
		}
		for c, x := range layerNorm(row, ones, zeros) {
			dw[c] += d[c] * x
			db[c] += d[c]
		}
	}
	dh, dy, grads := g.poisoned(g.rows()*g.Width), g.poison(g.rows()*g.Width), Norm{g.poisoned(g.Width), g.poisoned(g.Width)}
	require.NoError(g.t, g.k.NormBack(da, h, n, dh, false, dy, grads, false))
	const terms = 30 // about the sum of the sizes of the terms of a column
	near(g, "dh", dh, dhs, 4)
	near(g, "dy", dy, dhs, 4)
	near(g, "dw", grads.W, dw, terms)
	near(g, "db", grads.B, db, terms)

	dh, before := g.floats(g.rows() * g.Width)
	gradW, beforeW := g.floats(g.Width)
	gradB, beforeB := g.floats(g.Width)
	require.NoError(g.t, g.k.NormBack(da, h, n, dh, true, dy, Norm{gradW, gradB}, true))
	near(g, "dh with a residual", dh, plus(dhs, before), 4)
	near(g, "dy with a residual", dy, plus(dhs, before), 4)
	near(g, "accumulated dw", gradW, plus(dw, beforeW), terms)
	near(g, "accumulated db", gradB, plus(db, beforeB), terms)
}

func plus(a, b []float64) []float64 {
	sum := make([]float64, len(a))
	for i := range a {
		sum[i] = a[i] + b[i]
	}
	return sum
}

func TestEmbedBack(t *testing.T) { each(t, testEmbedBack, testEmbedBack) }

func testEmbedBack[T Float](g *rig[T]) {
	text, words := g.text()
	dh, dhs := g.floats(g.rows() * g.Width)
	toks, places := make([]float64, g.Vocab*g.Width), make([]float64, g.Context*g.Width)
	for r := range g.rows() {
		for c := range g.Width {
			toks[int(words[r/g.Context*g.Line()+r%g.Context])*g.Width+c] += dhs[r*g.Width+c]
			places[r%g.Context*g.Width+c] += dhs[r*g.Width+c]
		}
	}
	dtok, dpos := g.poisoned(len(toks)), g.poisoned(len(places))
	require.NoError(g.t, g.k.EmbedBack(text, dh, dtok, dpos, false, false))
	near(g, "dtok", dtok, toks, 10)
	near(g, "dpos", dpos, places, 10)
	dtok, beforeTok := g.floats(len(toks))
	dpos, beforePos := g.floats(len(places))
	require.NoError(g.t, g.k.EmbedBack(text, dh, dtok, dpos, false, true))
	near(g, "accumulated dtok", dtok, plus(toks, beforeTok), 10)
	near(g, "accumulated dpos", dpos, plus(places, beforePos), 10)
	dtok, beforeTok = g.floats(len(toks))
	dpos = g.poisoned(len(places))
	require.NoError(g.t, g.k.EmbedBack(text, dh, dtok, dpos, true, false))
	near(g, "dtok of a head, too", dtok, plus(toks, beforeTok), 10)
	near(g, "dpos beside a head", dpos, places, 10)
}

// attend is the reference of one place of a head: the output of its query, and the logarithm of
// the sum of the exponentials of its scores.
func (z Sizes) attend(qkv []float64, row, column, i int) ([]float64, float64) {
	at := func(j, of, d int) float64 { return qkv[(row+j)*3*z.Width+of*z.Width+column+d] }
	p, sum, o := make([]float64, i+1), 0.0, make([]float64, z.head())
	for j := range p {
		s := 0.0
		for d := range o {
			s += at(i, 0, d) * at(j, 1, d)
		}
		p[j] = math.Exp(s / math.Sqrt(float64(len(o))))
		sum += p[j]
	}
	for j := range p {
		for d := range o {
			o[d] += p[j] / sum * at(j, 2, d)
		}
	}
	return o, math.Log(sum)
}

// attendAll is the reference of all heads.
func (z sized) attendAll(qkv []float64) (o, lse []float64) {
	o = make([]float64, z.rows()*z.Width)
	for n := range z.sequences * z.Heads {
		row, column := n/z.Heads*z.Context, n%z.Heads*z.head()
		for i := range z.Context {
			out, l := z.attend(qkv, row, column, i)
			copy(o[(row+i)*z.Width+column:], out)
			lse = append(lse, l)
		}
	}
	return o, lse
}

func TestAttention(t *testing.T) { each(t, testAttention, testAttention) }

func testAttention[T Float](g *rig[T]) {
	qkv, in := g.acts(g.rows() * 3 * g.Width)
	o, lse := g.poison(g.rows()*g.Width), g.poisoned(g.rows()*g.Heads)
	require.NoError(g.t, g.k.Attention(qkv, o, lse))
	wantO, wantLSE := g.attendAll(in)
	near(g, "output", o, wantO, 4)
	near(g, "lse", lse, wantLSE, 1)
}

func TestAttentionBack(t *testing.T) { each(t, testAttentionBack, testAttentionBack) }

func testAttentionBack[T Float](g *rig[T]) {
	qkv, in := g.acts(g.rows() * 3 * g.Width)
	do, dos := g.acts(g.rows() * g.Width)
	outs, sums := g.attendAll(in)
	o, _ := upload[T, T](g, outs)
	lse, _ := upload[T, float32](g, sums)
	dqkv := g.poison(g.rows() * 3 * g.Width)
	require.NoError(g.t, g.k.AttentionBack(qkv, o, do, lse, dqkv))
	picks, want := make([]int, 100), []float64{} // slopes of all elements would take a minute
	for i := range picks {
		k := g.r.IntN(len(in))
		row, column := k/(3*g.Width)/g.Context*g.Context, k%g.Width/g.head()*g.head()
		want = append(want, slope(&in[k], func() (loss float64) {
			for i := range g.Context {
				out, _ := g.attend(in, row, column, i)
				loss += inner(dos[(row+i)*g.Width+column:][:g.head()], out)
			}
			return loss
		}))
		picks[i] = k
	}
	near(g, "gradient", pick(g, dqkv, picks), want, 10)
}

// pick returns some elements of x, all of which must be numbers.
func pick[T Float, E Float](g *rig[T], x memory.Slice[E], picks []int) memory.Slice[E] {
	host, some := make([]E, x.Len()), make([]E, len(picks))
	require.NoError(g.t, x.CopyTo(g.k.s, host))
	for _, x := range wide(host) {
		require.False(g.t, math.IsNaN(float64(x)), "an element was not written")
	}
	for i, k := range picks {
		some[i] = host[k]
	}
	return send(g, some)
}

// geluOf is torch's gelu with approximate='tanh'.
func geluOf(x float64) float64 {
	return 0.5 * x * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(x+0.044715*x*x*x)))
}

func TestGELU(t *testing.T) { each(t, testGELU, testGELU) }

func testGELU[T Float](g *rig[T]) {
	x, xs := g.acts(1000)
	d, ds := g.acts(1000)
	y, want, back := g.poison(1000), make([]float64, 1000), make([]float64, 1000)
	for i := range xs {
		want[i] = geluOf(xs[i])
		back[i] = ds[i] * slope(&xs[i], func() float64 { return geluOf(xs[i]) })
	}
	require.NoError(g.t, g.k.GELU(x, y))
	near(g, "gelu", y, want, 1)
	require.NoError(g.t, g.k.GELUBack(x, d))
	near(g, "gradient", d, back, 1)
}

func TestWiden(t *testing.T) { each(t, testWiden, testWiden) }

func testWiden[T Float](g *rig[T]) {
	x, xs := g.acts(1000)
	sum := g.poisoned(1000)
	require.NoError(g.t, g.k.Widen(x, sum, false))
	near(g, "copy", sum, xs, 0)
	sum, before := g.floats(1000)
	require.NoError(g.t, g.k.Widen(x, sum, true))
	near(g, "sum", sum, plus(xs, before), 1)
}

// crossEntropyOf is the reference of a row.
func crossEntropyOf(z []float64, want int32) float64 {
	sum := 0.0
	for _, x := range z {
		sum += math.Exp(x)
	}
	return math.Log(sum) - z[want]
}

func TestCrossEntropy(t *testing.T) { each(t, testCrossEntropy, testCrossEntropy) }

func testCrossEntropy[T Float](g *rig[T]) {
	text, words := g.text()
	logits := g.normal(g.rows() * g.Vocab)
	z, zs := upload[T, T](g, logits)
	want := 0.0
	of := func(r int) float64 {
		return crossEntropyOf(zs[r*g.Vocab:][:g.Vocab], words[r/g.Context*g.Line()+r%g.Context+1])
	}
	for r := range g.rows() {
		want += of(r)
	}
	picks, grads := make([]int, 1000), make([]float64, 1000)
	for i := range picks {
		k := g.r.IntN(len(zs))
		if r := i; r < g.rows() { // the next token
			k = r*g.Vocab + int(words[r/g.Context*g.Line()+r%g.Context+1])
		}
		picks[i], grads[i] = k, 0.5*slope(&zs[k], func() float64 { return of(k / g.Vocab) })
	}
	loss := g.poisoned(1)
	require.NoError(g.t, g.k.CrossEntropy(z, text, loss, 0.5, false))
	near(g, "loss", loss, []float64{want / 2}, 0)
	near(g, "gradient", pick(g, z, picks), grads, 1)
	z, _ = upload[T, T](g, logits)
	require.NoError(g.t, g.k.CrossEntropy(z, text, loss, 0.5, true))
	near(g, "loss of two micro-batches", loss, []float64{want}, 0)
}

func TestEndStep(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := newRig[float32](t, devs[0], cases[0])
		const steps, peak, warmup = 12, 3e-3, 10
		step, log := send(g, []int32{0}), g.poisoned(2*steps)
		rate, other := send(g, []float64{0}), send(g, []float64{0})
		var want []float64
		for s := range steps + 1 { // one more than the log has room for
			loss, l := g.floats(1)
			norm, n := g.floats(1)
			require.NoError(t, g.k.EndStep(loss, norm, step, log, rate, other, peak, warmup))
			want = append(want, l[0], n[0])
			var got [1]float64
			require.NoError(t, rate.CopyTo(g.k.s, got[:]))
			require.Equal(t, peak*min(1, float64(s+2)/warmup), got[0], "rate of the step after %d", s)
			require.NoError(t, other.CopyTo(g.k.s, got[:]))
			require.Equal(t, peak*min(1, float64(s+2)/warmup), got[0], "other rate of the step after %d", s)
		}
		near(g, "log", log, want[:2*steps], 0)
	})
}
