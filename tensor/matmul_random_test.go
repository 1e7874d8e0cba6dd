package tensor_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

const (
	f64, f32, f16, bf16 = memory.Float64, memory.Float32, memory.Float16, memory.BFloat16
	e4m3, e5m2          = memory.Float8E4M3, memory.Float8E5M2
)

// productTypes has the types of a, b and c.
var productTypes = [][3]memory.DType{
	{f64, f64, f64}, {f32, f32, f32}, {f16, f16, f16}, {f16, f16, f32}, {bf16, bf16, bf16}, {bf16, bf16, f32},
	{e4m3, e4m3, bf16}, {e4m3, e4m3, f16}, {e4m3, e4m3, f32}, {e4m3, e4m3, e4m3},
	{e4m3, e5m2, bf16}, {e5m2, e4m3, f16}, {e5m2, e4m3, f32}, {e4m3, e5m2, e4m3}, {e5m2, e4m3, e5m2},
}

// A trial is one random product.
type trial struct {
	*lab
	types         [3]memory.DType
	batch         int // 0 means two dimensions
	m, n, k       int
	a, b, c       *operand
	cfg           tensor.MatMulConfig
	settings      tensor.MatMulSettings
	alpha, beta   float64
	scaleA, scale []float64 // of a, and of b
	result        float64   // ScaleResult
	float8        bool
	positive      []float64 // for ReLUGrad, the input of ReLU
	uncertain     []float64 // the error of positive
	text          string
}

// TestMatMulRandom compares random products of all types, layouts, epilogues and settings
// with float64, and checks that nothing outside of the outputs is written.
func TestMatMulRandom(t *testing.T) {
	seed := *productsSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-productsseed %d repeats this", seed)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		l := newLab(t, s, seed)
		defer l.close()
		unsupported := map[string]int{}
		for i := range *products {
			x := l.trial()
			x.text = fmt.Sprintf("product %d: %s", i, x.text)
			if err := x.run(); err != nil {
				require.ErrorIs(t, err, errors.ErrUnsupported, x.text)
				require.True(t, l.cuda, "virtual devices support all products of this test: %s: %v", x.text, err)
				unsupported[fmt.Sprint(x.types, " epilogue ", x.cfg.Epilogue, " bias ", x.cfg.Bias.Len() > 0, " aux ", x.cfg.Aux.Len() > 0)]++
			}
			l.close()
		}
		for what, n := range unsupported {
			t.Logf("not supported by this library and device: %s (%d times)", what, n)
		}
	})
}

func (l *lab) pick(n int) bool { return l.r.IntN(n) == 0 }

// trial draws a product and makes its operands.
func (l *lab) trial() *trial {
	x := &trial{lab: l, types: productTypes[l.r.IntN(len(productTypes))], result: 1, scaleA: []float64{1}, scale: []float64{1}}
	x.float8 = x.types[0] == e4m3 || x.types[0] == e5m2
	x.m, x.n, x.k = 1+l.r.IntN(40), 1+l.r.IntN(40), 1+l.r.IntN(60)
	if l.pick(8) {
		x.k = 512 + l.r.IntN(300) // split
	}
	if l.pick(8) {
		x.m, x.n = 64+l.r.IntN(20), 64+l.r.IntN(20) // needs a workspace
	}
	unit := 1
	if x.float8 {
		unit = 16
		x.n, x.k = (x.n+15)/16*16, (x.k+15)/16*16
	}
	if l.pick(2) {
		x.batch = 1 + l.r.IntN(3)
	}
	x.a, x.b = x.input(x.types[0], x.m, x.k, unit, false), x.input(x.types[1], x.k, x.n, unit, true)
	y := l.layout(unit)
	y.transposed = y.transposed && l.pick(2) && !x.float8
	x.drawSettings()
	x.drawEpilogue(&y)
	x.c = l.make(x.types[2], x.batch, x.m, x.n, y)
	x.drawFactors(y, unit)
	if x.float8 {
		x.drawScales()
	}
	x.text = fmt.Sprintf("%v, batch %d, %d x %d x %d, strides c %v a %v b %v, alpha %v beta %v, epilogue %d bias %v aux %v add %v, %+v", x.types, x.batch, x.m, x.n, x.k,
		x.c.Strides(), x.a.Strides(), x.b.Strides(), x.alpha, x.beta, x.cfg.Epilogue, x.cfg.Bias.Shape(), x.cfg.Aux.Shape(), x.cfg.Add.Shape(), x.settings)
	return x
}

