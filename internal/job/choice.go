package job

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
)

// DialAttempt limits one attempt to connect, so that a host that drops packets
// does not delay the attempts at other hosts.
const DialAttempt = 2 * time.Second

// Delays between attempts to reach the coordinator.
const (
	FirstRetry = 5 * time.Millisecond
	LastRetry  = 500 * time.Millisecond
)

// searchInterval is the time between two searches of an agent that is not yet bound, for a
// smaller seed than its current coordinator.
const searchInterval = time.Second

// Refusals is how often all candidates must refuse this host in a row until it believes that it has another
// secret, job or version.
const Refusals = 5

const (
	// atOnce is the number of candidates that an agent dials at the same time.
	atOnce = 16
	// slowPart is the part of LostAfter in which a candidate answers if its host has not vanished.
	slowPart = 24
)

// slowAfter returns the time in which a host answers that has not vanished.
func slowAfter(lostAfter time.Duration) time.Duration {
	return max(lostAfter/slowPart, time.Millisecond)
}

// SuccessionTime returns the time for the choice of a coordinator.
func SuccessionTime(lostAfter time.Duration) time.Duration { return 2*lostAfter + 2*DialAttempt }

// A choice decides which coordinator a host registers with. At the start of a job, this is the smallest seed that answers. After the
// loss of a coordinator, it is the first host by succession that answers, or the leader that others have chosen
// meanwhile. Like a coordinator, a choice is a function of events and time. An election (election.go) has its connections.
type choice struct {
	voter      *voter   // of this host
	candidates []string // addresses, the preferred one first
	self       string   // address of this host's coordinator, or ""
	history    *history // nil at the start of the job
	// After the loss of a coordinator:
	lostAt   string  // its address
	mayLead  bool    // it was silent or has lost this host, and perhaps leads the other hosts
	noticed  instant // until then, a host that has not noticed the loss is waited for
	deadline instant // the time for the choice is over

	now, begun instant
	actions    []action
	named      string // address of the coordinator of the running job, if another one has told it
	refused    error  // the first refusal that nobody proved, while another candidate answered
	failure    error  // of the last search
	rejections int    // searches in a row in which all candidates have refused this host
	search     *search
	lastDial   uint64
	delay      time.Duration // until the next search, if this host is not registered
	wake       instant       // when the next search begins
	leadersAt  instant       // when this host may look for leaders again
	lineAt     instant       // when the user is told what this host waits for

	gathered bool // this host has registered with the candidate that has the most hosts

	link  uint64 // number of the dial to the coordinator with which this host has registered; 0: none
	addr  string
	hello Welcome
	bound bool // this host agreed to stay with it
	over  bool
}

// newChoice returns the choice of the first coordinator among seeds, which are sorted.
func newChoice(v *voter, seeds []string, self string, now instant) *choice {
	return &choice{voter: v, candidates: seeds, self: self, now: now, begun: now, wake: now, delay: FirstRetry, lineAt: now + WaitLine}
}

// newSuccession returns the choice of another coordinator, after the loss of the one at lostAt.
func newSuccession(v *voter, h *history, self, lostAt string, how Loss, now instant) *choice {
	c := newChoice(v, h.addresses(), self, now)
	c.history, c.lostAt, c.noticed, c.deadline = h, lostAt, now+h.lostAfter, now+SuccessionTime(h.lostAfter)
	c.mayLead = how == lostSilent || how == lostByIt
	if how == lostByIt { // if the coordinator goes on, no other hosts will come
		c.deadline -= h.lostAfter
	}
	return c
}

// A choiceEvent happens to a choice.
type choiceEvent interface{ choose(c *choice) }

type (
	// begin begins the choice.
	begin struct{}
	// answered: a host has answered a dial, or the dial has failed.
	answered struct {
		dial    uint64
		hello   Welcome
		refers  *Referral // the host does not coordinate
		refused bool      // a process at the address has refused this host, without a proof of who it is
		err     error
	}
	// voteAsked: a coordinator asks this host to stay with it. Attempt 0 releases it.
	voteAsked struct {
		dial, attempt uint64
		by            Leader
	}
	// planSent: a coordinator has the hosts of the job.
	planSent struct {
		dial, epoch uint64
		plan        plan
	}
	// turnedAway: a coordinator does not accept this host.
	turnedAway struct {
		dial uint64
		err  error
	}
	// ledElsewhere: a coordinator knows of one that runs the job.
	ledElsewhere struct{ at string }
	// linkLost: the connection of a dial has ended.
	linkLost struct{ dial uint64 }
)

