package nccl

import (
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Virtual time passes on machines with many processors, too, where threads poll for operations to enqueue.
func TestVirtualTimeWithManyProcessors(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(8))
	TestLateStreamIsNamed(t)
}

// A rank whose stream arrives 5 ms late is named, although the host issues all operations at once.
func TestLateStreamIsNamed(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		const late, steps = 1, 10
		cs, err := NewCommunicators(testgpu.Context(t), devs[:2], nil)
		require.NoError(t, err)
		streams, xs := make([]*stream.Stream, 2), make([]memory.Slice[float32], 2)
		for i, c := range cs {
			defer func() { require.NoError(t, c.Close()) }()
			streams[i], err = stream.New(devs[i], nil)
			require.NoError(t, err)
			defer streams[i].Close()
			xs[i], err = memory.Make[float32](streams[i], 64)
			require.NoError(t, err)
			defer xs[i].Close()
		}
		busy := streamtest.NewSpinner(t, devs[late])
		for range steps {
			busy.On(streams[late], 5*time.Millisecond)
			require.NoError(t, Group(func(b *Batch) error {
				for i, c := range cs {
					c.marks.SetRequested(0) // a mark is due
					if err := AllReduce(b.On(c), streams[i], xs[i], xs[i], Sum); err != nil {
						return err
					}
				}
				return nil
			}))
			for _, s := range streams {
				require.NoError(t, s.Sync(testgpu.Context(t)))
			}
		}
		ranks := make([]analyze.Arrivals, 2)
		for i, c := range cs {
			_, _, err := c.watch.Observe()
			require.NoError(t, err)
			for _, a := range c.rec.Arrivals() {
				require.Positive(t, a[1])
				if a[2] > 0 {
					ranks[i].List = append(ranks[i].List, analyze.Arrival{Sequence: uint64(a[0]), Called: a[1], Took: a[2]})
				}
			}
		}
		tallies, _ := analyze.CompareArrivals(ranks, 1) // the first one connects the ranks
		require.GreaterOrEqual(t, tallies[late].Compared, uint64(8), "%+v", ranks)
		require.Equal(t, tallies[late].Compared, tallies[late].OnStreams)
		require.True(t, tallies[late].Straggles(), "%+v of %+v", tallies, ranks)
		require.False(t, tallies[1-late].Straggles())
	})
}

// Collectives with a root, sends and captured operations are not reported, and of a burst only the first is.
func TestArrivals(t *testing.T) {
	r := newIdleRank(t)
	rec := r.recorded(0)
	defer rec.Close()
	at := collective.Now()
	schedule := func(k collective.Kind, captured bool) {
		o := collective.Call{Request: collective.Request{Kind: k, N: 64, Captured: captured}, Stream: r.s}
		rec.Schedule(&o, at)
		rec.Accept(&o)
		at += int64(10 * time.Microsecond)
	}
	schedule(collective.AllReduce, false) // 1
	schedule(collective.AllReduce, false)
	schedule(collective.AllGather, false)
	at += int64(2 * time.Millisecond)
	schedule(collective.Send, false)
	at += int64(2 * time.Millisecond)
	schedule(collective.Broadcast, false) // 4
	at += int64(2 * time.Millisecond)
	schedule(collective.AllReduce, true)
	at += int64(2 * time.Millisecond)
	schedule(collective.ReduceScatter, false) // 6
	list := rec.Arrivals()
	require.Len(t, list, 2, "%+v", list)
	require.EqualValues(t, 1, list[0][0])
	require.EqualValues(t, 6, list[1][0])
	require.Greater(t, list[1][1]-list[0][1], int64(8*time.Millisecond))
	for range 2 * collective.MaxArrivals {
		at += int64(2 * time.Millisecond)
		schedule(collective.AllReduce, false)
	}
	require.Len(t, rec.Arrivals(), 16, "all that the ring has")
	require.NotEmpty(t, collective.Clock())
}
