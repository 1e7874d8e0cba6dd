package kernel_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

type mixArgs struct {
	Out       memory.Slice[float64]
	In        memory.Slice[int16]
	Flag      bool
	Half      memory.Float16Bits
	Small     int8
	BFloat    memory.BFloat16Bits
	Unsigned  uint32
	Long      int64
	Float     float32
	Double    float64
	N         int32
	Unchecked memory.Slice[float32]
}

const mixCUDA = `extern "C" __global__ void mix(double* out, const short* in, bool flag, unsigned short half, signed char small,
	unsigned short bfloat, unsigned unsigned_, long long long_, float float_, double double_, int n, void* unchecked) {
	for (int i = 0; i < n; i++) out[i] = in[i];
	out[n] = flag; out[n + 1] = half; out[n + 2] = small; out[n + 3] = bfloat; out[n + 4] = unsigned_;
	out[n + 5] = long_; out[n + 6] = float_; out[n + 7] = double_; out[n + 8] = unchecked != 0;
}`

func mixGo(c *kernel.Call, a mixArgs) {
	out := kernel.Data(c, a.Out)
	for i, x := range kernel.Data(c, a.In.Slice(0, int(a.N))) {
		out[i] = float64(x)
	}
	number := func(b bool) float64 {
		if b {
			return 1
		}
		return 0
	}
	copy(out[a.N:], []float64{number(a.Flag), float64(a.Half), float64(a.Small), float64(a.BFloat), float64(a.Unsigned),
		float64(a.Long), float64(a.Float), a.Double, number(a.Unchecked.Len() > 0)})
}

func makeFrom[T memory.Element](t testing.TB, s *stream.Stream, xs ...T) memory.Slice[T] {
	t.Helper()
	x, err := memory.MakeFrom(s, xs)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

func open(t testing.TB, dev *device.Device, src *kernel.Source) (*stream.Stream, *kernel.Module) {
	t.Helper()
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	m, err := kernel.Compile(dev, src)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	return s, m
}

// Every type of field arrives as it was passed, also with the arguments of a Kernel, and in
// a graph.
func TestFuncArguments(t *testing.T) {
	src := &kernel.Source{Name: "mix.cu", CUDA: mixCUDA}
	mix := kernel.Define(src, "mix", mixGo)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, m := open(t, devs[0], src)
		out, in := makeFrom(t, s, make([]float64, 11)...), makeFrom[int16](t, s, -3, 30000, 5)
		args := mixArgs{Out: out, In: in, Flag: true, Half: memory.Float16Of(1.5), Small: -100, BFloat: memory.BFloat16Of(-2),
			Unsigned: 1 << 31, Long: -1 << 40, Float: 0.5, Double: -0.1, N: 2}
		want := []float64{-3, 30000, 1, 0x3e00, -100, 0xc000, 1 << 31, -1 << 40, 0.5, -0.1, 0}
		got := make([]float64, len(want))
		check := func(err error) {
			t.Helper()
			require.NoError(t, err)
			require.NoError(t, out.CopyTo(s, got))
			require.Equal(t, want, got)
			require.NoError(t, out.Zero(s))
		}
		check(mix.Launch(s, kernel.Cover(1), args))
		args.Unchecked, want[10] = makeFrom[float32](t, s, 1), 1
		check(mix.LaunchCooperative(s, flat(1, 1, 0), args))
		k, err := m.Kernel("mix")
		require.NoError(t, err)
		check(k.Launch(s, kernel.Cover(1), kernel.Ptr(out), kernel.Ptr(in), kernel.Scalar(true), kernel.Scalar(args.Half), kernel.Scalar[int8](-100),
			kernel.Scalar(args.BFloat), kernel.Scalar[uint32](1<<31), kernel.Scalar[int64](-1<<40), kernel.Scalar[float32](0.5),
			kernel.Scalar(-0.1), kernel.Scalar[int32](2), kernel.Ptr(args.Unchecked)))
		exec, err := graph.Capture([]*stream.Stream{s}, func() error { return mix.Launch(s, kernel.Cover(1), args) }, nil)
		require.NoError(t, err)
		defer exec.Close()
		check(exec.Launch(s))
	})
}

