package ddp_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// Buckets follow the order in which gradients became ready.
func TestRebuild(t *testing.T) {
	cases(t, func(t *testing.T, g *comm.Group, flat bool, cfg ddp.ReducerConfig, r *rand.Rand) {
		tr := newTrainer(t, g, flat, &cfg)
		require.ErrorContains(t, tr.red.Rebuild(testgpu.Context(t)), "there was no step yet")
		for step := range 4 {
			order := r.Perm(len(gradLens))
			tr.step(step, all(g.Size()), order)
			require.NoError(t, tr.red.Rebuild(testgpu.Context(t)))
			for _, bucket := range tr.red.BucketGrads() {
				require.ElementsMatch(t, order[:len(bucket)], bucket)
				order = order[len(bucket):]
			}
			require.Empty(t, order)
		}
	})
}

// The order is rank 0's, whatever that of the others was.
func TestRebuildTakesRank0sOrder(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		lens := []int{3, 5, 7}
		buckets := make([][][]int, 2)
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, b := range testgpu.Exchanges(t.Context(), 2) {
			wg.Go(func() {
				buckets[i], errs[i] = rebuilt(testgpu.Context(t), b, devs[i], lens, [][]int{{1, 0, 2}, {2, 1, 0}}[i])
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, [][]int{{1}, {0}, {2}}, buckets[0])
		require.Equal(t, buckets[0], buckets[1])
	})
}

// rebuilt runs a step in an order and one as the resulting buckets are
// ordered.
func rebuilt(ctx context.Context, b comm.Rendezvous, dev *device.Device, lens, order []int) (buckets [][]int, err error) {
	g, err := comm.Join(ctx, b, dev, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.Shutdown(ctx)) }()
	s := g.Stream(0)
	whole, grads, err := memory.MakeFlat[float32](s, lens...)
	if err != nil {
		return nil, err
	}
	defer whole.Close()
	if err := whole.Zero(s); err != nil {
		return nil, err
	}
	red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, &ddp.ReducerConfig{BucketBytes: 1})
	if err != nil {
		return nil, err
	}
	defer red.Close()
	for range 2 {
		for _, j := range order {
			if err := red.Ready(s, j); err != nil {
				return nil, err
			}
		}
		if err := errors.Join(red.Finish(s), red.Rebuild(ctx)); err != nil {
			return nil, err
		}
	}
	return red.BucketGrads(), nil
}
