package job

import (
	"cmp"
	"container/heap"
	"fmt"
	"math/rand/v2"
	"time"
)

// A coreSim is an elastic job of real coordinators and voters. Connections, processes and time are simulated by events
// in a heap, which one seed orders, so that a seed always has the same result. Compared with simJob, which runs the real code
// of everything, it is hundreds of times as fast.
type coreSim struct {
	coreConfig
	rng       *rand.Rand
	now       time.Duration
	seq       uint64
	queue     coreQueue
	agents    []*coreAgent // one for each host
	past      []*coreAgent // that have been replaced
	down      []bool       // hosts without power
	cuts      [][]int      // by source and destination: faults that lose the packets
	links     []*coreLink
	commits   []*coreCommit
	proposals int
	touched   map[int]bool // hosts that a fault has touched
	healed    bool         // no fault is active any more
	starts    int          // workers that were started again
	bothSince time.Duration
	violation string
	log       []string
	logs      bool
	lastPID   int
}

// A coreConfig describes a job.
type coreConfig struct {
	seed      uint64
	hosts     int
	restarts  int
	slow      bool // functions need time to return
	lostAfter time.Duration
	faults    []coreFault
}

func (c coreConfig) String() string {
	return fmt.Sprintf("%#v", c)
}

// A coreFault is a fault that begins some time after the first epoch, or after the n-th proposal or commit.
type coreFault struct {
	Event string // "", "propose" or "commit"
	Count int
	After time.Duration
	// Kind is split, isolate, mute (what it sends is lost), deafen (what is sent to it is lost), cut, kill, crash (what it has just sent is
	// lost), worker, power, pause, stop (only the launcher), stall (only the worker), drain, path (B reports that it does not
	// reach the host), late (the host starts then) or restart (with another identity).
	Kind string
	A, B int // hosts; -1: the host of the coordinator of the event
	D    time.Duration
}

type coreCommit struct {
	epoch, term uint64
	by          *coreServer
	members     []string
	workers     map[*coreWorker]bool // whose functions run in it
	hosts       []string
}

type coreEvent struct {
	at  time.Duration
	seq uint64
	f   func()
}

type coreQueue []coreEvent

func (q coreQueue) Len() int { return len(q) }

func (q coreQueue) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(q[i].at, q[j].at), cmp.Compare(q[i].seq, q[j].seq)) < 0
}