// Compile compares the fields with the declaration.
func TestFuncFieldsAreAsTheSourceDeclares(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	type floats = memory.Slice[float32]
	const plain = `extern "C" __global__ void f(float* y, const float* x, int n) {}`
	for want, c := range map[string]struct {
		cuda   string
		define func(*kernel.Source)
	}{
		"f: it has 3 parameters in the source, but its arguments have 1 fields": {plain, defineOf[struct{ Y floats }]},
		`f: parameter 2 is "int n" in the source, but field N is float32`: {plain, defineOf[struct {
			Y, X floats
			N    float32
		}]},
		`f: parameter 2 is "int n" in the source, but field N is a slice of int32`: {plain, defineOf[struct {
			Y, X floats
			N    memory.Slice[int32]
		}]},
		`f: parameter 1 is "const float* x" in the source, but field X is a slice of float64`: {plain, defineOf[struct {
			Y floats
			X memory.Slice[float64]
			N int32
		}]},
		`f: parameter 0 is "float* y" in the source, but field Y is float32`: {plain, defineOf[struct {
			Y float32
			X floats
			N int32
		}]},
		`f: field 0 is X, but parameter 0 is "float* y" and "const float* x" is parameter 1`: {plain, defineOf[struct {
			X, Y floats
			N    int32
		}]},
		"is of type int: want a memory.Slice, or a number such as int32 or float32": {plain, defineOf[struct {
			Y, X floats
			N    int
		}]},
		"the arguments are of type int32: want a struct": {plain, defineOf[int32]},
		"f: its parameters cannot be read in the source": {`#define MORE , int n` + "\n" + `extern "C" __global__ void f(float* y MORE) {}`, defineOf[struct {
			Y floats
			N int32
		}]},
	} {
		src := &kernel.Source{Name: "f.cu", CUDA: c.cuda}
		c.define(src)
		_, err := kernel.Compile(devs[0], src)
		require.ErrorContains(t, err, "kernel: compile f.cu: ")
		require.ErrorContains(t, err, want)
	}
	src := &kernel.Source{Name: "f.cu", CUDA: plain}
	defineOf[struct { // other names are correct
		Result, Left floats
		Count        uint32
	}](src)
	m, err := kernel.Compile(devs[0], src)
	require.NoError(t, err)
	require.NoError(t, m.Close())
	src = &kernel.Source{Name: "f.cu", CUDA: plain}
	kernel.Define[struct {
		Y, X floats
		N    int32
	}](src, "f", nil)
	_, err = kernel.Compile(devs[0], src)
	require.ErrorContains(t, err, "no Go function to stand in")
}

func defineOf[A any](src *kernel.Source) { kernel.Define(src, "f", func(*kernel.Call, A) {}) }

type doubleArgs struct {
	Y memory.Slice[float32]
	X memory.Slice[float32]
}

var doubleCUDA = `extern "C" __global__ void twice(float* y, const float* x) { y[threadIdx.x] = 2 * x[threadIdx.x]; }`

func doubleGo(c *kernel.Call, a doubleArgs) {
	y := kernel.Data(c, a.Y)
	for i, x := range kernel.Data(c, a.X) {
		y[i] = 2 * x
	}
}

