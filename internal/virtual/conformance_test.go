package virtual

import (
	"fmt"
	"testing"

	"github.com/gochorus/chorus/internal/conformance"
	"github.com/stretchr/testify/require"
)

// store is conformance.StorePTX.
var store = Kernel{Name: "store", Params: []Param{PtrParam, Uint32Param},
	Func: func(k *KernelCall) { WriteOf[uint32](k, k.Ptr(0), 1)[0] = k.Uint32(1) }}

func TestConformance(t *testing.T) {
	counts := []int{1, 2, 3, 4}
	if raceEnabled {
		counts = []int{3}
	}
	for _, devices := range counts {
		t.Run(fmt.Sprintf("devices=%d", devices), func(t *testing.T) {
			m, err := New(&Config{Devices: devices})
			require.NoError(t, err)
			t.Logf("seed %#x", m.Seed())
			t.Run("Driver", func(t *testing.T) { conformance.Driver(t, m.Driver()) })
			t.Run("Kernels", func(t *testing.T) { conformance.Kernels(t, m.Driver(), m.ModuleImage([]Kernel{store})) })
			t.Run("CUBLAS", func(t *testing.T) { conformance.CUBLAS(t, m.Driver(), m.CUBLAS()) })
			t.Run("NCCL", func(t *testing.T) { conformance.NCCL(t, m.Driver(), m.NCCL()) })
			t.Run("CuFile", func(t *testing.T) { conformance.CuFile(t, m.Driver(), m.CuFile()) })
			require.Empty(t, m.Reports())
			for d := range m.devices {
				require.Empty(t, m.devices[d].why)
			}
		})
	}
}
