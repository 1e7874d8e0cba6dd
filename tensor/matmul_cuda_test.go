package tensor_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// largeProducts have the shapes of docs/PERFORMANCE.md.
var largeProducts = []struct {
	name           string
	batch, m, n, k int
	in, out        memory.DType
	cfg            tensor.MatMulConfig
	turned         bool // b is a transposed view, as weights are
}{
	{"bfloat16 4096", 0, 4096, 4096, 4096, bf16, bf16, tensor.MatMulConfig{}, false},
	{"bfloat16 4096, b transposed", 0, 4096, 4096, 4096, bf16, bf16, tensor.MatMulConfig{}, true},
	{"bfloat16 8192", 0, 8192, 8192, 8192, bf16, bf16, tensor.MatMulConfig{}, false},
	{"bfloat16 16 rows", 0, 16, 4096, 4096, bf16, bf16, tensor.MatMulConfig{}, true},
	{"bfloat16 wide", 0, 4096, 11008, 4096, bf16, bf16, tensor.MatMulConfig{}, true},
	{"bfloat16 batch", 64, 512, 512, 64, bf16, bf16, tensor.MatMulConfig{}, false},
	{"bfloat16 GELU", 0, 4096, 4096, 4096, bf16, bf16, tensor.MatMulConfig{Epilogue: tensor.GELU}, true},
	{"float16 8192", 0, 8192, 8192, 8192, f16, f16, tensor.MatMulConfig{}, false},
	{"float32 4096", 0, 4096, 4096, 4096, f32, f32, tensor.MatMulConfig{}, false},
	{"TF32 4096", 0, 4096, 4096, 4096, f32, f32, tensor.MatMulConfig{Settings: &tensor.MatMulSettings{Float32Precision: tensor.High}}, false},
	{"float8 8192, fast", 0, 8192, 8192, 8192, e4m3, bf16, tensor.MatMulConfig{FastAccum: true}, true},
	{"float8 8192", 0, 8192, 8192, 8192, e4m3, bf16, tensor.MatMulConfig{}, true},
}

// TestCUDAProducts checks large products of random data on a GPU, and prints their rates before
// and after tuning, and the host's time for small products: `go test ./tensor -run TestCUDAProducts -v`.
func TestCUDAProducts(t *testing.T) {
	s, err := stream.New(testgpu.CUDA(t, 1)[0], nil)
	require.NoError(t, err)
	defer s.Close()
	for _, l := range s.Device().System().Libraries() {
		t.Log(l.Name, l.Version, l.Path)
	}
	l := newLab(t, s, rand.Uint64())
	defer l.close()
	for _, p := range largeProducts {
		batch := max(1, p.batch)
		a := l.large(p.in, p.batch, p.m, p.k)
		b := l.large(p.in, p.batch, p.k, p.n)
		if p.turned {
			b = l.large(p.in, p.batch, p.n, p.k).T()
		}
		c := l.large(p.out, p.batch, p.m, p.n)
		run := func() { require.NoError(t, tensor.MatMul(s, c, a, b, &p.cfg)) }
		run()
		l.sample(c, a, b, &p.cfg, p.name)
		took := l.duration(20, run)
		flop := 2 * float64(batch) * float64(p.m) * float64(p.n) * float64(p.k)
		tuned, err := tensor.TuneMatMul(testgpu.Context(t), s, c, a, b, &p.cfg, nil)
		require.NoError(t, err)
		run()
		l.sample(c, a, b, &p.cfg, p.name+", tuned")
		t.Logf("%-30s %8.1f µs %8.1f TFLOP/s, tuned %.3f of the default's time", p.name,
			float64(took)/1e3, flop/took.Seconds()/1e12, tuned.Time.Seconds()/tuned.Default.Seconds())
		l.close()
	}
	t.Logf("host time of a product of 64x64x64: %v", l.enqueueTime())
}

// large returns uniform random numbers.
func (l *lab) large(t memory.DType, batch, rows, cols int) tensor.Tensor {
	shape := []int{rows, cols}
	if batch > 0 {
		shape = []int{batch, rows, cols}
	}
	x, err := tensor.Make(l.s, t, shape...)
	require.NoError(l.t, err)
	l.open = append(l.open, x)
	v := make([]float32, x.Len())
	for i := range v {
		v[i] = 2*l.r.Float32() - 1
	}
	host, err := tensor.OfHost(v, shape...)
	require.NoError(l.t, err)
	require.NoError(l.t, tensor.Copy(l.s, x, host))
	return x
}

// sample compares some elements with float64.
func (l *lab) sample(c, a, b tensor.Tensor, cfg *tensor.MatMulConfig, name string) {
	l.t.Helper()
	for range 20 {
		ca, aa, bb := c, a, b
		if c.Dims() == 3 {
			z := l.r.IntN(c.Size(0))
			ca, aa, bb = selected(l, c, 0, z), selected(l, a, 0, z), selected(l, b, 0, z)
		}
		i, j := l.r.IntN(ca.Size(0)), l.r.IntN(ca.Size(1))
		row, col := l.values(selected(l, aa, 0, i)), l.values(selected(l, bb, 1, j))
		want, size := 0.0, 0.0
		for p := range row {
			want += row[p] * col[p]
			size += math.Abs(row[p] * col[p])
		}
		bound := (float64(len(row))*0x1p-23 + 8*numerics[c.DType()].unit) * size
		if a.DType() == e4m3 {
			bound = float64(len(row)) * 0x1p-13 * size
		}
		if cfg.Settings != nil {
			bound += 0x1p-9 * size // TF32
		}
		if cfg.Epilogue == tensor.GELU {
			bound = 1.13*bound + 2e-3*(math.Abs(want)+1)
			want = gelu(want)
		}
		got := l.values(selected(l, selected(l, ca, 0, i), 0, j))
		checkClose(l.t, c.DType(), []float64{want}, got, []float64{bound}, "%s: row %d column %d", name, i, j)
	}
}

