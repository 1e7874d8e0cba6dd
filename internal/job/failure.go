package job

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// An Exit describes the exit of a worker process, as its launcher saw it.
type Exit struct {
	Rank   int    `json:"rank"`
	Local  int    `json:"local"` // rank on its host
	Host   string `json:"host"`
	PID    int    `json:"pid"`
	Code   int    `json:"code"`   // as in a shell: 128+n for signal n
	Reason string `json:"reason"` // such as "exited with code 3"
	// Asked is true if the launcher had asked the worker to exit: then the exit
	// is a consequence of another failure, whatever the code.
	Asked bool `json:"asked,omitempty"`
}

func newFaults() faults { return faults{exits: map[int]Exit{}} }

func (e Exit) fault() Fault {
	return Fault{Rank: e.Rank, Host: e.Host, PID: e.PID, Reason: e.Reason, Code: e.Code}
}

// faults is the part of a coordinator that decides which failure was first.
// Sessions and launchers learn of different events. A worker that exits with code
// 0 and an open session is a loss for the other sessions, but not a failure that
// stops hosts. A launcher that was asked to stop stops hosts, but is not yet a
// loss: the workers may still need each other to exit cleanly.
type faults struct {
	lost    *Fault // reported to sessions
	stop    *Fault // reported to launchers
	exits   map[int]Exit
	pending *pending
	held    []func() // events after the pending loss, in order
}

// reach selects the receivers of a fault.
type reach int

const (
	tellAll      reach = iota // sessions report a loss, launchers stop
	tellNote                  // sessions report a loss, launchers only record it
	tellSessions              // launchers already know the cause
)

func (e Exit) reach() reach {
	switch {
	case e.Asked:
		return tellSessions
	case e.Code == 0:
		return tellNote
	}
	return tellAll
}

// A pending loss is incomplete: either the worker's connection closed and its
// launcher has not reported the exit yet, or the launcher reported the exit and
// the worker's last messages are not yet read.
type pending struct {
	peer   *peer
	fault  Fault
	exited bool // the launcher has reported the exit
}

// lastFaults sends the remaining reports before the coordinator closes: pending
// losses, and a failure to hosts that have not finished.
func (c *coordinator) lastFaults() {
	for c.faults.pending != nil {
		c.resolve(c.faults.pending.fault, tellAll)
	}
	unfinished := func(p *peer) bool { return p.state == peerJoined }
	switch {
	case c.plan == nil || c.handedOver || c.hasFinished() && c.elastic.told:
	case slices.ContainsFunc(c.agents, unfinished):
		c.fail(c.ownFault("its launcher, which coordinated the job, left before all workers had ended"), tellAll)
	case c.isUnfinished(): // the others have no workers
		c.fail(c.ownFault("its launcher, which coordinated the job, left before the program had ended"), tellAll)
	}
}

// firstExit returns the exit of a rank that never joined, so that the world
// cannot become complete.
func (f *faults) firstExit(c *coordinator) (Exit, bool) {
	for _, rank := range slices.Sorted(maps.Keys(f.exits)) {
		joined := func(p *peer) bool { return p.reg.Rank == rank }
		if c.world == nil && !slices.ContainsFunc(c.workers, joined) {
			e := f.exits[rank]
			e.Reason += " before it joined"
			return e, true
		}
	}
	return Exit{}, false
}

// disconnected handles the end of a connection.
func (c *coordinator) disconnected(p *peer, why ending) {
	p.over = true
	if !c.counts(p) || c.closed || c.handedOver {
		p.state = peerGone
		return
	}
	if c.cfg.Registry {
		c.delist(p, why.reason)
		return
	}
	if (c.plan != nil || c.world != nil) && c.restart == nil && !c.isElastic() && !c.hasFinished() && !why.closed && c.isCutOff(p) {
		p.state = peerGone
		c.late = remove(c.late, p)
		c.later(func() {
			f := c.ownFault(fmt.Sprintf("cut off from the other hosts: it coordinates the job and has heard none of them for %v", c.silent(p).Round(100*time.Millisecond)))
			f.Silent = c.silent(p)
			c.fail(f, tellAll)
		})
		return
	}
	switch p.role {
	case roleAgent:
		c.loseAgent(p, c.agentEnd(why))
	case roleWorker:
		f := c.lossOf(p, why.reason)
		f.Closed = why.closed
		c.workerDisconnected(p, f, why.closed)
	}
}