// A Func launches the kernel of the stream's device while a module of it is open.
func TestFuncFollowsModules(t *testing.T) {
	src := &kernel.Source{Name: "twice.cu", CUDA: doubleCUDA}
	twice := kernel.Define(src, "twice", doubleGo)
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		x := makeFrom[float32](t, s, 1, 2, 3)
		launch := func() error { return twice.Launch(s, flat(1, 3, 0), doubleArgs{x, x}) }
		require.ErrorContains(t, launch(), "kernel: launch twice on "+devs[0].String()+": its source is not compiled for the device")
		other, _ := open(t, devs[1], src)
		require.ErrorContains(t, launch(), "not compiled for the device")
		one, err := kernel.Compile(devs[0], src)
		require.NoError(t, err)
		two, err := kernel.Compile(devs[0], src)
		require.NoError(t, err)
		require.NoError(t, launch())
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.NoError(t, one.Close())
		require.NoError(t, launch(), "by the other module")
		got := make([]float32, 3)
		require.NoError(t, x.CopyTo(s, got))
		require.Equal(t, []float32{4, 8, 12}, got)
		require.NoError(t, two.Close())
		require.ErrorContains(t, launch(), "or the module is closed")
		require.ErrorContains(t, twice.Launch(other, flat(1, 3, 0), doubleArgs{x, x}), "argument 0 is memory of")
		require.ErrorContains(t, twice.Launch(nil, flat(1, 3, 0), doubleArgs{}), "stream")
		require.ErrorContains(t, (*kernel.Func[doubleArgs])(nil).Launch(s, flat(1, 3, 0), doubleArgs{}), "no function given")
	})
}

// Data returns memory of the arguments only, and records a write only if the source allows
// the kernel to write.
func TestData(t *testing.T) {
	var given memory.Slice[float32] // as the host has it
	run := func(t *testing.T, report string, standIn func(c *kernel.Call, a doubleArgs)) {
		src := &kernel.Source{Name: "twice.cu", CUDA: doubleCUDA}
		twice := kernel.Define(src, "twice", standIn)
		sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
		s, err := stream.New(sys.Devices()[0], nil)
		require.NoError(t, err)
		m, err := kernel.Compile(sys.Devices()[0], src)
		require.NoError(t, err)
		x, err := memory.MakeFrom(s, make([]float32, 8))
		require.NoError(t, err)
		given = x.Slice(0, 4)
		require.NoError(t, twice.Launch(s, flat(1, 3, 0), doubleArgs{given, x.Slice(4, 7)}))
		err = s.Sync(testgpu.Context(t))
		if report == "" {
			require.NoError(t, err)
		} else {
			require.Error(t, err)
			require.Len(t, sys.Reports(), 1)
			require.Contains(t, sys.Reports()[0], report)
		}
		_, _, _ = x.Close(), m.Close(), s.Close()
	}
	var kept memory.Slice[float32]
	run(t, "", func(c *kernel.Call, a doubleArgs) {
		require.Len(t, kernel.Data(c, a.X.Slice(1, 3)), 2)
		require.Nil(t, kernel.Data(c, a.X.Slice(1, 1)))
		kept = a.X
	})
	require.Zero(t, kept.Ptr(), "only Data reaches the memory")
	run(t, "4 elements of float32 that are not in an argument of the launch", func(c *kernel.Call, a doubleArgs) { kernel.Data(c, given) })
}

// Two streams may read the memory of a pointer to const at once, and not that of another.
func TestDataOfConstIsRead(t *testing.T) {
	for name, cuda := range map[string]string{
		"const": doubleCUDA, "not const": `extern "C" __global__ void twice(float* y, float* x) { y[threadIdx.x] = 2 * x[threadIdx.x]; }`,
	} {
		t.Run(name, func(t *testing.T) {
			src := &kernel.Source{Name: "twice.cu", CUDA: cuda}
			twice := kernel.Define(src, "twice", doubleGo)
			sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
			s, err := stream.New(sys.Devices()[0], nil)
			require.NoError(t, err)
			other, err := stream.New(sys.Devices()[0], nil)
			require.NoError(t, err)
			m, err := kernel.Compile(sys.Devices()[0], src)
			require.NoError(t, err)
			x, err := memory.MakeFrom(s, make([]float32, 12))
			require.NoError(t, err)
			require.NoError(t, s.Sync(testgpu.Context(t)))
			require.NoError(t, twice.Launch(s, flat(1, 3, 0), doubleArgs{x.Slice(0, 4), x.Slice(8, 12)}))
			_ = x.RecordStream(other)
			require.NoError(t, twice.Launch(other, flat(1, 3, 0), doubleArgs{x.Slice(4, 8), x.Slice(8, 12)}))
			_, _ = s.Sync(testgpu.Context(t)), other.Sync(testgpu.Context(t))
			require.Equal(t, name != "const", len(sys.Reports()) > 0, "%v", sys.Reports())
			_, _, _, _ = x.Close(), m.Close(), s.Close(), other.Close()
		})
	}
}

