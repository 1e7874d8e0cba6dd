package device_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// Virtual devices have every library but a compiler, and each says its version.
func TestLibrariesOfVirtualDevices(t *testing.T) {
	s := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
	versions := map[string]string{}
	for _, l := range s.Libraries() {
		require.NoError(t, l.Err, l.Name)
		require.Equal(t, "built in", l.Path, l.Name)
		versions[l.Name] = l.Version
	}
	require.Len(t, versions, 5)
	require.Equal(t, "2.28.3", versions["NCCL"])
	require.Equal(t, "1.15", versions["cuFile"])
	require.Contains(t, versions["CUDA driver"], "CUDA ")
	require.Contains(t, versions, "cuBLAS")
	require.Equal(t, "13.0.2", versions["cuBLASLt"])
}
