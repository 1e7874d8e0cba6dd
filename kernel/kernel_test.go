package kernel_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

var axpy = kernel.Source{
	Name: "axpy.cu",
	CUDA: `extern "C" __global__ void axpy(float* y, const float* x, float a, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) y[i] += a * x[i];
}`,
	Kernels: []kernel.Def{{
		Name:   "axpy",
		Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.F32, kernel.I32},
		Go: func(c *kernel.Call) {
			n := int(kernel.Get[int32](c, 3))
			y, x := kernel.Update[float32](c, 0, n), kernel.Read[float32](c, 1, n)
			for i := range y {
				y[i] += kernel.Get[float32](c, 2) * x[i]
			}
		},
	}},
}

func setup(t *testing.T, d *device.Device) (*stream.Stream, *kernel.Module, *kernel.Kernel) {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	m, err := kernel.Compile(d, &axpy)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	k, err := m.Kernel("axpy")
	require.NoError(t, err)
	return s, m, k
}

func TestLaunch(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, _, k := setup(t, devs[0])
		for _, n := range []int{0, 1, 255, 256, 257, 100_003} {
			a, b := make([]float32, n), make([]float32, n)
			for i := range a {
				a[i], b[i] = float32(i%1000), float32(i%7)
			}
			x, err := memory.MakeFrom(s, a)
			require.NoError(t, err)
			y, err := memory.MakeFrom(s, b)
			require.NoError(t, err)
			require.NoError(t, k.Launch(s, kernel.Cover(n), kernel.Ptr(y), kernel.Ptr(x), kernel.Scalar[float32](0.5), kernel.Scalar(int32(n))))
			got := make([]float32, n)
			require.NoError(t, y.CopyTo(s, got))
			for i := range got {
				require.Equal(t, b[i]+0.5*a[i], got[i], "element %d of %d", i, n)
			}
			require.NoError(t, x.Close())
			require.NoError(t, y.Close())
		}
	})
}

// A launch compares the elements of its arguments with the source's declaration, and
// Compile compares Params with it.
func TestArgumentsAreAsTheSourceDeclares(t *testing.T) {
	src := func(params ...kernel.Param) *kernel.Source {
		return &kernel.Source{Name: "fill.cu", CUDA: `extern "C" __global__ void fill(float* x, unsigned* u, const void* any, int n) {
	for (int i = 0; i < n; i++) x[i] = 7;
}`, Kernels: []kernel.Def{{Name: "fill", Params: params, Go: func(c *kernel.Call) {
			for i, x := 0, kernel.Update[float32](c, 0, int(kernel.Get[int32](c, 3))); i < len(x); i++ {
				x[i] = 7
			}
		}}}}
	}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		_, err := kernel.Compile(devs[0], src(kernel.Pointer, kernel.Pointer, kernel.Pointer))
		require.ErrorContains(t, err, "fill has 4 parameters in the source, but Params has 3")
		_, err = kernel.Compile(devs[0], src(kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.F32))
		require.ErrorContains(t, err, `parameter 3 of fill is "int n" in the source, but Params says float`)
		_, err = kernel.Compile(devs[0], src(kernel.I64, kernel.Pointer, kernel.Pointer, kernel.I32))
		require.ErrorContains(t, err, `parameter 0 of fill is "float* x" in the source, but Params says long long`)
		m, err := kernel.Compile(devs[0], src(kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.I32))
		require.NoError(t, err)
		defer m.Close()
		k, err := m.Kernel("fill")
		require.NoError(t, err)
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		floats, err := memory.MakeFrom(s, []float32{1, 2, 3, 4})
		require.NoError(t, err)
		defer floats.Close()
		longs, err := memory.MakeFrom(s, []int64{1, 2})
		require.NoError(t, err)
		defer longs.Close()
		ints, err := memory.MakeFrom(s, []int32{1, 2})
		require.NoError(t, err)
		defer ints.Close()
		launch := func(x, u, v kernel.Arg) error { return k.Launch(s, kernel.Cover(1), x, u, v, kernel.Scalar[int32](4)) }
		require.ErrorContains(t, launch(kernel.Ptr(longs), kernel.Ptr(ints), kernel.Ptr(longs)), `kernel: launch fill: argument 0 is memory of int64, but the source declares "float* x"`)
		require.ErrorContains(t, launch(kernel.Ptr(floats), kernel.Ptr(floats), kernel.Address(0)), `argument 1 is memory of float32`)
		require.NoError(t, launch(kernel.Ptr(floats), kernel.Ptr(ints), kernel.Ptr(longs)))
		require.NoError(t, launch(kernel.Ptr(floats), kernel.Address(0), kernel.Address(0)))
		got := make([]float32, 4)
		require.NoError(t, floats.CopyTo(s, got))
		require.Equal(t, []float32{7, 7, 7, 7}, got)
	})
}

