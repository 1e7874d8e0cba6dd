package ddp_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var shardLens = []int{5, 1000, 3, 0, 7001, 257, 1}

// Each rank updates its shard by reduced gradients, and all have all parameters
// then: those of one that has everything.
func TestSharder(t *testing.T) {
	for ranks := 1; ranks <= 4; ranks++ {
		for _, bytes := range []int{1, 4096, 0} {
			for _, op := range []comm.Op{comm.Sum, comm.Avg} {
				t.Run(fmt.Sprintf("ranks=%d/bucket=%d/%v", ranks, bytes, op), func(t *testing.T) {
					testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
						testSharder(t, local(t, devs), &ddp.ShardConfig{BucketBytes: bytes, FirstBucketBytes: bytes / 2, Op: &op})
					})
				})
			}
		}
	}
}

func testSharder(t *testing.T, g *comm.Group, cfg *ddp.ShardConfig) {
	sh, err := ddp.NewSharder[float32](g, shardLens, cfg)
	require.NoError(t, err)
	defer sh.Close()
	sum := 0
	for _, n := range shardLens {
		sum += n
	}
	require.GreaterOrEqual(t, sh.Len()*g.Size(), sum)
	require.Less(t, sh.Len()*g.Size(), sum+len(shardLens)*4*(g.Size()+1), "padding is at most 16 bytes for each gradient, and each rank's part of a bucket")
	streams := newStreams(t, g)
	want := make([][]float32, len(shardLens)) // the parameters, begun with zeros
	for j, n := range shardLens {
		want[j] = make([]float32, n)
	}
	for step := range 3 {
		for i, s := range streams {
			for j, n := range shardLens {
				require.NoError(t, sh.WaitOn(s, j))
				require.Equal(t, n, sh.Params(i)[j].Len())
			}
			for j := len(shardLens) - 1; j >= 0; j-- {
				h := make([]float32, shardLens[j])
				for k := range h {
					h[k] = part(step, i, j, k)
				}
				require.NoError(t, sh.Grads(i)[j].CopyFrom(s, h))
				require.NoError(t, sh.Ready(s, j))
			}
		}
		require.NoError(t, sh.Finish(streams...))
		for i, s := range streams {
			descend(t, s, sh.Parts(i), sh.Len())
		}
		require.NoError(t, sh.AllGather(streams...))
		for j := range want {
			for k := range want[j] {
				grad := float32(0)
				for i := range streams {
					grad += part(step, i, j, k)
				}
				if *cfg.Op == comm.Avg {
					grad /= float32(g.Size())
				}
				want[j][k] -= grad
			}
		}
		for i, s := range streams {
			for j, n := range shardLens {
				h := make([]float32, n)
				require.NoError(t, sh.WaitOn(s, j))
				require.NoError(t, sh.Params(i)[j].CopyTo(s, h))
				for k := range h { // the parameters of earlier steps have their errors, too
					require.InDelta(t, want[j][k], h[k], 2*float64(step+1)*meanBound(*cfg.Op, g.Size()), "step %d rank %d parameter %d element %d", step, i, j, k)
				}
			}
		}
	}
}

