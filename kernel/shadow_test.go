package kernel_test

import (
	"errors"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// increment has a kernel that adds to n elements; the Go function adds by to the first goes of them.
func increment(body string, by float32, goes int) *kernel.Source {
	return &kernel.Source{Name: "increment.cu", CUDA: `extern "C" __global__ void increment(float* x, const float* y, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	` + body + `
}`,
		Kernels: []kernel.Def{{Name: "increment", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.I32}, Go: func(c *kernel.Call) {
			x := kernel.Update[float32](c, 0, goes)
			for i := range x {
				x[i] += by
			}
		}}}}
}

const correct = "if (i < n) x[i] += 1;"

// In tests virtual devices compare launches with the CUDA source.
func TestLaunchesAreCompared(t *testing.T) {
	if _, err := exec.LookPath("g++"); err != nil {
		t.Skip("needs g++: ", err)
	}
	for name, c := range map[string]struct {
		body  string
		by    float32
		goes  int
		grid  kernel.Grid
		inout bool // y is x
		want  string
	}{
		"equal":           {body: correct, by: 1, goes: 100, grid: flat(4, 32, 0)},
		"rounded":         {body: correct, by: 1.00001, goes: 100, grid: flat(4, 32, 0)},
		"in place":        {body: "if (i < n) x[i] = y[i] + 1;", by: 1, goes: 100, grid: flat(4, 32, 0), inout: true},
		"barrier":         {body: "__shared__ float s[32]; s[threadIdx.x] = x[i]; __syncthreads(); x[i] = s[threadIdx.x] + 1;", by: 1, goes: 96, grid: flat(3, 32, 0)},
		"other result":    {body: correct, by: 2, goes: 100, grid: flat(4, 32, 0), want: "wrote 2 to element 0 of x, and its CUDA source, run on the host, 1; 100 of 100 elements differ"},
		"grid too small":  {body: correct, by: 1, goes: 100, grid: flat(2, 32, 0), want: "wrote 65 to element 64 of x, and its CUDA source, run on the host, 64; 36 of 100 elements differ: the CUDA source does not write it"},
		"out of bounds":   {body: "x[i + (i == 3 ? 1 << 24 : 0)] += 1;", by: 1, goes: 100, grid: flat(4, 32, 0), want: "CUDA_ERROR_ILLEGAL_ADDRESS"},
		"trap":            {body: correct + " if (i == 3) __trap();", by: 1, goes: 100, grid: flat(4, 32, 0), want: "a trap or a failed assertion"},
		"misaligned":      {body: "if (i == 0) ((float2*)(x + 1))->x += 1;", by: 1, goes: 100, grid: flat(4, 32, 0), want: "CUDA_ERROR_MISALIGNED_ADDRESS"},
		"stuck barrier":   {body: "if (i < 3) __syncthreads(); else if (i < 5) __syncwarp();", by: 0, goes: 100, grid: flat(1, 8, 0), want: "wait for threads that do not come"},
		"not for g++":     {body: "unsigned c = clock(); x[i] += c;", by: 1, goes: 100, grid: flat(4, 32, 0)},
		"state":           {body: "__shared__ int s; x[i] = 7; } __device__ int counter; __device__ void f() {", by: 1, goes: 100, grid: flat(4, 32, 0)},
		"waits":           {body: "if (i == 0) while (*(volatile float*)x == 0) ;", by: 1, goes: 100, grid: flat(1, 32, 0)},
		"too many":        {body: "", by: 1, goes: 100, grid: flat(2000, 32, 0)},
		"reads elsewhere": {body: "if (i < n) x[i] += 1 + 0 * y[i % 2];", by: 1, goes: 100, grid: flat(4, 32, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1}).Devices()
			s, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			m, err := kernel.Compile(devs[0], increment(c.body, c.by, c.goes))
			require.NoError(t, err)
			defer func() { _ = errors.Join(m.Close(), s.Close()) }() // the device may be lost
			k, err := m.Kernel("increment")
			require.NoError(t, err)
			host := make([]float32, 100)
			for i := range host {
				host[i] = float32(i)
			}
			x, err := memory.MakeFrom(s, host)
			require.NoError(t, err)
			y, err := memory.MakeFrom(s, host[:2])
			require.NoError(t, err)
			in := kernel.Ptr(y)
			if c.inout {
				in = kernel.Ptr(x)
			}
			err = k.Launch(s, c.grid, kernel.Ptr(x), in, kernel.Scalar[int32](100))
			require.NoError(t, err)
			err = s.Sync(testgpu.Context(t))
			_ = errors.Join(x.Close(), y.Close())
			if c.want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.want)
		})
	}
}

