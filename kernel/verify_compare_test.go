package kernel

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/memory"
)

func TestULP(t *testing.T) {
	for _, x := range []float64{0, 1, 1.5, 0.999, -2, 1e30, 3e-40, 1e-45} {
		f := float32(math.Abs(x))
		require.Equal(t, float64(math.Nextafter32(f, math.MaxFloat32))-float64(f), ulp(memory.Float32, float64(f)), x)
		require.Equal(t, math.Nextafter(math.Abs(x), math.MaxFloat64)-math.Abs(x), ulp(memory.Float64, x), x)
	}
	for bits := range uint16(0x7b00) { // the next number has the next bits
		h := memory.Float16Bits(bits)
		require.Equal(t, float64((h+1).Float32())-float64(h.Float32()), ulp(memory.Float16, float64(h.Float32())), "%#x", bits)
		b := memory.BFloat16Bits(bits)
		require.Equal(t, float64((b+1).Float32())-float64(b.Float32()), ulp(memory.BFloat16, float64(b.Float32())), "%#x", bits)
	}
	for bits := range uint8(0x7a) {
		e := memory.Float8E4M3Bits(bits)
		require.Equal(t, float64((e+1).Float32())-float64(e.Float32()), ulp(memory.Float8E4M3, float64(e.Float32())), "%#x", bits)
		f := memory.Float8E5M2Bits(bits)
		require.Equal(t, float64((f+1).Float32())-float64(f.Float32()), ulp(memory.Float8E5M2, float64(f.Float32())), "%#x", bits)
	}
	require.Equal(t, 1.0, ulp(memory.Int32, 1e9))
}

func TestCompareElements(t *testing.T) {
	inf, nan, negative := float32(math.Inf(1)), float32(math.NaN()), float32(math.Copysign(0, -1))
	next := math.Nextafter32(3, 4)
	for i, c := range []struct {
		cuda, goes float32
		tolerance  *Tolerance
		differs    bool
	}{
		{1, 1, nil, false}, {3, next, nil, true}, {nan, -nan, nil, false}, {inf, inf, nil, false}, {0, negative, nil, true},
		{3, next, &Tolerance{ULP: 1}, false}, {3, math.Nextafter32(next, 4), &Tolerance{ULP: 1}, true},
		{0, negative, &Tolerance{}, false}, {3, next, &Tolerance{}, true},
		{10, 11, &Tolerance{Rel: 0.1}, false}, {11, 10, &Tolerance{Rel: 0.0909}, true}, {10, 11.5, &Tolerance{Rel: 0.1, Abs: 0.5}, false},
		{1, nan, &Tolerance{Abs: 1e9}, true}, {nan, 1, &Tolerance{Rel: 9}, true}, {inf, 1, &Tolerance{Rel: 9}, true}, {1, inf, &Tolerance{Rel: 9, ULP: 5}, true},
		{inf, -inf, &Tolerance{Abs: math.Inf(1)}, true},
	} {
		side := func(x float32) *testArg {
			b := binary.LittleEndian.AppendUint32(nil, math.Float32bits(x))
			return &memoryOf([]testArg{{param: Pointer, elem: memory.Float32, value: b, memory: []byte{}}}, 0)[0]
		}
		tolerances := map[memory.DType]Tolerance{memory.Float64: {Abs: math.Inf(1)}}
		if c.tolerance != nil {
			tolerances[memory.Float32] = *c.tolerance
		}
		var d Difference
		require.Equal(t, c.differs, d.compareElements(side(c.cuda), side(c.goes), tolerances), "case %d: %+v", i, c)
	}
}

// Integers that are one float64 differ.
func TestCompareIntegers(t *testing.T) {
	for _, of := range []memory.DType{memory.Int64, memory.Uint64} {
		side := func(x int64) *testArg {
			b := make([]byte, 8)
			dtype.Of(of).Store(b, 0, dtype.IntValue(x))
			return &memoryOf([]testArg{{param: Pointer, elem: of, value: b, memory: []byte{}}}, 0)[0]
		}
		var d Difference
		require.True(t, d.compareElements(side(-2), side(-1), nil))
		require.Equal(t, 1.0, d.Error)
		want := [2]string{"-2", "-1"}
		if of == memory.Uint64 {
			want = [2]string{"18446744073709551614", "18446744073709551615"}
		}
		require.Equal(t, want, [2]string{d.CUDA, d.Go})
		require.False(t, d.compareElements(side(-2), side(-1), map[memory.DType]Tolerance{of: {Abs: 1}}))
	}
}
