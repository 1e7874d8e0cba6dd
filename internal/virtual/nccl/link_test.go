package nccl

import (
	"net"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// A rank that leaves says to whom it has sent data. Such a rank waits for the connection, however late
// it is accepted. Any other rank learns at once that it waits in vain.
func TestDataOfARankThatHasLeft(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		c := &comm{
			lib: &lib{}, stop: make(chan struct{}), failed: make(chan struct{}), joined: make(chan struct{}), in: map[int]*link{},
			arrivals: map[int]chan struct{}{}, departed: map[int]chan struct{}{}, sentTo: map[int]bool{},
		}
		c.idle = sync.NewCond(&c.mu)
		from := func(peer int) <-chan error {
			result := make(chan error, 1)
			go func() { _, err := c.from(peer); result <- err }()
			return result
		}
		c.hear(nil, &notice{Kind: noticeBye, Rank: 1, Links: []int{c.rank}})
		late := from(1)
		synctest.Wait()
		require.False(t, isClosed(c.failed))
		here, there := net.Pipe()
		defer there.Close()
		c.arrive(1, here)
		require.NoError(t, <-late)

		c.hear(nil, &notice{Kind: noticeBye, Rank: 2, Links: []int{c.rank + 1}})
		never := from(2)
		synctest.Wait()
		require.True(t, isClosed(c.failed))
		require.Equal(t, "rank 2 destroyed its communicator while other ranks still wait for it", c.state().Text)
		close(c.stop)
		require.ErrorIs(t, <-never, errStopped)
	})
}
