package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
)

// searchInterval is the time between two searches of an agent that is not yet bound, for a
// smaller seed than its current coordinator.
const searchInterval = time.Second

// An election finds the host that coordinates: the smallest reachable seed, in
// the natural order of the configured addresses, which is the same on all hosts.
// Each seed runs a coordinator. When all hosts have registered with one
// coordinator, it commits the plan, and the others are closed.
type election struct {
	agent *Agent
	seeds []string // sorted, or the candidates' addresses in the order of succession
	mine  string   // the seed address of this host, or ""
	// After the loss of a coordinator:
	history  *history
	lostAt   string    // its address
	patience time.Time // until then, an agent that has not noticed the loss is waited for

	// The current registration.
	k     *client
	addr  string
	reply chan outcome

	mu     sync.Mutex
	bound  *client // we agreed to stay with it
	moving *client // we are leaving it and refuse to stay
	other  string  // address of the coordinator of the running job, if a coordinator has told it
	// refused is a refusal that nobody proved, while another candidate answered: the reason if the join takes too long.
	refused error
}

// An outcome ends a registration with a plan or an error.
type outcome struct {
	k     *client
	epoch uint64
	plan  plan
	err   error
}

func (e *election) run(ctx context.Context) error {
	start := time.Now()
	if err := e.prepare(ctx); err != nil {
		return err
	}
	o, err := e.elect(ctx, start)
	if err != nil {
		return err
	}
	return e.adopt(o)
}

// elect registers with coordinators until one has a plan.
func (e *election) elect(ctx context.Context, start time.Time) (*outcome, error) {
	e.reply = make(chan outcome, 4)
	for {
		if err := e.register(ctx, start); err != nil {
			return nil, e.failed(err)
		}
		o, err := e.await(ctx, start)
		if err != nil {
			return nil, e.failed(err)
		}
		if o != nil {
			return o, nil
		}
		// The coordinator closed before it had a plan: retry.
		e.k.close()
		e.k = nil
	}
}

// noteRefusal keeps the first refusal of a candidate while this host waits at another one, and reports whether err is that one.
func (e *election) noteRefusal(err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err == nil || e.refused != nil {
		return false
	}
	e.refused = err
	return true
}

func (e *election) failed(err error) error {
	if t, ok := errors.AsType[*JoinTimeoutError](err); ok && t.Err == nil {
		e.mu.Lock()
		t.Err = e.refused
		e.mu.Unlock()
	}
	e.agent.coord.decide(err)
	switch {
	case e.k == nil:
	case e.history != nil: // the time for a choice is over: a candidate that does not answer is not waited for
		e.k.hangUp()
		e.k.wg.Wait()
	default:
		e.k.leave(err)
	}
	return err
}

// adopt makes the outcome the agent's. It closes this host's coordinator if
// another one was chosen.
func (e *election) adopt(o *outcome) error {
	a := e.agent
	a.mu.Lock()
	a.k, a.addr = o.k, e.addr
	a.mu.Unlock()
	t, err := a.newAttempt(o.k, o.epoch, o.plan)
	if err != nil {
		return err
	}
	if err := a.adopt(t); err != nil {
		return err
	}
	if e.addr != e.mine {
		a.resign()
	}
	return nil
}

// prepare starts this host's coordinator, if it is a seed, and gossip.
func (e *election) prepare(ctx context.Context) error {
	a := e.agent
	if a.cfg.Nodes == 1 {
		return e.prepareAlone()
	}
	for _, s := range a.cfg.Seeds {
		h, p, err := splitAddr(s, defaultPort)
		if err != nil {
			return badConfig("seed %q: %v", s, err)
		}
		if n, err := strconv.Atoi(p); err != nil || n < 1 || n > 65535 {
			return badConfig("seed %q: want a port from 1 to 65535", s)
		}
		e.seeds = append(e.seeds, net.JoinHostPort(h, p))
	}
	if err := a.cfg.sys.checkBind(a.cfg.Bind); err != nil {
		return err
	}
	slices.SortFunc(e.seeds, naturalCompare)
	e.seeds = slices.Compact(e.seeds)
	if err := a.cfg.sys.checkSeeds(ctx, e.seeds); err != nil {
		return err
	}
	ln, err := e.listenAsSeed(ctx)
	if err != nil {
		return err
	}
	if !a.cfg.NoGossip && env.Gossip.Value() != "no" {
		a.gossip = openGossip(a, e.seeds, e.mine)
	}
	if ln != nil {
		a.seed = true
		a.port.open(ln, e.mine)
		a.serve(a.port.let(), nil)
		return nil
	}
	return a.openPort(e.seeds)
}