func newStreams(t *testing.T, g *comm.Group) []*stream.Stream {
	t.Helper()
	var streams []*stream.Stream
	for i := range g.Locals() {
		s, err := stream.New(g.Device(i), nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		streams = append(streams, s)
	}
	return streams
}

// descend subtracts the gradients from the parameters of a shard.
func descend(t *testing.T, s *stream.Stream, parts []ddp.Part[float32], length int) {
	t.Helper()
	at := 0
	for _, p := range parts {
		require.Equal(t, at, p.At)
		at += p.Param.Len()
		x, d := make([]float32, p.Param.Len()), make([]float32, p.Grad.Len())
		require.NoError(t, p.Param.CopyTo(s, x))
		require.NoError(t, p.Grad.CopyTo(s, d))
		for k := range x {
			x[k] -= d[k]
		}
		require.NoError(t, p.Param.CopyFrom(s, x))
	}
	require.Equal(t, length, at)
}

// The gaps of the flat memory stay zeros, so that norms over parts are right.
func TestShardsHaveNoStrangeNumbers(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		sh, err := ddp.NewSharder[float32](g, []int{1, 1}, nil)
		require.NoError(t, err)
		defer sh.Close()
		streams := newStreams(t, g)
		for i, s := range streams {
			for j := range 2 {
				require.NoError(t, sh.WaitOn(s, j))
				require.NoError(t, sh.Grads(i)[j].CopyFrom(s, []float32{3}))
				require.NoError(t, sh.Ready(s, j))
			}
		}
		require.NoError(t, sh.Finish(streams...))
		for i, s := range streams {
			p := sh.Parts(i)[0]
			h := make([]float32, p.Grad.Len())
			require.NoError(t, p.Grad.CopyTo(s, h))
			require.Equal(t, []float32{3, 0, 0, 0}, h)
			require.NoError(t, p.Param.CopyTo(s, h))
			require.Equal(t, make([]float32, 4), h)
		}
	})
}

// Parameters of 16 bits with shards of float32 copies, which are the optimiser's:
// steps too small for 16 bits add up.
func TestShardsOfAnotherType(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		sh, err := ddp.NewSharder[memory.BFloat16Bits](g, []int{100}, nil)
		require.NoError(t, err)
		defer sh.Close()
		one := make([]memory.BFloat16Bits, 100)
		for k := range one {
			one[k] = memory.BFloat16Of(1)
		}
		streams := newStreams(t, g)
		masters := make([]memory.Slice[float32], 2)
		for i, s := range streams {
			require.NoError(t, sh.WaitOn(s, 0))
			require.NoError(t, sh.Params(i)[0].CopyFrom(s, one))
			masters[i], err = memory.Make[float32](s, sh.Len())
			require.NoError(t, err)
			defer masters[i].Close()
			convert(t, s, masters[i], sh.Parts(i)[0].Param)
		}
		const steps = 8
		for range steps {
			for i, s := range streams {
				require.NoError(t, sh.Grads(i)[0].CopyFrom(s, one))
				require.NoError(t, sh.Ready(s, 0))
			}
			require.NoError(t, sh.Finish(streams...))
			for i, s := range streams {
				p := sh.Parts(i)[0]
				grad, x := make([]memory.BFloat16Bits, sh.Len()), make([]float32, sh.Len())
				require.NoError(t, p.Grad.CopyTo(s, grad))
				require.NoError(t, masters[i].CopyTo(s, x))
				for k := range x {
					x[k] += grad[k].Float32() / 1024
				}
				require.NoError(t, masters[i].CopyFrom(s, x))
				convert(t, s, p.Param, masters[i])
			}
			require.NoError(t, sh.AllGather(streams...))
		}
		for i, s := range streams {
			h := make([]memory.BFloat16Bits, 100)
			require.NoError(t, sh.WaitOn(s, 0))
			require.NoError(t, sh.Params(i)[0].CopyTo(s, h))
			for k := range h {
				require.Equal(t, memory.BFloat16Of(1+steps/1024.), h[k], "1 is the nearest to 1+1/1024")
			}
		}
	})
}

func convert[D, S memory.Element](t *testing.T, s *stream.Stream, dst memory.Slice[D], src memory.Slice[S]) {
	t.Helper()
	to, err := tensor.Of(dst, dst.Len())
	require.NoError(t, err)
	from, err := tensor.Of(src, src.Len())
	require.NoError(t, err)
	require.NoError(t, tensor.Copy(s, to, from))
}

