package fabric_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// A member is one rank with its stream.
type member struct {
	*fabric.Rank
	s *stream.Stream
}

var newStream = streamtest.NewStream

// openBy opens a rank on each device. by returns the exchange and the configuration of a rank that has a seat.
func openBy(t testing.TB, ctx context.Context, devs []*device.Device, by func(i int, s *stream.Stream, seat collective.Exchange) (collective.Exchange, *fabric.Config)) ([]member, []error) {
	t.Helper()
	seats, group, errs := fabric.NewTable(len(devs)), make([]member, len(devs)), make([]error, len(devs))
	var wg sync.WaitGroup
	for i, dev := range devs {
		s := newStream(t, dev)
		exchange, cfg := by(i, s, seats.Seat(i))
		wg.Go(func() {
			r, err := fabric.Open(ctx, s, i, len(devs), exchange, cfg)
			group[i], errs[i] = member{r, s}, err
		})
	}
	wg.Wait()
	return group, errs
}

// openAll opens a rank on each device, and returns what came of it.
func openAll(t testing.TB, devs []*device.Device, cfg *fabric.Config) ([]member, error) {
	t.Helper()
	group, errs := openBy(t, testgpu.Context(t), devs, func(_ int, _ *stream.Stream, seat collective.Exchange) (collective.Exchange, *fabric.Config) {
		return seat, cfg
	})
	return group, errors.Join(errs...)
}

// atOnce runs f for all ranks, each on a goroutine of its own.
func atOnce(group []member, f func(i int, m member)) {
	var wg sync.WaitGroup
	for i, m := range group {
		wg.Go(func() { f(i, m) })
	}
	wg.Wait()
}

// seeded returns random numbers, and logs their seed.
func seeded(t testing.TB) *rand.Rand {
	seed := rand.Uint64()
	t.Log("seed ", seed)
	return rand.New(rand.NewPCG(seed, 0))
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