// A Go function may write only what the launch has passed, and its panics have a line.
func TestWritesAreChecked(t *testing.T) {
	t.Setenv(env.VirtualKernels.Name, "go")
	for name, c := range map[string]struct {
		fn   func(c *kernel.Call)
		want []string // parts of the error
	}{
		"all":             {func(c *kernel.Call) { kernel.Update[float32](c, 0, 100)[99]++ }, nil},
		"behind it":       {func(c *kernel.Call) { kernel.Update[float32](c, 0, 101)[100]++ }, []string{"asks for 404 bytes", "4 past the end of the argument", "shadow_test.go:"}},
		"behind a part":   {func(c *kernel.Call) { kernel.UpdateAddress[float32](c, c.Address(0)+396, 2)[1]++ }, []string{"asks for 8 bytes", "4 past the end", "shadow_test.go:"}},
		"in another":      {func(c *kernel.Call) { kernel.UpdateAddress[float32](c, c.Address(2), 10)[0]++ }, nil},
		"const":           {func(c *kernel.Call) { kernel.Update[float32](c, 1, 1)[0]++ }, []string{"declares a pointer to const there", "shadow_test.go:"}},
		"reads behind it": {func(c *kernel.Call) { kernel.Update[float32](c, 0, 1)[0] += kernel.Read[float32](c, 0, 101)[100] * 0 }, nil},
		"panic": {func(c *kernel.Call) {
			x := kernel.Update[float32](c, 0, 100)
			x[c.Grid().Threads[0]+100] = 1
		}, []string{"index out of range [132]", "shadow_test.go:"}},
		"freed": {func(c *kernel.Call) { kernel.Update[float32](c, 2, 10); kernel.UpdateAddress[float32](c, 1<<40, 1) }, []string{"CUDA_ERROR_ILLEGAL_ADDRESS", "shadow_test.go:"}},
	} {
		t.Run(name, func(t *testing.T) {
			devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1}).Devices()
			s, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			m, err := kernel.Compile(devs[0], &kernel.Source{Name: "f.cu", CUDA: `extern "C" __global__ void f(float* x, const float* y, float* z) {}`,
				Kernels: []kernel.Def{{Name: "f", Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.Pointer}, Go: c.fn}}})
			require.NoError(t, err)
			defer func() { _ = errors.Join(m.Close(), s.Close()) }() // the device may be lost
			k, err := m.Kernel("f")
			require.NoError(t, err)
			x, err := memory.MakeFrom(s, make([]float32, 300))
			require.NoError(t, err)
			err = errors.Join(k.Launch(s, flat(1, 32, 0), kernel.Ptr(x.Slice(0, 100)), kernel.Ptr(x.Slice(200, 300)), kernel.Ptr(x.Slice(100, 200))), s.Sync(testgpu.Context(t)))
			_ = x.Close()
			if c.want == nil {
				require.NoError(t, err)
			}
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

// A launch that is compared with its source finds writes to memory that the Go function has asked for to read.
func TestWritesOfConstants(t *testing.T) {
	if _, err := exec.LookPath("g++"); err != nil {
		t.Skip("needs g++: ", err)
	}
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1}).Devices()
	s, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	m, err := kernel.Compile(devs[0], &kernel.Source{Name: "f.cu", CUDA: `extern "C" __global__ void f(float* x, const float* y) { x[threadIdx.x] = y[threadIdx.x]; }`,
		Kernels: []kernel.Def{{Name: "f", Params: []kernel.Param{kernel.Pointer, kernel.Pointer}, Go: func(c *kernel.Call) {
			y := kernel.Read[float32](c, 1, 32)
			copy(kernel.Update[float32](c, 0, 32), y)
			y[3] = 7
		}}}})
	require.NoError(t, err)
	defer func() { _ = errors.Join(m.Close(), s.Close()) }() // the device is lost
	k, err := m.Kernel("f")
	require.NoError(t, err)
	x, err := memory.MakeFrom(s, make([]float32, 64))
	require.NoError(t, err)
	err = errors.Join(k.Launch(s, flat(1, 32, 0), kernel.Ptr(x.Slice(0, 32)), kernel.Ptr(x.Slice(32, 64))), s.Sync(testgpu.Context(t)))
	_ = x.Close()
	require.ErrorContains(t, err, "its Go function wrote byte 14 of argument 1")
}

