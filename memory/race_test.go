package memory_test

import (
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Of two pools that goroutines use on one stream at the same time, neither stays in
// use when the first to begin is the first to end.
func TestPoolUsesThatOverlap(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s, first, second := newStream(t, d), newPool(t, nil), newPool(t, nil)
		began, other, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
		var x memory.Slice[byte]
		var group sync.WaitGroup
		var errs [2]error
		group.Go(func() {
			defer close(ended)
			errs[0] = first.Use(s, func() error {
				close(began)
				<-other
				return nil
			})
		})
		group.Go(func() {
			<-began
			errs[1] = second.Use(s, func() (err error) {
				close(other)
				<-ended
				x, err = memory.Make[byte](s, 1000)
				return err
			})
		})
		group.Wait()
		require.Equal(t, [2]error{}, errs)
		require.Equal(t, []int{0, 1024}, []int{first.Allocated(), second.Allocated()}, "the one that is still in use")
		y, err := memory.Make[byte](s, 1000)
		require.NoError(t, err)
		require.Equal(t, []int{0, 1024}, []int{first.Allocated(), second.Allocated()}, "none is in use")
		require.NoError(t, x.Close())
		require.NoError(t, y.Close())
	})
}

// What is allocated while the stream is being closed is an error or memory, of the
// device's pool and of one with an Allocator, and nothing stays behind.
func TestAllocateWhileTheStreamCloses(t *testing.T) {
	d := fresh(t, "virtual")
	for i := range 100 {
		s, err := stream.New(d, nil)
		require.NoError(t, err)
		p := memory.NewPool(&memory.PoolConfig{Allocator: memory.Count(memory.Driver)})
		var group sync.WaitGroup
		start := make(chan struct{})
		fill := func() error {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			for {
				x, err := memory.Alloc(s, 1+r.IntN(4*mib))
				if err != nil {
					return err
				}
				if err := x.Close(); err != nil {
					return err
				}
			}
		}
		errs := make([]error, 3)
		for g := range errs {
			group.Go(func() {
				<-start
				if g == 0 {
					errs[g] = p.Use(s, fill)
				} else {
					errs[g] = fill()
				}
			})
		}
		close(start)
		require.NoError(t, s.Close())
		group.Wait()
		for _, err := range errs {
			require.Error(t, err)
		}
		require.NoError(t, p.Close())
	}
	require.NoError(t, memory.EmptyCache(d))
	require.Zero(t, statsOf(t, d).ReservedBytes.All.Current)
	require.Empty(t, d.System().Reports())
}
