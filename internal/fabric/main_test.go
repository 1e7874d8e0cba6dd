package fabric_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// A member is one rank with its stream.
type member struct {
	*fabric.Rank
	s *stream.Stream
}

func newStream(t testing.TB, dev *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// openAll opens a rank on each device, and returns what came of it.
func openAll(t testing.TB, devs []*device.Device, cfg *fabric.Config) ([]member, error) {
	t.Helper()
	seats := fabric.NewTable(len(devs))
	group := make([]member, len(devs))
	errs := make([]error, len(devs))
	var wg sync.WaitGroup
	for i, dev := range devs {
		s := newStream(t, dev)
		wg.Go(func() {
			r, err := fabric.Open(testgpu.Context(t), s, i, len(devs), seats.Seat(i), cfg)
			group[i], errs[i] = member{r, s}, err
		})
	}
	wg.Wait()
	return group, errors.Join(errs...)
}

// open opens a group, which the end of the test closes.
func open(t testing.TB, devs []*device.Device, cfg *fabric.Config) []member {
	t.Helper()
	group, err := openAll(t, devs, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { closeAll(t, group) })
	return group
}

func closeAll(t testing.TB, group []member) {
	t.Helper()
	for _, m := range group {
		require.NoError(t, m.Close())
	}
}

// each runs fn on virtual devices of these numbers, and on as many GPUs as there are. With
// CHORUS_SHARE_GPUS=yes, ranks share GPUs and virtual devices.
func each(t *testing.T, counts []int, fn func(t *testing.T, devs []*device.Device)) {
	for _, n := range counts {
		t.Run(fmt.Sprint("virtual/", n), func(t *testing.T) {
			fn(t, testgpu.VirtualRanks(t, n))
		})
	}
	for _, n := range []int{2, 4, 8} {
		t.Run(fmt.Sprint("cuda/", n), func(t *testing.T) { fn(t, testgpu.Ranks(t, n)) })
	}
}
