package fabric_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

var errEnough = errors.New("enough")

// If Open ends with its context, the memory of a rank stays until the other ranks' copies to it have ended. Virtual devices report an
// earlier reuse as a race.
func TestOpenIsCancelledBeforeTheCopies(t *testing.T) {
	for name, cfg := range map[string]*fabric.Config{"kernels": {Bytes: 1 << 16}, "experts": {Slot: 1 << 16}, "pushes": &pushes} {
		t.Run(name, func(t *testing.T) {
			devs := testgpu.VirtualRanks(t, 3)
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			goOn := make(chan struct{})
			group, errs := openBy(t, ctx, devs, func(i int, s *stream.Stream, seat collective.Exchange) (collective.Exchange, *fabric.Config) {
				calls := 0
				return func(ctx context.Context, mine []byte) ([][]byte, error) {
					said, err := seat(ctx, mine)
					if calls++; calls == 1 { // the copies come next
						err = errors.Join(err, s.Callback(func() { <-goOn }))
						if i == 0 {
							time.AfterFunc(20*time.Millisecond, func() { cancel(errEnough) })
						}
					}
					return said, err
				}, cfg
			})
			for _, err := range errs {
				require.ErrorIs(t, err, errEnough)
			}
			require.Zero(t, fabric.Scratches())
			later := openLater(t, devs, cfg) // reuses memory that is free
			close(goOn)
			for _, m := range group {
				require.NoError(t, m.s.Sync(testgpu.Context(t)))
			}
			closeAll(t, later())
		})
	}
}

// openLater opens another group on streams of its own.
func openLater(t *testing.T, devs []*device.Device, cfg *fabric.Config) func() []member {
	var group []member
	var err error
	var all sync.WaitGroup
	all.Go(func() { group, err = openAll(t, devs, cfg) })
	return func() []member {
		all.Wait()
		require.NoError(t, err)
		return group
	}
}

// attempts opens and closes a rank many times, with a context that ends after a random time, and then opens it without one and
// reduces.
func attempts(t *testing.T, s *stream.Stream, rank, ranks, n int, seed uint64, cfg *fabric.Config, seat func(attempt int) collective.Exchange) {
	c := rand.New(rand.NewPCG(seed, uint64(rank)))
	ended := 0
	for k := range n {
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Duration(c.Int64N(int64(12*time.Millisecond))), errEnough)
		r, err := fabric.Open(ctx, s, rank, ranks, seat(2*k), cfg)
		cancel()
		if err != nil {
			ended++
		} else {
			require.NoError(t, r.Close())
		}
		_, err = seat(2*k+1)(testgpu.Context(t), nil) // the attempt is over for all ranks
		require.NoError(t, err)
	}
	require.NotZero(t, ended)
	r, err := fabric.Open(testgpu.Context(t), s, rank, ranks, seat(2*n), cfg)
	require.NoError(t, err)
	if !cfg.Pushes && cfg.Slot == 0 {
		x := makeOf[float32](t, s, 1000)
		require.NoError(t, x.Zero(s))
		require.NoError(t, fabric.AllReduce(r, s, x, x, collective.Sum, nil))
		require.NoError(t, s.Sync(testgpu.Context(t)))
	}
	_, err = seat(2*n+1)(testgpu.Context(t), nil)
	require.NoError(t, err)
	require.NoError(t, r.Close())
	require.Eventually(t, func() bool { return fabric.Scratches() == 0 }, time.Minute, time.Millisecond)
}

// Ranks that give up at any time do not disturb the others, nor later groups.
func TestOpenIsCancelledAtAnyTime(t *testing.T) {
	for name, cfg := range map[string]*fabric.Config{"kernels": {Bytes: 1 << 16}, "experts": {Slot: 1 << 16}, "pushes": &pushes} {
		t.Run(name, func(t *testing.T) {
			devs := testgpu.VirtualRanks(t, 3)
			const n = 60
			tables := make([]*fabric.Table, 2*n+2)
			for i := range tables {
				tables[i] = fabric.NewTable(len(devs))
			}
			var all sync.WaitGroup
			for i, dev := range devs {
				s := newStream(t, dev)
				all.Go(func() {
					attempts(t, s, i, len(devs), n, 1, cfg, func(k int) collective.Exchange { return tables[k].Seat(i) })
				})
			}
			all.Wait()
		})
	}
}