// Every type of argument arrives as it was passed.
func TestArgumentTypes(t *testing.T) {
	const signature = `extern "C" __global__ void all(double* out, int a, long long b, unsigned c, unsigned long long d, float e, double f,
	signed char g, unsigned char h, short i, unsigned short j, bool k, unsigned short l, unsigned short m) {
	out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f;
	out[6] = g; out[7] = h; out[8] = i; out[9] = j; out[10] = k; out[11] = l; out[12] = m;
}`
	src := &kernel.Source{Name: "all.cu", CUDA: signature, Kernels: []kernel.Def{{
		Name: "all",
		Params: []kernel.Param{kernel.Pointer, kernel.I32, kernel.I64, kernel.U32, kernel.U64, kernel.F32, kernel.F64,
			kernel.I8, kernel.U8, kernel.I16, kernel.U16, kernel.B8, kernel.F16, kernel.BF16},
		Go: func(c *kernel.Call) {
			truth := 0.0
			if kernel.Get[bool](c, 11) {
				truth = 1
			}
			copy(kernel.Update[float64](c, 0, 13), []float64{float64(kernel.Get[int32](c, 1)), float64(kernel.Get[int64](c, 2)), float64(kernel.Get[uint32](c, 3)),
				float64(kernel.Get[uint64](c, 4)), float64(kernel.Get[float32](c, 5)), kernel.Get[float64](c, 6), float64(kernel.Get[int8](c, 7)), float64(kernel.Get[uint8](c, 8)),
				float64(kernel.Get[int16](c, 9)), float64(kernel.Get[uint16](c, 10)), truth, float64(kernel.Get[memory.Float16Bits](c, 12)), float64(kernel.Get[memory.BFloat16Bits](c, 13))})
		},
	}}}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		m, err := kernel.Compile(devs[0], src)
		require.NoError(t, err)
		defer m.Close()
		k, err := m.Kernel("all")
		require.NoError(t, err)
		x, err := memory.Make[float64](s, 13)
		require.NoError(t, err)
		defer x.Close()
		got := make([]float64, 13)
		for h, want := range map[kernel.Arg]float64{kernel.Scalar[uint8](200): 200, kernel.Scalar(memory.Float8E4M3Of(1)): 0x38, kernel.Scalar(memory.Float8E5M2Of(1)): 0x3c} {
			require.NoError(t, k.Launch(s, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}, kernel.Ptr(x),
				kernel.Scalar[int32](-7), kernel.Scalar[int64](-1<<40), kernel.Scalar[uint32](1<<31), kernel.Scalar[uint64](1<<63), kernel.Scalar[float32](0.5), kernel.Scalar(-0.1),
				kernel.Scalar[int8](-100), h, kernel.Scalar[int16](-30000), kernel.Scalar[uint16](60000), kernel.Scalar(true),
				kernel.Scalar(memory.Float16Of(1.5)), kernel.Scalar(memory.BFloat16Of(-2))))
			require.NoError(t, x.CopyTo(s, got))
			require.Equal(t, []float64{-7, -1 << 40, 1 << 31, 1 << 63, 0.5, -0.1,
				-100, want, -30000, 60000, 1, 0x3e00, 0xc000}, got)
		}
	})
}

func TestNullPointer(t *testing.T) {
	src := &kernel.Source{Name: "null.cu", CUDA: `extern "C" __global__ void nulls(int* out, const float* a, const float* b, const float* c) {
	out[0] = a == 0; out[1] = b == 0; out[2] = c == 0;
}`, Kernels: []kernel.Def{{
		Name:   "nulls",
		Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer},
		Go: func(c *kernel.Call) {
			out := kernel.Update[int32](c, 0, 3)
			for i := range out {
				if out[i] = 0; c.Address(i+1) == 0 {
					out[i] = 1
				}
			}
		},
	}}}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		m, err := kernel.Compile(devs[0], src)
		require.NoError(t, err)
		defer m.Close()
		k, err := m.Kernel("nulls")
		require.NoError(t, err)
		out, err := memory.Make[int32](s, 3)
		require.NoError(t, err)
		defer out.Close()
		x, err := memory.Make[float32](s, 1)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, k.Launch(s, kernel.Cover(1), kernel.Ptr(out), kernel.Address(0), kernel.Ptr(x), kernel.Ptr(memory.Slice[float32]{})))
		got := make([]int32, 3)
		require.NoError(t, out.CopyTo(s, got))
		require.Equal(t, []int32{1, 0, 1}, got)
	})
}