// openPort opens the control port of a host that is not a seed.
func (a *Agent) openPort(seeds []string) error {
	if g := a.gossip; g != nil {
		a.port.at, a.port.local = g.at, reachable(g.transport.tcp.Addr())
		return nil
	}
	ip, err := ownIP(&a.cfg, seeds, "")
	if err != nil {
		return nil // no seed can be reached yet; this host cannot coordinate
	}
	ln, err := a.cfg.sys.listenAt(net.JoinHostPort(ip, "0"))
	if err != nil {
		return err
	}
	at := ln.Addr().String()
	if adv, _, err := splitAddr(a.cfg.Advertise, ""); err == nil {
		at = net.JoinHostPort(adv, strconv.Itoa(portOf(at)))
	}
	a.port.open(ln, at)
	return nil
}

// checkBind validates the address to listen on, so that a mistake is reported
// before any wait.
func (s *system) checkBind(bind string) error {
	if bind == "" {
		return nil
	}
	h, _, err := splitAddr(bind, "0")
	if err != nil {
		return badConfig("bind to %q: %v", bind, err)
	}
	ip := parseIP(h)
	if ip == nil {
		return badConfig("bind to %q: want an IP address, or IP:port", bind)
	}
	if !ip.IsUnspecified() && !s.isLocal(ip) {
		return badConfig("bind to %q: no interface of this host has that address", bind)
	}
	return nil
}

// prepareAlone prepares a job on one host, whose coordinator is in this process.
func (e *election) prepareAlone() error {
	a := e.agent
	at := net.JoinHostPort(loopback(), "0")
	if a.cfg.Bind != "" {
		h, p, err := splitAddr(a.cfg.Bind, "0")
		if err != nil {
			return badConfig("bind to %q: %v", a.cfg.Bind, err)
		}
		at = net.JoinHostPort(h, p)
	}
	ln, err := a.cfg.sys.listenAt(at)
	if err != nil && a.cfg.Bind != "" {
		return badConfig("bind to %q: %v", a.cfg.Bind, errors.Unwrap(err))
	}
	if err != nil {
		return err
	}
	e.mine = reachable(ln.Addr())
	e.seeds = []string{e.mine}
	a.serve(ln, nil)
	return nil
}

// reachable returns a listener's address in a form that this host can dial.
func reachable(addr net.Addr) string {
	t, ok := addr.(*net.TCPAddr)
	if !ok || !t.IP.IsUnspecified() {
		return addr.String()
	}
	return net.JoinHostPort(loopback(), strconv.Itoa(t.Port))
}

// listenAsSeed opens the seed port of this host, if it is a seed. It compares
// addresses, not host names. If another agent of this job on the same machine has
// the port, this host is not a seed.
func (e *election) listenAsSeed(ctx context.Context) (net.Listener, error) {
	a := e.agent
	for _, s := range e.seeds {
		at, ok := e.isMine(ctx, s)
		if !ok {
			continue
		}
		ln, err := a.cfg.sys.listenAt(at)
		if errors.Is(err, syscall.EADDRINUSE) {
			to := target{job: a.cfg.Job, addr: s, key: a.keys.control, sys: a.cfg.sys}
			if err := to.portTaken(ctx, err, "choose another in --seeds"); err != nil {
				return nil, err
			}
			continue
		}
		if err != nil {
			return nil, err
		}
		e.mine, a.byOwnName = s, strings.HasPrefix(at, ":")
		return ln, nil
	}
	return nil, nil
}

