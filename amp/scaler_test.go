package amp_test

import (
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// A recording has iterations of torch's scaler: Unscale, Step of SGD with a learning rate of
// 1/8, and Update. Grad is the gradient after Unscale.
type recording struct {
	Scaler []struct {
		Args struct {
			Init     float64 `json:"init_scale"`
			Growth   float64 `json:"growth_factor"`
			Backoff  float64 `json:"backoff_factor"`
			Interval int     `json:"growth_interval"`
		}
		Pattern string
		Trace   []struct {
			Inf         bool
			Scale       float64
			Tracker     int
			Grad, Param floats
		}
		State amp.State
	}
}

type floats []float32

func (f *floats) UnmarshalJSON(b []byte) error {
	var raw struct{ B64 string }
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	data, err := base64.StdEncoding.DecodeString(raw.B64)
	for i := 0; i+4 <= len(data); i += 4 {
		*f = append(*f, math.Float32frombits(binary.LittleEndian.Uint32(data[i:])))
	}
	return err
}

func TestRecordings(t *testing.T) {
	files, err := filepath.Glob("../optim/testdata/train*.json.gz")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	if more := env.Fixtures.Value(); more != "" {
		if info, err := os.Stat(more); err == nil && info.IsDir() {
			more = filepath.Join(more, "*train*.json.gz")
		}
		others, err := filepath.Glob(more)
		require.NoError(t, err)
		files = append(files, others...)
	}
	played := 0
	for _, file := range files {
		rec := load(t, file)
		played += len(rec.Scaler)
		t.Run(filepath.Base(file), func(t *testing.T) {
			testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) { rec.play(t, devs[0]) })
		})
	}
	require.Positive(t, played)
}

func load(t *testing.T, file string) (rec recording) {
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	_ = json.NewDecoder(z).Decode(&rec) // another kind of recording decodes to nothing
	return rec
}

func (rec *recording) play(t *testing.T, dev *device.Device) {
	for _, c := range rec.Scaler {
		t.Run(c.Pattern, func(t *testing.T) {
			b := newBench(t, dev, 5)
			sc := b.scaler(t, &amp.ScalerConfig{InitScale: c.Args.Init, GrowthFactor: c.Args.Growth, BackoffFactor: c.Args.Backoff, GrowthInterval: c.Args.Interval})
			for i, want := range c.Trace {
				state, err := sc.State(b.s)
				require.NoError(t, err)
				b.setGrads(t, func(k int) float32 { return want.Grad[k] * float32(state.Scale) })
				require.NoError(t, sc.Unscale(b.s, b.opt))
				require.NoError(t, sc.Step(b.s, b.opt, nil))
				require.NoError(t, sc.Update(b.s))
				state, err = sc.State(b.s)
				require.NoError(t, err)
				require.Equal(t, want.Scale, state.Scale, "step %d", i)
				require.Equal(t, want.Tracker, state.GrowthTracker, "step %d", i)
				requireSame(t, want.Param, b.read(t, b.value))
				requireSame(t, want.Grad, b.read(t, b.grad))
			}
			state, err := sc.State(b.s)
			require.NoError(t, err)
			require.Equal(t, c.State, state)
		})
	}
}

func requireSame(t *testing.T, want, got []float32) {
	t.Helper()
	require.Equal(t, len(want), len(got))
	for i := range want {
		if want[i] == want[i] || got[i] == got[i] {
			require.Equal(t, want[i], got[i], "element %d", i)
		}
	}
}

// A bench is parameters of 1 with an optimiser that subtracts an eighth of the gradient.
type bench struct {
	s           *stream.Stream
	value, grad memory.Slice[float32]
	opt         *optim.Optimizer
}

func newBench(t *testing.T, dev *device.Device, n int) *bench {
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return benchOn(t, s, n)
}

func benchOn(t *testing.T, s *stream.Stream, n int) *bench {
	b, ones := &bench{s: s}, make([]float32, n)
	for i := range ones {
		ones[i] = 1
	}
	var err error
	b.value, err = memory.MakeFrom(s, ones)
	require.NoError(t, err)
	b.grad, err = memory.MakeFrom(s, ones)
	require.NoError(t, err)
	b.opt, err = optim.NewSGD(s, []optim.Group{{Params: []optim.Param{optim.Of(b.value, b.grad)}}}, &optim.SGDConfig{LR: 0.125})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, b.opt.Close())
		require.NoError(t, b.value.Close())
		require.NoError(t, b.grad.Close())
	})
	return b
}