func (q coreQueue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

func (q *coreQueue) Push(x any) { *q = append(*q, x.(coreEvent)) }

func (q *coreQueue) Pop() any {
	x := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return x
}

func (s *coreSim) after(d time.Duration, f func()) {
	s.seq++
	heap.Push(&s.queue, coreEvent{s.now + d, s.seq, f})
}

func (s *coreSim) say(format string, args ...any) {
	if s.logs {
		s.log = append(s.log, fmt.Sprintf("%9.6f ", s.now.Seconds())+fmt.Sprintf(format, args...))
	}
}

func (s *coreSim) violate(format string, args ...any) {
	if s.violation == "" {
		s.violation = fmt.Sprintf(format, args...)
		s.say("VIOLATION: %s", s.violation)
	}
}

func (s *coreSim) random(n time.Duration) time.Duration { return time.Duration(s.rng.Int64N(int64(n))) }

// run lets d pass.
func (s *coreSim) run(d time.Duration) {
	for end := s.now + d; s.violation == ""; {
		if len(s.queue) == 0 || s.queue[0].at > end {
			s.now = end
			return
		}
		e := heap.Pop(&s.queue).(coreEvent)
		s.now = e.at
		e.f()
	}
}

// A coreProc is a process. While it is paused, what happens to it waits, and its clock stands still.
type coreProc struct {
	s        *coreSim
	host     int
	name     string
	dead     bool
	paused   int
	pausedAt time.Duration
	missed   time.Duration
	backlog  []func()
}

func (p *coreProc) clock() time.Duration {
	if p.paused > 0 {
		return p.pausedAt - p.missed
	}
	return p.s.now - p.missed
}

// do calls f in the process as soon as the process runs.
func (p *coreProc) do(f func()) {
	switch {
	case p.dead:
	case p.paused > 0 || len(p.backlog) > 0:
		p.backlog = append(p.backlog, f)
	default:
		f()
	}
}

// after calls f in the process after d on its clock.
func (p *coreProc) after(d time.Duration, f func()) {
	due := p.clock() + d
	var try func()
	try = func() {
		p.do(func() {
			if left := due - p.clock(); left > 0 {
				p.s.after(left, try)
				return
			}
			f()
		})
	}
	p.s.after(d, try)
}

func (p *coreProc) pause() {
	if p.paused++; p.paused == 1 {
		p.pausedAt = p.s.now
	}
	p.s.changed()
}

func (p *coreProc) resume() {
	if p.paused--; p.paused > 0 {
		return
	}
	p.missed += p.s.now - p.pausedAt
	p.s.changed()
	for len(p.backlog) > 0 && !p.dead && p.paused == 0 {
		f := p.backlog[0]
		p.backlog = p.backlog[1:]
		f()
	}
}

func (s *coreSim) passes(from, to int) bool {
	return !s.down[from] && !s.down[to] && (from == to || s.cuts[from][to] == 0)
}

// reaches reports whether a process would get an answer of another one.
func (s *coreSim) reaches(from int, to *coreProc) bool {
	return s.passes(from, to.host) && s.passes(to.host, from) && !to.dead && to.paused == 0
}

// refuses reports whether the kernel of a host refuses a connection, because the process has ended.
func (s *coreSim) refuses(from int, to *coreProc) bool {
	return s.passes(from, to.host) && s.passes(to.host, from) && to.dead
}

const (
	coreMember = 0 // the ends of a link
	coreServed = 1
)

// A coreLink is the connection of a launcher or a worker to a coordinator. Messages arrive in order, and lost ones are repeated.
type coreLink struct {
	s       *coreSim
	procs   [2]*coreProc // of both ends
	server  *coreServer
	hello   Welcome // when the link was opened
	opened  time.Duration
	peer    *peer
	reads   [2]bool          // whether the end reads
	over    [2]bool          // whether the end has sent its last message
	queue   [2][]*msg        // to the end; nil closes the connection
	busy    [2]bool          // delivery is due
	heardAt [2]time.Duration // when the end has heard the last, on its clock; -1: it hears the other end
	phase   time.Duration
	noWait  bool          // the process has exited
	hungUp  bool          // the server's end ignores what it reads
	roundAt time.Duration // when heartbeats have made their last round; -1: they do

	receive func(*coreLink, msg)          // by the member
	lost    func(*coreLink, Loss, string) // by the member
}

// changed looks for ends that do not hear the other end any more, or again.
func (s *coreSim) changed() {
	open := s.links[:0]
	for _, l := range s.links {
		if !l.reads[0] && !l.reads[1] && len(l.queue[0]) == 0 && len(l.queue[1]) == 0 {
			continue
		}
		open = append(open, l)
		beats := !l.hungUp
		for end := range 2 {
			me, other := l.procs[end], l.procs[1-end]
			beats = beats && l.reads[end] && !l.over[end] && !me.dead && me.paused == 0 && s.passes(me.host, other.host)
		}
		switch {
		case beats:
			l.roundAt = -1
		case l.roundAt < 0:
			l.roundAt = s.now - l.phase
		}
		for end := range 2 {
			if !l.reads[end] {
				continue
			}
			me, other := l.procs[end], l.procs[1-end]
			hears := s.passes(other.host, me.host) && !other.dead && other.paused == 0 && !l.over[1-end]
			switch {
			case hears:
				l.heardAt[end] = -1
			case l.heardAt[end] < 0:
				l.heardAt[end] = me.clock() - l.phase
				l.watch(end, l.heardAt[end])
			}
		}
	}
	s.links = open
}

// watch ends the connection at one end when its silence is too long.
func (l *coreLink) watch(end int, since time.Duration) {
	limit := l.s.lostAfter + l.s.lostAfter/32
	me := l.procs[end]
	me.after(since+limit-me.clock()+l.s.random(l.s.lostAfter/48), func() {
		if l.reads[end] && l.heardAt[end] == since {
			l.expire(end)
		}
	})
}

// isCertain reports whether the other end cannot have lost this one for silence.
func (l *coreLink) isCertain() bool { return l.roundAt < 0 || l.s.now-l.roundAt < l.s.lostAfter }

func (l *coreLink) expire(end int) {
	l.reads[end] = false
	if end == coreServed {
		l.server.step(disconnected{l.peer, ending{reason: "silent"}})
		return
	}
	l.send(coreServed, &msg{kind: KindSilent, epoch: FirstEpoch})
	l.send(coreServed, nil)
	l.lost(l, lostSilent, "silent")
}

// send sends a message to an end; nil closes the connection.
func (l *coreLink) send(to int, m *msg) {
	if l.over[1-to] || l.procs[1-to].dead {
		return
	}
	l.push(to, m)
}

func (l *coreLink) push(to int, m *msg) {
	l.over[1-to] = m == nil
	l.queue[to] = append(l.queue[to], m)
	if !l.busy[to] {
		l.busy[to] = true
		l.s.after(l.latency(), func() { l.deliver(to) })
	}
}

func (l *coreLink) latency() time.Duration {
	if l.procs[0].host == l.procs[1].host {
		return 20*time.Microsecond + l.s.random(20*time.Microsecond)
	}
	return 200*time.Microsecond + l.s.random(300*time.Microsecond)
}

func (l *coreLink) deliver(to int) {
	me := l.procs[to]
	if !l.s.passes(l.procs[1-to].host, me.host) {
		if l.s.down[me.host] || l.s.down[l.procs[1-to].host] {
			l.queue[to] = nil
			return
		}
		l.s.after(50*time.Millisecond+l.s.random(50*time.Millisecond), func() { l.deliver(to) })
		return
	}
	if len(l.queue[to]) == 0 { // what was sent is lost
		l.busy[to] = false
		return
	}
	m := l.queue[to][0]
	l.queue[to] = l.queue[to][1:]
	me.do(func() {
		if !l.reads[to] {
			return
		}
		switch {
		case m != nil && to == coreServed && l.hungUp:
		case m != nil && to == coreServed:
			l.server.step(received{l.peer, *m})
		case m != nil:
			l.receive(l, *m)
		case to == coreServed:
			l.closedByMember()
		default:
			l.closedByServer()
		}
	})
	if l.busy[to] = len(l.queue[to]) > 0; l.busy[to] {
		l.s.after(1+l.s.random(100*time.Microsecond), func() { l.deliver(to) })
	}
}

// closedByMember is called when the coordinator's end reads the end of the connection.
func (l *coreLink) closedByMember() {
	p, srv := l.procs[coreServed], l.server
	ends := func(e ending) {
		if l.reads[coreServed] {
			l.reads[coreServed] = false
			e.closed, e.reason = true, "closed"
			srv.step(disconnected{l.peer, e})
		}
	}
	grace := resumeGrace
	if l.noWait {
		grace = 0
	} else if l.peer.role == roleAgent {
		grace = 2 * FirstRetry
	}
	l.s.changed() // from now on, silence ends its part in the job
	var prove func()
	prove = func() {
		if !l.reads[coreServed] {
			return
		}
		if l.peer.role == roleAgent && srv.c.isElastic() && srv.c.counts(l.peer) {
			if !l.s.refuses(p.host, l.procs[coreMember]) {
				p.after(slowAfter(l.s.lostAfter), prove)
				return
			}
			ends(ending{found: foundEnded, certain: l.isCertain()})
			return
		}
		ends(ending{})
	}
	p.after(grace, prove)
}

// closedByServer is called when the member reads the end of the connection.
func (l *coreLink) closedByServer() {
	p := l.procs[coreMember]
	var try func()
	try = func() {
		if !l.reads[coreMember] {
			return
		}
		how := lostSilent
		switch to := l.procs[coreServed]; {
		case l.s.refuses(p.host, to):
			if l.isCertain() {
				how = lostEnded
			}
		case l.s.reaches(p.host, to): // its process does not coordinate any more
		default:
			p.after(slowAfter(l.s.lostAfter), try)
			return
		}
		l.reads[coreMember] = false
		l.lost(l, how, "its process ended")
	}
	p.after(FirstRetry, try)
}

// leave closes the member's end, after a message.
func (l *coreLink) leave() {
	l.send(coreServed, &msg{kind: kindLeave, epoch: FirstEpoch, id: leaveForAnother})
	l.close()
}

// close closes the member's end.
func (l *coreLink) close() {
	l.reads[coreMember] = false
	l.send(coreServed, nil)
	l.s.changed()
}

// simName returns the name of a host, one letter.
func simName(i int) string { return "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"[i : i+1] }

func nameOf(m Member) string { return fmt.Sprintf("%s/%d#%d", m.Host, m.LocalRank, m.PID) }