type (
	// dial asks for the event answered within a limit; 0 means that of the network.
	dial struct {
		dial  uint64
		addr  string
		limit time.Duration
	}
	// hangUpDial ends a dial, or its connection, without a registration.
	hangUpDial struct{ dial uint64 }
	// announce tells the coordinator at the other end of a connection that another one has replaced it, and ends the connection.
	announce struct{ dial uint64 }
	// enroll registers this host over the connection of a dial.
	enroll struct {
		dial    uint64
		addr    string
		hello   Welcome
		history *history
	}
	// prefer tells this host's coordinator with which other candidate the host has registered after a loss, or "".
	prefer struct{ addr string }
	// leave ends a registration.
	leave struct{ dial uint64 }
	// vote answers the event voteAsked.
	vote struct{ dial, attempt uint64 }
	// beCandidate starts this host's coordinator.
	beCandidate struct{ candidacy candidacy }
	// reportMissing tells the user of this host which hosts are missing.
	reportMissing struct{}
	// chosen ends the choice: this host follows a coordinator.
	chosen struct {
		dial, epoch uint64
		plan        plan
	}
	// notChosen ends the choice without a coordinator.
	notChosen struct{ err error }
)

var (
	errNotRunning = errors.New("the host is only a candidate")
	// ErrFinished is the error of a choice of a coordinator that is not needed: another host knows that the program has ended.
	ErrFinished = errors.New("the program has ended")
	// errChoiceTime is the error of a choice for which there is no time left.
	errChoiceTime = errors.New("the time for the choice of a coordinator is over")
	// errNoMajority is the error of a choice in which even all hosts without the lost one would not be enough.
	errNoMajority = errors.New("too few hosts are left")
)

// step handles an event at a time, and what is due then, and returns what must
// be done. A nil event only advances the time.
func (c *choice) step(now instant, e choiceEvent) []action {
	c.now = max(c.now, now)
	if e != nil {
		e.choose(c)
	}
	c.pass()
	out := c.actions
	c.actions = nil
	return out
}

// next returns when something is due. If nothing is due at any time, ok is
// false.
func (c *choice) next() (at instant, ok bool) {
	if c.over {
		return 0, false
	}
	at = c.lineAt
	if c.deadline > 0 {
		at = min(at, c.deadline)
	}
	switch s := c.search; {
	case s == nil:
		at = min(at, c.wake)
	case s.late < s.started && c.history != nil:
		at = min(at, s.lateAt)
	}
	return at, true
}

// pass does what is due.
func (c *choice) pass() {
	if c.over {
		return
	}
	if c.deadline > 0 && c.now >= c.deadline {
		c.fail(errChoiceTime)
		return
	}
	if s := c.search; s != nil && c.history != nil && s.late < s.started && c.now >= s.lateAt {
		s.late = s.started
		c.proceed()
	}
	if c.search == nil && !c.over && c.now >= c.wake {
		c.look()
	}
	if c.now >= c.lineAt && c.link != 0 {
		c.lineAt = c.now + WaitLine
		if c.addr != c.self { // otherwise this host's coordinator tells it
			c.act(reportMissing{})
		}
	}
	if c.now >= c.lineAt { // no candidate has been found since
		c.lineAt = c.now + WaitLine
		if c.failure != nil {
			c.act(notify{line: fmt.Sprintf("waiting since %v for a seed to answer: %v", (c.now - c.begun).Round(time.Second), c.failure)})
		}
	}
}

func (c *choice) act(a action) { c.actions = append(c.actions, a) }

// close ends the choice from outside.
func (c *choice) close() []action {
	c.over = true
	c.endSearch(nil)
	out := c.actions
	c.actions = nil
	return out
}

func (c *choice) fail(err error) {
	c.over = true
	c.endSearch(nil)
	c.act(notChosen{err})
}

