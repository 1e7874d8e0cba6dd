package ddp_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// otherGroup lets Autotune try another group after 5 steps, until 9 steps have ended, and choose it after 11.
func otherGroup(other *comm.Group) *ddp.Autotune {
	return &ddp.Autotune{Groups: []*comm.Group{other}, BucketBytes: []int{16}, Prefetch: []int{1}, Steps: 1}
}

func preferOther(m ddp.Measurement) time.Duration { return time.Duration(10 - m.Group) }

// otherReducer returns a Reducer of two buckets, with otherGroup, and the memory of the gradients of each local rank.
func otherReducer(t *testing.T, g, other *comm.Group) (*ddp.Reducer, comm.Shards[float32]) {
	t.Helper()
	flats, grads := comm.Shards[float32]{}, [][]memory.Slice[float32]{}
	for _, s := range g.Streams() {
		flat, parts, err := memory.MakeFlat[float32](s, 4, 4)
		require.NoError(t, err)
		flats, grads = append(flats, flat), append(grads, parts)
	}
	t.Cleanup(func() { require.NoError(t, flats.Close()) })
	a := otherGroup(other)
	a.Prefetch = nil
	r, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{BucketBytes: 16, FirstBucketBytes: 16, Autotune: a})
	require.NoError(t, err)
	r.InjectTimes(preferOther)
	return r, flats
}

func readyAll(r *ddp.Reducer, streams []*stream.Stream, grads ...int) error {
	var errs []error
	for _, i := range grads {
		for _, s := range streams {
			errs = append(errs, r.Ready(s, i))
		}
	}
	return errors.Join(errs...)
}

// The program may use the streams of its group after Finish and Close, whichever group reduces. The virtual devices report
// conflicts.
func TestAutotuneOrdersTheGroupsOwnStreams(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		zero := func(g *comm.Group, xs comm.Shards[float32]) {
			for i, x := range xs {
				require.NoError(t, x.Zero(g.Stream(i)))
			}
		}
		for _, n := range []int{1, 2} {
			for _, closed := range []int{4, 5, 8, 9, 11, 13} { // steps that have ended
				t.Run(fmt.Sprintf("%d ranks/%d steps", n, closed), func(t *testing.T) {
					g, other := local(t, devs[:n]), localWith(t, devs[:n], nil)
					r, flats := otherReducer(t, g, other)
					streams := newStreams(t, g)
					follow := func() {
						for i, s := range streams {
							require.NoError(t, s.WaitStream(g.Stream(i)))
						}
					}
					for range closed {
						follow()
						require.NoError(t, readyAll(r, streams, 1, 0))
						require.NoError(t, r.Finish(streams...))
						zero(g, flats)
					}
					follow()
					require.Equal(t, closed == 5 || closed == 8 || closed >= 11, r.Setting().Group == 1)
					require.NoError(t, readyAll(r, streams, 1))
					require.NoError(t, r.Close())
					zero(g, flats)
				})
			}
		}
	})
}

// Refresh and Close of Units let the streams of their own group wait, too.
func TestAutotuneOrdersTheOwnStreamsOfUnits(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g, other := local(t, devs[:1]), localWith(t, devs[:1], nil)
		a := otherGroup(other)
		a.BucketBytes = nil
		u, err := ddp.NewUnits[float32, memory.BFloat16Bits](g, [][]int{{500}, {500}}, &ddp.UnitsConfig{Autotune: a})
		require.NoError(t, err)
		s, own := newStreams(t, g)[0], g.Stream(0)
		for range 7 {
			require.NoError(t, errors.Join(s.WaitStream(own), u.Refresh(s)))
			require.NoError(t, u.Shard(0).Zero(own)) // the conversion has read it
			require.NoError(t, errors.Join(s.WaitStream(own), u.Refresh(s)))
			for k := 1; k >= 0; k-- {
				_, err := u.Grads(s, k)
				require.NoError(t, errors.Join(err, u.Ready(s, k)))
			}
			require.NoError(t, u.Finish(s))
			for _, x := range u.ShardGrads(0) {
				require.NoError(t, x.Zero(own)) // the reduction has written it
			}
		}
		require.Equal(t, 1, u.Setting().Group)
		require.NoError(t, own.Sync(testgpu.Context(t)))
		block := make(chan struct{})
		require.NoError(t, other.Stream(0).Callback(func() { <-block }))
		idle, errIdle := own.Query()
		errClose := u.Close()
		follows, err := own.Query()
		close(block)
		require.NoError(t, errors.Join(errIdle, errClose, err))
		require.True(t, idle)
		require.False(t, follows)
	})
}

// The error of a group that was closed too early says so, on one line.
func TestAutotuneOfAClosedGroup(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	const during = "the program closed Autotune.Groups[0] during the trial: keep it open until Measurements returns the choice"
	for closed, want := range map[int]string{ // after so many steps
		2:  "ddp: autotune: rank 0 cannot change to group 1, buckets of 16 bytes: " + during,
		6:  "ddp: gradient ready: " + during,
		10: "ddp: autotune: rank 0 cannot change to group 1, buckets of 16 bytes: " + during,
		12: "ddp: gradient ready: the program closed Autotune.Groups[0], which Autotune has chosen: close only the others",
	} {
		t.Run(fmt.Sprint(closed), func(t *testing.T) {
			g, other := local(t, devs), localWith(t, devs, nil)
			r, _ := otherReducer(t, g, other)
			var err error
			for step := 0; step < 14 && err == nil; step++ {
				if step == closed {
					require.NoError(t, other.Close())
				}
				for _, i := range []int{1, 0} {
					for _, s := range g.Streams() {
						if err == nil {
							err = r.Ready(s, i)
						}
					}
				}
				if err == nil {
					err = r.Finish(g.Streams()...)
				}
			}
			require.EqualError(t, err, want)
			require.ErrorIs(t, err, device.ErrClosed)
			require.NoError(t, r.Close())
		})
	}
}