// input returns a or b. 8-bit floats need them contiguous along k.
func (x *trial) input(t memory.DType, rows, cols, unit int, second bool) *operand {
	y := x.layout(unit)
	if x.float8 {
		y.transposed = second
	}
	switch {
	case x.batch == 0 || x.pick(4):
		return x.make(t, 0, rows, cols, y)
	case x.pick(4):
		return x.make(t, 1, rows, cols, y)
	}
	y.repeated = x.pick(4)
	return x.make(t, x.batch, rows, cols, y)
}

func (x *trial) drawSettings() {
	x.settings = tensor.MatMulSettings{
		Float32Precision: tensor.Float32Precision(x.r.IntN(3)), FP16Reduction: tensor.Reduction(x.r.IntN(3)), BF16Reduction: tensor.Reduction(x.r.IntN(3)),
		Deterministic: x.pick(4), Library: tensor.BLASLibrary(x.r.IntN(3)), SMCarveout: 8 * x.r.IntN(2),
	}
	x.settings.AllowFP16Accumulation = x.types[0] == f16 && x.types[2] == f16 && x.pick(3)
	if !x.pick(4) {
		x.cfg.Settings = &x.settings
	} else {
		x.settings = tensor.MatMulSettings{}
	}
}

// drawEpilogue draws an epilogue that the types support. With a bias or buffers c is row-major.
func (x *trial) drawEpilogue(y *layout) {
	all := []tensor.Epilogue{tensor.NoEpilogue, tensor.NoEpilogue, tensor.ReLU}
	half := x.types[0] == f16 || x.types[0] == bf16
	full := x.types[0] != f64 && !x.settings.AllowFP16Accumulation
	if full {
		all = append(all, tensor.GELU)
	}
	if full && !x.float8 {
		all = append(all, tensor.ReLUGrad, tensor.GELUGrad)
	}
	if full && half {
		all = append(all, tensor.SumA, tensor.SumB)
	}
	e := all[x.r.IntN(len(all))]
	x.cfg.Epilogue = e
	switch e {
	case tensor.ReLUGrad, tensor.GELUGrad:
		x.drawAux(e == tensor.ReLUGrad)
		if x.pick(2) {
			x.cfg.BiasGrad = x.biasVector(x.types[2], x.n, true)
		}
	case tensor.SumA:
		x.cfg.BiasGrad = x.biasVector(x.types[2], x.m, true)
	case tensor.SumB:
		x.cfg.BiasGrad = x.biasVector(x.types[2], x.n, true)
	default:
		if x.pick(2) {
			x.cfg.Bias = x.biasVector(x.biasType(), x.n, false)
		}
		if e != tensor.NoEpilogue && full && x.storesAux(e) && x.pick(2) {
			x.drawAux(e == tensor.ReLU)
		}
	}
	if x.cfg.Bias.Len()+x.cfg.BiasGrad.Len()+x.cfg.Aux.Len() > 0 {
		y.transposed = false
	}
}

// storesAux reports whether cuBLASLt stores what the gradient of an epilogue needs.
func (x *trial) storesAux(e tensor.Epilogue) bool {
	c := x.types[2]
	if !x.float8 || c == f16 || c == bf16 {
		return true
	}
	return e == tensor.GELU && (c == e5m2 || c == e4m3 && x.types[0] == e4m3 && x.types[1] == e4m3)
}

func (x *trial) biasType() memory.DType {
	switch c := x.types[2]; {
	case !x.float8 || c == f16 || c == bf16:
		return c
	case c == f32 || x.pick(2):
		return bf16
	}
	return f16
}

