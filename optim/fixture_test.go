package optim_test

import (
	"compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A recording has what torch 2.11 computed on an H200.
type recording struct {
	Optim []struct {
		Opt, Impl string
		Args      struct {
			LR          float64
			Betas       [2]float64
			Eps         float64
			WeightDecay *float64 `json:"weight_decay"`
			AMSGrad     bool
			Maximize    bool
			Momentum    float64
			Dampening   float64
			Nesterov    bool
		}
		Init  []array
		Grads [][]array
		After map[string][]array
		State []map[string]array
	}
	Clip []struct {
		Norm   string  `json:"norm_type"`
		Max    float64 `json:"max_norm"`
		DTypes []string
		Grads  []array
		Total  array
		After  []array
	}
	Unscale []struct {
		Before, After array
		Inverse       float32 `json:"inv_scale"`
		Found         float32
	}
}

type array struct {
	DType string
	Shape []int
	Bytes []byte
}

func (a *array) UnmarshalJSON(b []byte) error {
	var raw struct {
		DType string
		Shape []int
		B64   string
	}
	if err := json.Unmarshal(b, &raw); err != nil {
		return err
	}
	data, err := base64.StdEncoding.DecodeString(raw.B64)
	*a = array{raw.DType, raw.Shape, data}
	return err
}

var dtypes = map[string]memory.DType{"float16": memory.Float16, "bfloat16": memory.BFloat16, "float32": memory.Float32, "float64": memory.Float64}

// recordings are those of the package, and those that the user adds.
func recordings(t *testing.T) []string {
	files, err := filepath.Glob("testdata/train*.json.gz")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	more := env.Fixtures.Value()
	if more == "" {
		return files
	}
	if info, err := os.Stat(more); err == nil && info.IsDir() {
		more = filepath.Join(more, "*train*.json.gz")
	}
	others, err := filepath.Glob(more)
	require.NoError(t, err)
	for _, f := range others { // the user's folder may have allocator traces, too
		if rec := load(t, f); len(rec.Optim)+len(rec.Clip)+len(rec.Unscale) > 0 {
			files = append(files, f)
		}
	}
	return files
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

func TestRecordings(t *testing.T) {
	for _, file := range recordings(t) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			rec := load(t, file)
			testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
				t.Run("optim", func(t *testing.T) { rec.playOptim(t, devs[0]) })
				t.Run("clip", func(t *testing.T) { rec.playClip(t, devs[0]) })
				t.Run("unscale", func(t *testing.T) { rec.playUnscale(t, devs[0]) })
			})
		})
	}
}

// playOptim repeats the fused runs to a unit in the last place. The others begin with the
// values of the run before, and round otherwise: they are right to a part in 10,000.
func (rec *recording) playOptim(t *testing.T, dev *device.Device) {
	var init []array
	var grads [][]array
	for i, c := range rec.Optim {
		if len(c.Init) > 0 {
			init, grads = c.Init, c.Grads
		}
		t.Run(fmt.Sprintf("%d %s %s %s", i, c.Opt, c.Impl, init[0].DType), func(t *testing.T) {
			s := newStream(t, dev)
			var params []optim.Param
			for _, x := range init {
				params = append(params, optim.Param{Value: upload(t, s, x), Grad: upload(t, s, x)})
			}
			groups, a := []optim.Group{{Params: params}}, c.Args
			var o *optim.Optimizer
			var err error
			adam := &optim.AdamConfig{LR: a.LR, Betas: a.Betas, Eps: a.Eps, WeightDecay: a.WeightDecay, AMSGrad: a.AMSGrad, Maximize: a.Maximize}
			switch c.Opt {
			case "AdamW":
				o, err = optim.NewAdamW(s, groups, adam)
			case "Adam":
				o, err = optim.NewAdam(s, groups, adam)
			default:
				sgd := &optim.SGDConfig{LR: a.LR, Momentum: a.Momentum, Dampening: a.Dampening, Nesterov: a.Nesterov, Maximize: a.Maximize}
				if a.WeightDecay != nil {
					sgd.WeightDecay = *a.WeightDecay
				}
				o, err = optim.NewSGD(s, groups, sgd)
			}
			require.NoError(t, err)
			defer o.Close()
			same := func(what string, want array, got tensor.Tensor) {
				if c.Impl == "fused" {
					requireNear(t, s, want, got, 1, what)
				} else {
					requireClose(t, s, want, got, 1e-4, what)
				}
			}
			for step, list := range grads {
				for i, g := range list {
					write(t, s, params[i].Grad, g)
				}
				require.NoError(t, o.Step(s, nil))
				for i, want := range c.After[strconv.Itoa(step+1)] {
					same(fmt.Sprintf("parameter %d after step %d", i, step+1), want, params[i].Value)
				}
			}
			for i, have := range o.State() {
				for name, got := range map[string]tensor.Tensor{"exp_avg": have.ExpAvg, "exp_avg_sq": have.ExpAvgSq,
					"max_exp_avg_sq": have.MaxExpAvgSq, "momentum_buffer": have.MomentumBuffer} {
					want, ok := c.State[i][name]
					require.Equal(t, ok && len(want.Bytes) > 0, got.DType() != memory.Invalid, name)
					if ok && len(want.Bytes) > 0 {
						same(name, want, got)
					}
				}
				step := make([]float32, 1)
				require.NoError(t, have.Step.CopyTo(s, step))
				require.EqualValues(t, len(grads), step[0])
			}
		})
	}
}

