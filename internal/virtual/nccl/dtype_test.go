package nccl

import (
	"testing"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

// TestSmallTypesSaturate adds what is too large for the type: NCCL's 8-bit types
// stay finite.
func TestSmallTypesSaturate(t *testing.T) {
	for dt, x := range map[ncclapi.DType][2]uint16{
		ncclapi.Float16: {0x7bff, 0x7c00}, ncclapi.BFloat16: {0x7f7f, 0x7f80},
		ncclapi.Float8E4M3: {0x7e, 0x7e}, ncclapi.Float8E5M2: {0x7b, 0x7b},
	} {
		largest, sum := []byte{byte(x[0]), byte(x[0] >> 8)}, make([]byte, 2)
		n := dt.Size()
		combinerOf(dt, ncclapi.Sum)(sum[:n], largest[:n], largest[:n])
		require.Equal(t, []byte{byte(x[1]), byte(x[1] >> 8)}, sum, dtypeName(dt))
	}
}

func BenchmarkSumFloat32(b *testing.B) {
	x, y := make([]byte, sliceBytes), make([]byte, sliceBytes)
	f := combinerOf(ncclapi.Float32, ncclapi.Sum)
	b.SetBytes(sliceBytes)
	for b.Loop() {
		f(x, x, y)
	}
}

func BenchmarkSumFloat16(b *testing.B) {
	x, y := make([]byte, sliceBytes), make([]byte, sliceBytes)
	f := combinerOf(ncclapi.Float16, ncclapi.Sum)
	b.SetBytes(sliceBytes)
	for b.Loop() {
		f(x, x, y)
	}
}
