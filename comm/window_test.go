package comm_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// TestWindowsAreUsed compares how often NCCL's collectives and the copies beside them
// are called: a window takes one there and one back.
func TestWindowsAreUsed(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	g := groupBy(t, devs, comm.Config{Strategy: comm.Windows})
	for _, c := range []struct {
		kind  collective.Kind
		dtype memory.DType
		op    nccl.Op
		count int
		want  comm.Strategy
	}{
		{collective.AllReduce, memory.Float32, nccl.Sum, 1, comm.Windows},
		{collective.AllReduce, memory.BFloat16, nccl.Sum, 2 << 20, comm.Windows},
		{collective.AllReduce, memory.BFloat16, nccl.Sum, 2<<20 + 1, comm.NCCLOnly},
		{collective.AllReduce, memory.Float32, nccl.Max, 1, comm.NCCLOnly},
		{collective.AllReduce, memory.Int32, nccl.Sum, 1, comm.NCCLOnly},
		{collective.AllReduce, memory.Float32, nccl.Sum, 0, comm.NCCLOnly},
		{collective.AllGather, memory.Int32, 0, 2, comm.Windows},
		{collective.AllGather, memory.Int32, 0, 3, comm.NCCLOnly}, // 12 bytes, which NCCL 2.28.3 spoils
		{collective.AllGather, memory.Int64, 0, 256 << 10, comm.Windows},
		{collective.AllGather, memory.Int64, 0, 256<<10 + 1, comm.NCCLOnly},
		{collective.ReduceScatter, memory.Float16, nccl.Sum, 4, comm.Windows},
		{collective.ReduceScatter, memory.Float16, nccl.Sum, 5, comm.NCCLOnly},
		{collective.Broadcast, memory.Float32, 0, 4, comm.NCCLOnly},
		{collective.AllToAll, memory.Float32, 0, 4, comm.NCCLOnly},
	} {
		require.Equal(t, c.want, g.Choice(1, collective.Op{Call: collective.Call{Request: collective.Request{Kind: c.kind, DType: c.dtype, Reduction: collective.Reduction(c.op), N: c.count}}}), "%+v", c)
	}
	// NCCL 2.28.0 to before 2.30.7 may read stale data in graphs.
	captured := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllReduce, DType: memory.Float32, N: 1, Captured: true}}}
	require.Equal(t, comm.NCCLOnly, g.Choice(1, captured))
	for version, want := range map[string]comm.Strategy{"2.27.7": comm.Windows, "2.28.0": comm.NCCLOnly, "2.30.6": comm.NCCLOnly, "2.30.7": comm.Windows} {
		other := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: version}), comm.Config{Strategy: comm.Windows})
		require.Equal(t, want, other.Choice(0, captured), version)
		captured.Captured = false
		require.Equal(t, comm.Windows, other.Choice(0, captured), version)
		captured.Captured = true
	}
	exact := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.28.7"}), comm.Config{Strategy: comm.Windows})
	require.Equal(t, comm.Windows, exact.Choice(0, collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllGather, DType: memory.Int32, N: 3}}}))
	old := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.26.2"}), comm.Config{Strategy: comm.Windows})
	require.Equal(t, comm.NCCLOnly, old.Strategy(), "it has no windows")

	// What NCCL is given lies in the windows: with in place results its own memory would
	// be both, and what is beside stays as it was.
	xs, hs := shards(t, g, 100)
	ys, _ := shards(t, g, 300)
	before := [][]float32{read(t, g, 0, ys[0]), read(t, g, 1, ys[1])}
	require.NoError(t, comm.ReduceScatter(g, comm.Sum, comm.Shards[float32]{ys[0].Slice(100, 150), ys[1].Slice(100, 150)}, xs))
	require.NoError(t, g.Wait(testgpu.Context(t)))
	for i := range ys {
		copy(before[i][100:], total(hs)[50*i:50*i+50])
		require.Equal(t, before[i], read(t, g, i, ys[i]))
	}
}

