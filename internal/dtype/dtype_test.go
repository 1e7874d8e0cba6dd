package dtype

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// FMA rounds once, as a sum of unlimited precision does.
func TestFMA(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	exact := func(x float32) *big.Float { return new(big.Float).SetPrec(400).SetFloat64(float64(x)) }
	for range 20_000 {
		a := math.Float32frombits(random.Uint32()&0x807fffff | (100+random.Uint32N(50))<<23)
		b := math.Float32frombits(random.Uint32()&0x807fffff | (100+random.Uint32N(50))<<23)
		c := math.Float32frombits(random.Uint32()&0x80000fff | (90+random.Uint32N(80))<<23)
		sum := new(big.Float).SetPrec(400).Mul(exact(a), exact(b))
		want, _ := sum.Add(sum, exact(c)).Float32()
		require.Equal(t, want, FMA(a, b, c), "%v * %v + %v", a, b, c)
	}
}

// Each row agrees with the format, with the Go type and with the other rows.
func TestTable(t *testing.T) {
	names := map[string]map[string]bool{}
	once := func(column, name string) {
		if names[column] == nil {
			names[column] = map[string]bool{}
		}
		require.False(t, name != "" && names[column][name], "two types have the %s %q", column, name)
		names[column][name] = true
	}
	for n, row := range All() {
		require.Same(t, row, Of(n))
		for column, name := range map[string]string{"name": row.Name, "scalar type": row.Scalar, "storage": row.Storage,
			"name in safetensors": row.Safetensors, "name in nccl-tests": row.NCCLTests, "name in C": row.C, "short name": row.Short} {
			once(column, name)
		}
		if row.CUDA >= 0 {
			require.Same(t, row, ByCUDA(row.CUDA))
		}
		bits := 8 * row.Size
		switch row.Kind {
		case Boolean:
			require.Equal(t, 1, row.Digits)
		case Signed:
			require.Equal(t, bits-1, row.Digits)
		case Unsigned:
			require.Equal(t, bits, row.Digits)
		default:
			checkFloat(t, row)
		}
		b := make([]byte, 3*row.Size+8)
		row.Store(b, 1, IntValue(1))
		require.Equal(t, 1.0, row.Load(b, 1).Float64(), row.Name)
		row.Store(b, 1, IntValue(0))
		require.Equal(t, make([]byte, len(b)), b, "%s: only the element is written", row.Name)
	}
	require.Equal(t, &table[Invalid], Of(Count))
	require.Nil(t, ByCUDA[int32](-1))
	require.Nil(t, ByCUDA[int32](1<<20))
}

func checkFloat(t *testing.T, row *Type) {
	t.Helper()
	at := func(bits uint64) float64 {
		b := make([]byte, 8)
		*(*uint64)(unsafe.Pointer(&b[0])) = bits
		return row.Load(b, 0).Float64()
	}
	one := uint64(1-row.MinExp) << (row.Digits - 1) // the bias is 1-MinExp
	require.Equal(t, 1.0, at(one), row.Name)
	require.Equal(t, 1+math.Ldexp(1, 1-row.Digits), at(one+1), row.Name)
	require.Equal(t, math.Ldexp(1, row.MinExp), at(1<<(row.Digits-1)), row.Name)
	require.True(t, math.IsNaN(at(row.Infinity+1)), row.Name)
	if last := at(row.Infinity); !math.IsInf(last, 1) {
		require.Equal(t, row.Max, last, row.Name)
	} else {
		require.Equal(t, row.Max, at(row.Infinity-1), row.Name)
	}
	require.Equal(t, row.MaxExp, math.Ilogb(row.Max), row.Name)
	require.Equal(t, row.Max, row.Round(FloatValue(row.Max)), row.Name)
	if f := row.Format; f != nil {
		require.Equal(t, row.Size, f.Bytes())
		require.EqualValues(t, 1<<(8*row.Size-1)-1, f.EncodeDevice(float32(math.Copysign(math.NaN(), -1))), row.Name)
	}
}

// Values convert between all types as C does.
func TestConversions(t *testing.T) {
	b := make([]byte, 8)
	for _, x := range []struct {
		to   int
		v    Value
		want int64
	}{
		{Bool, FloatValue(0.25), 1}, {Bool, FloatValue(0), 0}, {Bool, FloatValue(math.NaN()), 1}, {Bool, IntValue(256), 1},
		{Int8, IntValue(0x1ff), -1}, {Uint8, IntValue(-1), 255}, {Int16, FloatValue(-3.9), -3}, {Uint16, IntValue(-2), 65534},
		{Int32, IntValue(1 << 31), math.MinInt32}, {Uint32, IntValue(-1), math.MaxUint32}, {Int64, FloatValue(1e15), 1e15},
		{Uint64, FloatValue(0x1p63), math.MinInt64}, {Uint64, UintValue(-1), -1}, {Uint64, FloatValue(7.5), 7},
	} {
		Of(x.to).Store(b, 0, x.v)
		require.Equal(t, x.want, Of(x.to).Load(b, 0).Int64(), "%s of %+v", Of(x.to).Name, x.v)
		if x.v.whole {
			require.Equal(t, x.want, Of(x.to).Wrap(x.v.i), "%s of %+v", Of(x.to).Name, x.v)
		}
	}
	Of(Uint64).Store(b, 0, IntValue(-1))
	require.Equal(t, float64(1<<64), Of(Uint64).Load(b, 0).Float64())
	require.Equal(t, 0x1p24, Of(Float32).Round(IntValue(1<<24+1)))
	require.Equal(t, 65504.0, Of(Float16).Round(FloatValue(65519)))
	require.True(t, math.IsInf(Of(Float16).Round(UintValue(-1)), 1))
}

func BenchmarkConvert(b *testing.B) {
	for _, x := range []struct{ to, from int }{{Float32, BFloat16}, {Float16, Float32}, {Int32, Float64}, {Int64, Int8}} {
		to, from := Of(x.to), Of(x.from)
		out, in := make([]byte, 1024*to.Size), make([]byte, 1024*from.Size)
		b.Run(from.Name+" to "+to.Name, func(b *testing.B) {
			b.SetBytes(int64(len(in)))
			for b.Loop() {
				for i := range 1024 {
					to.Store(out, i, from.Load(in, i))
				}
			}
		})
	}
}
