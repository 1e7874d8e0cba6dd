package nccl

import (
	"errors"
	"fmt"
	"time"
)

// connect connects the rank to its neighbours once the members are known, and
// returns when all ranks are connected.
//
// Rank 0 sends a count around the ring, and each rank forwards it when it is
// connected. When the count is back, rank 0 knows that all ranks are connected and
// sends a notice. A rank notifies its neighbours before it returns from here, and
// each later notice implies it. So before another rank can observe an action of a
// rank that has returned, it knows that all ranks are connected: it sees a loss as
// an error of the communicator, not of connect.
func (c *comm) connect(v *verdict) error {
	c.mu.Lock()
	c.rank, c.n, c.members = v.Rank, len(v.Members), v.Members
	c.mu.Unlock()
	if c.n == 1 {
		return nil
	}
	next := (c.rank + 1) % c.n
	conn, err := greet(c.members[next].Address, &hello{Token: c.token, Use: "control", Rank: c.rank})
	if err != nil {
		return err
	}
	forward := c.attend(next, conn)
	patience := time.NewTimer(rootPatience)
	defer patience.Stop()
	if err := c.awaitNeighbour(c.left, patience); err != nil {
		return err
	}
	if c.rank == 0 {
		forward.send(&notice{Kind: noticeConnected})
	}
	if err := c.awaitNeighbour(c.counted, patience); err != nil {
		return err
	}
	if c.rank > 0 {
		forward.send(&notice{Kind: noticeConnected})
		return c.awaitNeighbour(c.joined, patience)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if closeOnce(c.joined) {
		c.tell(&notice{Kind: noticeJoined}, nil)
	}
	return nil
}

// awaitNeighbour waits for a step of connect, or until all ranks are connected.
func (c *comm) awaitNeighbour(step <-chan struct{}, patience *time.Timer) error {
	select {
	case <-step:
		return nil
	case <-c.joined:
		return nil
	case <-c.failed:
		if isClosed(c.joined) { // both became known at the same time
			return nil
		}
		return errors.New(c.state().Text)
	case <-patience.C:
		return fmt.Errorf("rank %d did not connect", (c.rank+c.n-1)%c.n)
	}
}
