package cluster

import "time"

const (
	// joinPatience multiplies LostAfter until the world is complete: while all processes
	// start, hosts are busy, and nothing is lost if a dead host is noticed later.
	joinPatience = 5
	// startTime is how long a complete list of hosts waits for the world to be complete
	// before silence counts as usual, in units of LostAfter. A program may never attach.
	startTime = 10
)

// step is the time between two checks for silence of the other end.
func (w welcome) step() time.Duration {
	return max(min(w.Heartbeat/4, w.LostAfter/24), time.Millisecond)
}

// tooSilent is the silence that ends a stream if limit is its time limit. A
// heartbeat that is due just before the limit has the time to arrive.
func tooSilent(limit time.Duration) time.Duration { return limit + limit/8 }

// watchSilence looks for silent peers.
func (c *coordinator) watchSilence() {
	t := time.NewTicker(c.clock.step)
	defer t.Stop()
	for {
		select {
		case <-c.quit:
			return
		case <-t.C:
			c.clock.tick()
			c.expireSilent()
		}
	}
}

func (c *coordinator) expireSilent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	limit := tooSilent(c.silenceLimit())
	for _, p := range c.peers {
		if p.silent() > limit || c.isLate(p, limit) {
			p.expire()
		}
	}
}

// silenceLimit returns the silence after which a peer is lost.
func (c *coordinator) silenceLimit() time.Duration {
	limit := c.cfg.self.LostAfter
	if c.world == nil && c.faults.lost == nil && (c.plan == nil || time.Since(c.planned) < startTime*limit) {
		return joinPatience * limit
	}
	return limit
}
