package nccl_test

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/nccl"
)

// Random rounds of puts leave in the windows what a model of them says. In each round a rank waits
// for the puts into its window, reads it, and tells the others that it has.
func TestOneSidedAgainstModel(t *testing.T) {
	const size, slots, rounds = 3, 16, 30
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	g := rand.New(rand.NewPCG(seed, 1))
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: size, VirtualNCCL: newest})
	ranks := connect(t, devs)
	xs, windows := windowsOf(t, ranks)
	model := make([][]float32, size)
	for i, r := range ranks {
		model[i] = make([]float32, slots)
		require.NoError(t, xs[i].Slice(0, 2*slots).CopyFrom(r.s, make([]float32, 2*slots)))
	}
	barrier(t, ranks)
	for round := range rounds {
		came := make([][size]int, size)
		for i, r := range ranks {
			values := make([]float32, slots) // behind the slots
			for k := range values {
				values[k] = g.Float32()
			}
			src := xs[i].Slice(slots, 2*slots)
			require.NoError(t, src.CopyFrom(r.s, values))
			for slot := range slots {
				peer := g.IntN(size)
				if slot%size != i || g.IntN(2) == 0 { // a slot has one writer in all windows
					continue
				}
				require.NoError(t, nccl.Put(windows[i], r.s, src.Slice(slot, slot+1), peer, 4*slot))
				model[peer][slot] = values[slot]
				came[peer][i]++
			}
		}
		for i, r := range ranks {
			for peer, n := range came[i] {
				if n > 0 {
					require.NoError(t, nccl.WaitSignal(r.c, r.s, peer, n))
				}
			}
		}
		for i, r := range ranks {
			require.Equal(t, model[i], read(t, r.s, xs[i].Slice(0, slots)), "round %d, rank %d", round, i)
		}
		barrier(t, ranks)
	}
	for _, w := range windows {
		require.NoError(t, w.Close())
	}
}

// barrier lets each rank's stream wait for the streams of all ranks.
func barrier(t *testing.T, ranks []rank) {
	t.Helper()
	for _, r := range ranks {
		for peer := range ranks {
			require.NoError(t, nccl.Signal(r.c, r.s, peer))
		}
	}
	for _, r := range ranks {
		for peer := range ranks {
			require.NoError(t, nccl.WaitSignal(r.c, r.s, peer, 1))
		}
	}
}

// A wait ends with the communicator, and needs a window.
func TestWaitForSignalThatDoesNotCome(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ranks := connect(t, devs)
	early := nccl.Signal(ranks[0].c, ranks[0].s, 1)
	require.ErrorIs(t, early, nccl.ErrorInvalidUsage)
	require.ErrorContains(t, early, "the communicator has no window yet")
	_, windows := windowsOf(t, ranks)
	require.NoError(t, nccl.WaitSignal(ranks[0].c, ranks[0].s, 1, 2))
	require.NoError(t, nccl.Signal(ranks[1].c, ranks[1].s, 0))
	require.NoError(t, ranks[1].s.Sync(testgpu.Context(t)))
	done, err := ranks[0].s.Query()
	require.NoError(t, err)
	require.False(t, done, "one signal of two has come")
	for _, w := range windows {
		require.NoError(t, w.Close())
	}
	require.NoError(t, ranks[0].c.Close())
	require.NoError(t, ranks[0].s.Sync(testgpu.Context(t)))
}

// A wait for more signals than come fails the communicator after its timeout.
func TestTimeoutOfAWaitForSignals(t *testing.T) {
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest}, func(t *testing.T, devs []*device.Device) {
		ranks := connectWith(t, devs, &nccl.Config{Timeout: limit(devs)})
		_, windows := windowsOf(t, ranks)
		require.NoError(t, nccl.WaitSignal(ranks[0].c, ranks[0].s, 1, 1))
		require.NoError(t, nccl.Signal(ranks[1].c, ranks[1].s, 0))
		time.Sleep(3 * limit(devs))
		require.NoError(t, ranks[0].c.Err())
		require.NoError(t, nccl.WaitSignal(ranks[0].c, ranks[0].s, 1, 2))
		require.NoError(t, nccl.Signal(ranks[1].c, ranks[1].s, 0))
		err := ranks[0].c.Wait(testgpu.Context(t), ranks[0].s)
		var late *nccl.TimeoutError
		require.ErrorAs(t, err, &late)
		require.True(t, late.OneSided)
		require.Empty(t, late.Graph)
		require.ErrorContains(t, err, "a one-sided operation (Put, Signal or WaitSignal) on "+ranks[0].s.String()+", with operations of rank 0 of 2 (virtual:0), has not ended after")
		require.Equal(t, err, ranks[1].c.Err())
		for _, w := range windows {
			require.NoError(t, w.Close())
		}
	})
}
