package memory_test

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
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

// random returns numbers from 0 to 1, the same ones for each n. Nobody else has the slice
// yet, so the race detector need not look at it.
//
//go:norace
func random(n int) []float32 {
	x := make([]float32, n)
	state := uint64(n)
	for i := range x { // SplitMix64
		state += 0x9e3779b97f4a7c15
		z := (state ^ state>>30) * 0xbf58476d1ce4e5b9
		z = (z ^ z>>27) * 0x94d049bb133111eb
		x[i] = float32(z>>40) / (1 << 24)
	}
	return x
}

// same is require.Equal for long slices, which that goes over by reflection.
func same[T comparable](t testing.TB, want, got []T, args ...any) {
	t.Helper()
	if !testgpu.SameBits(want, got) {
		require.Equal(t, want, got, args...)
	}
}

func TestRoundTrip(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		for _, n := range []int{0, 1, 3, 1023, 1 << 20} {
			in, out := random(n), make([]float32, n)
			x, err := memory.MakeFrom(s, in)
			require.NoError(t, err)
			require.Equal(t, n, x.Len())
			require.Equal(t, 4*n, x.Bytes())
			require.NoError(t, x.CopyTo(s, out))
			same(t, in, out)
			require.NoError(t, x.Close())
			require.NoError(t, x.Close(), "Close is idempotent")
		}
	})
}

// CopyFrom lets the source be reused at once, ordinary or pinned.
func TestCopyFromReturnsWhenSourceMayBeReused(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		const n = 1 << 18
		h, err := memory.MakePinned[float32](devs[0], n)
		require.NoError(t, err)
		defer h.Close()
		for _, src := range [][]float32{make([]float32, n), h.Data()} {
			want, got := random(n), make([]float32, n)
			copy(src, want)
			x, err := memory.Make[float32](s, n)
			require.NoError(t, err)
			require.NoError(t, x.CopyFrom(s, src))
			clear(src)
			require.NoError(t, x.CopyTo(s, got))
			require.Equal(t, want, got)
			require.NoError(t, x.Close())
		}
	})
}

func TestPinned(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		const n = 1 << 16
		src, err := memory.MakePinned[int64](devs[0], n)
		require.NoError(t, err)
		dst, err := memory.MakePinned[int64](devs[0], n)
		require.NoError(t, err)
		for i := range src.Data() {
			src.Data()[i] = int64(i) * math.MaxInt32
			dst.Data()[i] = -1
		}
		x, err := memory.Make[int64](s, n)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, x.CopyFromPinned(s, src))
		require.NoError(t, x.CopyToPinned(s, dst))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.Equal(t, src.Data(), dst.Data())
		require.NoError(t, src.Close())
		require.NoError(t, dst.Close())
		require.NoError(t, dst.Close())
		require.Nil(t, dst.Data())
		require.ErrorIs(t, x.CopyFromPinned(s, src), device.ErrClosed)
		require.NoError(t, (*memory.Pinned[int8])(nil).Close())
	})
}

func TestCopyOnOneDevice(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		in, out := random(1000), make([]float32, 1000)
		x, err := memory.MakeFrom(s, in)
		require.NoError(t, err)
		defer x.Close()
		y, err := memory.Make[float32](s, 1000)
		require.NoError(t, err)
		defer y.Close()
		require.NoError(t, y.Zero(s))
		require.NoError(t, memory.Copy(s, y.Slice(10, 500), x.Slice(20, 510)))
		require.NoError(t, y.CopyTo(s, out))
		want := make([]float32, 1000)
		copy(want[10:500], in[20:510])
		same(t, want, out)
	})
}

func TestCopyAcrossDevices(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		a, b := newStream(t, devs[0]), newStream(t, devs[1])
		for _, n := range []int{1, 4097, 1 << 21} {
			in, out := random(n), make([]float32, n)
			x, err := memory.MakeFrom(a, in)
			require.NoError(t, err)
			y, err := memory.Make[float32](b, n)
			require.NoError(t, err)
			require.NoError(t, y.Zero(b))
			require.NoError(t, a.WaitStream(b))
			require.NoError(t, y.RecordStream(a))
			require.NoError(t, memory.Copy(a, y, x))
			require.NoError(t, b.WaitStream(a))
			require.NoError(t, y.CopyTo(b, out))
			same(t, in, out)
			require.NoError(t, x.Close())
			require.NoError(t, y.Close())
		}
	})
}

func TestWrongArguments(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		a, b := newStream(t, devs[0]), newStream(t, devs[1])
		x, err := memory.Make[float32](a, 8)
		require.NoError(t, err)
		y, err := memory.Make[float32](b, 8)
		require.NoError(t, err)
		defer y.Close()
		_, err = memory.Make[float32](a, -1)
		require.ErrorContains(t, err, "out of range")
		_, err = memory.Make[float64](a, math.MaxInt/4)
		require.ErrorContains(t, err, "out of range")
		require.ErrorContains(t, x.CopyFrom(a, make([]float32, 7)), "the host has 7 elements, the device 8")
		require.ErrorContains(t, x.CopyTo(b, make([]float32, 8)), "use a stream of that device")
		require.ErrorContains(t, memory.Copy(a, x, x.Slice(0, 4)), "8 elements, the source 4")
		require.ErrorIs(t, x.Slice(0, 4).Close(), memory.ErrView)
		require.Panics(t, func() { x.Slice(4, 9) })
		_, err = memory.View[float32](x.Buffer(), 2, 1)
		require.ErrorContains(t, err, "misaligned: want a multiple of 4")
		_, err = memory.View[float32](x.Buffer(), 28, 2)
		require.ErrorContains(t, err, "the buffer has 32 bytes")
		require.NoError(t, x.Close())
		require.ErrorIs(t, x.Zero(a), device.ErrClosed)
		require.ErrorIs(t, memory.Copy(a, x, y), device.ErrClosed)
		var zero memory.Slice[float32]
		require.NoError(t, zero.Close())
		require.NoError(t, zero.CopyTo(a, nil))
	})
}