// isMine reports whether a seed's address belongs to this host, and returns the address to listen on.
func (e *election) isMine(ctx context.Context, seed string) (at string, ok bool) {
	h, port, _ := net.SplitHostPort(seed)
	bindIP, bindPort, _ := splitAddr(e.agent.cfg.Bind, port)
	advIP, advPort, _ := splitAddr(e.agent.cfg.Advertise, port)
	ips := e.agent.cfg.sys.resolve(ctx, h)
	if e.agent.cfg.Bind == "" && isOwnName(h) && onlyLoopback(ips) {
		return net.JoinHostPort("", port), true // see ownname.go
	}
	for _, ip := range ips {
		text := ip.String()
		if len(ips) == 1 && parseIP(h) != nil {
			text = h // with its zone
		}
		switch {
		case e.agent.cfg.Advertise != "" && parseIP(advIP).Equal(ip) && advPort == port:
			return net.JoinHostPort(cmp.Or(bindIP, text), cmp.Or(bindPort, port)), true
		case e.agent.cfg.Bind == "" || parseIP(bindIP).IsUnspecified():
			if !e.agent.cfg.sys.isLocal(ip) || e.agent.cfg.Bind != "" && bindPort != port {
				continue
			}
			return net.JoinHostPort(cmp.Or(bindIP, text), port), true
		case parseIP(bindIP).Equal(ip) && bindPort == port:
			return net.JoinHostPort(bindIP, port), true
		}
	}
	return "", false
}

func (s *system) isLocal(ip net.IP) bool {
	addrs, err := s.interfaceAddrs()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && (n.IP.Equal(ip) || n.IP.IsLoopback() && n.Contains(ip))
	})
}

// candidates returns the addresses to try, up to limit, in order: the seeds, then
// a coordinator that another one has named.
func (e *election) candidates(limit string) []string {
	all := slices.Clone(e.seeds)
	e.mu.Lock()
	if e.other != "" && !slices.Contains(all, e.other) {
		all = append(all, e.other)
	}
	e.mu.Unlock()
	if i := slices.Index(all, limit); i >= 0 {
		all = all[:i]
	}
	return all
}

// A try is a connection that answered, or the last error.
type try struct {
	link    *link
	hello   welcome
	addr    string
	err     error
	refused error // of a candidate before this one
}

// isRefusal reports whether a process at a candidate's address has refused this host. It has not proved who it is, so that this
// is only a hint: any stranger at the port can say so.
func isRefusal(err error) bool {
	_, auth := errors.AsType[*AuthError](err)
	return auth
}

// refusals is how often all candidates must refuse this host in a row until it believes that it has another
// secret, job or version.
const refusals = 5

// firstAnswer connects to the first candidate that answers. If none does, its error is an *AuthError only if all
// have refused.
func (e *election) firstAnswer(ctx context.Context, candidates []string) try {
	if e.history != nil {
		return e.firstOf(ctx, candidates, false)
	}
	var t try
	for _, addr := range candidates {
		l, hello, err := e.agent.cfg.sys.dialCoordinator(ctx, e.agent.cfg.Job, addr, e.agent.keys.control)
		if r, refers := errors.AsType[*referral](err); refers && r.at != "" {
			addr = r.at
			l, hello, err = e.agent.cfg.sys.dialCoordinator(ctx, e.agent.cfg.Job, addr, e.agent.keys.control)
		}
		if err == nil {
			return try{link: l, hello: hello, addr: addr, refused: t.refused}
		}
		if isRefusal(err) {
			t.refused = err
		}
		if t.err == nil || isRefusal(t.err) {
			t.err = err
		}
	}
	return t
}

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

