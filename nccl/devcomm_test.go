package nccl_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
)

// TestDevComm checks arguments and versions. Virtual devices refuse the rest with a reason.
func TestDevComm(t *testing.T) {
	for version, want := range map[string]string{"2.27.3": "NCCL 2.28.3", "2.28.9": "NCCL 2.29.2", "2.29.2": "", newest: ""} {
		t.Run(version, func(t *testing.T) {
			ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: version}))
			c := ranks[0].c
			_, err := c.NewDevComm(testgpu.Context(t), &nccl.DevCommConfig{Bytes: 248, LSABarriers: 16})
			if want != "" {
				var u *device.UnsupportedError
				require.ErrorAs(t, err, &u)
				require.Equal(t, want, u.Need)
				return
			}
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
			require.ErrorContains(t, err, "virtual devices run Go functions in place of CUDA kernels")
			for _, cfg := range []*nccl.DevCommConfig{nil, {}, {Bytes: 5000}, {Bytes: 248, Barriers: -1}, {Bytes: 248, LLA2ASlots: 1 << 21}} {
				_, err := c.NewDevComm(testgpu.Context(t), cfg)
				require.ErrorContains(t, err, "nccl: ncclDevCommCreate on rank 0 of 2: ")
			}
			require.NoError(t, c.Err())
			require.NoError(t, (*nccl.DevComm)(nil).Close())
		})
	}
}

// TestIntParameter reads a number, and logs all parameters.
func TestIntParameter(t *testing.T) {
	t.Setenv("NCCL_ALGO", "ring")
	t.Setenv("NCCL_PROTO", "0x12")
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest})[0]
	v, err := nccl.IntParameter(dev, "NCCL_PROTO")
	require.NoError(t, err)
	require.Equal(t, int64(18), v)
	for _, key := range []string{"NCCL_ALGO", "NCCL_MISSPELT"} {
		_, err = nccl.IntParameter(dev, key)
		require.ErrorIs(t, err, nccl.ErrorInvalidArgument)
	}
	require.NoError(t, nccl.LogParameters(dev))
	old := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: "2.28.3"})[0]
	_, err = nccl.IntParameter(old, "NCCL_PROTO")
	require.ErrorIs(t, errors.Join(err, nccl.LogParameters(old)), errors.ErrUnsupported)
}