func (begin) choose(c *choice) {
	switch h := c.history; {
	case h == nil:
	case !h.isPossible() && !c.mayLead:
		c.fail(errNoMajority)
	case slices.Contains(c.candidates, c.self):
		own := *h // the coordinator adds to it what others know
		own.Plan.Hosts, own.Proposed, own.Ended = slices.Clone(h.Plan.Hosts), slices.Clone(h.Proposed), slices.Clone(h.Ended)
		own.Ledger.Restarts = slices.Clone(h.Ledger.Restarts)
		c.act(beCandidate{candidacy{history: own}})
	}
}

// A search dials candidates until one answers that this host registers with.
type search struct {
	addrs   []string
	leaders bool     // only leaders of a running job are wanted, and candidates that have more hosts
	others  []string // where leaders are looked for afterwards
	found   []found  // by index in addrs
	started int      // how many were dialled
	late    int      // candidates before this one have had their time to answer
	lateAt  instant  // when the other ones that were dialled have had it
	until   instant  // when all dials fail; 0: when the network says so
}

// A found is what a search has found at a candidate.
type found struct {
	dial     uint64
	addr     string
	referral error // the candidate has referred this host to addr
	answered bool
	refused  bool
	waits    bool // the host has not noticed the loss of the coordinator yet
	hello    Welcome
	err      error
}

// look begins a search: for any candidate, or for a better one than that with which this host has registered.
func (c *choice) look() {
	all := slices.Clone(c.candidates)
	if c.named != "" && !slices.Contains(all, c.named) {
		all = append(all, c.named)
	}
	returns := c.mayLead && (c.link != 0 || !c.history.isPossible())
	if returns && !slices.Contains(all, c.lostAt) { // this host returns to it if nobody has replaced it
		all = append(all, c.lostAt)
	}
	if c.link == 0 {
		c.begin(&search{addrs: all})
		return
	}
	c.wake = c.now + c.interval()
	if c.bound || len(all) < 2 {
		return
	}
	before, others := all, []string(nil)
	if i := slices.Index(all, c.addr); i >= 0 {
		before, others = all[:i], all[i+1:]
	}
	if c.history != nil && !c.hello.Running {
		others = all
	}
	if c.now < c.leadersAt {
		others = nil
	} else {
		c.leadersAt = c.now + c.leaderInterval()
	}
	switch {
	case len(before) > 0 && !c.gathered:
		c.begin(&search{addrs: before, others: others, leaders: c.hello.Running})
	case len(others) > 0:
		c.begin(&search{addrs: others, leaders: true})
	}
}

// interval returns the time between two searches of a host that has registered.
func (c *choice) interval() time.Duration {
	if c.history == nil {
		return searchInterval
	}
	return slowAfter(c.history.lostAfter)
}

// leaderInterval returns the time between two searches for leaders. One that this host has lost may be heard only for a moment.
func (c *choice) leaderInterval() time.Duration {
	if c.history == nil {
		return searchInterval
	}
	return min(searchInterval, c.history.lostAfter/4)
}

func (c *choice) begin(s *search) {
	s.found = make([]found, len(s.addrs))
	if c.history != nil {
		s.until = c.now + c.history.lostAfter/4
	}
	c.search = s
	c.proceed()
}

// dialNext dials the next candidates: one at the start of a job, and many side by side after the loss of a coordinator, because
// several hosts may have vanished together.
func (c *choice) dialNext() {
	s, n := c.search, 1
	if c.history != nil {
		n = atOnce
		s.lateAt = c.now + slowAfter(c.history.lostAfter)
	}
	for range min(n, len(s.addrs)-s.started) {
		s.found[s.started] = found{addr: s.addrs[s.started], dial: c.dial(s.addrs[s.started])}
		s.started++
	}
}

// dial dials an address for the search.
func (c *choice) dial(addr string) uint64 {
	c.lastDial++
	x := dial{dial: c.lastDial, addr: addr}
	if c.search.until > 0 {
		x.limit = max(c.search.until-c.now, time.Millisecond)
	}
	c.act(x)
	return c.lastDial
}

func (e answered) choose(c *choice) {
	i := -1
	if c.search != nil {
		i = slices.IndexFunc(c.search.found[:c.search.started], func(f found) bool { return f.dial == e.dial && !f.answered })
	}
	if i >= 0 {
		c.judge(&c.search.found[i], e)
		c.proceed()
	} else if e.err == nil {
		c.act(hangUpDial{e.dial})
	}
}

