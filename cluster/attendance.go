package cluster

import (
	"fmt"
	"time"
)

// waitLine is the interval of messages about missing members.
const waitLine = 5 * time.Second

// attendance returns the members that have joined, of the hosts or of the workers.
func (c *coordinator) attendance() attendance {
	var r attendance
	if c.cfg.agents > 0 && c.plan == nil {
		r = attendance{Unit: unitHost, Want: c.cfg.agents, Have: append(members(c.agents), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Node })
	} else {
		r = attendance{Unit: unitProcess, Want: c.size(), Have: append(members(c.workers), c.gone...)}
		r.Missing = missing(r, func(m Member) int { return m.Rank })
	}
	r.Gone, r.Elastic = c.gone, c.isElastic()
	return r
}

// sendAttendance answers a request for the attendance. The record of a large world is long, so it is encoded without
// the lock, and once for all requests of a peer that have come meanwhile.
func (c *coordinator) sendAttendance(p *peer, id uint64) {
	if len(p.inquiries) >= maxNamed {
		return // it asks faster than it can be answered
	}
	p.inquiries = append(p.inquiries, id)
	if len(p.inquiries) > 1 || c.closed {
		return
	}
	r := c.attendance()
	c.wg.Go(func() {
		m := note(kindAttendance, r)
		c.mu.Lock()
		defer c.unlock()
		for _, id := range p.inquiries {
			m.id = id
			p.send(m)
		}
		p.inquiries = nil
	})
}

// size returns the world size, or 0 while the hosts are not known.
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

// missing returns the numbers of the missing members, or nil if the joined
// members have no numbers.
func missing(r attendance, number func(Member) int) []int {
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

// waitLoop reports the missing members every few seconds.
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
	if !waiting || c.faults.lost != nil && c.restart == nil {
		return ""
	}
	since := c.started
	if c.restart != nil {
		since = c.restart.begun
	}
	return fmt.Sprintf("job %s: waiting since %v: %v", c.cfg.job, time.Since(since).Round(time.Second), c.attendance())
}
