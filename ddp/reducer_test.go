package ddp_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var gradLens = []int{5, 1000, 3, 0, 20_000, 257, 1}

// backward is one local rank that makes gradients on its own stream.
type backward struct {
	s     *stream.Stream
	grads []memory.Slice[float32]
}

func backwards(t *testing.T, g *comm.Group, flat bool) []backward {
	t.Helper()
	bs := make([]backward, g.Locals())
	for i := range bs {
		s, err := stream.New(g.Device(i), nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		bs[i].s = s
		if flat {
			all, parts, err := memory.MakeFlat[float32](s, gradLens...)
			require.NoError(t, err)
			require.NoError(t, all.Zero(s))
			t.Cleanup(func() { require.NoError(t, all.Close()) })
			bs[i].grads = parts
			continue
		}
		for _, n := range gradLens {
			x, err := memory.Make[float32](s, n)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, x.Close()) })
			bs[i].grads = append(bs[i].grads, x)
		}
	}
	return bs
}

// value is element k of gradient j of rank i in a step: whole numbers, so that
// sums are exact, and sums over 2 ranks are even, so that means are too.
func value(step, i, j, k int) float32 { return float32(2 * ((step*7+i*3+j*5+k)%200 - 100)) }

func TestReducer(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, flat := range []bool{true, false} {
			for _, bytes := range []int{1, 4096, 64 << 10, 0} {
				for _, op := range []comm.Op{comm.Sum, comm.Avg} {
					t.Run(fmt.Sprintf("flat=%v/bucket=%d/%v", flat, bytes, op), func(t *testing.T) {
						testReducer(t, local(t, devs), flat, bytes, op)
					})
				}
			}
		}
	})
}

func testReducer(t *testing.T, g *comm.Group, flat bool, bytes int, op comm.Op) {
	bs := backwards(t, g, flat)
	lists := make([][]memory.Slice[float32], len(bs))
	for i := range bs {
		lists[i] = bs[i].grads
	}
	red, err := ddp.NewReducer(g, lists, &ddp.ReducerConfig{BucketBytes: bytes, FirstBucketBytes: bytes / 2, Op: &op})
	require.NoError(t, err)
	defer red.Close()
	streams := make([]*stream.Stream, len(bs))
	for step := range 3 {
		for i, b := range bs {
			streams[i] = b.s
			for j := len(gradLens) - 1; j >= 0; j-- {
				h := make([]float32, gradLens[j])
				for k := range h {
					h[k] = value(step, i, j, k)
				}
				require.NoError(t, b.grads[j].CopyFrom(b.s, h))
				require.NoError(t, red.Ready(b.s, j))
			}
		}
		require.NoError(t, red.Finish(streams...))
		for i, b := range bs {
			for j, n := range gradLens {
				h := make([]float32, n)
				require.NoError(t, b.grads[j].CopyTo(b.s, h))
				for k := range h {
					want := value(step, 0, j, k) + value(step, 1, j, k)
					if op == comm.Avg {
						want /= 2
					}
					if h[k] != want {
						t.Fatalf("step %d rank %d gradient %d element %d: %v: want %v", step, i, j, k, h[k], want)
					}
				}
			}
		}
	}
}

// Gradients may come from several streams and in any order.
func TestReducerManyStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		b := backwards(t, g, true)[0]
		red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{b.grads}, nil)
		require.NoError(t, err)
		defer red.Close()
		require.Equal(t, 1, red.Buckets())
		other, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer other.Close()
		require.NoError(t, other.WaitStream(b.s))
		for n, j := range []int{3, 0, 6, 4, 1, 5, 2} {
			s := []*stream.Stream{b.s, other}[n%2]
			require.NoError(t, b.grads[j].RecordStream(s))
			h := make([]float32, gradLens[j])
			for k := range h {
				h[k] = value(0, 0, j, k)
			}
			require.NoError(t, b.grads[j].CopyFrom(s, h))
			require.NoError(t, red.Ready(s, j))
		}
		require.NoError(t, red.Finish(b.s))
		for j, n := range gradLens {
			h := make([]float32, n)
			require.NoError(t, b.grads[j].CopyTo(b.s, h))
			for k := range h {
				require.Equal(t, value(0, 0, j, k), h[k])
			}
		}
	})
}

func TestReducerOfAClosedGradient(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var grads []memory.Slice[float32]
		for range 2 {
			x, err := memory.Make[float32](g.Stream(0), 5)
			require.NoError(t, err)
			grads = append(grads, x)
		}
		red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, nil)
		require.NoError(t, err)
		require.NoError(t, grads[1].Close())
		err = red.Ready(g.Stream(0), 1)
		require.ErrorIs(t, err, device.ErrClosed)
		require.ErrorContains(t, err, "ddp: gradient ready: gradient 1 on rank 0 of 1: ")
		require.NoError(t, errors.Join(grads[0].Close(), red.Close()))
	})
}