// A launch allocates only what the virtual device's queue does, and as much as the launch of a
// Kernel.
func TestFuncLaunchAllocatesNothing(t *testing.T) {
	src := &kernel.Source{Name: "twice.cu", CUDA: doubleCUDA}
	twice := kernel.Define(src, "twice", func(*kernel.Call, doubleArgs) {})
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, m := open(t, devs[0], src)
		k, err := m.Kernel("twice")
		require.NoError(t, err)
		x := makeFrom(t, s, make([]float32, 4)...)
		grid := flat(0, 3, 0) // without blocks: everything but the driver's call
		require.Zero(t, testgpu.Allocs(100, func() {
			if err := twice.Launch(s, grid, doubleArgs{x, x}); err != nil {
				t.Fatal(err)
			}
		}))
		if devs[0].System().Backend() != "cuda" {
			return
		}
		grid = flat(1, 3, 0)
		require.Zero(t, testgpu.Allocs(100, func() {
			if err := twice.Launch(s, grid, doubleArgs{x, x}); err != nil {
				t.Fatal(err)
			}
			if err := k.Launch(s, grid, kernel.Ptr(x), kernel.Ptr(x)); err != nil {
				t.Fatal(err)
			}
		}))
		require.NoError(t, s.Sync(testgpu.Context(t)))
	})
}

// reach sums, in shared memory from its first to its last byte, the numbers of
// the blocks, and waits for all of them in between.
var reach = kernel.Source{
	Name: "reach.cu",
	CUDA: `extern "C" __global__ void __launch_bounds__(128) reach(unsigned* out, unsigned words) {
	extern __shared__ unsigned shared[];
	shared[0] = 1;
	shared[words - 1] += 1;
	atomicAdd(out, shared[0]);
}`,
	Kernels: []kernel.Def{{
		Name:   "reach",
		Params: []kernel.Param{kernel.Pointer, kernel.U32},
		Go: func(c *kernel.Call) {
			if g := c.Grid(); g.SharedBytes >= 4*kernel.Get[uint32](c, 1) {
				kernel.Update[uint32](c, 0, 1)[0] += g.Blocks[0] * g.Threads[0]
			}
		},
	}},
}

// together counts the blocks that have come, and each block waits for all.
var together = kernel.Source{
	Name: "together.cu",
	CUDA: `extern "C" __global__ void together(unsigned* come, unsigned* met) {
	atomicAdd(come, 1);
	while (*(volatile unsigned*)come < gridDim.x) {}
	atomicAdd(met, 1);
}`,
	Kernels: []kernel.Def{{
		Name:   "together",
		Params: []kernel.Param{kernel.Pointer, kernel.Pointer},
		Go: func(c *kernel.Call) {
			kernel.Update[uint32](c, 0, 1)[0] += c.Grid().Blocks[0]
			kernel.Update[uint32](c, 1, 1)[0] += c.Grid().Blocks[0]
		},
	}},
}

func compiled(t *testing.T, d *device.Device, src *kernel.Source) (*stream.Stream, *kernel.Kernel) {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	m, err := kernel.Compile(d, src)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	k, err := m.Kernel(src.Kernels[0].Name)
	require.NoError(t, err)
	return s, k
}

