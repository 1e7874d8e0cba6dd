package gemm_test

import (
	"fmt"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// A bench is a stream of one device with memory for products.
type bench struct {
	t   testing.TB
	dev *device.Device
	s   *stream.Stream
	x   [3]memory.Slice[memory.BFloat16Bits] // c, a and b
}

const most = 256 // rows and columns

func newBench(t testing.TB, dev *device.Device) *bench {
	t.Helper()
	b := &bench{t: t, dev: dev}
	var err error
	b.s, err = stream.New(dev, nil)
	require.NoError(t, err)
	for i := range b.x {
		b.x[i], err = memory.Make[memory.BFloat16Bits](b.s, most*most)
		require.NoError(t, err)
		require.NoError(t, b.x[i].Zero(b.s))
	}
	return b
}

func (b *bench) close() {
	for _, x := range b.x {
		require.NoError(b.t, x.Close())
	}
	require.NoError(b.t, b.s.Close())
}

// square returns c, a and b of n rows and columns, of bfloat16.
func (b *bench) square(n int) (m [3]tensor.Tensor) {
	b.t.Helper()
	for i := range m {
		var err error
		m[i], err = tensor.Of(b.x[i].Slice(0, n*n), n, n)
		require.NoError(b.t, err)
	}
	return m
}

func (b *bench) multiply(n int, cfg *tensor.MatMulConfig) error {
	m := b.square(n)
	return tensor.MatMul(b.s, m[0], m[1], m[2], cfg)
}

// counted returns the calls of cuBLAS and cuBLASLt while fn ran.
func (b *bench) counted(fn func()) map[string]int {
	stop := gpu.DeviceOf(b.dev).System().Machine.CountCalls()
	fn()
	calls := map[string]int{}
	for name, n := range stop() {
		if len(name) > 6 && name[:6] == "cublas" {
			calls[name] = n
		}
	}
	return calls
}

// A repeated product makes one call of the library, and one for each address that a
// descriptor has. What was made is destroyed with the stream.
func TestPlansAreKept(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	b := newBench(t, devs[0])
	bias := func(at int) *tensor.MatMulConfig {
		x, err := tensor.Of(b.x[2].Slice(at, at+32), 32)
		require.NoError(t, err)
		return &tensor.MatMulConfig{Bias: x}
	}
	first := b.counted(func() { require.NoError(t, b.multiply(32, nil)) })
	require.Equal(t, map[string]int{"cublasLtCreate": 1, "cublasLtMatmulDescCreate": 1, "cublasLtMatrixLayoutCreate": 4,
		"cublasLtMatmulPreferenceCreate": 1, "cublasLtMatmulPreferenceDestroy": 1, "cublasLtMatmulPreferenceSetAttribute": 5,
		"cublasLtMatmulAlgoGetHeuristic": 1, "cublasLtMatmul": 1}, first)
	again := map[string]int{"cublasLtMatmul": 2}
	require.Equal(t, again, b.counted(func() {
		require.NoError(t, b.multiply(32, nil))
		require.NoError(t, b.multiply(32, &tensor.MatMulConfig{Alpha: new(2.0), Beta: new(1.0)}))
	}))
	require.NoError(t, b.multiply(32, bias(2048)))
	require.NoError(t, b.multiply(64, nil))
	require.Equal(t, again, b.counted(func() {
		require.NoError(t, b.multiply(64, nil))
		require.NoError(t, b.multiply(32, nil))
	}), "several shapes in turns")
	require.Equal(t, map[string]int{"cublasLtMatmulDescSetAttribute": 1, "cublasLtMatmul": 2}, b.counted(func() {
		require.NoError(t, b.multiply(32, bias(4096)))
		require.NoError(t, b.multiply(32, bias(4096)))
	}), "another address of the bias")
	other, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	require.NoError(t, other.WaitStream(b.s))
	calls := b.counted(func() {
		m := b.square(32)
		require.NoError(t, tensor.MatMul(other, m[0], m[1], m[2], nil))
	})
	require.Zero(t, calls["cublasLtMatmulAlgoGetHeuristic"], "the algorithm is the device's: %v", calls)
	require.Zero(t, calls["cublasLtCreate"])
	require.NoError(t, b.s.WaitStream(other))
	closed := b.counted(func() {
		require.NoError(t, other.Close())
		b.close()
	})
	require.Equal(t, map[string]int{"cublasLtMatmulDescDestroy": 4, "cublasLtMatrixLayoutDestroy": 16}, closed)
	require.Equal(t, map[string]int{"cublasLtDestroy": 1}, b.counted(func() { require.NoError(t, devs[0].System().Close()) }))
}

// The number of plans is bounded.
func TestManyShapes(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	calls := b.counted(func() {
		for i := range gemm.MaxPlans + 10 {
			m, err := tensor.Of(b.x[1].Slice(0, i+1), i+1, 1)
			require.NoError(t, err)
			one, err := tensor.Of(b.x[2].Slice(0, 1), 1, 1)
			require.NoError(t, err)
			c, err := tensor.Of(b.x[0].Slice(0, i+1), i+1, 1)
			require.NoError(t, err)
			require.NoError(t, tensor.MatMul(b.s, c, m, one, nil))
		}
	})
	require.Equal(t, gemm.MaxPlans+10, calls["cublasLtMatmulDescCreate"])
	require.Equal(t, gemm.MaxPlans, calls["cublasLtMatmulDescDestroy"])
	require.Equal(t, map[string]int{"cublasLtMatmulDescDestroy": 10, "cublasLtMatrixLayoutDestroy": 40}, b.counted(b.close))
}

// A stream has one workspace, of the configured size, which it frees.
func TestWorkspace(t *testing.T) {
	for config, want := range map[string]int64{"": 32 << 20, ":1024:2:16:8": 2<<20 + 128<<10, ":4096:8": 32 << 20} {
		t.Run(config, func(t *testing.T) {
			t.Setenv(env.CUBLASWorkspaceConfig.Name, config)
			b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
			allocated := func() int64 { n, err := memory.Allocated(b.dev); require.NoError(t, err); return n }
			empty := allocated()
			require.NoError(t, b.multiply(16, nil))
			require.Equal(t, empty, allocated(), "this product needs none")
			for range 2 {
				require.NoError(t, b.multiply(128, nil))
				require.NoError(t, b.multiply(64, nil))
				require.Equal(t, empty+want, allocated())
			}
			n, err := gemm.Workspace(b.dev)
			require.NoError(t, err)
			require.Equal(t, want, n)
			b.close()
			require.Zero(t, allocated())
		})
	}
}

// With too little workspace an algorithm is chosen that needs none; without such an
// algorithm the error says so.
func TestSmallWorkspace(t *testing.T) {
	t.Setenv(env.CUBLASWorkspaceConfig.Name, ":0:0")
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	require.NoError(t, b.multiply(128, nil))
	require.NoError(t, gemm.Replace(b.s, func(api cublasapi.LtAPI) cublasapi.LtAPI { return greedy{api} }))
	err := b.multiply(64, &tensor.MatMulConfig{Epilogue: tensor.ReLU})
	var u *device.UnsupportedError
	require.ErrorAs(t, err, &u)
	require.ErrorContains(t, err, "at most 0 bytes of workspace")
	b.close()
}

// greedy is a library whose algorithms all need a workspace.
type greedy struct{ cublasapi.LtAPI }

func (g greedy) MatmulAlgoGetHeuristic(h cublasapi.LtHandle, o *cublasapi.Operation, p cublasapi.Preference, results []cublasapi.HeuristicResult) (int32, cublasapi.Result) {
	n, r := g.LtAPI.MatmulAlgoGetHeuristic(h, o, p, results)
	for i := range results {
		results[i].WorkspaceSize = 1 << 20
	}
	return n, r
}

func TestWorkspaceConfig(t *testing.T) {
	for _, config := range []string{"4096:8", ":4096", ":4096:8:", ":a:1", ":-1:2", ":99999999999999999999:1", ":1073741824:2", " :1:1"} {
		t.Setenv(env.CUBLASWorkspaceConfig.Name, config)
		b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
		err := b.multiply(16, nil)
		require.ErrorContains(t, err, fmt.Sprintf("%s=%q: want pairs", env.CUBLASWorkspaceConfig.Name, config))
		b.close()
	}
}

// Products that cuBLASLt refuses are cuBLAS's, if it can compute them. A failure of the
// library is an error, and the stream stays usable.
func TestFallback(t *testing.T) {
	b := newBench(t, testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cublasLtMatmulAlgoGetHeuristic#*=CUBLAS_STATUS_NOT_SUPPORTED"}).Devices()[0])
	calls := b.counted(func() {
		require.NoError(t, b.multiply(32, nil))
		require.NoError(t, b.multiply(32, &tensor.MatMulConfig{Beta: new(0.5)}))
	})
	require.Equal(t, 2, calls["cublasGemmEx"], "%v", calls)
	require.Zero(t, calls["cublasLtMatmul"])
	require.Equal(t, calls["cublasLtMatmulDescCreate"], calls["cublasLtMatmulDescDestroy"])
	for name, cfg := range map[string]*tensor.MatMulConfig{
		"epilogue": {Epilogue: tensor.ReLU},
		"split k":  {Settings: &tensor.MatMulSettings{BF16Reduction: tensor.NoSplitK}},
		"library":  {Settings: &tensor.MatMulSettings{Library: tensor.CUBLASLt}},
	} {
		var u *device.UnsupportedError
		require.ErrorAs(t, b.multiply(32, cfg), &u, name)
	}
	require.Equal(t, map[string]int{"cublasDestroy": 1}, b.counted(b.close))

	b = newBench(t, testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cublasLtMatmul#2=CUBLAS_STATUS_EXECUTION_FAILED,cublasLtCreate#1=CUBLAS_STATUS_ALLOC_FAILED"}).Devices()[0])
	require.ErrorContains(t, b.multiply(32, nil), "cublasLtCreate: CUBLAS_STATUS_ALLOC_FAILED")
	require.NoError(t, b.multiply(32, nil))
	require.ErrorContains(t, b.multiply(32, nil), "cublasLtMatmul: CUBLAS_STATUS_EXECUTION_FAILED")
	require.NoError(t, b.multiply(32, nil))
	b.close()
}

// Every failing call of the preparation is an error, leaves nothing behind, and the same
// product succeeds afterwards.
func TestFailedPreparation(t *testing.T) {
	for _, call := range []string{"cublasLtMatmulDescCreate#1", "cublasLtMatmulDescSetAttribute#1", "cublasLtMatmulDescSetAttribute#2", "cublasLtMatrixLayoutCreate#3",
		"cublasLtMatmulPreferenceCreate#1", "cublasLtMatmulPreferenceSetAttribute#2", "cublasLtMatmulAlgoGetHeuristic#1"} {
		b := newBench(t, testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: call + "=CUBLAS_STATUS_INTERNAL_ERROR"}).Devices()[0])
		bias, err := tensor.Of(b.x[2].Slice(4096, 4096+32), 32)
		require.NoError(t, err)
		cfg := &tensor.MatMulConfig{Bias: bias}
		calls := b.counted(func() { require.ErrorContains(t, b.multiply(32, cfg), "CUBLAS_STATUS_INTERNAL_ERROR", call) })
		for _, x := range []string{"cublasLtMatmulDesc", "cublasLtMatrixLayout", "cublasLtMatmulPreference"} {
			failed := 0
			if x+"Create" == call[:len(call)-2] {
				failed = 1
			}
			require.Equal(t, calls[x+"Create"]-failed, calls[x+"Destroy"], "%s: %v", call, calls)
		}
		require.NoError(t, b.multiply(32, cfg), call)
		b.close()
	}
}

// The settings reach the libraries.
func TestLibraries(t *testing.T) {
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	cublas := &tensor.MatMulConfig{Settings: &tensor.MatMulSettings{Library: tensor.CUBLAS}}
	calls := b.counted(func() {
		require.NoError(t, b.multiply(32, cublas))
		require.NoError(t, b.multiply(32, cublas))
	})
	require.Equal(t, map[string]int{"cublasCreate": 1, "cublasSetStream": 1, "cublasSetWorkspace": 1, "cublasGemmEx": 2, "cublasLtCreate": 1}, calls)
	calls = b.counted(func() {
		require.NoError(t, b.multiply(32, &tensor.MatMulConfig{Settings: &tensor.MatMulSettings{Library: tensor.CUBLAS, BF16Reduction: tensor.FullPrecision, SMCarveout: 4}}))
	})
	require.Equal(t, map[string]int{"cublasSetMathMode": 1, "cublasSetSmCountTarget": 1, "cublasGemmEx": 1}, calls)
	calls = b.counted(func() { require.NoError(t, b.multiply(32, cublas)) })
	require.Equal(t, map[string]int{"cublasSetMathMode": 1, "cublasSetSmCountTarget": 1, "cublasGemmEx": 1}, calls)
	calls = b.counted(func() {
		require.NoError(t, b.multiply(32, &tensor.MatMulConfig{Epilogue: tensor.ReLU, Settings: cublas.Settings}))
	})
	require.Equal(t, 1, calls["cublasLtMatmul"], "cuBLAS has no epilogues")
	b.close()
}

// instant is a library whose products do nothing.
type instant struct{ cublasapi.LtAPI }

func (instant) Matmul(cublasapi.LtHandle, cublasapi.MatmulDesc, cublasapi.Scalar, cublasapi.LtMatrix, cublasapi.LtMatrix, cublasapi.Scalar,
	cublasapi.LtMatrix, cublasapi.LtMatrix, *cublasapi.Algo, cudadrv.DevicePtr, uintptr, cudadrv.Stream) cublasapi.Result {
	return cublasapi.Success
}

func (instant) MatmulDescSetAttribute(cublasapi.MatmulDesc, cublasapi.DescAttribute, unsafe.Pointer, uintptr) cublasapi.Result {
	return cublasapi.Success
}

// After the first product of a kind, a product allocates nothing.
func TestProductsAllocateNothing(t *testing.T) {
	if testhost.On {
		t.Skip("the race detector allocates")
	}
	b := newBench(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	for name, run := range b.variants() {
		require.NoError(t, run())
		require.NoError(t, b.s.Sync(testgpu.Context(t)))
		require.NoError(t, gemm.Replace(b.s, func(api cublasapi.LtAPI) cublasapi.LtAPI { return instant{api} }))
		require.Zero(t, testgpu.Allocs(100, func() {
			if err := run(); err != nil {
				t.Fatal(err)
			}
		}), name)
		require.NoError(t, gemm.Replace(b.s, func(api cublasapi.LtAPI) cublasapi.LtAPI { return api.(instant).LtAPI }))
	}
	b.close()
}

// variants has products of several kinds, with tensors that exist.
func (b *bench) variants() map[string]func() error {
	m, big := b.square(32), b.square(128)
	row, err := tensor.Of(b.x[2].Slice(40000, 40032), 32)
	require.NoError(b.t, err)
	other, err := tensor.Of(b.x[2].Slice(41024, 41056), 32)
	require.NoError(b.t, err)
	batch := func(i int) tensor.Tensor {
		x, err := tensor.Of(b.x[i].Slice(0, 4*64*32), 4, 64, 32)
		require.NoError(b.t, err)
		return x
	}
	c, a := batch(0), batch(1)
	settings := &tensor.MatMulSettings{BF16Reduction: tensor.FullPrecision}
	turned, flip := m[2].T(), 0
	return map[string]func() error{
		"plain":     func() error { return tensor.MatMul(b.s, m[0], m[1], m[2], nil) },
		"workspace": func() error { return tensor.MatMul(b.s, big[0], big[1], big[2], nil) },
		"transposed": func() error {
			return tensor.MatMul(b.s, m[0], m[1], turned, &tensor.MatMulConfig{Settings: settings})
		},
		"bias": func() error {
			flip++
			if flip%2 == 0 {
				return tensor.MatMul(b.s, m[0], m[1], m[2], &tensor.MatMulConfig{Bias: row, Epilogue: tensor.GELU})
			}
			return tensor.MatMul(b.s, m[0], m[1], m[2], &tensor.MatMulConfig{Bias: other, Epilogue: tensor.GELU})
		},
		"batch": func() error { return tensor.MatMul(b.s, c, a, m[2], nil) },
	}
}

// BenchmarkEnqueue measures the host's time for a product without the library's.
func BenchmarkEnqueue(b *testing.B) {
	x := newBench(b, testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 1})[0])
	defer x.close()
	require.NoError(b, gemm.Replace(x.s, func(api cublasapi.LtAPI) cublasapi.LtAPI { return instant{api} }))
	for name, run := range x.variants() {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := run(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
