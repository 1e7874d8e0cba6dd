package cluster

import (
	"fmt"
	"time"
)

// A host flaps if its workers fail soon after they have joined, or if its launcher is lost
// soon after the host has joined. Each such failure stops all ranks of the job. The coordinator
// therefore excludes the host for a time, if the job has enough others. The times are multiples of
// Timing.Backoff. Another coordinator begins to count again.
const (
	// shortRun is the run of a process, in units of Timing.Backoff, that counts as a failure to start.
	shortRun = 10
	// flapLimit is the number of short runs in a row after which a host is excluded. After an
	// exclusion, one short run is enough.
	flapLimit = 4
	// exclusion is the time of the first exclusion, in units of Timing.Backoff. It doubles with each further one.
	exclusion = 30
)

// A flapper is the history of a host.
type flapper struct {
	short    int // short runs since the last exclusion
	inARow   int // short runs in a row
	excluded int // how often
	until    time.Time
}

// ranFor records a failure on a host after a run.
func (f *flapper) ranFor(run time.Duration, backoff time.Duration) {
	if run >= shortRun*backoff {
		*f = flapper{until: f.until}
		return
	}
	f.inARow++
	f.short++
}

// isDue reports whether the host must be excluded.
func (f *flapper) isDue() bool {
	return f.short >= flapLimit || f.excluded > 0 && f.short > 0
}

// exclude begins an exclusion and returns its length.
func (f *flapper) exclude(now time.Time, backoff time.Duration) time.Duration {
	d := exclusion * backoff << min(f.excluded, maxDoublings)
	f.excluded++
	f.short, f.until = 0, now.Add(d)
	return d
}

// excludedFor returns how long a host is excluded yet.
func (c *coordinator) excludedFor(host string) time.Duration {
	if f := c.flappers[host]; f != nil {
		return max(0, time.Until(f.until))
	}
	return 0
}

// failedAfter records that a process of a host has failed after a run, and excludes the host if it flaps.
func (c *coordinator) failedAfter(host string, run time.Duration, reason string) {
	if c.cfg.agents < 2 || c.cfg.again.backoff <= 0 || c.excludedFor(host) > 0 {
		return
	}
	if c.flappers == nil {
		c.flappers = map[string]*flapper{}
	}
	f := c.flappers[host]
	if f == nil {
		f = &flapper{}
		c.flappers[host] = f
	}
	f.ranFor(run, c.cfg.again.backoff)
	others := without(c.nextMembers(), func(p *peer) bool { return p.reg.Host == host })
	if !f.isDue() || !c.isEnough(others) || c.faults.stop != nil {
		return
	}
	d := f.exclude(time.Now(), c.cfg.again.backoff)
	c.tellNews(fmt.Sprintf("host %s is excluded for %v: its processes failed %d times in a row within %v of their start; the last: %s",
		host, d, f.inARow, shortRun*c.cfg.again.backoff, reason))
	for _, p := range without(c.workers, func(p *peer) bool { return p.reg.Host != host || p.elastic.exit != nil }) {
		c.elastic.spared[p.home] = true
		c.loseWorker(p, fault{Rank: p.reg.Rank, Host: p.reg.Host, PID: p.reg.PID, Code: -1, Reason: fmt.Sprintf("its host is excluded for %v", d)})
	}
	time.AfterFunc(d, func() {
		c.cfg.sys.await()
		c.mu.Lock()
		defer c.unlock()
		if c.isElastic() && !c.closed {
			c.checkChanges()
		}
	})
}

// admitLate gives free places to hosts that wait for one and are not excluded.
func (c *coordinator) admitLate() {
	late := c.late
	c.late = nil
	for _, a := range late {
		c.admitHost(a)
	}
}