func TestOutOfMemory(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		_, err := memory.Alloc(s, 1<<50)
		oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
		require.True(t, ok, "%v", err)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.EqualValues(t, 1<<50, oom.Requested)
		require.Positive(t, oom.Total)
		require.LessOrEqual(t, oom.Free, oom.Total)
		x, err := memory.Make[byte](s, 1<<20)
		require.NoError(t, err, "the device is as good as before")
		require.NoError(t, x.Close())
	})
}

func TestMakeFlatOfTooMany(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		for _, lens := range [][]int{{1 << 62, 1 << 62, 1 << 62, 1 << 62, 5}, {math.MaxInt}, {5, math.MaxInt / 8}} {
			_, _, err := memory.MakeFlat[float64](s, lens...)
			require.ErrorContains(t, err, "no memory has as many", "%v", lens)
		}
	})
}

func TestMakeFlat(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		flat, parts, err := memory.MakeFlat[memory.BFloat16Bits](s, 3, 0, 9, 8)
		require.NoError(t, err)
		defer flat.Close()
		require.Equal(t, 8+0+16+8, flat.Len())
		require.Len(t, parts, 4)
		for i, want := range []struct{ off, n int }{{0, 3}, {16, 0}, {16, 9}, {48, 8}} {
			require.Equal(t, want.off, parts[i].Offset())
			require.Equal(t, want.n, parts[i].Len())
		}
	})
}

// A forgotten event between two streams is found on virtual devices, every time.
func TestVirtualDevicesReportARace(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
	d := sys.Devices()[0]
	a, b := newStream(t, d), newStream(t, d)
	x, err := memory.Make[float32](a, 1024)
	require.NoError(t, err)
	require.NoError(t, x.Zero(a))
	require.NoError(t, x.Zero(b)) // no event orders b after a
	_ = a.Sync(testgpu.Context(t))
	_ = b.Sync(testgpu.Context(t))
	require.NotEmpty(t, sys.Reports())
	_ = x.Close()
}

func TestDTypes(t *testing.T) {
	for d, want := range map[memory.DType]string{
		memory.DTypeOf[bool](): "bool 1", memory.DTypeOf[int8](): "int8 1", memory.DTypeOf[uint8](): "uint8 1",
		memory.DTypeOf[int16](): "int16 2", memory.DTypeOf[uint16](): "uint16 2", memory.DTypeOf[int32](): "int32 4",
		memory.DTypeOf[uint32](): "uint32 4", memory.DTypeOf[int64](): "int64 8", memory.DTypeOf[uint64](): "uint64 8",
		memory.DTypeOf[memory.Float16Bits](): "float16 2", memory.DTypeOf[memory.BFloat16Bits](): "bfloat16 2",
		memory.DTypeOf[float32](): "float32 4", memory.DTypeOf[float64](): "float64 8",
		memory.DTypeOf[memory.Float8E4M3Bits](): "float8_e4m3fn 1", memory.DTypeOf[memory.Float8E5M2Bits](): "float8_e5m2 1",
	} {
		require.Equal(t, want, d.String()+" "+string(rune('0'+d.Size())))
	}
}

// Enqueueing costs no allocation on CUDA; virtual devices allocate below.
func TestCopyAllocatesNothing(t *testing.T) {
	devs := testgpu.CUDA(t, 1)
	s := newStream(t, devs[0])
	x, err := memory.Make[float32](s, 1024)
	require.NoError(t, err)
	defer x.Close()
	y, err := memory.Make[float32](s, 1024)
	require.NoError(t, err)
	defer y.Close()
	h, err := memory.MakePinned[float32](devs[0], 1024)
	require.NoError(t, err)
	defer h.Close()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := x.CopyFromPinned(s, h); err != nil {
			t.Fatal(err)
		}
		if err := memory.Copy(s, y, x); err != nil {
			t.Fatal(err)
		}
	}))
	require.NoError(t, s.Sync(testgpu.Context(t)))
}

// Close waits, on the device, for the streams that RecordStream named: virtual
// devices report it otherwise.
func TestCloseWaitsForRecordedStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a, b := newStream(t, devs[0]), newStream(t, devs[0])
		for range 10 {
			x, err := memory.Make[float32](a, 1<<18)
			require.NoError(t, err)
			require.NoError(t, b.WaitStream(a))
			require.NoError(t, x.RecordStream(b))
			require.NoError(t, x.Zero(b))
			require.NoError(t, x.Close())
			require.NoError(t, b.Sync(testgpu.Context(t)))
		}
	})
}

// Each of as many virtual devices as there can be has memory.
func TestEveryVirtualDeviceAllocates(t *testing.T) {
	for _, d := range testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 64}) {
		s := newStream(t, d)
		x, err := memory.MakeFrom(s, []int32{int32(d.Ordinal()), 7})
		require.NoError(t, err, "%s", d)
		out := make([]int32, 2)
		require.NoError(t, x.CopyTo(s, out))
		require.Equal(t, []int32{int32(d.Ordinal()), 7}, out)
		require.NoError(t, x.Close())
	}
}