// firstOf connects to candidates after the loss of a coordinator, side by side, because several hosts may have
// vanished together. It returns the leader of a running job, or the first candidate that answers, without waiting long for
// those before it. If running is true, it returns only a leader.
func (e *election) firstOf(ctx context.Context, candidates []string, running bool) try {
	type answer struct {
		try
		i int
	}
	ctx, cancel := context.WithTimeout(ctx, e.history.lostAfter/4)
	slow := slowAfter(e.history.lostAfter)
	answers, started := make(chan answer, len(candidates)), 0
	got := make([]*try, len(candidates))
	left := 0 // dials that have not answered
	defer func() {
		cancel()
		for ; left > 0; left-- {
			if a := <-answers; a.link != nil {
				a.link.close()
			}
		}
		for _, t := range got {
			if t != nil && t.link != nil {
				t.link.close()
			}
		}
	}()
	take := func(i int) try {
		t := *got[i]
		got[i] = nil
		return t
	}
	ticks := time.NewTicker(slow)
	defer ticks.Stop()
	for late := 0; ; { // candidates before late have had their time to answer
		if started == late { // none of those that were started is worth waiting for
			for ; started < min(late+atOnce, len(candidates)); started++ {
				i := started
				left++
				go func() { answers <- answer{e.dialCandidate(ctx, candidates[i]), i} }()
			}
		}
		for i := range started {
			if t := got[i]; t == nil && i >= late {
				break // it may still answer
			} else if t != nil && (t.err == nil || !running && e.isWaiting(t.err)) {
				return take(i)
			}
		}
		if left == 0 && started == len(candidates) {
			return firstError(got)
		}
		select {
		case a := <-answers:
			left--
			if running && a.err == nil && !a.hello.Running {
				a.link.close()
				a.try = try{err: errNotRunning}
			}
			got[a.i] = &a.try
			if a.err == nil && a.hello.Running || errors.Is(a.err, errFinished) {
				return take(a.i)
			}
		case <-ticks.C:
			late = started
		}
	}
}

var errNotRunning = errors.New("the host is only a candidate")

// isWaiting reports whether a host that answers has not noticed the loss yet, so that it will be a candidate soon.
func (e *election) isWaiting(err error) bool {
	r, refers := errors.AsType[*referral](err)
	return refers && r.over == "" && time.Now().Before(e.patience)
}

// firstError returns the first error of candidates, preferably one that is no refusal.
func firstError(ts []*try) (out try) {
	if len(ts) == 0 {
		out.err = errors.New("no host that is left can coordinate")
	}
	for _, t := range ts {
		if t != nil && (out.err == nil || isRefusal(out.err)) {
			out.err = t.err
		}
	}
	return out
}

// dialCandidate connects to a candidate after the loss of a coordinator, or to the leader that it names. A leader that another one has
// replaced learns that.
func (e *election) dialCandidate(ctx context.Context, addr string) try {
	a := e.agent
	l, hello, err := a.cfg.sys.dialCoordinator(ctx, a.cfg.Job, addr, a.keys.control)
	if r, refers := errors.AsType[*referral](err); refers && r.finished {
		return try{err: errFinished}
	} else if refers && r.at != "" && r.at != e.lostAt && r.at != addr {
		if l, hello, err := a.cfg.sys.dialCoordinator(ctx, a.cfg.Job, r.at, a.keys.control); err == nil && hello.Running && a.mayFollow(hello) {
			return try{link: l, hello: hello, addr: r.at}
		} else if err == nil {
			l.close()
		}
	}
	if run := a.promise().Run; err == nil && hello.Run != run {
		l.close()
		return try{err: fmt.Errorf("host %s at %s coordinates another run of the job", hello.Host, addr)}
	}
	if err == nil && !a.mayFollow(hello) {
		a.tellElsewhere(l, "")
		return try{err: fmt.Errorf("the coordinator at %s was replaced", addr)}
	}
	return try{link: l, hello: hello, addr: addr, err: err}
}

// firstRunning connects to the first candidate whose job is running: this host joins it.
func (e *election) firstRunning(ctx context.Context, candidates []string) try {
	if e.history != nil {
		return e.firstOf(ctx, candidates, true)
	}
	for _, addr := range candidates {
		l, hello, err := e.agent.cfg.sys.dialCoordinator(ctx, e.agent.cfg.Job, addr, e.agent.keys.control)
		if r, refers := errors.AsType[*referral](err); refers && r.at != "" {
			addr = r.at
			l, hello, err = e.agent.cfg.sys.dialCoordinator(ctx, e.agent.cfg.Job, addr, e.agent.keys.control)
		}
		if err != nil {
			continue
		}
		if hello.Running {
			return try{link: l, hello: hello, addr: addr}
		}
		l.close()
	}
	return try{}
}