// biasVector has one row for each product of the batch, or one for all.
func (x *trial) biasVector(t memory.DType, n int, each bool) tensor.Tensor {
	if x.batch > 0 && (each || x.pick(2)) {
		return x.vector(t, []int{x.batch, n})
	}
	return x.vector(t, []int{n})
}

func (x *trial) drawAux(mask bool) {
	shape := []int{x.m, (x.n + 7) / 8 * 8}
	d := x.types[2]
	if mask {
		shape[1], d = (x.n+127)/128*16, memory.Uint8
	} else if (d == e4m3 || d == e5m2) && x.pick(2) {
		d = f16
	}
	if x.batch > 0 {
		shape = append([]int{x.batch}, shape...)
	}
	aux := x.vector(d, shape)
	if !mask {
		var err error
		aux, err = aux.Narrow(-1, 0, x.n)
		require.NoError(x.t, err)
	}
	x.cfg.Aux = aux
}

// drawFactors draws alpha, beta and Add.
func (x *trial) drawFactors(y layout, unit int) {
	x.alpha, x.beta = 1, 0
	narrow := x.types[2] == e4m3 || x.types[2] == e5m2
	if x.pick(4) {
		t := x.types[2]
		if narrow {
			if t = bf16; x.cfg.Bias.DType() == f16 {
				t = f16
			}
		}
		ly := x.layout(unit)
		ly.transposed, ly.repeated = y.transposed, x.pick(4)
		x.cfg.Add = x.make(t, x.batch, x.m, x.n, ly).Tensor
		x.beta = 1
	}
	if x.pick(2) {
		x.alpha = []float64{0, 0.5, -1.25}[x.r.IntN(3)]
		x.cfg.Alpha = &x.alpha
	}
	if x.pick(2) && (!narrow || x.beta != 0) {
		x.beta = []float64{0, 0.5, -1.25}[x.r.IntN(3)]
		x.cfg.Beta = &x.beta
	}
	vector := min(x.m, x.n) == 1 && (x.cfg.Epilogue != tensor.NoEpilogue || x.cfg.Bias.Len() > 0 || x.cfg.Add.Len() > 0)
	if x.pick(5) && (!narrow || x.cfg.Add.Len() > 0) && !vector {
		t := f32
		if x.types[0] == f64 {
			t = f64
		}
		if x.settings.AllowFP16Accumulation {
			t = f16
		}
		x.cfg.Alpha, x.cfg.Beta = nil, nil
		x.cfg.DeviceAlpha = x.vector(t, []int{1}, float32(x.alpha))
		x.cfg.DeviceBeta = x.vector(t, nil, float32(x.beta))
	}
}

// drawScales draws what only 8-bit floats have.
func (x *trial) drawScales() {
	x.cfg.FastAccum = x.pick(2)
	draw := func() float32 { return []float32{0.5, 2, 0.25}[x.r.IntN(3)] }
	narrow := x.types[2] == e4m3 || x.types[2] == e5m2
	if x.batch == 0 && !narrow && x.pick(3) {
		x.cfg.ScaleA, x.cfg.ScaleB = x.vector(f32, []int{x.m, 1}), x.vector(f32, []int{1, x.n})
		x.scaleA, x.scale = x.values(x.cfg.ScaleA), x.values(x.cfg.ScaleB)
		return
	}
	if x.pick(2) {
		v := draw()
		x.cfg.ScaleA, x.scaleA = x.vector(f32, []int{1}, v), []float64{float64(v)}
	}
	if x.pick(2) {
		v := draw()
		x.cfg.ScaleB, x.scale = x.vector(f32, nil, v), []float64{float64(v)}
	}
	if narrow && x.pick(2) {
		v := draw()
		x.cfg.ScaleResult, x.result = x.vector(f32, []int{1}, v), float64(v)
	}
	if narrow && x.pick(2) {
		x.cfg.AMax = x.vector(f32, []int{1})
	}
}

