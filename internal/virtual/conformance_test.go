package virtual

import (
	"testing"

	"github.com/gochorus/chorus/internal/conformance"
	"github.com/stretchr/testify/require"
)

func TestConformance(t *testing.T) {
	for _, devices := range []int{1, 2, 3, 4} {
		m, err := New(&Config{Devices: devices})
		require.NoError(t, err)
		t.Logf("seed %#x", m.Seed())
		conformance.NCCL(t, m.Driver(), m.NCCL())
		require.Empty(t, m.Reports())
		for d := range m.devices {
			require.Empty(t, m.devices[d].why)
		}
	}
}
