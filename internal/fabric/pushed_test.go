package fabric_test

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// pushes has the smallest slots, so that a few hundred kilobytes take several pieces.
var pushes = fabric.Config{Slot: 1, Pushes: true}

// eachPushed is each without the tests in which more than two ranks share a GPU.
func eachPushed(t *testing.T, counts []int, fn func(t *testing.T, devs []*device.Device)) {
	each(t, counts, func(t *testing.T, devs []*device.Device) {
		if tooMany(devs) {
			t.Skip("more than two ranks share a GPU")
		}
		fn(t, devs)
	})
}

func tooMany(devs []*device.Device) bool {
	ranks := map[*device.Device]int{}
	for _, d := range devs {
		if ranks[d]++; ranks[d] > 2 {
			return true
		}
	}
	return false
}

// The waits of more than two ranks on a GPU could hold all its hardware queues.
func TestPushedOnSharedGPU(t *testing.T) {
	t.Setenv(env.ShareGPUs.Name, "yes")
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		group, err := openAll(t, []*device.Device{devs[0], devs[0]}, &pushes)
		require.NoError(t, err)
		closeAll(t, group)
		_, err = openAll(t, []*device.Device{devs[0], devs[0], devs[0]}, &pushes)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, "at most 2 ranks on a GPU")
	})
}

// pushedCalls runs all-reduces of a type with all reductions, of a part of a chunk up to some pieces.
func pushedCalls[T memory.Element](t *testing.T, group []member, k kit[T]) {
	t.Run(memory.DTypeOf[T]().String(), func(t *testing.T) {
		slot, _ := group[0].Sizes()
		drawn := testgpu.Sample(t, testhost.Rounds(16, 8))
		turn := 0
		for _, op := range allOps {
			for _, n := range lengths[T](5*slot*len(group)/2, true) {
				c := call{name: "all-reduce", op: op, algorithm: fabric.Pushed, n: n, skip: turn % 2, inPlace: turn/2%2 == 0}
				if turn++; group[0].s.Device().System().Backend() == "cuda" || drawn() {
					carryOut(t, group, k, c)
				}
			}
		}
	})
}

// All-reduces whose elements copy engines move give every element, and write nothing else.
func TestPushed(t *testing.T) {
	eachPushed(t, []int{2, 3, 8}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &pushes)
		pushedCalls(t, group, integers[int8]())
		pushedCalls(t, group, integers[uint64]())
		pushedCalls(t, group, floats(memory.Float16Of))
		pushedCalls(t, group, floats(memory.BFloat16Of))
		pushedCalls(t, group, floats(func(x float32) float32 { return x }))
		if len(devs) < 3 {
			pushedCalls(t, group, integers[uint8]())
			pushedCalls(t, group, integers[int32]())
			pushedCalls(t, group, integers[uint32]())
			pushedCalls(t, group, integers[int64]())
			pushedCalls(t, group, floats(func(x float64) float64 { return x }))
		}
	})
}

// Random sequences of them are right, also in graphs, with ranks that are out of step.
func TestPushedRandom(t *testing.T) {
	eachPushed(t, []int{2, 3, 8}, func(t *testing.T, devs []*device.Device) {
		seed := rand.Uint64()
		t.Log("seed ", seed)
		group := open(t, devs, &pushes)
		rounds := testgpu.Rounds(testhost.Rounds(4, 8), 60)
		if devs[0].System().Backend() == "cuda" {
			rounds = 200
		}
		atOnce(group, func(_ int, m member) { newPlan(seed, m, rounds).run(t, m) })
	})
}

// A rank that pushes executes nothing else, and other ranks do not push.
func TestPushedOnly(t *testing.T) {
	eachPushed(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		m, other := open(t, devs, &pushes)[0], open(t, devs, &fabric.Config{Bytes: 1})[0]
		x, y := makeOf[float32](t, m.s, 2), makeOf[float32](t, m.s, 2)
		require.ErrorContains(t, fabric.AllReduce(m.Rank, m.s, x, x, 0, nil), "there is no kernel for that")
		require.ErrorContains(t, fabric.AllToAll(m.Rank, m.s, x, y), "there is no kernel for that")
		require.ErrorContains(t, fabric.AllReduce(other.Rank, other.s, x, x, 0, &fabric.AllReduceConfig{Algorithm: fabric.Pushed}), "there is no kernel for that")
	})
}

