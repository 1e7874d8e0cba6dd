package conformance

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
)

func TestMain(m *testing.M) {
	if os.Getenv(envRank) != "" {
		runRank()
		return
	}
	if name := os.Getenv(caseVariable); name != "" {
		programMain(name)
		return
	}
	virtualtest.Main(m)
}

// Every backend passes the same suite.
func TestBackends(t *testing.T) {
	for _, name := range []string{gpu.Virtual, gpu.CUDA} {
		t.Run(name, func(t *testing.T) {
			s := open(t, name)
			t.Run("driver", func(t *testing.T) { testDriver(t, s.Driver) })
			t.Run("kernels", func(t *testing.T) { testKernels(t, s.Driver, imageFor(s)) })
			t.Run("nccl", func(t *testing.T) {
				// NCCL answers for a single rank without looking at most of what it
				// is given.
				if n, _ := s.Driver.DeviceGetCount(); n < 2 {
					skip(t, 2, n)
				}
				api, err := s.NCCL()
				require.NoError(t, err)
				testNCCL(t, s.Driver, api)
			})
			t.Run("cublas", func(t *testing.T) {
				api, err := s.CUBLAS()
				require.NoError(t, err)
				testCUBLAS(t, s.Driver, api)
			})
			t.Run("cublaslt", func(t *testing.T) {
				api, err := s.CUBLASLt()
				require.NoError(t, err)
				testCUBLASLt(t, s.Driver, api)
			})
			t.Run("cufile", func(t *testing.T) {
				api, err := s.CuFile()
				if err != nil {
					t.Skip(err) // files reach the devices without it
				}
				testCuFile(t, s.Driver, api)
			})
			if s.Machine != nil {
				require.Empty(t, s.Machine.Reports())
			}
		})
	}
}

func imageFor(s *gpu.Backend) []byte {
	if s.Machine == nil {
		return []byte(storePTX)
	}
	return s.Machine.ModuleImage([]machine.Kernel{store})
}

// store is the kernel of storePTX.
var store = machine.Kernel{Name: "store", Params: []machine.Param{machine.PtrParam, machine.Uint32Param},
	Func: func(k *machine.KernelCall) {
		machine.WriteOf[uint32](k, k.Ptr(0), 1)[0] = uint32(k.Bits(1, machine.Uint32Param))
	}}

func skip(t *testing.T, want int, have int32) {
	t.Helper()
	if n, _ := env.RequireGPU.Int(); n >= want {
		t.Fatalf("%s=%d, but there are %d GPUs", env.RequireGPU.Name, n, have)
	}
	t.Skipf("needs %d GPUs, there are %d", want, have)
}

func open(t *testing.T, name string) *gpu.Backend {
	t.Helper()
	s, err := gpu.OpenBackend(&gpu.BackendConfig{Backend: name})
	if err == nil || name == gpu.Virtual {
		require.NoError(t, err)
		return s
	}
	if n, _ := env.RequireGPU.Int(); n > 0 {
		t.Fatalf("%s=%d, but: %v", env.RequireGPU.Name, n, err)
	}
	t.Skip("needs a GPU: ", err)
	return nil
}

// Virtual devices of any number pass the suite.
func TestMachines(t *testing.T) {
	counts := []int{1, 2, 3, 4}
	if testhost.On {
		counts = []int{3}
	}
	for _, devices := range counts {
		t.Run(fmt.Sprintf("devices=%d", devices), func(t *testing.T) {
			m, err := gpu.NewVirtual(&gpu.VirtualConfig{Config: machine.Config{Devices: devices}})
			require.NoError(t, err)
			t.Logf("seed %#x", m.Seed())
			t.Run("Driver", func(t *testing.T) { testDriver(t, m.Driver()) })
			t.Run("Kernels", func(t *testing.T) { testKernels(t, m.Driver(), m.ModuleImage([]machine.Kernel{store})) })
			t.Run("CUBLAS", func(t *testing.T) { testCUBLAS(t, m.Driver(), m.CUBLAS()) })
			t.Run("CUBLASLt", func(t *testing.T) { testCUBLASLt(t, m.Driver(), m.CUBLASLt()) })
			t.Run("NCCL", func(t *testing.T) { testNCCL(t, m.Driver(), m.NCCL()) })
			t.Run("CuFile", func(t *testing.T) { testCuFile(t, m.Driver(), m.CuFile()) })
			require.Empty(t, m.Reports())
			for d := range cudadrv.Device(devices) {
				require.Empty(t, m.Explain(d))
			}
		})
	}
}

// A driver whose host waits for each operation passes the suite.
func TestBlocking(t *testing.T) {
	m, err := machine.New(&machine.Config{Devices: 2, Blocking: true})
	require.NoError(t, err)
	testDriver(t, m.Driver())
	require.Empty(t, m.Reports())
}