// delist takes a worker off the list of a registry, which it has left if reason
// is "".
func (c *coordinator) delist(p *peer, reason string) {
	p.state = peerGone
	c.workers = remove(c.workers, p)
	d := Departure{Member: p.reg.Member, Reason: reason, Planned: reason == ""}
	if d.Planned {
		d.Reason = "left"
	} else {
		c.say(fmt.Sprintf("member %s (%s) is lost: %s", d.Name, memberList([]Member{d.Member}), reason))
	}
	if len(c.departed) == maxDepartures {
		c.departed = c.departed[1:]
	}
	c.departed = append(slices.Clip(c.departed), d)
	c.act(listed{})
	c.departures++
	c.act(delisted{d, c.departures})
}

// counts reports whether the end of p's connection is a loss. The launcher of a host without workers still votes if
// processes call Run, until the end of the program is recorded.
func (c *coordinator) counts(p *peer) bool {
	return p.state == peerJoined || p.state == peerDone && c.isDeciding() && slices.Contains(c.agents, p)
}

// isCutOff reports whether p and all other processes on other hosts have been silent for a similar
// time, so that the network of this host is the likely cause. With one other host, the cause cannot be known.
func (c *coordinator) isCutOff(p *peer) bool {
	silent, hosts := c.silent(p), map[string]bool{}
	for _, q := range slices.Concat(c.agents, c.workers) {
		host := q.member().Host
		if q.state != peerJoined || host == c.cfg.Self.Host {
			continue
		}
		if c.silent(q) < silent/2 {
			return false
		}
		hosts[host] = true
	}
	return len(hosts) > 1 && silent >= c.cfg.Self.LostAfter/2 && p.member().Host != c.cfg.Self.Host
}

// agentEnd returns what the end of a launcher's connection says about it.
func (c *coordinator) agentEnd(why ending) agentEnd {
	end := agentEnd{reason: why.reason}
	switch {
	case why.found == foundEnded:
		end.reason, end.ended, end.knows = "its launcher ended", why.certain, true // otherwise it may have agreed with others before
	case why.found == foundAlive:
		end.reason = "its connection closed, and its launcher did not connect again"
	case why.closed && c.isDeciding():
		end.reason = "its connection closed, and it does not answer"
	case why.closed:
		end.reason = "its launcher ended"
	}
	if why.path != "" {
		end.reason += "; " + why.path
	}
	return end
}

// fault returns the loss of a process for a reason that is not its silence.
func (p *peer) fault(reason string) Fault {
	m := p.member()
	return Fault{Rank: m.Rank, Host: m.Host, PID: m.PID, Reason: reason, Code: -1}
}

// lossOf returns the loss of a process, which was last heard some time ago.
func (c *coordinator) lossOf(p *peer, reason string) Fault {
	f := p.fault(reason)
	f.Silent = c.silent(p)
	return f
}

// ownFault returns the loss of this process.
func (c *coordinator) ownFault(reason string) Fault {
	self := c.cfg.Self
	return Fault{Rank: self.Rank, Host: self.Host, PID: self.PID, Reason: reason, Code: -1}
}

// failHost fails a job of a fixed size because of a host. A pending loss of one of its workers is a consequence.
func (c *coordinator) failHost(p *peer, f Fault) {
	if w := c.faults.pending; w != nil && !w.exited && c.uuidOf(w.peer) == p.host.UUID {
		c.resolve(f, tellAll)
		return
	}
	c.later(func() { c.fail(f, tellAll) })
}

// workerDisconnected handles the end of a worker's connection, and gives the
// launcher, if any, time to report the worker's exit.
func (c *coordinator) workerDisconnected(p *peer, f Fault, closed bool) {
	if c.isElastic() {
		c.elasticDisconnected(p, f, closed)
		return
	}
	if w := c.faults.pending; w != nil && (w.peer != p || !w.exited) {
		c.later(func() { c.workerDisconnected(p, f, closed) })
		return
	}
	p.state = peerGone
	if w := c.faults.pending; w != nil {
		c.resolve(w.fault, tellAll)
		return
	}
	if c.hasFinished() {
		return
	}
	if f.Rank < 0 { // no rank was assigned yet
		f.Reason += " before the world was complete"
	}
	if e, ok := c.faults.exits[f.Rank]; ok && closed {
		c.fail(openSession(e), e.reach())
		return
	}
	if c.faults.lost != nil && c.faults.stop != nil {
		return // a consequence
	}
	if c.agentOf(p) == nil || !closed {
		c.fail(f, tellAll)
		return
	}
	c.awaitReport(&pending{peer: p, fault: f})
}