func TestLaunchChecksArguments(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s, m, k := setup(t, devs[0])
		other, err := stream.New(devs[1], nil)
		require.NoError(t, err)
		defer other.Close()
		x, err := memory.Make[float32](s, 4)
		require.NoError(t, err)
		far, err := memory.Make[float32](other, 4)
		require.NoError(t, err)
		defer far.Close()
		a, n := kernel.Scalar[float32](1), kernel.Scalar[int32](4)
		g := kernel.Cover(4)
		require.ErrorContains(t, k.Launch(s, g, kernel.Ptr(x), kernel.Ptr(x), a), "3 arguments: want 4")
		require.ErrorContains(t, k.Launch(s, g, kernel.Ptr(x), kernel.Ptr(x), n, a), "argument 2 is an int: want a float")
		require.ErrorContains(t, k.Launch(s, g, kernel.Ptr(x), kernel.Ptr(far), a, n), "argument 1 is memory of")
		require.ErrorContains(t, k.Launch(other, g, kernel.Ptr(far), kernel.Ptr(far), a, n), "use a stream of that device")
		require.NoError(t, x.Close())
		require.ErrorIs(t, k.Launch(s, g, kernel.Ptr(x), kernel.Ptr(x), a, n), device.ErrClosed)
		_, err = m.Kernel("nothing")
		require.ErrorContains(t, err, `no kernel "nothing"`)
	})
}

func TestCompileErrors(t *testing.T) {
	t.Run("cuda", func(t *testing.T) {
		devs := testgpu.CUDA(t, 1)
		_, err := kernel.Compile(devs[0], &kernel.Source{Name: "bad.cu", CUDA: "__global__ void f( {"})
		var ce *kernel.CompileError
		require.ErrorAs(t, err, &ce)
		require.Contains(t, ce.Log, "bad.cu")
	})
	t.Run("misspelled", func(t *testing.T) {
		testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
			for _, cuda := range []string{"", `extern "C" __global__ void scale(float* x) {}`} {
				_, err := kernel.Compile(devs[0], &kernel.Source{Name: "x.cu", CUDA: cuda, Kernels: []kernel.Def{{Name: "scal_e", Go: func(*kernel.Call) {}}}})
				require.ErrorContains(t, err, "kernel: compile x.cu: the source has no kernel scal_e")
			}
		})
	})
	t.Run("virtual", func(t *testing.T) {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
		_, err := kernel.Compile(devs[0], &kernel.Source{Name: "x.cu", CUDA: `extern "C" __global__ void x() {}`, Kernels: []kernel.Def{{Name: "x"}}})
		require.ErrorContains(t, err, "no Go function to stand in")
	})
}

func TestLaunchAllocatesNothing(t *testing.T) {
	devs := testgpu.CUDA(t, 1)
	s, _, k := setup(t, devs[0])
	x, err := memory.Make[float32](s, 256)
	require.NoError(t, err)
	defer x.Close()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := k.Launch(s, kernel.Cover(256), kernel.Ptr(x), kernel.Ptr(x), kernel.Scalar[float32](1), kernel.Scalar[int32](256)); err != nil {
			t.Fatal(err)
		}
	}))
	require.NoError(t, s.Sync(testgpu.Context(t)))
}

// What was not made is an error where it is used.
func TestNothingGiven(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, _, _ := setup(t, devs[0])
		_, err := kernel.Compile(devs[0], nil)
		require.ErrorContains(t, err, "no source given")
		_, err = kernel.Compile(nil, &kernel.Source{})
		require.ErrorContains(t, err, "no device given")
		_, err = (*kernel.Module)(nil).Kernel("add")
		require.ErrorContains(t, err, "no module given")
		var k *kernel.Kernel
		require.ErrorContains(t, k.Launch(s, kernel.Cover(1)), "no kernel given")
		require.ErrorContains(t, k.LaunchCooperative(s, kernel.Cover(1)), "no kernel given")
		require.ErrorContains(t, (*kernel.Elementwise)(nil).Launch(s), "no element-wise function given")
	})
}
