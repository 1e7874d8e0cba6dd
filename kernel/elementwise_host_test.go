package kernel

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// One operation in floats: what is computed in float64 and then rounded is what
// float has.
const hostCode = `template <typename T> void pick(T x, T y, T& least, T& scaled, T by) {
	least = x < y ? x : y;
	scaled = x * by;
}`

type hostTrial struct {
	v      *variant
	common memory.DType
	n      int
	in     [2][]byte
	number numeral // instead of the second input, unless its type is invalid
	by     numeral
	out    [2][]byte
}

// The kernels that are generated, compiled as C++, and the Go function give the
// same bytes.
func TestElementwiseSourceAgreesWithGo(t *testing.T) {
	t.Parallel()
	e, err := NewElementwise(hostCode, &ElementwiseConfig{
		Defaults: []Operand{Set("by", 1)},
		Floats:   func(in, out []float64) { out[0], out[1] = min(in[0], in[1]), in[0]*in[2] },
		Ints: func(in, out []int64) {
			out[0], out[1] = min(in[0], in[1]), in[0]*in[2]
		},
	})
	require.NoError(t, err)
	defer e.Close()
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	defer s.Close()

	const (
		f2, bf, f4, f8 = memory.Float16, memory.BFloat16, memory.Float32, memory.Float64
		bl, i1, u1, i2 = memory.Bool, memory.Int8, memory.Uint8, memory.Int16
		i4, i8, u4     = memory.Int32, memory.Int64, memory.Uint32
	)
	half, two := numberOf(0.5), numberOf(2)
	none := numeral{}
	var trials []*hostTrial
	for _, c := range []struct {
		in, out    [2]memory.DType
		n          int
		number, by numeral
	}{
		{[2]memory.DType{f4, f4}, [2]memory.DType{f4, f4}, 2100, none, half},
		{[2]memory.DType{f2, f2}, [2]memory.DType{f2, f4}, 1500, none, numberOf(0.3)},
		{[2]memory.DType{bf, i4}, [2]memory.DType{bf, f2}, 700, none, two},
		{[2]memory.DType{f2, bf}, [2]memory.DType{f8, bf}, 700, none, half},
		{[2]memory.DType{f8, f2}, [2]memory.DType{f2, f4}, 700, none, numberOf(1.7)},
		{[2]memory.DType{i8, f2}, [2]memory.DType{f2, f2}, 700, none, half},
		{[2]memory.DType{i1, u1}, [2]memory.DType{i2, i8}, 3000, none, two},
		{[2]memory.DType{bl, i4}, [2]memory.DType{i4, f8}, 1100, none, numberOf(-3)},
		{[2]memory.DType{u4, u4}, [2]memory.DType{i8, f4}, 900, none, two},
		{[2]memory.DType{i2, i2}, [2]memory.DType{f4, f2}, 900, half, two},
		{[2]memory.DType{i1, i1}, [2]memory.DType{i1, i2}, 1100, numberOf(300), numberOf(2.75)},
		{[2]memory.DType{bl, bl}, [2]memory.DType{bl, i1}, 1100, numberOf(true), numberOf(true)},
		{[2]memory.DType{f2, f2}, [2]memory.DType{f2, f2}, 300, numberOf(0.1), numberOf(0.1)},
	} {
		trials = append(trials, hostTrialOf(t, s, e, c.in, c.out, c.n, c.number, c.by))
	}
	runHost(t, e, trials)
}

