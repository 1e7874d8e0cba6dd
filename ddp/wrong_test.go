package ddp_test

import (
	"errors"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A wrongStep is a reducer with two gradients of four elements, and the errors of its steps.
type wrongStep struct {
	g     *comm.Group
	s     *stream.Stream
	grads []memory.Slice[float32]
	red   *ddp.Reducer
	errs  []error
}

// wrongSteps runs three steps on a group of one process. before may spoil step 1.
func wrongSteps(g *comm.Group, cfg ddp.ReducerConfig, before func(w *wrongStep) error) (w *wrongStep, err error) {
	w = &wrongStep{g: g, s: g.Stream(0)}
	for range 2 {
		x, err := memory.MakeFrom(w.s, make([]float32, 4))
		if err != nil {
			return w, err
		}
		defer x.Close()
		w.grads = append(w.grads, x)
	}
	cfg.Op = new(comm.Sum)
	if w.red, err = ddp.NewReducer(g, [][]memory.Slice[float32]{w.grads}, &cfg); err != nil {
		return w, err
	}
	defer w.red.Close()
	for step := range 3 {
		for j, x := range w.grads {
			if err := x.CopyFrom(w.s, []float32{1, 2, 3, float32(j)}); err != nil && !errors.Is(err, device.ErrClosed) {
				return w, err
			}
		}
		if step == 1 {
			if err := before(w); err != nil {
				return w, err
			}
		}
		var failed error
		for j := range w.grads {
			failed = errors.Join(failed, w.red.Ready(w.s, 1-j))
		}
		w.errs = append(w.errs, errors.Join(failed, w.red.Finish(w.s)))
	}
	return w, nil
}

// wrongOnRank1 runs the steps on two processes, of which rank 1 spoils one, after both have ended
// the step before.
func wrongOnRank1(t *testing.T, devs []*device.Device, cfg ddp.ReducerConfig, spoil func(w *wrongStep) error) [2]*wrongStep {
	t.Helper()
	var ws [2]*wrongStep
	ended := make(chan struct{}) // closed if rank 0 has ended the step before
	errs := processes(t, devs, func(g *comm.Group) (err error) {
		ws[g.Rank()], err = wrongSteps(g, cfg, func(w *wrongStep) error {
			if g.Rank() == 0 {
				close(ended)
				return nil
			}
			select {
			case <-ended:
				return spoil(w)
			case <-testgpu.Context(t).Done():
				return errors.New("rank 0 has not ended its step")
			}
		})
		return err
	})
	require.NoError(t, errors.Join(errs...))
	return ws
}

// A number that is not finite on one rank is an error on both, which names the rank and the
// gradient, and the next step is right.
func TestNumberOfOneRankThatIsNotFinite(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			for _, bytes := range []int{16, 0} {
				cfg := ddp.ReducerConfig{Verify: true, BucketBytes: bytes, FirstBucketBytes: bytes}
				ws := wrongOnRank1(t, devs, cfg, func(w *wrongStep) error {
					return w.grads[0].Slice(3, 4).CopyFrom(w.s, []float32{float32(bad)})
				})
				for rank, w := range ws {
					require.NoError(t, errors.Join(w.errs[0], w.errs[2]), "rank %d", rank)
					require.ErrorContains(t, w.errs[1], "on rank 1 an element of gradients 0", "rank %d", rank)
					require.ErrorContains(t, w.errs[1], "is infinite or NaN: skip the update on all ranks")
				}
			}
		}
	})
}

// A gradient that one rank has closed between two steps is an error on both.
func TestGradientThatOneRankHasClosed(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ws := wrongOnRank1(t, devs, ddp.ReducerConfig{Verify: true}, func(w *wrongStep) error { return w.grads[1].Close() })
		for rank, w := range ws {
			require.NoError(t, w.errs[0])
			for _, err := range w.errs[1:] {
				require.Error(t, err, "rank %d", rank)
				require.ErrorContains(t, err, "gradient 1", "rank %d", rank)
			}
		}
		require.ErrorIs(t, ws[1].errs[1], device.ErrClosed)
		require.ErrorContains(t, ws[0].errs[1], "rank 1")
	})
}

// A hook whose result does not fit in a later step breaks the group, so that no rank waits or
// takes a step that the others do not.
func TestHookOfWrongSizesLater(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		limitNCCL(t, devs)
		var wrong [2]bool // by rank
		gs := [2]*comm.Group{}
		hook := hookFunc(func(b *ddp.Bucket) ([]tensor.Tensor, error) {
			rank := b.Group.Rank()
			gs[rank] = b.Group
			if err := b.AllReduce(); err != nil || !wrong[rank] {
				return nil, err
			}
			x, err := b.Flat[0].Narrow(0, 0, 3)
			return []tensor.Tensor{x}, err
		})
		ws := wrongOnRank1(t, devs, ddp.ReducerConfig{Hook: hook}, func(w *wrongStep) error { wrong[1] = true; return nil })
		require.ErrorContains(t, ws[1].errs[1], "it returned 3 elements for local rank 0: want the")
		for rank, w := range ws {
			require.NoError(t, w.errs[0])
			require.ErrorIs(t, errors.Join(w.errs[1], w.errs[2], gs[rank].Wait(testgpu.Context(t))), comm.ErrBroken, "rank %d", rank)
		}
	})
}