// register connects to the smallest coordinator that answers.
func (e *election) register(ctx context.Context, start time.Time) error {
	cfg := &e.agent.cfg
	delay, slowest, lastLine := firstRetry, lastRetry, start
	if e.history != nil {
		slowest = max(firstRetry, slowAfter(e.history.lostAfter)/2)
	}
	for refused := 0; ; {
		t := e.firstAnswer(ctx, e.candidates(""))
		if t.err == nil {
			if e.history == nil && e.noteRefusal(t.refused) {
				cfg.Notify(fmt.Sprintf("job %s: %v; this host goes on with %s, because the refusal proves nothing", cfg.Job, t.refused, t.addr))
			}
			return e.introduce(t)
		}
		if refused++; !isRefusal(t.err) {
			refused = 0
		}
		if refused == refusals && e.history == nil || errors.Is(t.err, errFinished) {
			return t.err
		}
		if time.Since(lastLine) >= waitLine {
			lastLine = time.Now()
			cfg.Notify(fmt.Sprintf("job %s: waiting since %v for a seed to answer: %v", cfg.Job, time.Since(start).Round(time.Second), t.err))
		}
		if !sleep(ctx, delay) {
			return joinEnd(ctx, &JoinTimeoutError{Job: cfg.Job, Waited: time.Since(start),
				Addr: strings.Join(e.seeds, ", "), Unit: unitHost, Err: t.err})
		}
		delay = min(2*delay, slowest)
	}
}

// introduce registers this host over an answered connection.
func (e *election) introduce(t try) error {
	e.addr = t.addr
	self := e.agent.self(t.link)
	if e.history != nil {
		e.history.Term = e.agent.promise().Term
		self.History = e.history.excerpt(t.hello)
	}
	m := note(kindRegister, self)
	m.id = registerAgent
	to := target{job: e.agent.cfg.Job, addr: t.addr, key: e.agent.keys.control, sys: e.agent.cfg.sys}
	e.k = newClient(t.link, to, t.addr, "", t.hello, e.event)
	if e.history != nil { // a candidate may vanish, too, and others follow
		e.k.beStrict(0)
	}
	return e.k.send(m)
}

// event runs on the reader goroutine of a client.
func (e *election) event(k *client, m message) {
	switch m.kind {
	case kindRequestVote:
		var by leader
		if m.id != 0 {
			if err := m.record(&by); err != nil {
				k.cancel(err)
				return
			}
		}
		e.stay(k, m.id, by)
	case kindPlan:
		var p plan
		err := m.record(&p)
		if err == nil {
			err = e.agent.followPlan(p)
		}
		k.beStrict(startTime * k.hello.LostAfter)
		if e.agent.now.Load() != nil && (e.history == nil || e.agent.client() == k) {
			e.agent.planned(k, m.epoch, p, err)
			return
		}
		e.reply <- outcome{k: k, epoch: m.epoch, plan: p, err: err}
	case kindElsewhere:
		var other elsewhere
		if m.record(&other) == nil { // it is a hint
			e.mu.Lock()
			e.other = other.At
			e.mu.Unlock()
		}
	case kindRefuse:
		if e.agent.client() == k {
			e.agent.event(k, m)
			return
		}
		var r refusal
		err := m.record(&r)
		if err == nil {
			err = r.err(e.agent.cfg.Job, k.addr)
		}
		e.reply <- outcome{k: k, err: err}
	default:
		e.agent.event(k, m)
	}
}

// stay accepts a coordinator's proposal, unless this host is moving to a smaller
// seed. Attempt 0 cancels the acceptance.
func (e *election) stay(k *client, attempt uint64, by leader) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.moving == k {
		return
	}
	if attempt == 0 {
		e.bound = nil
		return
	}
	if e.history != nil {
		if err := e.agent.voteFor(by); err != nil {
			k.cancel(err) // this host registers again, with the term of its promise
			return
		}
	}
	e.bound = k
	_ = k.send(message{kind: kindVote, epoch: firstEpoch, id: attempt}) // the reader handles a failure
}

// abandon decides to leave k, unless this host agreed to stay.
func (e *election) abandon(k *client) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.bound == k {
		return false
	}
	e.moving = k
	return true
}

