package virtual

import (
	"fmt"
	"testing"

	"github.com/gochorus/chorus/internal/conformance"
	"github.com/stretchr/testify/require"
)

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
			t.Run("CUBLAS", func(t *testing.T) { conformance.CUBLAS(t, m.Driver(), m.CUBLAS()) })
			t.Run("NCCL", func(t *testing.T) { conformance.NCCL(t, m.Driver(), m.NCCL()) })
			require.Empty(t, m.Reports())
			for d := range m.devices {
				require.Empty(t, m.devices[d].why)
			}
		})
	}
}
