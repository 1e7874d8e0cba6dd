package nccl

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var nanTypes = []memory.DType{memory.Float16, memory.BFloat16, memory.Float32, memory.Float64, memory.Float8E4M3, memory.Float8E5M2}

// uploadBytes copies values to new memory on a device.
func uploadBytes(t *testing.T, s *stream.Stream, b []byte) memory.Slice[byte] {
	t.Helper()
	x, err := memory.MakeFrom(s, b)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// numbers returns n numbers, among them the largest ones and infinities of both signs.
func numbers(d memory.DType, n int) []byte {
	b := make([]byte, n*d.Size())
	for i := range n {
		v := []float64{0, 1, -2.5, math.Inf(1), math.Inf(-1)}[i%5]
		if d == memory.Float8E4M3 && math.IsInf(v, 0) {
			v = math.Copysign(448, v)
		}
		dtype.Of(d).Store(b, i, dtype.FloatValue(v))
	}
	return b
}

// The first NaN of each type is found at every place, and numbers and infinities are not NaN.
func TestFirstNaN(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := streamtest.NewStream(t, devs[0])
		for _, d := range nanTypes {
			require.True(t, canBeNaN(d))
			for _, n := range []int{1, 255, 256, 257, 100_003, 700_001} {
				for _, at := range []int{-1, 0, n / 2, n - 1} {
					c, err := newNaNChecker(devs[0])
					require.NoError(t, err)
					b := numbers(d, n)
					if at >= 0 {
						dtype.Of(d).Store(b, at, dtype.FloatValue(math.NaN()))
						dtype.Of(d).Store(b, n-1, dtype.FloatValue(math.NaN()))
					}
					x := uploadBytes(t, s, b)
					require.NoError(t, c.Check(s, x.Ptr(), n, d, 1<<40+7))
					require.NoError(t, s.Sync(testgpu.Context(t)))
					operation, index, found := c.Found()
					require.Equal(t, at >= 0, found, "%s %d at %d", d, n, at)
					if found {
						require.EqualValues(t, 1<<40+7, operation)
						require.Equal(t, at, index, "%s %d", d, n)
					}
					require.NoError(t, c.Close())
				}
			}
		}
		for _, d := range []memory.DType{memory.Bool, memory.Int8, memory.Uint16, memory.Int64, memory.Uint64} {
			require.False(t, canBeNaN(d))
		}
	})
}

// The first operation with a NaN is reported, and later ones do not change it.
func TestFirstOperation(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := streamtest.NewStream(t, devs[0])
		c, err := newNaNChecker(devs[0])
		require.NoError(t, err)
		bad := numbers(memory.Float32, 1000)
		dtype.Of(memory.Float32).Store(bad, 998, dtype.FloatValue(math.NaN()))
		good, wrong := uploadBytes(t, s, numbers(memory.Float32, 1000)), uploadBytes(t, s, bad)
		for operation := uint64(1); operation <= 200; operation++ {
			x := good
			if operation >= 77 {
				x = wrong
			}
			require.NoError(t, c.Check(s, x.Ptr(), 1000, memory.Float32, operation))
		}
		require.NoError(t, c.Check(s, 0, 0, memory.Float32, 300), "without elements")
		require.NoError(t, s.Sync(testgpu.Context(t)))
		operation, index, found := c.Found()
		require.True(t, found)
		require.EqualValues(t, 77, operation)
		require.Equal(t, 998, index)
		require.NoError(t, c.Close())
	})
}

// The kernels, compiled as C++, find the same elements as their Go functions.
func TestNaNKernelsAgreeWithGo(t *testing.T) {
	h := testgpu.CompileForHost(t, nanSource, nil, "look1", "look2", "look4", "look8")
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, infinity := range infinities {
		for range 20 * min(int(infinity), 1) {
			size, n, operation := map[uint64]int{0x7e: 1, 0x7c: 1, 0x7c00: 2, 0x7f80: 2, 0x7f800000: 4}[infinity], r.IntN(300), r.Uint64()
			if size == 0 {
				size = 8
			}
			b := make([]byte, n*size)
			for i := range b {
				b[i] = byte(r.Uint32()) & byte(0x3f|r.Uint32N(4)<<6)
			}
			want := []uint64{0, 0}
			if at := firstNaNOf(b, size, infinity); at >= 0 {
				want = []uint64{operation, uint64(at)}
			}
			claimed, slot, found := []uint64{0}, []uint64{0, 0}, []uint64{0, 0}
			for turn := range uint64(2) { // with the same slot, and the first one is reported
				h.Run(fmt.Sprint("look", size), 1+r.IntN(4), 32, b, uint64(n), infinity, operation+turn, claimed, slot, found)
			}
			require.Equal(t, want, found)
			require.Equal(t, []uint64{0, 0}, slot)
		}
	}
}

// firstNaNOf is firstNaN of bytes.
func firstNaNOf(b []byte, size int, infinity uint64) int {
	switch size {
	case 1:
		return firstNaN(b, infinity)
	case 2:
		return firstNaN(wordsOf[uint16](b), infinity)
	case 4:
		return firstNaN(wordsOf[uint32](b), infinity)
	}
	return firstNaN(wordsOf[uint64](b), infinity)
}

func wordsOf[W nanWord](b []byte) []W {
	x := make([]W, len(b)/binary.Size(W(0)))
	if err := binary.Read(bytes.NewReader(b), binary.LittleEndian, x); err != nil {
		panic(err)
	}
	return x
}