// run computes the product and compares it.
func (x *trial) run() error {
	if x.cfg.Epilogue == tensor.ReLUGrad {
		if err := x.forward(); err != nil {
			return err
		}
	}
	before, old := x.bytes(x.c.storage), x.values(x.c.Tensor)
	if err := tensor.MatMul(x.s, x.c.Tensor, x.a.Tensor, x.b.Tensor, &x.cfg); err != nil {
		return err
	}
	ref := x.multiply(x.c.Tensor, x.a.Tensor, x.b.Tensor, x.scaleA, x.scale)
	ref.scale(x.alpha)
	if x.beta != 0 {
		v := old
		if x.cfg.Add.Len() > 0 {
			v = x.values(x.cfg.Add)
		}
		ref.combine(x.beta, v)
	}
	if x.cuda && (x.cfg.Bias.Len() > 0 || x.cfg.Epilogue != tensor.NoEpilogue) {
		// Some kernels for unaligned operands round before the bias and the epilogue.
		ref.early, ref.rounded = slices.Clone(ref.sum), numerics[x.types[2]].unit
	}
	if x.cfg.Bias.Len() > 0 {
		ref.addRows(x.values(x.cfg.Bias))
	}
	bound := ref.bound(x)
	got := x.values(x.c.Tensor)
	want := x.epilogue(ref, bound)
	unscaled, limits := slices.Clone(want), slices.Clone(bound)
	for i := range want {
		want[i], bound[i] = x.result*want[i], math.Abs(x.result)*bound[i]
	}
	checkClose(x.t, x.types[2], want, got, bound, "%s", x.text)
	if x.cfg.AMax.Len() > 0 {
		x.requireAMax(unscaled, limits)
	}
	x.requireGaps(x.c, before)
	return nil
}

// forward computes the mask for ReLUGrad.
func (x *trial) forward() error {
	c := x.make(x.types[2], x.batch, x.m, x.n, layout{})
	if err := tensor.MatMul(x.s, c.Tensor, x.a.Tensor, x.b.Tensor, &tensor.MatMulConfig{Epilogue: tensor.ReLU, Aux: x.cfg.Aux}); err != nil {
		return err
	}
	ref := x.multiply(c.Tensor, x.a.Tensor, x.b.Tensor, []float64{1}, []float64{1})
	y := *x
	y.settings = tensor.MatMulSettings{}
	x.positive, x.uncertain = ref.sum, ref.bound(&y)
	return nil
}

func (r *reference) scale(f float64) {
	for i := range r.sum {
		r.sum[i] *= f
		r.size[i] *= math.Abs(f)
	}
}

// addRows adds a bias: n elements, or n for each product of the batch.
func (r *reference) addRows(v []float64) {
	for i := range r.sum {
		x := v[(i/(r.m*r.n)*r.n)%len(v)+i%r.n]
		r.sum[i] += x
		r.size[i] += math.Abs(x)
	}
}

// bound returns the largest error of each element before it is rounded to the type of c.
func (r *reference) bound(x *trial) []float64 {
	unit := 0x1p-23 // of one addition; tensor cores truncate
	inputs := 0.0
	switch {
	case x.types[0] == f64:
		unit = 0x1p-52
	case x.types[0] == f32 && x.settings.Float32Precision != tensor.Highest:
		inputs = 0x1p-9
	case x.settings.AllowFP16Accumulation:
		unit = 0x1p-10
	case x.float8 && x.cuda:
		unit = 0x1p-13
	}
	half := x.types[0] == f16 && x.settings.FP16Reduction == tensor.ReducedPrecision || x.types[0] == bf16 && x.settings.BF16Reduction == tensor.ReducedPrecision
	if half && !x.settings.Deterministic && (x.cuda || r.k >= 512) {
		inputs += 8 * numerics[x.types[2]].unit // parts may be rounded
	}
	bound := make([]float64, len(r.sum))
	for i, size := range r.size {
		bound[i] = (float64(r.k+8)*unit + inputs) * size
		if r.early != nil {
			bound[i] += r.rounded * math.Abs(r.early[i])
		}
	}
	return bound
}