// duration returns the median time of a call on the device, of five rounds.
func (l *lab) duration(calls int, run func()) time.Duration {
	var all []time.Duration
	for range 5 {
		begin, err := l.s.Record(&stream.EventConfig{Timing: true})
		require.NoError(l.t, err)
		for range calls {
			run()
		}
		end, err := l.s.Record(&stream.EventConfig{Timing: true})
		require.NoError(l.t, err)
		require.NoError(l.t, l.s.Sync(testgpu.Context(l.t)))
		d, err := end.Elapsed(begin)
		require.NoError(l.t, err)
		all = append(all, d/time.Duration(calls))
		require.NoError(l.t, begin.Close())
		require.NoError(l.t, end.Close())
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// enqueueTime returns the host's median time for a small product on an idle stream.
func (l *lab) enqueueTime() time.Duration {
	c, a, b := l.large(bf16, 0, 64, 64), l.large(bf16, 0, 64, 64), l.large(bf16, 0, 64, 64)
	var all []time.Duration
	for range 50 {
		start := time.Now()
		for range 100 {
			require.NoError(l.t, tensor.MatMul(l.s, c, a, b, nil))
		}
		all = append(all, time.Since(start)/100)
		require.NoError(l.t, l.s.Sync(testgpu.Context(l.t)))
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// TestMatMulSupport tries all types with all epilogues. What virtual devices support, a GPU
// must support; otherwise the virtual devices are wrong.
func TestMatMulSupport(t *testing.T) {
	testhost.Serial(t)
	virtual := map[string]bool{}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, 1)
		defer l.close()
		supported, refused := 0, 0
		for _, types := range productTypes {
			for _, e := range []tensor.Epilogue{tensor.NoEpilogue, tensor.ReLU, tensor.GELU, tensor.ReLUGrad, tensor.GELUGrad, tensor.SumA, tensor.SumB} {
				for _, extras := range []bool{false, true} {
					name := fmt.Sprintf("%v, epilogue %d, extras %v", types, e, extras)
					err := l.supports(types, e, extras)
					if err == nil {
						supported++
					} else {
						refused++
						require.ErrorIs(t, err, errors.ErrUnsupported, name)
					}
					if !l.cuda {
						virtual[name] = err == nil
					} else if virtual[name] && err != nil {
						t.Errorf("%s: virtual devices support it: %v", name, err)
					} else if !virtual[name] && err == nil {
						t.Logf("%s: only the GPU supports it", name)
					}
				}
			}
			l.close()
		}
		t.Logf("%d combinations are supported, %d are not", supported, refused)
		require.Greater(t, supported, 80)
	})
}

// supports tries a product with an epilogue; extras adds a bias or bias gradient and Aux.
func (l *lab) supports(types [3]memory.DType, e tensor.Epilogue, extras bool) error {
	x := &trial{lab: l, types: types, m: 64, n: 128, k: 64, float8: types[0] == e4m3 || types[0] == e5m2}
	x.cfg.Epilogue = e
	switch e {
	case tensor.ReLUGrad, tensor.GELUGrad:
		x.drawAux(e == tensor.ReLUGrad)
		if extras {
			x.cfg.BiasGrad = l.vector(x.biasType(), []int{x.n})
		}
	case tensor.SumA:
		x.cfg.BiasGrad = l.vector(x.biasType(), []int{x.m})
	case tensor.SumB:
		x.cfg.BiasGrad = l.vector(x.biasType(), []int{x.n})
	default:
		if extras {
			x.cfg.Bias = l.vector(x.biasType(), []int{x.n})
			if e != tensor.NoEpilogue {
				x.drawAux(e == tensor.ReLU)
			}
		}
	}
	a, b := l.make(types[0], 0, x.m, x.k, layout{}), l.make(types[1], 0, x.k, x.n, layout{transposed: true})
	return tensor.MatMul(l.s, l.make(types[2], 0, x.m, x.n, layout{}).Tensor, a.Tensor, b.Tensor, &x.cfg)
}

// BenchmarkMatMulEnqueue measures the host's time for small products on a GPU.
func BenchmarkMatMulEnqueue(b *testing.B) {
	s, err := stream.New(testgpu.CUDA(b, 1)[0], nil)
	require.NoError(b, err)
	defer s.Close()
	var m [3]tensor.Tensor
	for i := range m {
		m[i], err = tensor.Make(s, bf16, 64, 64)
		require.NoError(b, err)
		defer m[i].Close()
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if err := tensor.MatMul(s, m[0], m[1], m[2], nil); err != nil {
			b.Fatal(err)
		}
		if i%500 == 0 {
			b.StopTimer()
			require.NoError(b, s.Sync(b.Context()))
			b.StartTimer()
		}
	}
}

// After the first product a GPU's product allocates nothing.
func TestMatMulAllocatesNothing(t *testing.T) {
	s, err := stream.New(testgpu.CUDA(t, 1)[0], nil)
	require.NoError(t, err)
	defer s.Close()
	l := newLab(t, s, 1)
	defer l.close()
	c, a, b := l.large(bf16, 0, 64, 64), l.large(bf16, 0, 64, 64), l.large(bf16, 0, 64, 64)
	require.NoError(t, tensor.MatMul(s, c, a, b, nil))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := tensor.MatMul(s, c, a, b, nil); err != nil {
			t.Fatal(err)
		}
	}))
	require.NoError(t, s.Sync(testgpu.Context(t)))
}
