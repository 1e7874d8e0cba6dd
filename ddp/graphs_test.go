package ddp_test

import (
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// What a graph uses stays open until the graph is closed, and can be launched until then.
func TestCloseBeforeTheGraph(t *testing.T) {
	types := map[string]func(t *testing.T, g *comm.Group) (step func() error, x io.Closer){
		"reducer": func(t *testing.T, g *comm.Group) (func() error, io.Closer) {
			grads := separateGrads(t, g, 2)
			r, err := ddp.NewReducer(g, grads, nil)
			require.NoError(t, err)
			return func() error { return stepInOrder(g, r, 1, 0) }, r
		},
		"sharder": func(t *testing.T, g *comm.Group) (func() error, io.Closer) {
			sh, err := ddp.NewSharder[float32](g, []int{8}, nil)
			require.NoError(t, err)
			return func() error {
				ss := g.Streams()
				for _, s := range ss {
					if err := sh.Ready(s, 0); err != nil {
						return err
					}
				}
				return errors.Join(sh.Finish(ss...), sh.AllGather(ss...))
			}, sh
		},
		"units": func(t *testing.T, g *comm.Group) (func() error, io.Closer) {
			u, err := ddp.NewUnits[float32, float32](g, [][]int{{8}}, nil)
			require.NoError(t, err)
			return func() error {
				ss := g.Streams()
				for _, s := range ss {
					if _, err := u.Use(s, 0); err != nil {
						return err
					}
				}
				for _, s := range ss {
					_, err := u.Grads(s, 0)
					if err := errors.Join(err, u.Ready(s, 0), u.Done(s, 0)); err != nil {
						return err
					}
				}
				return errors.Join(u.Finish(ss...), u.Refresh(ss...))
			}, u
		},
	}
	for name, open := range types {
		t.Run(name, func(t *testing.T) {
			testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
				g := local(t, devs)
				step, x := open(t, g)
				require.NoError(t, step())
				require.NoError(t, g.Wait(testgpu.Context(t)))
				exec, err := graph.Capture(g.Streams(), step, nil)
				require.NoError(t, err)
				for range 2 {
					require.ErrorContains(t, x.Close(), "uses it: close the graph first")
				}
				require.NoError(t, exec.Launch(g.Stream(0)))
				require.NoError(t, g.Stream(0).Sync(testgpu.Context(t)))
				require.NoError(t, exec.Close())
				require.NoError(t, x.Close())
				require.NoError(t, x.Close())
			})
		})
	}
}

// separateGrads returns gradients of each local rank that are not neighbours, so that they are reduced in buffers.
func separateGrads(t *testing.T, g *comm.Group, n int) [][]memory.Slice[float32] {
	grads := make([][]memory.Slice[float32], g.Locals())
	for i := range grads {
		for range n {
			x, err := memory.Make[float32](g.Stream(i), 100)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, x.Close()) })
			require.NoError(t, x.Zero(g.Stream(i)))
			grads[i] = append(grads[i], x)
		}
	}
	return grads
}

func stepInOrder(g *comm.Group, r *ddp.Reducer, order ...int) error {
	for _, s := range g.Streams() {
		for _, k := range order {
			if err := r.Ready(s, k); err != nil {
				return err
			}
		}
	}
	return r.Finish(g.Streams()...)
}

// A graph can be launched after Rebuild, with the buckets that it has captured.
func TestRebuildKeepsTheBucketsOfAGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		grads := separateGrads(t, g, 4)
		sum := comm.Sum
		r, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{BucketBytes: 800, FirstBucketBytes: 800, Op: &sum})
		require.NoError(t, err)
		require.NoError(t, stepInOrder(g, r, 3, 2, 1, 0))
		require.NoError(t, g.Wait(testgpu.Context(t)))
		exec, err := graph.Capture(g.Streams(), func() error { return stepInOrder(g, r, 3, 2, 1, 0) }, nil)
		require.NoError(t, err)
		require.NoError(t, stepInOrder(g, r, 0, 3, 2, 1))
		before := r.BucketGrads()
		require.NoError(t, r.Rebuild(testgpu.Context(t)))
		require.NotEqual(t, before, r.BucketGrads())
		ones := make([]float32, 100)
		for k := range ones {
			ones[k] = 1
		}
		for i := range grads {
			for _, x := range grads[i] {
				require.NoError(t, x.CopyFrom(g.Stream(i), ones))
			}
		}
		require.NoError(t, g.Stream(0).WaitStream(g.Stream(1)))
		require.NoError(t, exec.Launch(g.Stream(0)))
		require.NoError(t, g.Stream(1).WaitStream(g.Stream(0)))
		require.NoError(t, stepInOrder(g, r, 0, 3, 2, 1))
		for i := range grads {
			for _, x := range grads[i] {
				require.NoError(t, x.CopyTo(g.Stream(i), ones))
				require.EqualValues(t, 4, ones[99])
			}
		}
		require.NoError(t, exec.Close())
		require.NoError(t, r.Close())
	})
}