// awaitReport waits for the second half of a loss.
func (c *coordinator) awaitReport(w *pending) {
	c.faults.pending = w
	c.after(ExitGrace, deadline{what: dueReport, of: w})
}

// openSession returns the fault of a worker that exited with an open session.
func openSession(e Exit) Fault {
	f := e.fault()
	if e.Code == 0 {
		f.Reason += " without Close or Shutdown of its session"
	}
	return f
}

// exited handles a launcher's report of a worker's exit.
func (c *coordinator) exited(a *peer, e Exit) {
	e.Host = a.host.Host
	if c.isElastic() {
		c.elasticExit(a, e)
		return
	}
	if c.isUnneeded(a, e) {
		return
	}
	c.faults.exits[e.Rank] = e
	for _, p := range c.workers {
		if p.reg.Rank == e.Rank {
			c.act(awaitNoLink{p})
		}
	}
	if w := c.faults.pending; w != nil {
		if w.peer.reg.Rank != e.Rank {
			c.later(func() { c.exited(a, e) })
			return
		}
		c.resolve(openSession(e), e.reach())
		return
	}
	switch {
	case e.Asked:
	case e.Code != 0 && c.world == nil && slices.ContainsFunc(c.gone, func(m Member) bool { return m.Rank == e.Rank }):
		c.fail(c.absent(e), tellAll)
	case e.Code != 0:
		open := func(p *peer) bool { return p.reg.Rank == e.Rank && p.state == peerJoined }
		if i := slices.IndexFunc(c.workers, open); i >= 0 && c.faults.lost == nil {
			c.awaitReport(&pending{peer: c.workers[i], fault: e.fault(), exited: true})
			return
		}
		c.fail(e.fault(), tellAll)
	case len(c.workers) > 0:
		if early, ok := c.faults.firstExit(c); ok {
			c.fail(early.fault(), early.reach())
		}
	}
}

// absent returns the fault of a worker that gave up because others never joined: the first of those is
// the cause.
func (c *coordinator) absent(e Exit) Fault {
	f := e.fault()
	missing := c.attendance().Missing
	if len(missing) == 0 {
		return f
	}
	f.Reason = fmt.Sprintf("never joined the job (missing %s), so rank %d gave up and %s", RankList(missing), e.Rank, e.Reason)
	f.Rank, f.PID = missing[0], 0
	if c.plan != nil {
		f.Host = c.plan.hostOf(missing[0])
	}
	return f
}

// memberTimedOut handles a member that timed out waiting for this process.
// Later failures of that member are consequences.
func (c *coordinator) memberTimedOut(p *peer) {
	if !c.counts(p) {
		return
	}
	if c.cfg.Registry {
		c.delist(p, fmt.Sprintf("it has heard nothing from the registry for %v and disconnected", c.cfg.Self.LostAfter))
		return
	}
	if c.hasFinished() && p.role == roleWorker {
		p.state = peerGone
		return
	}
	if c.isElastic() || c.hasFinished() || p.role == roleAgent && (c.plan == nil || !slices.Contains(c.agents, p)) { // no process of the job runs on its host
		c.lostTouch(p)
		return
	}
	// If it is a launcher, it stops its workers: their losses are consequences too.
	w := c.faults.pending
	consequence := w != nil && (w.peer == p || c.agentOf(w.peer) == p)
	p.state = peerGone
	f := c.ownFault(fmt.Sprintf("silent for %v, so that %s disconnected: stopped or starved", c.cfg.Self.LostAfter, memberList([]Member{p.member()})))
	if consequence {
		c.resolve(f, tellAll)
		return
	}
	c.later(func() { c.fail(f, tellAll) })
}

// stopped handles a launcher that was asked to stop the job.
func (c *coordinator) stopped(a *peer, f Fault) {
	f.Stop, f.Rank, f.Host, f.PID = true, -1, a.host.Host, a.host.PID
	if c.faults.stop == nil || c.restart != nil {
		c.restart = nil
		c.faults.stop = &f
		c.tellAgents(say(KindFault, f))
	}
}

// later runs f now or, if a loss is pending, after it, so that causes are
// reported as they arrive.
func (c *coordinator) later(f func()) {
	if c.faults.pending != nil {
		c.faults.held = append(c.faults.held, f)
		return
	}
	f()
}

