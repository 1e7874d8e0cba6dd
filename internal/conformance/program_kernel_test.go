package conformance

import (
	"sync"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A launched is a program that compiles a source with a kernel f(float* x, …) and launches it on x,
// which has 1024 elements.
type launched struct {
	cuda     string
	options  []string
	blocks   uint32 // 4
	threads  uint32 // 256
	shared   uint32
	offset   int // of the argument in x
	args     []kernel.Arg
	params   []kernel.Param
	elements int // that the Go function increments; 0 means all of the argument
}

func (l launched) source() *kernel.Source {
	return &kernel.Source{Name: "f.cu", CUDA: l.cuda, Options: l.options, Kernels: []kernel.Def{{
		Name: "f", Params: append([]kernel.Param{kernel.Pointer}, l.params...), Go: func(c *kernel.Call) {
			n := l.elements
			if n == 0 {
				n = 1024 - l.offset
			}
			for i, x := 0, kernel.Update[float32](c, 0, n); i < n; i++ {
				x[i]++
			}
		}}}}
}

func (l launched) run(r *run) error {
	s, x, k, err := l.prepare(r)
	if err != nil {
		return err
	}
	if err := k.Launch(s, l.grid(), append([]kernel.Arg{kernel.Ptr(x)}, l.args...)...); err != nil {
		return err
	}
	n := l.elements
	if n == 0 {
		n = x.Len()
	}
	return check(s, x, func(i int) float32 {
		if i < n {
			return float32(i+l.offset) + 1
		}
		return float32(i + l.offset)
	})
}

func (l launched) grid() kernel.Grid {
	g := kernel.Grid{Blocks: [3]uint32{4, 1, 1}, Threads: [3]uint32{256, 1, 1}, SharedBytes: l.shared}
	if l.blocks > 0 {
		g.Blocks[0] = l.blocks
	}
	if l.threads > 0 {
		g.Threads[0] = l.threads
	}
	return g
}

func (l launched) prepare(r *run) (*stream.Stream, memory.Slice[float32], *kernel.Kernel, error) {
	var x memory.Slice[float32]
	s, err := r.stream(0)
	if err != nil {
		return nil, x, nil, err
	}
	if x, err = floats(s, 1024); err != nil {
		return nil, x, nil, err
	}
	m, err := kernel.Compile(r.devs[0], l.source())
	if err != nil {
		return nil, x, nil, err
	}
	k, err := m.Kernel("f")
	return s, x.Slice(l.offset, 1024), k, err
}

const (
	head  = `extern "C" __global__ void f(float* x) { int i = blockIdx.x * blockDim.x + threadIdx.x; `
	plain = head + `if (i < 1024) x[i] += 1; }`
)

// live is a kernel with 160 values that are in use at the same time.
const live = `extern "C" __global__ void f(float* x) {
	float v[160];
#pragma unroll
	for (int k = 0; k < 160; k++) v[k] = x[(threadIdx.x * 7 + k * 13) % 1024];
	__syncthreads();
#pragma unroll 1
	for (int n = 0; n < 4; n++) {
#pragma unroll
		for (int k = 0; k < 160; k++) v[k] = v[k] * v[(k + 1) % 160] + 1;
	}
	float sum = 0;
#pragma unroll
	for (int k = 0; k < 160; k++) sum += v[k] * k;
	if (sum == 12345) x[threadIdx.x] = sum;
	x[threadIdx.x] += 1;
}`

const withoutNVRTC = "without NVRTC on the machine: the number of registers is the compiler's"

var isNVRTC = sync.OnceValue(func() bool {
	_, err := cudacc.OpenNVRTC()
	return err == nil
})

func kernelProgram(name string, gpu outcome, text string, l launched) program {
	return program{name: "kernel-" + name, area: "kernels", devices: 1, gpu: gpu, text: text, run: l.run}
}

// withNVRTC returns a program whose mistake virtual devices find if NVRTC is installed.
func withNVRTC(name, text string, l launched) program {
	p := kernelProgram(name, fails, text, l)
	if !isNVRTC() {
		p.forgiven = withoutNVRTC
	}
	return p
}

func forgivenProgram(name string, gpu outcome, why string, l launched) program {
	p := kernelProgram(name, gpu, "", l)
	p.forgiven = why
	return p
}

var kernelPrograms = []program{
	kernelProgram("correct", succeeds, "", launched{cuda: plain}),
	withNVRTC("registers", "1024 threads of a block: at most", launched{cuda: live, blocks: 1, threads: 1024}),
	kernelProgram("launch-bounds", fails, "512 threads of a block: at most 128", launched{blocks: 2, threads: 512,
		cuda: `extern "C" __global__ void __launch_bounds__(128) f(float* x) { int i = blockIdx.x * blockDim.x + threadIdx.x; x[i] += 1; }`}),
	kernelProgram("static-plus-dynamic-shared", fails, "bytes of dynamic shared memory: a block has at most", launched{shared: 200000,
		cuda: head + `__shared__ float s[10000]; extern __shared__ float d[]; s[threadIdx.x] = x[i]; d[threadIdx.x] = s[threadIdx.x]; x[i] = d[threadIdx.x] + 1; }`}),
	kernelProgram("missing-dynamic-shared", fails, "declares dynamic shared memory",
		launched{cuda: head + `extern __shared__ float d[]; d[threadIdx.x + 100000] = x[i]; __syncthreads(); x[i] = d[threadIdx.x + 100000] + 1; }`}),
	kernelProgram("local-600k", fails, "CUDA_ERROR_INVALID_VALUE",
		launched{cuda: head + `float v[150000]; for (int k = 0; k < 150000; k++) v[(k * 7 + i) % 150000] = x[i] + k; x[i] = v[(int)x[0] + i * 7 % 150000] * 0 + x[i] + 1; }`}),
	kernelProgram("local-400k", succeeds, "",
		launched{cuda: head + `float v[100000]; v[(i * 7) % 100000] = x[i]; x[i] = v[(i * 7) % 100000] + 1; }`}),
	kernelProgram("grid-too-small", wrongData, "is the grid too small?", launched{cuda: plain, blocks: 2}),
	kernelProgram("syntax-error", fails, "NVRTC_ERROR_COMPILATION", launched{cuda: head + `x[i] += 1 }`}),
	kernelProgram("bad-option", fails, "NVRTC_ERROR_INVALID_OPTION", launched{cuda: plain, options: []string{"--no-such-option"}}),
	kernelProgram("missing-header", fails, "NVRTC_ERROR_COMPILATION", launched{cuda: "#include \"no/such_header.h\"\n" + plain}),
	kernelProgram("trap", fails, "a trap", launched{cuda: head + `if (i == 1000) __trap(); x[i] += 1; }`}),
	kernelProgram("out-of-bounds", fails, "outside of its arguments", launched{cuda: head + `x[i] += 1; if (i == 5) x[i + (1 << 27)] = 1; }`}),
	kernelProgram("float4-misaligned", fails, "want a multiple of 16 bytes", launched{offset: 1, blocks: 1, threads: 1, elements: 4,
		cuda: `extern "C" __global__ void f(float4* x) { float4 v = *x; v.x += 1; v.y += 1; v.z += 1; v.w += 1; *x = v; }`}),
	kernelProgram("float4-cast-misaligned", fails, "misaligned", launched{offset: 1, blocks: 1, threads: 1, elements: 4,
		cuda: `extern "C" __global__ void f(float* x) { float4* p = (float4*)x; float4 v = *p; v.x += 1; v.y += 1; v.z += 1; v.w += 1; *p = v; }`}),
	kernelProgram("not-extern-c", fails, `not extern "C"`, launched{cuda: `__global__ void f(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }`}),
	kernelProgram("misspelled", fails, "the source has no kernel f", launched{cuda: `extern "C" __global__ void g(double* x) { x[blockIdx.x * blockDim.x + threadIdx.x] += 1; }`}),
	kernelProgram("typedef-scalar", fails, `"real a" in the source`, launched{params: []kernel.Param{kernel.F32}, args: []kernel.Arg{kernel.Scalar[float32](1)},
		cuda: `typedef double real; extern "C" __global__ void f(float* x, real a) { x[blockIdx.x * blockDim.x + threadIdx.x] += a; }`}),
	{name: "kernel-occupancy-static-shared", area: "kernels", devices: 1, gpu: succeeds, run: func(r *run) error {
		_, _, k, err := launched{cuda: head + `__shared__ float s[10000]; s[threadIdx.x] = x[i]; __syncthreads(); x[i] = s[255 - threadIdx.x]; }`}.prepare(r)
		if err != nil {
			return err
		}
		if n, err := k.Occupancy(128, 0); err != nil || n != 5 {
			return wrong("%d blocks on a multiprocessor: want 5 (%v)", n, err)
		}
		return nil
	}},
	{name: "graph-update-kernel-cooperative", area: "kernels", devices: 1, gpu: fails, text: "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", run: func(r *run) error {
		l := launched{cuda: plain}
		s, x, k, err := l.prepare(r)
		if err != nil {
			return err
		}
		var execs [2]*graph.Exec
		for i, launch := range []func(*stream.Stream, kernel.Grid, ...kernel.Arg) error{k.Launch, k.LaunchCooperative} {
			if execs[i], err = graph.Capture([]*stream.Stream{s}, func() error { return launch(s, l.grid(), kernel.Ptr(x)) }, nil); err != nil {
				return err
			}
		}
		return execs[0].Update(execs[1])
	}},
	forgivenProgram("grid-barrier-too-many-blocks", hangs, "blocks that wait for each other: virtual devices and g++ run a block after the other", launched{
		blocks: 100000, threads: 1024, cuda: `__device__ unsigned arrived;
extern "C" __global__ void f(float* x) {
	if (threadIdx.x == 0) { atomicAdd(&arrived, 1u); while (atomicAdd(&arrived, 0u) < gridDim.x) ; }
	__syncthreads();
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < 1024) x[i] += 1;
}`}),
}