// hostTrialOf runs a launch on the virtual device.
func hostTrialOf(t *testing.T, s *stream.Stream, e *Elementwise, in, out [2]memory.DType, n int, num, by numeral) *hostTrial {
	t.Helper()
	random := rand.New(rand.NewPCG(3, uint64(n)))
	tr := &hostTrial{n: n, number: num, by: by}
	var ops []Operand
	upload := func(d memory.DType, b []byte, r role) memory.Slice[uint8] {
		x, err := memory.MakeFrom(s, b)
		require.NoError(t, err)
		t.Cleanup(func() { _ = x.Close() })
		ops = append(ops, Operand{role: r, dtype: d, raw: x.Ptr(), n: n, dev: s.Device()})
		return x
	}
	for i, d := range in {
		b := make([]byte, n*d.Size())
		for k := range n {
			switch {
			case dtype.Of(d).IsFloat():
				dtype.Of(d).Store(b, k, dtype.FloatValue(random.NormFloat64()*10))
			case d == memory.Bool:
				b[k] = byte(random.IntN(2))
			default:
				dtype.Of(d).Store(b, k, dtype.IntValue(random.Int64()>>random.IntN(60)))
			}
		}
		tr.in[i] = b
		if i == 1 && num.dtype != memory.Invalid {
			ops = append(ops, Operand{role: number, dtype: num.dtype, bits: num.bits})
			continue
		}
		upload(d, b, input)
	}
	var outs []memory.Slice[uint8]
	for _, d := range out {
		outs = append(outs, upload(d, make([]byte, n*d.Size()), output))
	}
	ops = append(ops, Operand{role: scalar, name: "by", dtype: by.dtype, bits: by.bits})
	require.NoError(t, e.Launch(s, ops...))
	for i, x := range outs {
		tr.out[i] = make([]byte, x.Len())
		require.NoError(t, x.CopyTo(s, tr.out[i]))
	}
	l := job{v: variant{dev: s.Device()}}
	require.NoError(t, e.prepare(&l, ops))
	tr.v, tr.common = &l.v, l.common
	return tr
}

// runHost compiles the kernels of all trials into one program and compares.
func runHost(t *testing.T, e *Elementwise, trials []*hostTrial) {
	t.Helper()
	var code strings.Builder
	var names []string
	for i, tr := range trials {
		source := strings.NewReplacer(`extern "C" `, "", "::pick<", "pick<").Replace(e.source(tr.v, tr.common))
		fmt.Fprintf(&code, "namespace v%d {\n%s\n}\n", i, source)
		names = append(names, fmt.Sprintf("v%d::%s", i, elementwiseKernel))
	}
	h := testgpu.CompileForHost(t, code.String(), nil, names...)
	for i, tr := range trials {
		args, outputs := []any{uint64(tr.n), uint32(0)}, [][]byte(nil)
		for j := range e.arity() {
			switch a := tr.v.args[j]; a.role {
			case input:
				args = append(args, tr.in[j])
			case output:
				outputs = append(outputs, make([]byte, tr.n*a.dtype.Size()))
				args = append(args, outputs[len(outputs)-1])
			case number:
				args = append(args, tr.number.bits)
			case scalar:
				args = append(args, tr.by.bits)
			}
		}
		h.Run(names[i], tr.n/elementwiseBlock+1, elementwiseBlock, args...)
		for k, want := range tr.out {
			require.True(t, bytes.Equal(want, outputs[k]), "trial %d, output %d:\n% x\n% x", i, k, want[:64], outputs[k][:64])
		}
	}
}

// What a launch does before the kernel's own allocates nothing.
func TestElementwisePrepareAllocatesNothing(t *testing.T) {
	e, err := NewElementwise(hostCode, &ElementwiseConfig{Defaults: []Operand{Set("by", 1)}})
	require.NoError(t, err)
	defer e.Close()
	e.kernels[variant{}] = &Kernel{}
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	defer s.Close()
	x, err := memory.Make[float32](s, 100)
	require.NoError(t, err)
	defer x.Close()
	y, err := memory.Make[float64](s, 100)
	require.NoError(t, err)
	defer y.Close()
	prepare := func(operands ...Operand) {
		l := job{v: variant{dev: devs[0]}}
		if err := e.prepare(&l, operands); err != nil || l.n != 100 {
			t.Fatal(l.n, err)
		}
		l.v = variant{}
		if k, err := e.kernel(&l.v, l.common); k == nil || err != nil {
			t.Fatal(err)
		}
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { prepare(Out(x), Out(y), In(x), Number(2), Set("by", 0.5)) }))
}