// await returns the outcome of the registration, or nil if its coordinator
// closed. While it waits, it moves to smaller seeds as they appear.
func (e *election) await(ctx context.Context, start time.Time) (*outcome, error) {
	every := searchInterval
	if e.history != nil {
		every = slowAfter(e.history.lostAfter)
	}
	again := time.NewTicker(every)
	defer again.Stop()
	lines := time.NewTicker(waitLine)
	defer lines.Stop()
	s := newSeedSearch(ctx, e)
	defer s.close()
	for {
		select {
		case o := <-e.reply:
			if o.k == e.k {
				return &o, o.err
			}
		case <-e.k.ctx.Done():
			return nil, e.gone(ctx)
		case <-e.k.endedC:
			return nil, e.gone(ctx)
		case <-ctx.Done():
			return nil, e.timeout(ctx, start)
		case <-again.C:
			s.start()
		case <-lines.C:
			e.notifyMissing(start)
		case t := <-s.found:
			s.running = false
			if err := e.move(t); err != nil {
				return nil, err
			}
		}
	}
}

// notifyMissing tells the user of this host which hosts are missing, unless this host coordinates
// and tells it anyway.
func (e *election) notifyMissing(start time.Time) {
	if e.addr == e.mine {
		return
	}
	if r, err := e.k.askMissing(); err == nil && r.Unit == unitHost { // otherwise await learns why
		cfg := &e.agent.cfg
		cfg.Notify(fmt.Sprintf("job %s: waiting since %v: %v", cfg.Job, time.Since(start).Round(time.Second), r))
	}
}

// A seedSearch looks for a smaller seed than the current coordinator, or for the
// coordinator of the running job, in the background.
type seedSearch struct {
	e       *election
	ctx     context.Context
	cancel  context.CancelFunc
	found   chan try
	running bool
	last    time.Time // when it looked for the coordinator of a running job
}

func newSeedSearch(ctx context.Context, e *election) *seedSearch {
	s := &seedSearch{e: e, found: make(chan try, 1)}
	s.ctx, s.cancel = context.WithCancel(ctx)
	return s
}

// start starts a search, unless one is running or there is no other candidate.
func (s *seedSearch) start() {
	smaller, all := s.e.candidates(s.e.addr), s.e.candidates("")
	if s.running || len(all) < 2 {
		return
	}
	others := slices.DeleteFunc(all[len(smaller):], func(addr string) bool { return addr == s.e.addr })
	if time.Since(s.last) < searchInterval {
		others = nil
	} else {
		s.last = time.Now()
	}
	if len(smaller)+len(others) == 0 {
		return
	}
	s.running = true
	go func() {
		t := s.e.firstAnswer(s.ctx, smaller)
		if isRefusal(t.err) {
			s.e.noteRefusal(t.err)
		}
		if t.link == nil {
			t = s.e.firstRunning(s.ctx, others)
		}
		s.found <- t
	}()
}

// close ends the search and closes the connection that it has found.
func (s *seedSearch) close() {
	s.cancel()
	if s.running {
		if t := <-s.found; t.link != nil {
			t.link.close()
		}
	}
}

// said returns the coordinator's last message if it was an error.
func (e *election) said() error {
	for {
		select {
		case o := <-e.reply:
			if o.k == e.k {
				return o.err
			}
		default:
			return nil
		}
	}
}

// gone handles a coordinator that closed before the plan: it returns the
// coordinator's last error, or waits for another attempt.
func (e *election) gone(ctx context.Context) error {
	if err := e.said(); err != nil {
		return err
	}
	if !sleep(ctx, firstRetry) {
		return joinEnd(ctx, &JoinTimeoutError{Job: e.agent.cfg.Job, Addr: e.addr, Unit: unitHost, Err: context.Cause(e.k.ctx)})
	}
	return nil
}

func (e *election) move(t try) error {
	if t.err != nil || t.link == nil {
		return nil
	}
	if e.k.hello.Running && !t.hello.Running || !e.abandon(e.k) {
		t.link.close()
		return nil
	}
	e.k.close()
	return e.introduce(t)
}

func (e *election) timeout(ctx context.Context, start time.Time) error {
	cfg := &e.agent.cfg
	t := &JoinTimeoutError{Job: cfg.Job, Waited: time.Since(start), Addr: e.addr, Unit: unitHost}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		r, err := e.k.askMissing()
		if said := e.said(); err != nil && said != nil { // the coordinator reached the same time limit
			return said
		}
		t.fill(r)
		t.Unit, t.Err = cmp.Or(t.Unit, unitHost), err
	}
	return joinEnd(ctx, t)
}
