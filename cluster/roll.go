package cluster

import (
	"fmt"
	"time"
)

// waitLine is how often those who wait for others say for whom.
const waitLine = 5 * time.Second

// roll says who has come, of those for whom somebody waits now.
func (c *coordinator) roll() roll {
	var r roll
	if c.cfg.agents > 0 && c.plan == nil {
		r = roll{Unit: unitHost, Want: c.cfg.agents, Have: append(members(c.agents), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Node })
	} else {
		r = roll{Unit: unitProcess, Want: c.size(), Have: append(members(c.workers), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Rank })
	}
	r.Gone = c.gone
	if c.cfg.hint != nil && r.Unit == unitHost {
		r.Hint = c.cfg.hint(r.Have)
	}
	return r
}

func (c *coordinator) sendRoll(p *peer, id uint64) {
	m := note(kindRoll, c.roll())
	m.id = id
	p.send(m)
}

// size returns the world's size, or 0 while the hosts are not all known.
func (c *coordinator) size() int {
	if c.cfg.agents == 0 {
		return c.cfg.size
	}
	if c.plan == nil {
		return 0
	}
	return c.plan.size()
}

func members(ps []*peer) []Member {
	ms := make([]Member, 0, len(ps))
	for _, p := range ps {
		ms = append(ms, p.member())
	}
	return ms
}

// missing returns the numbers of those who have not come; nil when those who
// have are not numbered.
func missing(r roll, number func(Member) int) []int {
	come := map[int]bool{}
	for _, m := range r.Have {
		if number(m) < 0 {
			return nil
		}
		come[number(m)] = true
	}
	var ns []int
	for n := range r.Want {
		if !come[n] {
			ns = append(ns, n)
		}
	}
	return ns
}

// waitLoop says every few seconds for whom the job waits.
func (c *coordinator) waitLoop() {
	for c.pause(waitLine) {
		if line := c.waitingLine(); line != "" {
			c.cfg.notify(line)
		}
	}
}

func (c *coordinator) waitingLine() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := c.cfg.agents > 0 && c.plan == nil || c.world == nil && len(c.workers) > 0
	if !waiting || c.faults.lost != nil {
		return ""
	}
	return fmt.Sprintf("job %s: waiting since %v: %v", c.cfg.job, time.Since(c.started).Round(time.Second), c.roll())
}