// playClip repeats clip_grad_norm_. torch adds up in float32, and Chorus in float64, so the
// norm may differ by two units in the last place. The factor is max/(norm + 1e-6), so that it may differ
// by four, and a gradient, whose product is rounded once more, by five.
func (rec *recording) playClip(t *testing.T, dev *device.Device) {
	grads := map[string][]array{}
	for i, c := range rec.Clip {
		key := fmt.Sprint(c.DTypes)
		if len(c.Grads) > 0 {
			grads[key] = c.Grads
		}
		t.Run(fmt.Sprintf("%d norm %s of %s", i, c.Norm, key), func(t *testing.T) {
			s := newStream(t, dev)
			var xs []tensor.Tensor
			for _, g := range grads[key] {
				xs = append(xs, upload(t, s, g))
			}
			p, err := strconv.ParseFloat(c.Norm, 64)
			require.NoError(t, err)
			g, err := optim.NewGrads(s, xs...)
			require.NoError(t, err)
			defer g.Close()
			norm, err := g.ClipNorm(s, c.Max, p)
			require.NoError(t, err)
			total := make([]float32, 1)
			require.NoError(t, norm.CopyTo(s, total))
			want := values(c.Total)[0]
			require.InEpsilon(t, want, total[0], 3*0x1p-23, "the norm")
			for k := range xs {
				requireNear(t, s, c.After[k], xs[k], 5, fmt.Sprint("gradient ", k))
			}
		})
	}
}

func (rec *recording) playUnscale(t *testing.T, dev *device.Device) {
	for i, c := range rec.Unscale {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			s := newStream(t, dev)
			x := upload(t, s, c.Before)
			g, err := optim.NewGrads(s, x)
			require.NoError(t, err)
			defer g.Close()
			inverse, found := device32(t, s, c.Inverse), device32(t, s, 0)
			require.NoError(t, g.Unscale(s, inverse, found))
			requireNear(t, s, c.After, x, 0, "gradient")
			got := make([]float32, 1)
			require.NoError(t, found.CopyTo(s, got))
			require.Equal(t, c.Found, got[0])
		})
	}
}

// ---- helpers ----

func newStream(t *testing.T, dev *device.Device) *stream.Stream {
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func device32(t *testing.T, s *stream.Stream, x float32) memory.Slice[float32] {
	m, err := memory.MakeFrom(s, []float32{x})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return m
}

// upload returns a tensor with the recorded elements.
func upload(t *testing.T, s *stream.Stream, a array) tensor.Tensor {
	x, err := tensor.Make(s, dtypes[a.DType], a.Shape...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	write(t, s, x, a)
	return x
}

func write(t *testing.T, s *stream.Stream, x tensor.Tensor, a array) {
	b, err := memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
	require.NoError(t, err)
	require.NoError(t, b.CopyFrom(s, a.Bytes))
}

// read returns the elements of a tensor.
func read(t *testing.T, s *stream.Stream, x tensor.Tensor) array {
	b, err := memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
	require.NoError(t, err)
	a := array{DType: x.DType().String(), Shape: x.Shape(), Bytes: make([]byte, x.Bytes())}
	require.NoError(t, b.CopyTo(s, a.Bytes))
	return a
}

// bitsOf returns the elements as integers that follow each other as the numbers do.
func bitsOf(a array) (all []int64) {
	size := dtypes[a.DType].Size()
	for i := 0; i < len(a.Bytes); i += size {
		var u uint64
		switch size {
		case 2:
			u = uint64(binary.LittleEndian.Uint16(a.Bytes[i:])) << 48
		case 4:
			u = uint64(binary.LittleEndian.Uint32(a.Bytes[i:])) << 32
		default:
			u = binary.LittleEndian.Uint64(a.Bytes[i:])
		}
		x := int64(u)
		if x < 0 {
			x = math.MinInt64 - x
		}
		all = append(all, x>>(64-8*size))
	}
	return all
}

// values returns the elements as numbers.
func values(a array) (all []float64) {
	for i := 0; i < len(a.Bytes); i += dtypes[a.DType].Size() {
		switch a.DType {
		case "float16":
			all = append(all, float64(memory.Float16Bits(binary.LittleEndian.Uint16(a.Bytes[i:])).Float32()))
		case "bfloat16":
			all = append(all, float64(memory.BFloat16Bits(binary.LittleEndian.Uint16(a.Bytes[i:])).Float32()))
		case "float32":
			all = append(all, float64(math.Float32frombits(binary.LittleEndian.Uint32(a.Bytes[i:]))))
		default:
			all = append(all, math.Float64frombits(binary.LittleEndian.Uint64(a.Bytes[i:])))
		}
	}
	return all
}

// requireNear checks that each element is within some units in the last place.
func requireNear(t *testing.T, s *stream.Stream, want array, got tensor.Tensor, units int64, what string) {
	t.Helper()
	have := read(t, s, got)
	require.Equal(t, len(want.Bytes), len(have.Bytes), what)
	a, b, wants, gots := bitsOf(want), bitsOf(have), values(want), values(have)
	for i := range a {
		if math.IsNaN(wants[i]) && math.IsNaN(gots[i]) {
			continue
		}
		require.LessOrEqual(t, max(a[i]-b[i], b[i]-a[i]), units, "%s: element %d is %v: want %v", what, i, gots[i], wants[i])
	}
}

// requireClose checks that each element is right to a part of the largest.
func requireClose(t *testing.T, s *stream.Stream, want array, got tensor.Tensor, part float64, what string) {
	t.Helper()
	w, h := values(want), values(read(t, s, got))
	require.Equal(t, len(w), len(h), what)
	for i := range w {
		require.InDelta(t, w[i], h[i], part*math.Max(1, math.Abs(w[i])), "%s: element %d", what, i)
	}
}