// resolve completes the pending loss. If the launcher had asked the worker to
// exit, it reports the held events first: the cause is among them, delayed on
// another connection.
func (c *coordinator) resolve(f Fault, r reach) {
	c.faults.pending = nil
	held := c.faults.held
	c.faults.held = nil
	if r != tellSessions {
		c.fail(f, r)
	}
	for _, h := range held {
		c.later(h)
	}
	if r == tellSessions {
		c.later(func() { c.fail(f, r) })
	}
}

// fail reports the first loss to sessions and the first failure to launchers,
// because later ones are consequences.
func (c *coordinator) fail(f Fault, r reach) {
	if c.faults.lost == nil {
		c.faults.lost = &f
		for _, p := range c.workers {
			if p.state == peerJoined || p.reg.Rank == f.Rank {
				c.send(p, say(KindFault, f))
			}
		}
		if r == tellNote {
			c.tellAgents(say(kindNote, f))
		}
	}
	if r == tellAll && c.faults.stop == nil {
		c.planRestart(&f)
		c.faults.stop = &f
		c.tellAgents(say(KindFault, f))
		if f.Again {
			c.awaitHosts(f)
		}
	}
}

func (c *coordinator) tellAgents(m msg) {
	for _, p := range c.agents {
		if p.state != peerGone {
			c.send(p, m)
		}
	}
}

// agentOf returns the connected agent of a worker's host, or nil.
func (c *coordinator) agentOf(p *peer) *peer {
	for _, a := range c.agents {
		if a.host.UUID == c.uuidOf(p) && a.state != peerGone {
			return a
		}
	}
	return nil
}

// uuidOf returns the UUID of the agent of a worker's host, or "".
func (c *coordinator) uuidOf(p *peer) string {
	if p.reg.Agent != "" {
		return p.reg.Agent
	}
	if c.plan == nil || p.reg.Node < 0 || p.reg.Node >= len(c.plan.Hosts) {
		return ""
	}
	return c.plan.Hosts[p.reg.Node].UUID
}

// describe returns the text for an exit code if the launcher provides none.
func describe(code int) string {
	if code > 128 && code < 128+65 {
		return fmt.Sprintf("killed by signal %d", code-128)
	}
	return fmt.Sprintf("exited with code %d", code)
}

// pathFailed handles the report of an agent that it does not reach another host. If the coordinator
// does not hear one of both either, the reason is another one.
func (c *coordinator) pathFailed(from *peer, r pathReport) {
	heard := func(p *peer) bool { return p.state == peerJoined && c.silent(p) < c.cfg.Self.LostAfter/2 }
	for _, p := range c.agents {
		if p.host.UUID != r.UUID || !heard(p) || !heard(from) {
			continue
		}
		what := fmt.Sprintf("%s %v", memberList([]Member{from.member()}), r.State)
		if !r.Before { // perhaps a firewall lets only the coordinator's port pass
			c.sayOf(p.addr, fmt.Sprintf("warning: the path to %s: %s, at the port of gossip; collectives between both may hang", memberList([]Member{p.member()}), what))
			return
		}
		reason := what + "; both reach the coordinator, so a link, a route or a firewall between them fails"
		if c.isElastic() {
			c.loseAgent(p, agentEnd{reason: reason})
		} else { // it is still connected, and learns the reason, too
			c.failHost(p, c.lossOf(p, reason))
		}
		return
	}
}

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
	cause Fault
	begun instant
	due   bool // the back-off is over
}

// planRestart decides whether the job goes on after f, which is not sent yet.
func (c *coordinator) planRestart(f *Fault) {
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
func (c *coordinator) awaitHosts(f Fault) {
	c.plan = nil
	c.agents = without(c.agents, func(p *peer) bool { return p.state == peerGone })
	for _, p := range c.agents {
		p.ready, p.state = false, peerJoined
	}
	c.admitLate()
	if len(c.agents) < c.cfg.leastHosts() {
		c.say(f.text() + "; waiting for another host")
	}
}

// admitsLateHosts reports whether a host may wait for a place in a job that is complete.
func (c *coordinator) admitsLateHosts() bool {
	return c.cfg.again.most > 0 || c.cfg.leastHosts() < c.cfg.agents
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
		quantity(p.size(), UnitProcess), quantity(len(p.Hosts), unitHost), c.restart.cause.text(), (c.now - c.restart.begun).Round(time.Millisecond))
	c.restart = nil
}

// text describes a loss after its end, such as "rank 2 (host b, pid 9): killed by SIGKILL".
func (f Fault) text() string {
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
	// FlapLimit is the number of short runs in a row after which a host is excluded. After an
	// Exclusion, one short run is enough.
	FlapLimit = 4
	// Exclusion is the time of the first exclusion, in units of Timing.Backoff. It doubles with each further one.
	Exclusion = 30
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
	return f.short >= FlapLimit || f.excluded > 0 && f.short > 0
}