// TestWindowsAndGraphs launches a graph on a stream of one rank, the group's or another,
// beside operations of the group, without a word about order: the window is one for all.
func TestWindowsAndGraphs(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Strategy: comm.Windows})
		other := streamtest.NewStream(t, devs[0])
		for _, s := range []*stream.Stream{g.Stream(0), other} {
			var in, out [2]comm.Shards[float32]
			var want [2][]float32
			for k := range in {
				xs, hs := shards(t, g, 2000)
				in[k], want[k] = xs, total(hs)
				out[k], _ = shards(t, g, 2000)
			}
			sum := func(k int) error {
				return routed(g, func(b *nccl.Batch) error {
					one := func(i int) error {
						return nccl.AllReduce(b.On(g.Communicator(i)), g.Stream(i), out[k][i], in[k][i], nccl.Sum)
					}
					return errors.Join(one(0), one(1))
				})
			}
			x, err := graph.Capture(g.Streams(), func() error { return sum(0) }, nil)
			require.NoError(t, err)
			defer x.Close()
			require.NoError(t, g.Wait(testgpu.Context(t)))
			for range 30 {
				require.NoError(t, x.Launch(s))
				require.NoError(t, sum(1))
			}
			require.NoError(t, g.Wait(testgpu.Context(t)))
			require.NoError(t, s.Sync(testgpu.Context(t)))
			for k := range out {
				for i := range out[k] {
					require.Equal(t, want[k], read(t, g, i, out[k][i]))
				}
			}
		}
	})
}

// TestWindowsFail fails the copies there and back.
func TestWindowsFail(t *testing.T) {
	for _, fault := range []string{"cuMemcpyDtoDAsync#1=CUDA_ERROR_INVALID_VALUE", "cuMemcpyDtoDAsync#3=CUDA_ERROR_INVALID_VALUE", "cuMemcpyDtoDAsync#4=CUDA_ERROR_INVALID_VALUE"} {
		t.Run(fault, func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fault})
			g := groupBy(t, devs, comm.Config{Strategy: comm.Windows})
			xs, _ := shards(t, g, 100)
			err := comm.AllReduce(g, comm.Sum, xs...)
			require.ErrorIs(t, err, comm.ErrBroken)
			require.ErrorContains(t, err, "cuMemcpyDtoDAsync")
			require.NoError(t, g.Close())
		})
	}
}

// TestWindowsThatOneRankCannotHave fails the memory of one rank's window, and then its
// registration, for which NCCL waits for all ranks: none waits, and all name that rank.
func TestWindowsThatOneRankCannotHave(t *testing.T) {
	for fault, says := range map[string]string{
		"ncclMemAlloc#2=ncclSystemError":           `windows: .*rank (\d) of 3 .*ncclMemAlloc`,
		"ncclCommWindowRegister#3=ncclSystemError": `ncclCommWindowRegister on rank (\d) of 3 .*ncclSystemError`,
	} {
		for _, s := range []comm.Strategy{comm.Windows, comm.Tuned} {
			t.Run(fmt.Sprint(fault, "/", s), func(t *testing.T) {
				cfg := &comm.Config{Strategy: s, Tuning: &comm.Tuning{}}
				devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: fault})
				_, err := comm.Local(testgpu.Context(t), devs, cfg)
				require.Regexp(t, says, err)
				devs = testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: fault})
				_, errs := joinBy(t, devs, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) { return b, cfg })
				culprits, others := map[string]bool{}, 0
				for _, err := range errs {
					require.NotErrorIs(t, err, context.DeadlineExceeded)
					require.Regexp(t, says, err)
					culprits[regexp.MustCompile(says).FindStringSubmatch(err.Error())[1]] = true
					if strings.Contains(err.Error(), " cannot: ") {
						others++
					} else {
						require.ErrorIs(t, err, nccl.ErrorSystem)
					}
				}
				require.Len(t, culprits, 1, "%v", errs)
				require.Equal(t, 2, others, "%v", errs)
			})
		}
	}
}