// A step can be captured: of the launches, each begins with the parameters that the
// one before has left.
func TestSharderInAGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		sh, err := ddp.NewSharder[float32](g, []int{3, 50, 9}, &ddp.ShardConfig{BucketBytes: 64, Op: new(comm.Sum)})
		require.NoError(t, err)
		defer sh.Close()
		streams := newStreams(t, g)
		step := func() error {
			for i, s := range streams {
				for j := range 3 {
					if err := sh.WaitOn(s, j); err != nil {
						return err
					}
					if err := memory.Copy(s, sh.Grads(i)[j], sh.Params(i)[j]); err != nil {
						return err
					}
				}
				for j := range 3 {
					if err := sh.Ready(s, j); err != nil {
						return err
					}
				}
			}
			if err := sh.Finish(streams...); err != nil {
				return err
			}
			for i, s := range streams {
				for _, p := range sh.Parts(i) {
					if err := memory.Copy(s, p.Param, p.Grad); err != nil {
						return err
					}
				}
			}
			if err := sh.AllGather(streams...); err != nil {
				return err
			}
			for _, s := range streams {
				for j := range 3 {
					if err := sh.WaitOn(s, j); err != nil {
						return err
					}
				}
			}
			return nil
		}
		for i, s := range streams {
			for j, x := range sh.Params(i) {
				h := make([]float32, x.Len())
				for k := range h {
					h[k] = float32(j + k)
				}
				require.NoError(t, sh.WaitOn(s, j))
				require.NoError(t, x.CopyFrom(s, h))
			}
		}
		require.NoError(t, step()) // each step doubles the parameters, as there are two ranks
		require.NoError(t, streams[0].WaitStream(streams[1]))
		exec, err := graph.Capture(streams, step, nil)
		require.NoError(t, err)
		defer exec.Close()
		for range 3 {
			require.NoError(t, exec.Launch(streams[0]))
		}
		require.NoError(t, streams[1].WaitStream(streams[0]))
		require.NoError(t, step())
		for i, s := range streams {
			for j, x := range sh.Params(i) {
				h := make([]float32, x.Len())
				require.NoError(t, x.CopyTo(s, h))
				for k := range h {
					require.Equal(t, float32(32*(j+k)), h[k], "rank %d parameter %d element %d", i, j, k)
				}
			}
		}
	})
}

func TestSharderErrors(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		for _, lens := range [][]int{{}, {3, -1}, {1 << 62, 1 << 62}, {1 << 62, 1 << 62, 1 << 62, 1 << 62, 5}, {math.MaxInt}} {
			_, err := ddp.NewSharder[float32](g, lens, nil)
			require.ErrorIs(t, err, comm.ErrMismatch)
		}
		_, err := ddp.NewSharder[float32](g, []int{4}, &ddp.ShardConfig{BucketBytes: -1})
		require.ErrorContains(t, err, "want a positive size")
		sh, err := ddp.NewSharder[float32](g, []int{4, 5}, nil)
		require.NoError(t, err)
		s := newStreams(t, g)
		require.ErrorContains(t, sh.WaitOn(s[0], 2), "parameter 2 of 2 does not exist")
		require.NoError(t, sh.Ready(s[1], 1))
		require.ErrorContains(t, sh.Ready(s[1], 1), "gradient 1 was ready already")
		require.ErrorContains(t, sh.Finish(s...), "on rank 0 gradients 0, 1 of 2 are not ready; on rank 1 gradient 0 of 2 is not ready: every gradient must be")
		require.ErrorContains(t, sh.Finish(s...), "no gradient has become ready since the last step")
		require.ErrorContains(t, sh.Finish(s[0], s[0]), "want one for each local rank")
		require.ErrorIs(t, sh.AllGather(s[0]), comm.ErrMismatch)
		require.NoError(t, sh.Close())
		require.NoError(t, sh.Close())
		require.ErrorIs(t, sh.Ready(s[0], 0), device.ErrClosed)
		require.ErrorIs(t, sh.AllGather(s...), device.ErrClosed)
	})
}

// Parameters are gathered as the next forward pass needs them.
func TestShardsAreGatheredInOrder(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	sh, err := ddp.NewSharder[float32](g, []int{800, 80, 8}, &ddp.ShardConfig{BucketBytes: 1, FirstBucketBytes: 1})
	require.NoError(t, err)
	defer sh.Close()
	require.NoError(t, sh.AllGather(g.Streams()...))
	var counts []int
	for _, o := range g.Communicator(0).Trace() {
		counts = append(counts, o.Count)
	}
	require.Equal(t, []int{400, 40, 4}, counts)
}
