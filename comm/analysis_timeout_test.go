package comm_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/nccl"
)

// A limitedExchange limits each wait for a request, as the store of a job does.
type limitedExchange struct{ *testgpu.Exchange }

func (b limitedExchange) Get(ctx context.Context, key string) ([]byte, error) {
	if strings.HasSuffix(key, "dump/wanted") {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, shortTimeout/100)
		defer cancel()
	}
	return b.Exchange.Get(ctx, key)
}

// Set replaces a report of a rank's progress, as the store of a job does.
func (b limitedExchange) Set(ctx context.Context, key string, value []byte) error {
	if strings.Contains(key, "progress/") {
		_, _ = b.Delete(ctx, key)
	}
	return b.Exchange.Set(ctx, key, value)
}

// joinLimited returns a group of one rank for each device over exchanges whose waits are limited.
func joinLimited(t *testing.T, devs []*device.Device, limit time.Duration) []*comm.Group {
	t.Helper()
	gs, errs := joinBy(t, devs, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) {
		return limitedExchange{b}, &comm.Config{NCCL: &nccl.Config{Timeout: limit}}
	})
	require.NoError(t, errors.Join(errs...))
	return gs
}

// The error of a timeout has the verdict, also if the rank that is behind has waited for a request longer
// than its store permits.
func TestTimeoutHasTheVerdict(t *testing.T) {
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		gs := joinLimited(t, devs, shortTimeout)
		xs, _ := shards(t, gs[0], 8)
		err := comm.AllReduce(gs[0], comm.Sum, xs...)
		if err == nil {
			err = gs[0].Wait(testgpu.Context(t))
		}
		require.ErrorAs(t, err, new(*nccl.TimeoutError))
		require.ErrorContains(t, err, "the flight recorders of the ranks say: Rank 1 ")
		require.ErrorContains(t, err, "has not issued collective 1 (all_reduce(8 x Float, sum))")
	})
}

// Ranks outside the group are not asked, so they are not said to be silent: ranks 0 and 1 compare a
// group of their own, while all three are in the world group.
func TestVerdictOfASubgroup(t *testing.T) {
	late := errors.New("late")
	for name, hangs := range map[string]bool{"subgroup hangs": true, "only the world group hangs": false} {
		t.Run(name, func(t *testing.T) {
			gs := joinLimited(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), time.Minute)
			issuers := []*comm.Group{gs[0], gs[1]}
			sub := splitPair(t, gs)
			if hangs {
				issuers = append(issuers, sub)
			}
			for _, g := range issuers {
				xs, _ := shards(t, g, 8)
				before := g.Communicator(0).Progress().Issued.Record   // of the group's creation
				go func() { _ = comm.AllReduce(g, comm.Sum, xs...) }() // waits for the ranks that do not come
				require.Eventually(t, func() bool { return g.Communicator(0).Progress().Issued.Record > before }, time.Minute, time.Millisecond)
			}
			err := comm.Analyzed(testgpu.Context(t), sub, 2*time.Minute, late)
			if !hangs {
				require.Equal(t, late, err)
				return
			}
			require.ErrorContains(t, err, "Rank 1 ")
			require.ErrorContains(t, err, "(all_reduce(8 x Float, sum)) of split")
			require.NotContains(t, err.Error(), "rank 2")
		})
	}
}

// splitPair returns rank 0's group of ranks 0 and 1.
func splitPair(t *testing.T, gs []*comm.Group) *comm.Group {
	t.Helper()
	subs := make([][]*comm.Group, len(gs))
	groups.Each(t, gs, func(i int, g *comm.Group) (err error) {
		subs[i], err = g.Split(testgpu.Context(t), []int{i / 2}, nil)
		return err
	})
	t.Cleanup(func() { atOnce(len(subs), func(i int) error { return subs[i][0].Close() }) })
	return subs[0][0]
}