func zeros(t *testing.T, s *stream.Stream, n int) memory.Slice[uint32] {
	t.Helper()
	x, err := memory.MakeFrom(s, make([]uint32, n))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

func first(t *testing.T, s *stream.Stream, x memory.Slice[uint32]) uint32 {
	t.Helper()
	got := make([]uint32, x.Len())
	require.NoError(t, x.CopyTo(s, got))
	return got[0]
}

func flat(blocks, threads, shared uint32) kernel.Grid {
	return kernel.Grid{Blocks: [3]uint32{blocks, 1, 1}, Threads: [3]uint32{threads, 1, 1}, SharedBytes: shared}
}

func TestDynamicSharedMemory(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &reach)
		x := zeros(t, s, 1)
		most := uint32(k.Attributes().MaxDynamicSharedBytes)
		require.GreaterOrEqual(t, most, uint32(48<<10))
		want := uint32(0)
		for _, bytes := range []uint32{8, 48 << 10, most, 1024, most} {
			require.NoError(t, k.Launch(s, flat(3, 1, bytes), kernel.Ptr(x), kernel.Scalar[uint32](bytes/4)))
			want += 3
			require.Equal(t, want, first(t, s, x), "%d bytes", bytes)
		}
		err := k.Launch(s, flat(1, 1, most+1), kernel.Ptr(x), kernel.Scalar[uint32](1))
		require.ErrorContains(t, err, "bytes of dynamic shared memory: a block has at most")
		require.Equal(t, want, first(t, s, x), "nothing ran, and the device is well")
	})
}

func TestSharedMemoryIsAllowedOnce(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuFuncSetAttribute#2=CUDA_ERROR_INVALID_VALUE"})
	s, k := compiled(t, devs[0], &reach)
	x := zeros(t, s, 1)
	for _, bytes := range []uint32{60 << 10, 100 << 10, 64 << 10} {
		require.NoError(t, k.Launch(s, flat(1, 1, bytes), kernel.Ptr(x), kernel.Scalar[uint32](2)))
	}
	_, l := compiled(t, devs[0], &reach)
	require.ErrorIs(t, l.Launch(s, flat(1, 1, 60<<10), kernel.Ptr(x), kernel.Scalar[uint32](2)), device.ErrorInvalidValue)
}

func TestLaunchChecksGrid(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &reach)
		x := zeros(t, s, 1)
		most := uint32(k.Attributes().MaxThreads)
		for want, g := range map[string]kernel.Grid{
			"no threads in y: want 1 or more":            {Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 0, 1}, SharedBytes: 8},
			"2147483648 blocks in x: at most 2147483647": flat(1<<31, 1, 8),
			"65536 blocks in z: at most 65535":           {Blocks: [3]uint32{1, 1, 1 << 16}, Threads: [3]uint32{1, 1, 1}, SharedBytes: 8},
			"65 threads of a block in z: at most 64":     {Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 65}, SharedBytes: 8},
			"1025 threads of a block in x: at most 1024": flat(1, 1025, 8),
			"1056 threads of a block: at most":           {Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{32, 33, 1}, SharedBytes: 8},
		} {
			err := k.Launch(s, g, kernel.Ptr(x), kernel.Scalar[uint32](2))
			require.ErrorContains(t, err, "kernel: launch reach on "+devs[0].String()+": ")
			require.ErrorContains(t, err, want)
		}
		if most < 1024 { // what the source binds; a stand-in has no such thing
			require.ErrorContains(t, k.Launch(s, flat(1, most+1, 8), kernel.Ptr(x), kernel.Scalar[uint32](2)), "threads of a block: at most 128 of this kernel")
		}
		require.NoError(t, k.Launch(s, flat(0, 1, 8), kernel.Ptr(x), kernel.Scalar[uint32](2)), "launches nothing")
		require.NoError(t, k.Launch(s, flat(2, most, 8), kernel.Ptr(x), kernel.Scalar[uint32](2)))
		require.Equal(t, 2*most, first(t, s, x))
	})
}

func TestAttributes(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		_, k := compiled(t, devs[0], &reach)
		a := k.Attributes()
		require.Positive(t, a.MaxThreads)
		require.GreaterOrEqual(t, a.MaxDynamicSharedBytes, 48<<10)
		if devs[0].System().Backend() == "cuda" {
			require.Equal(t, 128, a.MaxThreads, "as __launch_bounds__ says")
			require.Positive(t, a.Registers)
			require.Zero(t, a.LocalBytes)
		}
	})
}

