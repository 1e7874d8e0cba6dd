package amp_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/tensor"
)

func TestPolicy(t *testing.T) {
	half, brain, single, double, whole := memory.Float16, memory.BFloat16, memory.Float32, memory.Float64, memory.Int32
	for _, c := range []struct {
		lower  memory.DType
		op     string
		inputs []memory.DType
		want   memory.DType
	}{
		{half, "linear", []memory.DType{single, half}, half},
		{brain, "mm", []memory.DType{single, single}, brain},
		{brain, "softmax", []memory.DType{brain}, single},
		{half, "cat", []memory.DType{half, single}, single},
		{half, "cat", []memory.DType{half, half}, half},
		{half, "cat", []memory.DType{half, brain}, single},
		{half, "relu", []memory.DType{single}, memory.Invalid},
		{half, "mm", []memory.DType{double, double}, memory.Invalid},
		{half, "sum", []memory.DType{whole}, memory.Invalid},
		{memory.Invalid, "mm", []memory.DType{single}, half},
	} {
		got, err := amp.Autocast{Lower: c.lower}.Type(c.op, c.inputs...)
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%s of %v", c.op, c.inputs)
	}
	_, err := amp.Autocast{}.Type("binary_cross_entropy", half)
	require.ErrorContains(t, err, "use binary_cross_entropy_with_logits")
	_, err = amp.Autocast{Lower: single}.Type("mm", half)
	require.ErrorContains(t, err, "want float16 or bfloat16")
}

// Every operation is in one class.
func TestClasses(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range []string{"lower", "float32", "widest", "refused"} {
		names := amp.Operations(c)
		require.NotEmpty(t, names)
		for _, n := range names {
			require.False(t, seen[n], n)
			seen[n] = true
			require.Equal(t, c, amp.ClassOf(n))
		}
	}
	require.Empty(t, amp.ClassOf("relu"))
}

// Inputs of the right type are borrowed or shared, and others are rounded copies.
func TestCast(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0], 3)
		require.NoError(t, b.value.CopyFrom(b.s, []float32{1, 2.001, -3}))
		x, err := tensor.Of(b.value, 3)
		require.NoError(t, err)
		h, err := tensor.Make(b.s, memory.BFloat16, 3)
		require.NoError(t, err)
		defer h.Close()
		out, err := amp.Autocast{Lower: memory.BFloat16}.Cast(b.s, "mm", x, h)
		require.NoError(t, err)
		require.Equal(t, memory.BFloat16, out[0].DType())
		require.Equal(t, h.Ptr(), out[1].Ptr())
		back, err := tensor.Make(b.s, memory.Float32, 3)
		require.NoError(t, err)
		defer back.Close()
		require.NoError(t, tensor.Copy(b.s, back, out[0]))
		v, err := tensor.Slice[float32](back)
		require.NoError(t, err)
		require.Equal(t, []float32{1, 2, -3}, b.read(t, v))
		for _, y := range out {
			require.NoError(t, y.Close())
		}
	})
}

// An infinity on one rank makes all ranks skip the step, for each type of gradients.
func TestAgreeOnEachType(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		one, inf := float32(1), float32(math.Inf(1))
		for _, unscale := range []bool{false, true} {
			agreeOn(t, devs, unscale, one, inf)
			agreeOn(t, devs, unscale, memory.BFloat16Of(one), memory.BFloat16Of(inf))
		}
		agreeOn(t, devs, false, memory.Float16Of(one), memory.Float16Of(inf))
	})
}

func agreeOn[T memory.Element](t *testing.T, devs []*device.Device, unscale bool, one, inf T) {
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer g.Close()
	scs, opts, values := make([]*amp.Scaler, 2), make([]*optim.Optimizer, 2), make([]memory.Slice[T], 2)
	for i, grad := range []T{one, inf} {
		s := g.Stream(i)
		values[i], err = memory.MakeFrom(s, []T{one})
		require.NoError(t, err)
		defer values[i].Close()
		grads, err := memory.MakeFrom(s, []T{grad})
		require.NoError(t, err)
		defer grads.Close()
		opts[i], err = optim.NewSGD(s, []optim.Group{{Params: []optim.Param{optim.Of(values[i], grads)}}}, nil)
		require.NoError(t, err)
		defer opts[i].Close()
		scs[i], err = amp.NewScaler(s, &amp.ScalerConfig{InitScale: 2})
		require.NoError(t, err)
		defer scs[i].Close()
	}
	require.ErrorContains(t, amp.Agree(g, scs...), "call Unscale or Check before")
	for i, sc := range scs {
		if unscale {
			require.NoError(t, sc.Unscale(g.Stream(i), opts[i]))
		} else {
			require.NoError(t, sc.Check(g.Stream(i), opts[i]))
			require.ErrorContains(t, sc.Check(g.Stream(i), opts[i]), "were checked")
		}
	}
	require.NoError(t, amp.Agree(g, scs...))
	for i, sc := range scs {
		require.NoError(t, sc.Step(g.Stream(i), opts[i], nil))
		require.NoError(t, sc.Update(g.Stream(i)))
		got := []T{inf}
		require.NoError(t, values[i].CopyTo(g.Stream(i), got))
		require.Equal(t, []T{one}, got)
		state, err := sc.State(g.Stream(i))
		require.NoError(t, err)
		require.EqualValues(t, 1, state.Scale)
	}
}

// Agree has nothing of an optimiser that was not checked before it.
func TestStepOfWhatWasNotAgreed(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer g.Close()
	a, b := benchOn(t, g.Stream(0), 1), benchOn(t, g.Stream(0), 1)
	sc := a.scaler(t, nil)
	require.NoError(t, sc.Check(a.s, a.opt))
	require.NoError(t, amp.Agree(g, sc))
	require.ErrorContains(t, sc.Step(b.s, b.opt, nil), "not checked before Agree")
	require.NoError(t, sc.Step(a.s, a.opt, nil))
	require.NoError(t, sc.Update(a.s))
	require.NoError(t, sc.Step(b.s, b.opt, nil))
}