// The variable selects how kernels run.
func TestVirtualKernels(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	t.Setenv(env.VirtualKernels.Name, "neither")
	_, err := kernel.Compile(devs[0], increment(correct, 2, 100))
	require.ErrorContains(t, err, "one of auto, go, both")
	t.Setenv(env.VirtualKernels.Name, "go")
	s, k := compiled(t, devs[0], increment(correct, 2, 100))
	x, err := memory.MakeFrom(s, make([]float32, 100))
	require.NoError(t, err)
	defer x.Close()
	require.NoError(t, k.Launch(s, flat(1, 1, 0), kernel.Ptr(x), kernel.Ptr(x), kernel.Scalar[int32](100)))
	require.NoError(t, s.Sync(testgpu.Context(t)))
}

// Every compiler finds some mistakes.
func TestSyntaxErrors(t *testing.T) {
	if _, err := exec.LookPath("g++"); err != nil {
		t.Skip("needs g++: ", err)
	}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for _, body := range []string{"x[i] += 1", "if (i < n { }"} {
			_, err := kernel.Compile(devs[0], increment(body, 1, 1))
			var e *kernel.CompileError
			require.ErrorAs(t, err, &e, body)
		}
		m, err := kernel.Compile(devs[0], increment("x[i] += __ldcs(y) + clock64();", 1, 1)) // only CUDA has these
		require.NoError(t, err)
		require.NoError(t, m.Close())
	})
}

// With NVRTC, virtual devices know the limits that a GPU of the same architecture has.
func TestVirtualLimitsAreThoseOfCUDA(t *testing.T) {
	gpu := testgpu.CUDA(t, 1)[0]
	major, minor, err := gpu.Capability()
	require.NoError(t, err)
	if major != 9 || minor != 0 {
		t.Skipf("needs a GPU with compute capability 9.0, as virtual devices have: it is %d.%d", major, minor)
	}
	t.Setenv(env.VirtualKernels.Name, "go")
	virtual := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	for name, cuda := range map[string]string{
		"simple": `extern "C" __global__ void f(float* x) { x[threadIdx.x] += 1; }`,
		"bounds": `extern "C" __global__ void __launch_bounds__(192) f(float* x) { x[threadIdx.x] += 1; }`,
		"shared": `extern "C" __global__ void f(float* x) { __shared__ float s[10000]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[threadIdx.x ^ 1]; }`,
		"odd":    `extern "C" __global__ void f(float* x) { __shared__ char s[44670]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[threadIdx.x ^ 1]; }`,
		"local":  `extern "C" __global__ void f(float* x) { float v[1000]; for (int k = 0; k < 1000; k++) v[(k * 7 + threadIdx.x) % 1000] = x[k]; x[threadIdx.x] = v[(int)x[0]]; }`,
		"const":  `__constant__ float table[100] = {1, 2, 3}; extern "C" __global__ void f(float* x) { x[threadIdx.x] += table[(int)x[threadIdx.x] % 100]; }`,
		"registers": `extern "C" __global__ void f(float* x) { float v[100], s = 0;
#pragma unroll
	for (int k = 0; k < 100; k++) v[k] = x[(threadIdx.x * 7 + k * 13) % 1024];
	__syncthreads();
#pragma unroll
	for (int k = 0; k < 100; k++) s += v[k] * v[(k + 1) % 100];
	x[threadIdx.x] = s; }`,
	} {
		var kernels [2]*kernel.Kernel
		for i, d := range []*device.Device{gpu, virtual} {
			_, kernels[i] = compiled(t, d, &kernel.Source{Name: name + ".cu", CUDA: cuda,
				Kernels: []kernel.Def{{Name: "f", Params: []kernel.Param{kernel.Pointer}, Go: func(*kernel.Call) {}}}})
		}
		require.Equal(t, kernels[0].Attributes(), kernels[1].Attributes(), name)
		for threads := 32; threads <= kernels[0].Attributes().MaxThreads; threads += 32 {
			want, err := kernels[0].Occupancy(threads, 1000)
			require.NoError(t, err)
			got, err := kernels[1].Occupancy(threads, 1000)
			require.NoError(t, err)
			require.Equal(t, want, got, "%s, %d threads", name, threads)
		}
	}
}
