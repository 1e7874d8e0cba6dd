package rng_test

import (
	"encoding/hex"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

func newStream(t testing.TB, d *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// fetch allocates n elements, poisons them, lets fill write them, and returns them.
func fetch[T memory.Element](t testing.TB, s *stream.Stream, n int, fill func(memory.Slice[T]) error) []T {
	t.Helper()
	out := make([]T, n)
	poison(bytesOf(out))
	x, err := memory.MakeFrom(s, out)
	require.NoError(t, err)
	require.NoError(t, fill(x))
	require.NoError(t, x.CopyTo(s, out))
	require.NoError(t, x.Close())
	return out
}

// poison fills b with 1: a bool must be 0 or 1.
func poison(b []byte) {
	for n := copy(b, []byte{1}); n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

func bytesOf[T memory.Element](x []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(z)))
}

func state(g *rng.Generator) string {
	s := g.State()
	return hex.EncodeToString(s[:])
}

// float returns an element's value.
func float[T memory.Element](v T) float64 {
	switch v := any(v).(type) {
	case bool:
		if v {
			return 1
		}
		return 0
	case int8:
		return float64(v)
	case uint8:
		return float64(v)
	case int16:
		return float64(v)
	case uint16:
		return float64(v)
	case int32:
		return float64(v)
	case int64:
		return float64(v)
	case float32:
		return float64(v)
	case float64:
		return v
	case memory.Float16Bits:
		return rng.FromHalf(v)
	case memory.BFloat16Bits:
		return rng.FromBFloat(v)
	}
	panic("no number")
}