func TestReducerErrors(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		b := backwards(t, g, true)[0]
		_, err := ddp.NewReducer[memory.Slice[float32]](g, nil, nil)
		require.ErrorIs(t, err, comm.ErrMismatch)
		_, err = ddp.NewReducer(g, [][]memory.Slice[float32]{b.grads}, &ddp.ReducerConfig{BucketBytes: -1})
		require.ErrorContains(t, err, "want a positive size")
		for _, missing := range []ddp.Gradient{nil, (*memory.Slice[float32])(nil)} {
			_, err = ddp.NewReducer(g, [][]ddp.Gradient{{b.grads[0], missing}}, nil)
			require.ErrorIs(t, err, comm.ErrMismatch)
			require.ErrorContains(t, err, "gradient 1 of local rank 0 is nil")
		}
		red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{b.grads}, nil)
		require.NoError(t, err)
		require.NoError(t, red.Ready(b.s, 1))
		require.ErrorContains(t, red.Ready(b.s, 1), "gradient 1 was ready already")
		require.ErrorContains(t, red.Ready(b.s, 7), "gradient 7 of 7 does not exist")
		require.ErrorContains(t, red.Finish(b.s), "on rank 0 gradients 0, 2 to 6 of 7 are not ready: every gradient must be, in every step; they counted as zeros, and the next Ready begins another step")
		require.NoError(t, red.Close())
		require.NoError(t, red.Close())
		require.ErrorIs(t, red.Ready(b.s, 0), device.ErrClosed)
		require.ErrorContains(t, red.Ready(b.s, 0), "ddp: gradient ready: the reducer: use after Close")
		require.ErrorContains(t, red.Finish(b.s), "ddp: finish gradients: the reducer: use after Close")
		require.ErrorContains(t, red.Rebuild(testgpu.Context(t)), "ddp: rebuild buckets: the reducer: use after Close")
	})
}

// A gradient that is given twice, or shares memory with another one, would be reduced
// twice.
func TestReducerOfSharedGradients(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	xs, _ := shards(t, g, 8)
	for name, cut := range map[string]func(x memory.Slice[float32]) []memory.Slice[float32]{
		"twice": func(x memory.Slice[float32]) []memory.Slice[float32] { return []memory.Slice[float32]{x, x} },
		"overlap": func(x memory.Slice[float32]) []memory.Slice[float32] {
			return []memory.Slice[float32]{x.Slice(3, 8), x.Slice(0, 2), x.Slice(1, 4)}
		},
	} {
		_, err := ddp.NewReducer(g, [][]memory.Slice[float32]{cut(xs[0]), cut(xs[1])}, nil)
		require.ErrorIs(t, err, comm.ErrMismatch, name)
		require.ErrorContains(t, err, "share some memory")
		require.NotContains(t, err.Error(), "do not fit the group")
	}
	apart := func(x memory.Slice[float32]) []memory.Slice[float32] {
		return []memory.Slice[float32]{x.Slice(4, 8), x.Slice(2, 2), x.Slice(0, 4), x.Slice(4, 4)}
	}
	r, err := ddp.NewReducer(g, [][]memory.Slice[float32]{apart(xs[0]), apart(xs[1])}, nil)
	require.NoError(t, err)
	require.NoError(t, r.Close())
}

// A step in which gradients are missing ends with an error that names them for all ranks, and
// the next one is as good as any: the missing ones have counted as zeros.
func TestReducerAfterMissingGradients(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, flat := range []bool{true, false} {
			for _, static := range []bool{false, true} {
				tr := newTrainer(t, local(t, devs), flat, &ddp.ReducerConfig{BucketBytes: 4096, StaticGraph: static})
				tr.step(0, all(2), []int{6, 5, 4, 3, 2, 1, 0})
				less := all(2)
				less[0][2], less[0][3], less[0][4], less[1][1] = false, false, false, false
				tr.run(1, less, []int{6, 5, 4, 3, 2, 1, 0})
				err := tr.red.Finish(tr.streams()...)
				require.ErrorContains(t, err, "ddp: finish gradients: on rank 0 gradients 2 to 4 of 7 are not ready; on rank 1 gradient 1 of 7 is not ready: ")
				require.ErrorContains(t, err, "; they counted as zeros, and the next Ready begins another step")
				tr.check(1)
				require.ErrorContains(t, tr.red.Finish(tr.streams()...), "no gradient has become ready since the last step")
				tr.check(1)
				tr.step(2, all(2), []int{0, 1, 2, 3, 4, 5, 6})
			}
		}
	})
}

// The ranks of two processes stay together when one of them lacks gradients.
func TestReducerOfProcessesAfterMissingGradients(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs, errs := join(t, testgpu.Context(t), devs[:2])
		require.NoError(t, errors.Join(errs...))
		var wg sync.WaitGroup
		for i, g := range gs {
			wg.Go(func() { errs[i] = lackingSteps(t, g) })
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
	})
}

// lackingSteps runs three steps of two gradients, in the second of which rank 1 lacks one.
func lackingSteps(t *testing.T, g *comm.Group) error {
	s := g.Stream(0)
	flat, grads, err := memory.MakeFlat[float32](s, 10, 10)
	if err != nil {
		return err
	}
	defer flat.Close()
	red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, &ddp.ReducerConfig{BucketBytes: 40, FirstBucketBytes: 40})
	if err != nil {
		return err
	}
	defer red.Close()
	for step := range 3 {
		for j := 1; j >= 0; j-- {
			h := make([]float32, 10)
			for k := range h {
				h[k] = float32(100*step + 10*j + k + g.Rank()*1000)
			}
			if err := grads[j].CopyFrom(s, h); err != nil {
				return err
			}
			if lacks := step == 1 && j == 1 && g.Rank() == 1; lacks {
				continue
			}
			if err := red.Ready(s, j); err != nil {
				return err
			}
		}
		if err := red.Finish(s); (err != nil) != (step == 1 && g.Rank() == 1) {
			return fmt.Errorf("step %d on rank %d: %w", step, g.Rank(), err)
		}
		if err := g.Wait(testgpu.Context(t)); err != nil {
			return err
		}
		for j := range grads {
			h := make([]float32, 10)
			if err := grads[j].CopyTo(s, h); err != nil {
				return err
			}
			for k := range h {
				want := float32(100*step+10*j+k) + 500
				if step == 1 && j == 1 {
					want = (want - 500) / 2
				}
				if h[k] != want {
					return fmt.Errorf("step %d on rank %d: gradient %d: element %d is %v: want %v", step, g.Rank(), j, k, h[k], want)
				}
			}
		}
	}
	return nil
}