// epilogue applies the epilogue to the reference, widens the bounds, and checks the other
// outputs of the epilogue.
func (x *trial) epilogue(r *reference, bound []float64) []float64 {
	want := append([]float64{}, r.sum...)
	rough := 1e-6
	if x.cuda {
		rough = 2e-3
	}
	switch x.cfg.Epilogue {
	case tensor.ReLU:
		for i := range want {
			want[i] = max(0, want[i])
		}
	case tensor.GELU:
		if x.cfg.Aux.Len() > 0 {
			checkClose(x.t, x.cfg.Aux.DType(), r.sum, x.values(x.cfg.Aux), bound, "%s: Aux", x.text)
		}
		for i, v := range want {
			want[i] = gelu(v)
			bound[i] = 1.13*bound[i] + rough*(math.Abs(v)+1)
		}
	case tensor.ReLUGrad:
		for i := range want {
			switch p := x.positive[i]; {
			case math.Abs(p) <= x.uncertain[i]:
				bound[i] += math.Abs(want[i]) // either value is right
			case p < 0:
				want[i], bound[i] = 0, 0
			}
		}
	case tensor.GELUGrad:
		for i, v := range x.values(x.cfg.Aux) {
			bound[i] = 1.13*bound[i] + rough*(math.Abs(want[i])+1)
			want[i] *= geluSlope(v)
		}
	}
	if x.cfg.BiasGrad.Len() > 0 {
		x.requireBiasGrad(r, want, bound)
	}
	return want
}

// requireBiasGrad checks the sums of columns, or of an input.
func (x *trial) requireBiasGrad(r *reference, want, bound []float64) {
	n := r.n
	if x.cfg.Epilogue == tensor.SumA {
		n = r.m
	}
	sums, limits := make([]float64, r.batch*n), make([]float64, r.batch*n)
	unit := 0.0
	if x.cuda { // some kernels add the rounded elements of c
		unit = numerics[x.types[2]].unit
	}
	add := func(i int, v, limit float64) {
		sums[i] += v
		limits[i] += limit + math.Abs(v)*float64(r.m+r.k+8)*0x1p-23
	}
	va, vb, sa, sb := x.values(x.a.Tensor), x.values(x.b.Tensor), x.a.Shape(), x.b.Shape()
	for z := range r.batch {
		for i := range r.m {
			for p := range r.k {
				if x.cfg.Epilogue == tensor.SumA {
					add(z*n+i, at(va, sa, z, i, p), 0)
				}
			}
		}
		for j := range r.n {
			for p := range r.k {
				if x.cfg.Epilogue == tensor.SumB {
					add(z*n+j, at(vb, sb, z, p, j), 0)
				}
			}
			for i := range r.m {
				if o := (z*r.m+i)*r.n + j; x.cfg.Epilogue == tensor.ReLUGrad || x.cfg.Epilogue == tensor.GELUGrad {
					add(z*n+j, want[o], bound[o]+unit*math.Abs(want[o]))
				}
			}
		}
	}
	checkClose(x.t, x.cfg.BiasGrad.DType(), sums, x.values(x.cfg.BiasGrad), limits, "%s: BiasGrad", x.text)
}

func (x *trial) requireAMax(want, bound []float64) {
	low, high := 0.0, 0.0
	if x.cfg.Bias.Len() > 0 {
		for _, b := range x.values(x.cfg.Bias) { // see AMax
			high = max(high, math.Abs(b))
		}
	}
	for i, w := range want {
		low, high = max(low, math.Abs(w)-bound[i]), max(high, math.Abs(w)+bound[i])
	}
	got := x.values(x.cfg.AMax)[0]
	require.True(x.t, got >= low*(1-1e-6) && got <= high*(1+1e-6), "%s: AMax is %v: want %v to %v, the largest of %v", x.text, got, low, high, want[:min(len(want), 100)])
}