func TestOccupancy(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		_, k := compiled(t, devs[0], &together)
		p, err := devs[0].Properties()
		require.NoError(t, err)
		all, err := k.Occupancy(256, 0)
		require.NoError(t, err)
		require.Equal(t, p.ThreadsPerMultiproc/256, all)
		few, err := k.Occupancy(256, k.Attributes().MaxDynamicSharedBytes)
		require.NoError(t, err)
		require.Equal(t, 1, few)
		for _, limit := range []int{0, 100, 5000} {
			threads, blocks, err := k.BestBlock(0, limit)
			require.NoError(t, err)
			each, err := k.Occupancy(threads, 0)
			require.NoError(t, err)
			require.Equal(t, each*p.Multiprocessors, blocks)
			if limit == 100 {
				require.LessOrEqual(t, threads, 100)
			} else {
				require.Equal(t, p.ThreadsPerMultiproc, each*threads)
			}
		}
		for _, bad := range [][2]int{{0, 0}, {1025, 0}, {-1, 0}, {32, -1}, {32, 1 << 20}} {
			_, err := k.Occupancy(bad[0], bad[1])
			require.ErrorContains(t, err, "kernel: occupancy of together: ", bad)
		}
		_, _, err = k.BestBlock(0, -1)
		require.ErrorContains(t, err, "a limit of -1 threads")
		_, _, err = k.BestBlock(1<<20, 0)
		require.ErrorContains(t, err, "1048576 bytes of dynamic shared memory: want 0 to")
	})
}

func TestCooperativeLaunch(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &together)
		p, err := devs[0].Properties()
		require.NoError(t, err)
		each, err := k.Occupancy(64, 0)
		require.NoError(t, err)
		blocks := uint32(each * p.Multiprocessors)
		come, met := zeros(t, s, 1), zeros(t, s, 1)
		// One thread of each block counts.
		err = k.LaunchCooperative(s, flat(blocks+1, 64, 0), kernel.Ptr(come), kernel.Ptr(met))
		require.ErrorIs(t, err, device.ErrorCooperativeLaunchTooLarge)
		require.ErrorContains(t, err, "kernel: launch together together: ")
		require.Equal(t, uint32(0), first(t, s, come))
		each, err = k.Occupancy(1, 0)
		require.NoError(t, err)
		blocks = uint32(each * p.Multiprocessors)
		require.NoError(t, k.LaunchCooperative(s, flat(blocks, 1, 0), kernel.Ptr(come), kernel.Ptr(met)))
		require.Equal(t, blocks, first(t, s, met))
		require.ErrorContains(t, k.LaunchCooperative(s, flat(1, 1, 0), kernel.Ptr(come)), "1 arguments: want 2: [pointer pointer]")
	})
}

func TestAttributesFail(t *testing.T) {
	for _, fault := range []string{"cuFuncGetAttribute#3=CUDA_ERROR_INVALID_HANDLE", "cuDeviceGetAttribute#2=CUDA_ERROR_INVALID_HANDLE"} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault})
		_, err := kernel.Compile(devs[0], &reach)
		require.ErrorIs(t, err, device.ErrorInvalidHandle, fault)
	}
}

func TestBadDefinitions(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	stand := func(*kernel.Call) {}
	for want, defs := range map[string][]kernel.Def{
		`has no name, or the same name as another kernel: ""`:  {{Go: stand}},
		`has no name, or the same name as another kernel: "a"`: {{Name: "a", Go: stand}, {Name: "a", Go: stand}},
		"a has 33 parameters: at most 32":                      {{Name: "a", Go: stand, Params: make([]kernel.Param, 33)}},
		"parameter 1 of a has no type":                         {{Name: "a", Go: stand, Params: []kernel.Param{kernel.I32, 99}}},
	} {
		_, err := kernel.Compile(devs[0], &kernel.Source{Name: "bad.cu", Kernels: defs})
		require.ErrorContains(t, err, "kernel: compile bad.cu: ")
		require.ErrorContains(t, err, want)
	}
}

func TestCover(t *testing.T) {
	for n, blocks := range map[int]uint32{-5: 0, 0: 0, 1: 1, 256: 1, 257: 2, 1 << 20: 1 << 12, 1 << 45: math.MaxUint32} {
		require.Equal(t, flat(blocks, 256, 0), kernel.Cover(n), "%d threads", n)
	}
}
