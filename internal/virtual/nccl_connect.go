package virtual

import (
	"errors"
	"fmt"
	"time"
)

// connect joins the rank to its neighbours once the members are known, and
// returns when all ranks have done so.
//
// Rank 0 sends a count around the ring, which each rank passes on when it is
// connected. When the count is back, rank 0 knows that all are and says so. A
// rank that has heard it tells its neighbours before it returns from here, and
// every later notice of it implies it. So whatever a rank does right after its
// own CommInit, another rank that is still in here learns first that it may
// return: it hears of a loss as the communicator's error and not as its own.
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
		if isClosed(c.joined) { // the two become known together
			return nil
		}
		return errors.New(c.state().Text)
	case <-patience.C:
		return fmt.Errorf("rank %d did not connect", (c.rank+c.n-1)%c.n)
	}
}