// judge records what a candidate has answered, or dials the coordinator that it names.
func (c *choice) judge(f *found, e answered) {
	r, promised, isStart := e.refers, c.voter.promised, c.history == nil
	refers := r != nil && r.At != "" && r.At != f.addr && f.referral == nil
	switch {
	case r != nil && r.Finished && !isStart && e.hello.Run == promised.Run: // another run says nothing about this one
		e.err = ErrFinished
	case refers && (isStart || r.At != c.lostAt):
		f.dial, f.addr, f.referral = c.dial(r.At), r.At, e.err
		return
	case isStart:
	case f.referral != nil: // only a leader is worth it
		if e.err == nil && e.hello.Running && c.voter.accepts(e.hello) {
			break
		}
		if e.err == nil {
			c.act(hangUpDial{e.dial})
		}
		e.err = f.referral
	case r != nil:
		f.waits = r.Over == "" && c.now < c.noticed
	case e.err != nil:
	case e.hello.Run != promised.Run:
		e.err = fmt.Errorf("host %s at %s coordinates another run of the job", e.hello.Host, f.addr)
		c.act(hangUpDial{e.dial})
	case !c.voter.accepts(e.hello):
		e.err = fmt.Errorf("the coordinator at %s was replaced", f.addr)
		c.act(announce{e.dial}) // it learns that
	}
	s := c.search
	if e.err == nil && s.leaders && !e.hello.Running && (isStart || !e.hello.Elects) {
		e.err = errNotRunning
		c.act(hangUpDial{e.dial})
	}
	f.answered, f.hello, f.err, f.refused = true, e.hello, e.err, e.refused
	if at := e.hello.At; s.leaders && e.err == nil && !e.hello.Running && at != "" && !slices.Contains(s.addrs, at) {
		s.addrs, s.found = append(slices.Clone(s.addrs), at), append(s.found, found{})
	}
}

// proceed takes the first candidate that has answered, without waiting long for those before it, or a leader. It dials others
// if none of those that were dialled is worth waiting for.
func (c *choice) proceed() {
	s := c.search
	for {
		for i := range s.found[:s.started] {
			switch f := &s.found[i]; {
			case !f.answered:
			case errors.Is(f.err, ErrFinished):
				c.fail(ErrFinished)
				return
			case f.err == nil && f.hello.Running:
				c.take(f)
				return
			}
		}
		for i := range s.found[:s.started] {
			f := &s.found[i]
			if !f.answered && i >= s.late {
				break // it may still answer
			}
			if f.answered && f.err == nil && !s.leaders {
				c.take(f)
				return
			}
			if f.answered && f.waits && !s.leaders { // it will be a candidate soon
				c.endSearch(nil)
				c.failed(s, f.err, false)
				return
			}
		}
		for s.late < s.started && s.found[s.late].answered {
			s.late++
		}
		if s.late < s.started || s.started == len(s.addrs) {
			break
		}
		c.dialNext()
	}
	if slices.ContainsFunc(s.found, func(f found) bool { return !f.answered }) {
		return
	}
	if f := s.largest(); f != nil && f.addr != c.addr && s.has(c.addr) {
		c.take(f)
		c.gathered = true
	} else {
		err, refused := s.firstError()
		c.endSearch(nil)
		c.failed(s, err, refused)
	}
}

// firstError returns the first error of candidates, preferably one that is no refusal.
func (s *search) firstError() (err error, refused bool) {
	err = errors.New("no host that is left can coordinate")
	for i, f := range s.found {
		if i == 0 || refused && !f.refused {
			err, refused = f.err, f.refused
		}
	}
	return err, refused
}

// largest returns the candidate that has the most hosts, of a search for leaders. Hosts that know of different proposals prefer different
// candidates, of which none may have enough hosts. If each host goes where more are, they meet.
func (s *search) largest() (l *found) {
	for i := range s.found {
		f := &s.found[i]
		if s.leaders && f.err == nil && f.hello.Elects && (l == nil || cmp.Or(cmp.Compare(f.hello.Hosts, l.hello.Hosts), cmp.Compare(l.hello.Agent, f.hello.Agent)) > 0) {
			l = f
		}
	}
	return l
}

