package cluster

import (
	"fmt"
	"slices"
	"time"
)

// A restartPolicy says how often and how soon processes are started again.
type restartPolicy struct {
	most    int           // restarts of the job
	backoff time.Duration // Timing.Backoff
}

const (
	// maxDoublings limits the growth of the back-off.
	maxDoublings = 6
	// goodRun is how long a process must run so that its next failure counts as the first one.
	goodRun = 5 * time.Minute
)

// delay returns the time before a restart after n failures in a row.
func (p restartPolicy) delay(n int) time.Duration {
	if n < 2 {
		return 0
	}
	return p.backoff << min(n-2, maxDoublings)
}

// retries counts the restarts of a job, or of one process.
type retries struct {
	total   int // since the start
	inARow  int // failures without a good run between them
	started time.Time
	counted int       // of one place: PID of the process whose exit was counted last
	joined  time.Time // of one process: zero if it has not joined since its last start
}

// failed counts a failure of processes that were started at r.started.
func (r *retries) failed() {
	if time.Since(r.started) >= goodRun {
		r.inARow = 0
	}
	r.inARow++
	r.total++
}

// A restart is the time between two attempts at a job whose processes are all started
// again. Hosts may leave and join during it.
type restart struct {
	cause fault
	begun time.Time
	timer *time.Timer // ends the back-off
	due   bool        // the back-off is over
}

// planRestart decides whether the job goes on after f, which is not sent yet.
func (c *coordinator) planRestart(f *fault) {
	if c.plan == nil || c.elastic != nil || c.retries.total >= c.cfg.again.most {
		return
	}
	f.Again = true
	c.retries.failed()
	r := &restart{cause: *f, begun: time.Now()}
	r.timer = time.AfterFunc(c.cfg.again.delay(c.retries.inARow), func() {
		c.cfg.sys.await()
		c.mu.Lock()
		defer c.unlock()
		r.due = true
		c.tryPropose()
	})
	c.restart = r
}

// awaitHosts lets the hosts of the next plan come, after all have been told of f.
func (c *coordinator) awaitHosts(f fault) {
	c.plan = nil
	c.agents = without(c.agents, func(p *peer) bool { return p.state == peerGone })
	for _, p := range c.agents {
		p.ready, p.state = false, peerJoined
	}
	c.admitLateHosts()
	if len(c.agents) < c.cfg.leastHosts() {
		c.say(f.text() + "; waiting for another host")
	}
}

// admitsLateHosts reports whether a host may wait for a place in a job that is complete.
func (c *coordinator) admitsLateHosts() bool {
	return c.cfg.again.most > 0 || c.cfg.leastHosts() < c.cfg.agents
}

// admitLateHosts gives free places to hosts that wait for one.
func (c *coordinator) admitLateHosts() {
	for len(c.late) > 0 && len(c.agents) < c.cfg.agents {
		p := c.late[0]
		c.late = c.late[1:]
		if r := c.hostObjection(p.host); r != nil { // another host has its node rank
			c.refuse(p, *r)
			continue
		}
		c.agents = append(c.agents, p)
	}
}

// say queues a line for the user of this host.
func (c *coordinator) say(text string) {
	c.lines = append(c.lines, fmt.Sprintf("job %s: %s", c.cfg.job, text))
}

// agentReady records that the workers of a host have exited after a failure.
func (c *coordinator) agentReady(p *peer) {
	if c.restart == nil || p.state == peerGone {
		return
	}
	p.ready = true
	c.tryPropose()
}

// tryPropose proposes a plan if all hosts are present and, after a failure, ready.
func (c *coordinator) tryPropose() {
	if c.succession != nil {
		c.trySucceed()
		return
	}
	if c.closed || c.mustWait() || c.plan != nil || c.attempt != 0 || len(c.agents) < c.cfg.leastHosts() {
		return
	}
	if c.restart == nil && len(c.agents) < c.cfg.agents && !c.lastCall() {
		return
	}
	if c.restart != nil && (!c.restart.due || slices.ContainsFunc(c.agents, func(p *peer) bool { return !p.ready })) {
		return
	}
	c.propose()
}

// lastCallTime is the time that a job with enough hosts waits for more, after each arrival.
const lastCallTime = 3 * time.Second

// lastCall reports whether no host has arrived for lastCallTime.
func (c *coordinator) lastCall() bool {
	newest := time.Duration(0)
	for _, p := range c.agents {
		newest = max(newest, p.since)
	}
	wait := newest + lastCallTime - c.clock.now()
	if wait <= 0 {
		return true
	}
	time.AfterFunc(wait, func() {
		c.cfg.sys.await()
		c.mu.Lock()
		defer c.unlock()
		c.tryPropose()
	})
	return false
}

// beginAttempt forgets the processes of the last attempt, if p is not the first plan.
func (c *coordinator) beginAttempt(p *plan) {
	c.retries.started = time.Now()
	if c.restart == nil {
		return
	}
	for _, w := range c.workers {
		w.state = peerGone
		w.closeAfterQueue()
	}
	c.workers, c.world, c.engine, c.elastic, c.faults = nil, nil, nil, nil, newFaults()
	c.epoch++
	p.Restarts = c.retries.total
	p.News = fmt.Sprintf("restart %d of %d: epoch %d has %s on %s; %s; the job stood still for %v", p.Restarts, c.cfg.again.most, c.epoch,
		quantity(p.size(), unitProcess), quantity(len(p.Hosts), unitHost), c.restart.cause.text(), time.Since(c.restart.begun).Round(time.Millisecond))
	c.restart = nil
}

// text describes a loss after its end, such as "rank 2 (host b, pid 9): killed by SIGKILL".
func (f fault) text() string {
	who := (&MemberLostError{Rank: f.Rank, Host: f.Host, PID: f.PID}).Who()
	return fmt.Sprintf("%s: %s", who, f.Reason)
}