func (b *bench) scaler(t *testing.T, cfg *amp.ScalerConfig) *amp.Scaler {
	sc, err := amp.NewScaler(b.s, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sc.Close()) })
	return sc
}

func (b *bench) setGrads(t *testing.T, of func(i int) float32) {
	xs := make([]float32, b.grad.Len())
	for i := range xs {
		xs[i] = of(i)
	}
	require.NoError(t, b.grad.CopyFrom(b.s, xs))
}

func (b *bench) read(t *testing.T, x memory.Slice[float32]) []float32 {
	xs := make([]float32, x.Len())
	require.NoError(t, x.CopyTo(b.s, xs))
	return xs
}

// Without Unscale the step reads scaled gradients and leaves them in memory. The whole
// iteration can be captured.
func TestStepOfScaledGradients(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0], 4)
		sc := b.scaler(t, &amp.ScalerConfig{InitScale: 4, GrowthInterval: 2})
		iteration := func() error {
			if err := sc.Step(b.s, b.opt, nil); err != nil {
				return err
			}
			return sc.Update(b.s)
		}
		b.setGrads(t, func(int) float32 { return 8 })
		require.NoError(t, iteration())
		require.Equal(t, []float32{0.75, 0.75, 0.75, 0.75}, b.read(t, b.value))
		exec, err := graph.Capture([]*stream.Stream{b.s}, iteration, nil)
		require.NoError(t, err)
		defer exec.Close()
		require.NoError(t, exec.Launch(b.s)) // the scale grows
		require.Equal(t, []float32{0.5, 0.5, 0.5, 0.5}, b.read(t, b.value))
		require.NoError(t, exec.Launch(b.s))
		require.Equal(t, []float32{0.375, 0.375, 0.375, 0.375}, b.read(t, b.value))
		b.setGrads(t, func(i int) float32 { return []float32{1, 1, 1, float32(math.Inf(-1))}[i] })
		require.NoError(t, exec.Launch(b.s))
		require.Equal(t, []float32{0.375, 0.375, 0.375, 0.375}, b.read(t, b.value))
		state, err := sc.State(b.s)
		require.NoError(t, err)
		require.Equal(t, amp.State{Scale: 4, GrowthFactor: 2, BackoffFactor: 0.5, GrowthInterval: 2}, state)
	})
}

// One optimiser of two skips its step; the scale backs off once.
func TestTwoOptimizers(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a := newBench(t, devs[0], 2)
		b := benchOn(t, a.s, 2)
		sc := a.scaler(t, &amp.ScalerConfig{InitScale: 128, GrowthInterval: 1})
		a.setGrads(t, func(int) float32 { return 128 })
		b.setGrads(t, func(int) float32 { return float32(math.Inf(1)) })
		for range 2 { // what was found is forgotten
			require.NoError(t, sc.Step(a.s, a.opt, nil))
			require.NoError(t, sc.Step(a.s, b.opt, nil))
			require.NoError(t, sc.Update(a.s))
			b.setGrads(t, func(int) float32 { return 64 })
			a.setGrads(t, func(int) float32 { return 64 })
		}
		require.Equal(t, []float32{0.75, 0.75}, a.read(t, a.value))
		require.Equal(t, []float32{0.875, 0.875}, b.read(t, b.value))
		state, err := sc.State(a.s)
		require.NoError(t, err)
		require.EqualValues(t, 128, state.Scale)
	})
}

// An infinity on one rank backs off on all; without Agree it would on one.
func TestAgree(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		defer g.Close()
		var bs []*bench
		var scs []*amp.Scaler
		for i := range devs {
			var b *bench
			if i == 0 {
				b = benchOn(t, g.Stream(0), 3)
			} else {
				b = newBench(t, devs[i], 3)
			}
			bs, scs = append(bs, b), append(scs, b.scaler(t, &amp.ScalerConfig{InitScale: 2}))
			b.setGrads(t, func(k int) float32 {
				if i == 1 && k == 2 {
					return float32(math.NaN())
				}
				return 2
			})
			require.NoError(t, scs[i].Unscale(b.s, b.opt))
		}
		require.NoError(t, amp.Agree(g, scs...))
		for i, sc := range scs {
			require.NoError(t, sc.Step(bs[i].s, bs[i].opt, nil))
			require.NoError(t, sc.Update(bs[i].s))
			require.Equal(t, []float32{1, 1, 1}, bs[i].read(t, bs[i].value))
			state, err := sc.State(bs[i].s)
			require.NoError(t, err)
			require.EqualValues(t, 1, state.Scale)
		}
		require.ErrorContains(t, amp.Agree(g, scs[0]), "1 scalers")
	})
}