// exclude begins an exclusion and returns its length.
func (f *flapper) exclude(now instant, backoff time.Duration) time.Duration {
	d := Exclusion * backoff << min(f.excluded, maxDoublings)
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
		c.elastic.exempt[p.home] = true
		c.loseWorker(p, p.fault(fmt.Sprintf("its host is excluded for %v", d)))
	}
	c.after(d, deadline{what: dueReturnTo})
}

// A ledger is what the next coordinator must know beside the epochs: the restarts so far, and whether the program has
// ended. A coordinator acts on an entry only when all launchers that it reaches have it, so that the entry survives
// the coordinator. Entries only grow, so that two ledgers can be merged.
type ledger struct {
	Used     int         `json:"used,omitempty"` // restarts so far
	Restarts []restarted `json:"restarts,omitempty"`
	Finished bool        `json:"finished,omitempty"` // all functions of an epoch have returned nil
}

// restarted are the restarts in one place.
type restarted struct {
	Agent  string `json:"agent"`
	Local  int    `json:"local"`
	PID    int    `json:"pid"` // of the process whose exit was counted last
	Total  int    `json:"total"`
	InARow int    `json:"inARow,omitempty"`
}

// merge adds the entries of another ledger.
func (l *ledger) merge(o ledger) {
	l.Used, l.Finished = max(l.Used, o.Used), l.Finished || o.Finished
	l.Restarts = slices.Clone(l.Restarts)
	for _, r := range o.Restarts {
		i := slices.IndexFunc(l.Restarts, func(q restarted) bool { return q.Agent == r.Agent && q.Local == r.Local })
		switch {
		case i < 0:
			l.Restarts = append(l.Restarts, r)
		case l.Restarts[i].Total < r.Total:
			l.Restarts[i] = r
		}
	}
}

// An entry waits for the answers of launchers.
type entry struct {
	number uint64
	then   func()
}

// ledger returns the ledger of the job.
func (c *coordinator) ledger() ledger {
	l := ledger{Used: c.retries.total}
	e := c.elastic
	if e == nil {
		return l
	}
	l.Finished = e.finished
	for _, at := range sortedPlaces(e.retries) {
		if r := e.retries[at]; r.total > 0 {
			l.Restarts = append(l.Restarts, restarted{Agent: at.agent, Local: at.local, PID: r.counted, Total: r.total, InARow: r.inARow})
		}
	}
	return l
}

// inherit takes over the ledger of an earlier coordinator.
func (c *coordinator) inherit(l ledger) {
	c.retries.total = l.Used
	for _, r := range l.Restarts {
		c.elastic.retries[place{r.Agent, r.Local}] = &retries{total: r.Total, inARow: r.InARow, counted: r.PID, inherited: r.PID, started: c.now}
	}
}

// record calls then when all launchers have the ledger as it is now.
func (c *coordinator) record(then func()) {
	if c.plan == nil {
		then()
		return
	}
	c.lastEntry++
	c.entries = append(c.entries, entry{c.lastEntry, then})
	m := say(kindLedger, news{By: c.leads(), Ledger: c.ledger()})
	m.id = c.lastEntry
	for _, a := range c.agents {
		if a.state != peerGone {
			a.recording = c.lastEntry
			c.send(a, m)
		}
	}
	c.checkRecorded()
}

// recorded records the answer of a launcher.
func (c *coordinator) recorded(a *peer, number uint64) {
	a.recorded = max(a.recorded, min(number, a.recording))
	c.checkRecorded()
}

// checkRecorded acts on the entries that all launchers have. Those that were lost meanwhile are not waited for, as long as the
// others may go on.
func (c *coordinator) checkRecorded() {
	for len(c.entries) > 0 {
		x, have := c.entries[0], map[string]bool{}
		for _, a := range c.agents {
			switch {
			case a.state == peerGone || a.recording < x.number:
			case a.recorded < x.number:
				return
			default:
				have[a.host.UUID] = true
			}
		}
		if c.faults.stop != nil {
			c.entries = nil
			return
		}
		if !allow(c.voterSets, have, c.ended) {
			return
		}
		if d := c.leased(); d > 0 {
			c.after(d, deadline{what: dueLedger})
			return
		}
		c.entries = c.entries[1:]
		x.then()
	}
}