// has reports whether the candidate at an address has answered.
func (s *search) has(addr string) bool {
	return slices.ContainsFunc(s.found, func(f found) bool { return f.addr == addr && f.err == nil })
}

// endSearch ends the search, and all its connections but one.
func (c *choice) endSearch(but *found) {
	if c.search == nil {
		return
	}
	for i := range c.search.found[:c.search.started] {
		if f := &c.search.found[i]; f != but && (!f.answered || f.err == nil) {
			c.act(hangUpDial{f.dial})
		}
	}
	c.search = nil
}

// failed handles a search that has found no candidate.
func (c *choice) failed(s *search, err error, refused bool) {
	if c.link != 0 {
		if refused && c.history == nil && c.refused == nil {
			c.refused = err
		}
		if len(s.others) > 0 {
			c.begin(&search{addrs: s.others, leaders: true})
		}
		return
	}
	c.failure = err
	if c.rejections++; !refused {
		c.rejections = 0
	}
	if c.rejections == Refusals && c.history == nil {
		c.fail(err)
		return
	}
	c.wake = c.now + c.delay
	slowest := LastRetry
	if c.history != nil {
		slowest = max(FirstRetry, c.interval()/2)
	}
	c.delay = min(2*c.delay, slowest)
}

// take registers with a candidate, unless this host must stay where it is.
func (c *choice) take(f *found) {
	s := c.search
	c.endSearch(f)
	switch {
	case c.link != 0 && (c.bound || c.hello.Running && !f.hello.Running):
		c.act(hangUpDial{f.dial})
		return
	case c.link != 0:
		c.act(leave{c.link})
	default:
		for _, g := range s.found[:s.started] {
			if g.refused && c.history == nil && c.refused == nil {
				c.refused = g.err
				c.act(notify{line: fmt.Sprintf("%v; this host goes on with %s, because the refusal proves nothing", g.err, f.addr)})
			}
		}
	}
	c.link, c.addr, c.hello, c.bound = f.dial, f.addr, f.hello, false
	c.failure, c.rejections, c.delay, c.leadersAt = nil, 0, FirstRetry, 0
	c.wake, c.lineAt = c.now+c.interval(), c.now+WaitLine
	x := enroll{dial: f.dial, addr: f.addr, hello: f.hello}
	if c.history != nil {
		c.history.Term = c.voter.promised.Term
		x.history = c.history.excerpt(f.hello)
	}
	c.act(x)
	if c.history != nil {
		other := f.addr
		if other == c.self {
			other = ""
		}
		c.act(prefer{other})
	}
}

// unregister leaves the coordinator, and looks for another one after a while.
func (c *choice) unregister() {
	c.endSearch(nil)
	c.act(leave{c.link})
	c.link, c.bound, c.gathered = 0, false, false
	c.wake, c.delay = c.now+FirstRetry, FirstRetry
}

func (e voteAsked) choose(c *choice) {
	switch {
	case e.dial != c.link:
		return
	case e.attempt == 0:
		c.bound = false
		return
	}
	if c.history != nil {
		if err := c.voter.vote(e.by); err != nil {
			if !c.over {
				c.unregister() // this host registers again, with the term of its promise
			}
			return
		}
	}
	c.bound = true
	c.act(vote{e.dial, e.attempt})
}

func (e planSent) choose(c *choice) {
	if e.dial != c.link || c.over {
		return
	}
	if err := c.voter.Follow(e.plan.By); err != nil {
		c.fail(err)
		return
	}
	c.over = true
	c.endSearch(nil)
	c.act(chosen(e))
}

func (e turnedAway) choose(c *choice) {
	if e.dial == c.link && !c.over {
		c.fail(e.err)
	}
}

func (e ledElsewhere) choose(c *choice) { c.named = e.at }

func (e linkLost) choose(c *choice) {
	if e.dial == c.link && !c.over {
		c.unregister()
	}
}

// A Referral is the answer of a host that does not coordinate the job.
type Referral struct {
	At       string // address of the coordinator, or "" if the host does not know it
	Over     string // why the job has ended on the host, or ""
	Finished bool   // the program has ended
	ip       string // address of the host that has answered
}

func (r *Referral) Error() string {
	if r.At == "" {
		return "the host does not coordinate the job, and waits for a coordinator itself"
	}
	return "the host does not coordinate the job; the coordinator is at " + r.At
}