func TestOrderOfCalls(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], 2)
	sc := b.scaler(t, nil)
	require.ErrorContains(t, sc.Update(b.s), "no gradients were checked")
	require.NoError(t, sc.Unscale(b.s, b.opt))
	require.ErrorContains(t, sc.Unscale(b.s, b.opt), "were unscaled")
	require.NoError(t, sc.Step(b.s, b.opt, nil))
	require.ErrorContains(t, sc.Step(b.s, b.opt, nil), "has stepped")
	require.ErrorContains(t, sc.Unscale(b.s, b.opt), "has stepped")
	require.NoError(t, sc.Update(b.s))
	require.ErrorContains(t, sc.Step(b.s, b.opt, &optim.StepConfig{GradScale: sc.Factor()}), "the scaler sets them")
	half, err := tensor.Make(b.s, memory.Float16, 2)
	require.NoError(t, err)
	defer half.Close()
	halfGrad, err := tensor.Make(b.s, memory.Float16, 2)
	require.NoError(t, err)
	defer halfGrad.Close()
	o, err := optim.NewSGD(b.s, []optim.Group{{Params: []optim.Param{{Value: half, Grad: halfGrad}}}}, nil)
	require.NoError(t, err)
	defer o.Close()
	require.ErrorContains(t, sc.Unscale(b.s, o), "gradient 0 is float16")
	for want, cfg := range map[string]*amp.ScalerConfig{
		"growth factor 1":             {GrowthFactor: 1},
		"backoff factor 1":            {BackoffFactor: 1},
		"backoff factor 0.9999999999": {BackoffFactor: 0.9999999999},
		"interval -1":                 {GrowthInterval: -1},
		"scale -1":                    {InitScale: -1},
		"scale 1e+39":                 {InitScale: 1e39},
		"scale 1e-60":                 {InitScale: 1e-60},
		"factor +Inf":                 {GrowthFactor: math.Inf(1)},
	} {
		_, err := amp.NewScaler(b.s, cfg)
		require.ErrorContains(t, err, want)
	}
	for _, scale := range []float64{0, 1e-46, -1, math.NaN(), math.Inf(1)} {
		require.ErrorContains(t, sc.SetScale(b.s, scale), "want a finite float32")
	}
	require.NoError(t, sc.Close())
	require.NoError(t, sc.Close())
	require.ErrorIs(t, sc.Update(b.s), device.ErrClosed)
	_, err = amp.NewScaler(nil, nil)
	require.ErrorContains(t, err, "no stream")
}

// A state goes through JSON under torch's names, and a disabled scaler saves nothing.
func TestState(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], 2)
	sc := b.scaler(t, nil)
	want := amp.State{Scale: 3, GrowthFactor: 1.5, BackoffFactor: 0.25, GrowthInterval: 7, GrowthTracker: 5}
	require.NoError(t, sc.LoadState(b.s, want))
	got, err := sc.State(b.s)
	require.NoError(t, err)
	require.Equal(t, want, got)
	text, err := json.Marshal(got)
	require.NoError(t, err)
	require.JSONEq(t, `{"scale":3,"growth_factor":1.5,"backoff_factor":0.25,"growth_interval":7,"_growth_tracker":5}`, string(text))
	require.ErrorContains(t, sc.LoadState(b.s, amp.State{}), "the state is empty")
	require.NoError(t, sc.SetScale(b.s, 16))
	got, err = sc.State(b.s)
	require.NoError(t, err)
	require.Equal(t, 16.0, got.Scale)
	require.Equal(t, 5, got.GrowthTracker)

	off := b.scaler(t, &amp.ScalerConfig{Disabled: true})
	require.NoError(t, off.Unscale(b.s, b.opt))
	require.NoError(t, off.Step(b.s, b.opt, nil))
	require.NoError(t, off.Update(b.s))
	require.Equal(t, []float32{0.875, 0.875}, b.read(t, b.value))
	require.Equal(t, []float32{1}, b.read(t, off.Factor()))
	got, err = off.State(b.s)
	require.NoError(t, err)
	require.Zero(t, got)
}

