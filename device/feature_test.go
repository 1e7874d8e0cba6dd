package device_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

func TestFeatures(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		major, minor, err := d.Capability()
		require.NoError(t, err)
		p, err := d.Properties()
		require.NoError(t, err)
		require.Equal(t, []int{p.Major, p.Minor}, []int{major, minor})
		arch, err := d.Arch()
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("sm_%d%d", major, minor), arch)
		for _, c := range []struct {
			major, minor int
			want         bool
		}{
			{major, minor, true}, {major, minor + 1, false}, {major + 1, 0, false},
			{major - 1, 9, true}, {5, 0, true}, {99, 9, false},
		} {
			f := device.Feature{Name: "tea", Major: c.major, Minor: c.minor}
			ok, err := d.Supports(f)
			require.NoError(t, err)
			require.Equal(t, c.want, ok, "%d.%d on %s", c.major, c.minor, arch)
			err = d.Require(f)
			if c.want {
				require.NoError(t, err)
				continue
			}
			u, isUnsupported := errors.AsType[*device.UnsupportedError](err)
			require.True(t, isUnsupported)
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.Equal(t, "tea", u.Feature)
			require.ErrorContains(t, err, fmt.Sprintf("needs a device of sm_%d%d or newer; this machine has %s of %s", c.major, c.minor, d, arch))
		}
	})
	// A virtual device answers as an H200 does.
	d := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	for _, f := range []device.Feature{device.TensorCores, device.BFloat16, device.TF32, device.Float8} {
		require.NoError(t, d.Require(f))
	}
}

func TestCurrent(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ctx := context.Background()
	require.Nil(t, device.Current(ctx))
	outer := device.NewContext(ctx, devs[0])
	inner := device.NewContext(outer, devs[1])
	require.Same(t, devs[1], device.Current(inner))
	require.Same(t, devs[0], device.Current(outer), "the outer context is as it was")

	s, err := stream.New(devs[1], nil)
	require.NoError(t, err)
	defer s.Close()
	work := stream.NewContext(outer, s)
	require.Same(t, devs[1], device.Current(work), "a stream tells its device")
	require.Same(t, s, stream.Current(work, device.Current(work)))
	require.Same(t, stream.Default(devs[0]), stream.Current(work, devs[0]))
	back := device.NewContext(work, devs[0])
	require.Same(t, devs[0], device.Current(back))
	require.Same(t, s, stream.Current(back, devs[1]), "each device keeps its stream")
}