// What an aborted rank sends, when its stream comes to it, does not pass for data.
func TestPushedAfterAbort(t *testing.T) {
	eachPushed(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &pushes)
		gate := make(chan struct{})
		x := []memory.Slice[float32]{makeOf[float32](t, group[0].s, 1000), makeOf[float32](t, group[1].s, 1000)}
		require.NoError(t, group[0].s.Callback(func() { <-gate }))
		for i, m := range group {
			require.NoError(t, fabric.AllReduce(m.Rank, m.s, x[i], x[i], collective.Sum, &fabric.AllReduceConfig{Algorithm: fabric.Pushed}))
		}
		group[0].Abort()
		close(gate)
		require.NoError(t, group[0].s.Sync(testgpu.Context(t)))
		require.NoError(t, group[1].Err())
		deadline := time.Now().Add(20 * time.Millisecond)
		for time.Now().Before(deadline) {
			done, err := group[1].s.Query()
			require.NoError(t, err)
			require.False(t, done)
		}
		group[1].Abort()
		require.NoError(t, group[1].s.Sync(testgpu.Context(t)))
	})
}

// A rank may close as soon as its own operations are complete, although another one still has to end them.
func TestPushedClose(t *testing.T) {
	eachPushed(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		for range testhost.Rounds(5, 50) {
			group := open(t, devs, &pushes)
			x := []memory.Slice[float32]{makeOf[float32](t, group[0].s, 1000), makeOf[float32](t, group[1].s, 1000)}
			for i, m := range group {
				require.NoError(t, fabric.AllReduce(m.Rank, m.s, x[i], x[i], collective.Sum, &fabric.AllReduceConfig{Algorithm: fabric.Pushed}))
			}
			require.NoError(t, group[0].s.Sync(testgpu.Context(t)))
			require.NoError(t, group[0].Close())
			require.True(t, group[1].Clear(), "it would wait for a rank that has nothing more to send")
			require.NoError(t, group[1].s.Sync(testgpu.Context(t)))
			require.NoError(t, group[1].Close())
		}
	})
}

// Ranks whose operations differ wait for each other.
func TestPushedDisagree(t *testing.T) {
	eachPushed(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		pushed := &fabric.AllReduceConfig{Algorithm: fabric.Pushed}
		for name, enqueue := range map[string]func(m member, i int) error{
			"lengths": func(m member, i int) error {
				x := makeOf[float32](t, m.s, 1000+i)
				return fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, pushed)
			},
			"reductions": func(m member, i int) error {
				x := makeOf[float32](t, m.s, 1000)
				return fabric.AllReduce(m.Rank, m.s, x, x, collective.Reduction(2*i), pushed)
			},
			"types": func(m member, i int) error {
				x, y := makeOf[float32](t, m.s, 1000), makeOf[int32](t, m.s, 1000)
				if i == 0 {
					return fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, pushed)
				}
				return fabric.AllReduce(m.Rank, m.s, y, y, collective.Sum, pushed)
			},
		} {
			t.Run(name, func(t *testing.T) {
				group := open(t, devs, &pushes)
				disagree(t, group, func(i int) error { return enqueue(group[i], i) })
			})
		}
	})
}

// With one hardware queue, a rank's copies do not wait behind its own waits.
func TestPushedOneQueue(t *testing.T) {
	t.Setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
	group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), &pushes)
	for _, m := range group {
		x := makeOf[float32](t, m.s, 100_000)
		for range 10 {
			require.NoError(t, fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, &fabric.AllReduceConfig{Algorithm: fabric.Pushed}))
		}
	}
	for _, m := range group {
		require.NoError(t, m.s.Sync(testgpu.Context(t)))
	}
}

// A capture may begin and end while another one is in progress.
func TestPushedInTwoCaptures(t *testing.T) {
	eachPushed(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &pushes)
		graphs, xs := make([][2]*graph.Exec, len(group)), make([][2]memory.Slice[float32], len(group))
		for i, m := range group {
			other := newStream(t, devs[i])
			streams := [2]*stream.Stream{m.s, other}
			for k := range streams {
				xs[i][k] = makeOf[float32](t, m.s, 3)
				require.NoError(t, xs[i][k].CopyFrom(m.s, []float32{float32(i), 1, float32(k)}))
			}
			reduce := func(k int) error {
				x := xs[i][k]
				return fabric.AllReduce(m.Rank, streams[k], x, x, collective.Sum, &fabric.AllReduceConfig{Algorithm: fabric.Pushed})
			}
			var err error
			graphs[i][0], err = graph.Capture(streams[:1], func() error {
				if err := reduce(0); err != nil {
					return err
				}
				inner := make(chan error)
				go func() { // a goroutine's captures do not nest
					var err error
					graphs[i][1], err = graph.Capture(streams[1:], func() error { return reduce(1) }, nil)
					inner <- err
				}()
				return errors.Join(<-inner, reduce(0))
			}, nil)
			require.NoError(t, err)
		}
		for k := range 2 {
			for i, m := range group {
				require.NoError(t, graphs[i][k].Launch(m.s))
			}
		}
		for i, m := range group {
			for k, want := range [][]float32{{2, 4, 0}, {1, 2, 2}} {
				require.Equal(t, want, fetch(t, m, xs[i][k]))
				require.NoError(t, graphs[i][k].Close())
			}
		}
	})
}