// A state that is wrong changes nothing.
func TestLoadOfAWrongState(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], 2)
	sc := b.scaler(t, nil)
	good := amp.State{Scale: 3, GrowthFactor: 1.5, BackoffFactor: 0.25, GrowthInterval: 7, GrowthTracker: 5}
	require.NoError(t, sc.LoadState(b.s, good))
	for want, spoil := range map[string]func(x *amp.State){
		"scale -1":           func(x *amp.State) { x.Scale = -1 },
		"scale NaN":          func(x *amp.State) { x.Scale = math.NaN() },
		"scale +Inf":         func(x *amp.State) { x.Scale = math.Inf(1) },
		"scale 1e+39":        func(x *amp.State) { x.Scale = 1e39 },
		"growth factor 1":    func(x *amp.State) { x.GrowthFactor = 1 },
		"growth factor 0":    func(x *amp.State) { x.GrowthFactor = 0 },
		"growth factor NaN":  func(x *amp.State) { x.GrowthFactor = math.NaN() },
		"backoff factor 1":   func(x *amp.State) { x.BackoffFactor = 1 },
		"backoff factor -1":  func(x *amp.State) { x.BackoffFactor = -1 },
		"growth interval 0":  func(x *amp.State) { x.GrowthInterval = 0 },
		"growth tracker -1":  func(x *amp.State) { x.GrowthTracker = -1 },
		"growth tracker 429": func(x *amp.State) { x.GrowthTracker = 1 << 32 },
	} {
		wrong := amp.State{Scale: 4, GrowthFactor: 2, BackoffFactor: 0.5, GrowthInterval: 8, GrowthTracker: 1}
		spoil(&wrong)
		require.ErrorContains(t, sc.LoadState(b.s, wrong), want)
		got, err := sc.State(b.s)
		require.NoError(t, err)
		require.Equal(t, good, got, want)
	}
}

func TestScale(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0], 3)
		sc := b.scaler(t, &amp.ScalerConfig{InitScale: 8})
		x, err := tensor.Of(b.value, 3)
		require.NoError(t, err)
		half, err := tensor.Make(b.s, memory.Float16, 2, 2)
		require.NoError(t, err)
		defer half.Close()
		ones := memory.Float16Of(1)
		h, err := tensor.Slice[memory.Float16Bits](half)
		require.NoError(t, err)
		require.NoError(t, h.CopyFrom(b.s, []memory.Float16Bits{ones, ones, ones, memory.Float16Of(65504)}))
		require.NoError(t, sc.Scale(b.s, x, half))
		require.Equal(t, []float32{8, 8, 8}, b.read(t, b.value))
		got := make([]memory.Float16Bits, 4)
		require.NoError(t, h.CopyTo(b.s, got))
		require.Equal(t, []string{"8", "8", "8", "+Inf"}, []string{got[0].String(), got[1].String(), got[2].String(), got[3].String()})

		g, err := graph.Capture([]*stream.Stream{b.s}, func() error { return sc.Scale(b.s, x) }, nil)
		require.NoError(t, err)
		require.Equal(t, []float32{8, 8, 8}, b.read(t, b.value), "the capture runs nothing")
		require.NoError(t, sc.SetScale(b.s, 0.5))
		require.NoError(t, g.Launch(b.s))
		require.Equal(t, []float32{4, 4, 4}, b.read(t, b.value), "the launch reads the new scale")
		require.NoError(t, g.Close())
	})
}

func TestScaleRefuses(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], 4)
	sc := b.scaler(t, nil)
	x, err := tensor.Of(b.value, 2, 2)
	require.NoError(t, err)
	part, err := tensor.Of(b.value.Slice(3, 4), 1)
	require.NoError(t, err)
	ints, err := tensor.Make(b.s, memory.Int32, 2)
	require.NoError(t, err)
	defer ints.Close()
	host, err := tensor.MakeHost(memory.Float32, 2)
	require.NoError(t, err)
	closed, err := tensor.Make(b.s, memory.Float32, 2)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	before := b.read(t, b.value)
	for text, xs := range map[string][]tensor.Tensor{
		"share memory":    {x, part},
		"tensor 1: int32": {x, ints},
		"tensor 1: ":      {x, host},
		"contiguous":      {x.T()},
		"use after Close": {x, closed},
		"tensor 0":        {{}},
	} {
		require.ErrorContains(t, sc.Scale(b.s, xs...), text)
	}
	require.Equal(t, before, b.read(t, b.value))
	require.NoError(t, sc.Scale(b.s))
}
