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
	return max(min(w.Heartbeat/4, w.LostAfter/48), time.Millisecond)
}

// extraPatience limits the time that isTooSilent adds to a limit.
func extraPatience(limit time.Duration) time.Duration { return limit/32 + limit/8 }

// isTooSilent reports whether the other end has been silent for longer than limit. A heartbeat that is due
// just before the limit has the time to arrive. If this process was starved during the silence, its
// clock stood still. It then waits for the same time once more, at most an eighth of the limit: it has
// messages to read, and other processes of this host were probably starved, too.
func (s *stream) isTooSilent(limit time.Duration) bool {
	starved := s.clock.starved() - time.Duration(s.starved.Load())
	return s.silent() > limit+limit/32+min(starved, limit/8)
}

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
	limit := c.silenceLimit()
	for _, p := range c.peers {
		if p.isTooSilent(limit) || c.isLate(p, limit) {
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
