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
	started instant
	counted int // of one place: PID of the process whose exit was counted last
	// inherited is counted of an earlier coordinator, until a process has come after it: its launcher may repeat the exit.
	inherited int
	excluded  instant // of one process: the end of the exclusion of its host that its last order to start has waited for
	joined    instant // of one process: zero if it has not joined since its last start
}

// failed counts a failure of processes that were started at r.started.
func (r *retries) failed(now instant) {
	if now-r.started >= goodRun {
		r.inARow = 0
	}
	r.inARow++
	r.total++
}

// A restart is the time between two attempts at a job whose processes are all started
// again. Hosts may leave and join during it.
type restart struct {
	cause fault
	begun instant
	due   bool // the back-off is over
}

// planRestart decides whether the job goes on after f, which is not sent yet.
func (c *coordinator) planRestart(f *fault) {
	if c.plan == nil || c.elastic != nil || c.retries.total >= c.cfg.again.most {
		return
	}
	f.Again = true
	c.retries.failed(c.now)
	r := &restart{cause: *f, begun: c.now}
	c.after(c.cfg.again.delay(c.retries.inARow), deadline{what: dueBackoff, of: r})
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
	wait := newest + lastCallTime - c.now
	if wait <= 0 {
		return true
	}
	c.after(wait, deadline{what: dueProposal})
	return false
}

// beginAttempt forgets the processes of the last attempt, if p is not the first plan.
func (c *coordinator) beginAttempt(p *plan) {
	c.retries.started = c.now
	if c.restart == nil {
		return
	}
	for _, w := range c.workers {
		w.state = peerGone
		c.hangUp(w)
	}
	c.workers, c.world, c.elastic, c.faults = nil, nil, nil, newFaults()
	c.act(openStore{})
	c.epoch++
	p.Restarts = c.retries.total
	p.News = fmt.Sprintf("restart %d of %d: epoch %d has %s on %s; %s; the job stood still for %v", p.Restarts, c.cfg.again.most, c.epoch,
		quantity(p.size(), unitProcess), quantity(len(p.Hosts), unitHost), c.restart.cause.text(), (c.now - c.restart.begun).Round(time.Millisecond))
	c.restart = nil
}

// text describes a loss after its end, such as "rank 2 (host b, pid 9): killed by SIGKILL".
func (f fault) text() string {
	who := (&MemberLostError{Rank: f.Rank, Host: f.Host, PID: f.PID}).Who()
	return fmt.Sprintf("%s: %s", who, f.Reason)
}

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
	until    instant
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
func (f *flapper) exclude(now instant, backoff time.Duration) time.Duration {
	d := exclusion * backoff << min(f.excluded, maxDoublings)
	f.excluded++
	f.short, f.until = 0, now+d
	return d
}

// excludedFor returns how long a host is excluded yet.
func (c *coordinator) excludedFor(host string) time.Duration {
	if f := c.flappers[host]; f != nil {
		return max(0, f.until-c.now)
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
	d := f.exclude(c.now, c.cfg.again.backoff)
	c.tellNews(fmt.Sprintf("host %s is excluded for %v: its processes failed %d times in a row within %v of their start; the last: %s",
		host, d, f.inARow, shortRun*c.cfg.again.backoff, reason))
	for _, p := range without(c.workers, func(p *peer) bool { return p.reg.Host != host || p.elastic.exit != nil }) {
		c.elastic.excused[p.home] = true
		c.loseWorker(p, fault{Rank: p.reg.Rank, Host: p.reg.Host, PID: p.reg.PID, Code: -1, Reason: fmt.Sprintf("its host is excluded for %v", d)})
	}
	c.after(d, deadline{what: dueReturnTo})
}

// admitLate gives free places to hosts that wait for one and are not excluded.
func (c *coordinator) admitLate() {
	late := c.late
	c.late = nil
	for _, a := range late {
		c.admitHost(a)
	}
}
