package job

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

// An election connects a choice (choice.go) to the network: it dials candidates, turns answers, messages and time into events, and
// carries out the actions. Each seed runs a coordinator at the start of a job. When all hosts have registered with one
// coordinator, it commits the plan, and the others are closed.
type election struct {
	agent *Agent
	seeds []string // sorted
	mine  string   // the seed address of this host, or ""

	begun  time.Time
	ctx    context.Context // ends with the choice
	stop   context.CancelFunc
	wg     sync.WaitGroup
	result chan outcome

	mu     sync.Mutex
	choice *choice // Agent.mu guards it, too
	timer  *time.Timer
	dials  map[uint64]*dialed
	k      *Client // of the current registration
	said   error   // why its coordinator has refused this host
}

// A dialed is a dial of a choice, and its connection.
type dialed struct {
	cancel context.CancelFunc
	link   *Link // nil until the host answers
}

// An outcome ends a choice with a plan or an error.
type outcome struct {
	k     *Client
	epoch uint64
	plan  plan
	addr  string
	self  bool // this host coordinates
	err   error
}

func (e *election) run(ctx context.Context) error {
	begun := time.Now()
	if err := e.prepare(ctx); err != nil {
		return err
	}
	o, err := e.elect(ctx, begun, newChoice(&e.agent.voter, e.seeds, e.mine, 1))
	if err != nil {
		return err
	}
	return e.adopt(o)
}

// elect returns the outcome of a choice that begins at the instant 1.
func (e *election) elect(ctx context.Context, begun time.Time, c *choice) (*outcome, error) {
	e.begun, e.choice, e.dials, e.result = begun, c, map[uint64]*dialed{}, make(chan outcome, 1)
	e.ctx, e.stop = context.WithCancel(ctx)
	e.mu.Lock()
	e.timer = time.AfterFunc(time.Hour, e.timeUp)
	e.mu.Unlock()
	e.step(begin{})
	var o outcome
	select {
	case o = <-e.result:
	case <-ctx.Done():
	}
	e.close()
	if o.err == nil && o.k == nil {
		select {
		case o = <-e.result: // it came together with the end of ctx
		default:
			o.err = e.timeout(ctx)
		}
	}
	if errors.Is(o.err, errChoiceTime) {
		o.err = e.timeout(ctx)
	}
	if o.err != nil {
		return nil, e.failed(o.err)
	}
	return &o, nil
}

// close ends the choice, so that only its registration remains.
func (e *election) close() {
	e.mu.Lock()
	e.agent.mu.Lock()
	actions := e.choice.close()
	e.agent.mu.Unlock()
	for _, a := range actions {
		e.do(a)
	}
	e.timer.Stop()
	e.mu.Unlock()
	e.stop()
	e.wg.Wait()
}

// now returns the time for the choice, which is never 0.
func (e *election) now() instant { return time.Since(e.begun) + 1 }

// step lets an event happen to the choice, and carries out what it decides.
func (e *election) step(ev choiceEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.agent.mu.Lock()
	actions := e.choice.step(e.now(), ev)
	at, ok := e.choice.next()
	e.agent.mu.Unlock()
	for _, a := range actions {
		e.do(a)
	}
	if ok {
		e.timer.Reset(max(at-e.now(), 0))
	} else {
		e.timer.Stop()
	}
}

// timeUp runs when something should be due.
func (e *election) timeUp() {
	e.agent.cfg.Sys.await()
	if e.ctx.Err() == nil {
		e.step(nil)
	}
}

// do carries out an action. The caller holds e.mu.
func (e *election) do(a action) {
	switch a := a.(type) {
	case dial:
		e.dial(a)
	case hangUpDial:
		e.hangUp(a.dial)
	case announce:
		if d := e.dials[a.dial]; d != nil {
			delete(e.dials, a.dial)
			e.agent.wg.Go(func() { e.agent.tellElsewhere(d.link, "") })
		}
	case enroll:
		e.enroll(a)
	case leave:
		k := e.k
		e.k = nil
		e.agent.wg.Go(func() { k.closeWith(leaveForAnother) }) // a coordinator that does not answer is not waited for
	case vote:
		_ = e.k.Send(Message{Kind: kindVote, Epoch: FirstEpoch, ID: a.attempt}) // the reader handles a failure
	case prefer:
		e.agent.mu.Lock()
		own := e.agent.Coord
		e.agent.mu.Unlock()
		if own != nil {
			_ = own.happen(registered(a)) // it has no peer
		}
	case beCandidate:
		e.agent.serve(e.agent.port.let(), a.candidacy)
	case notify:
		e.agent.notify(a.line)
	case reportMissing:
		k := e.k
		e.agent.wg.Go(func() { e.notifyMissing(k) })
	case chosen:
		own := e.k.Hello.Agent == e.agent.UUID // a host that has replaced this one has its address
		e.result <- outcome{k: e.k, epoch: a.epoch, plan: a.plan, addr: e.choice.addr, self: own}
	case notChosen:
		e.result <- outcome{err: a.err}
	}
}

// dial dials a candidate.
func (e *election) dial(x dial) {
	ctx, cancel := context.WithCancel(e.ctx)
	if x.limit > 0 {
		ctx, cancel = context.WithTimeout(e.ctx, x.limit)
	}
	d, a := &dialed{cancel: cancel}, e.agent
	e.dials[x.dial] = d
	e.wg.Go(func() {
		defer cancel()
		l, hello, err := a.to(x.addr).Dial(ctx)
		ev := answered{dial: x.dial, hello: hello, refused: IsRefusal(err), err: err}
		ev.refers, _ = errors.AsType[*Referral](err)
		e.mu.Lock()
		switch {
		case e.dials[x.dial] != d: // it is not wanted any more
			if l != nil {
				l.Close()
			}
			e.mu.Unlock()
			return
		case err != nil:
			delete(e.dials, x.dial)
		default:
			d.link = l
		}
		e.mu.Unlock()
		e.step(ev)
	})
}

// hangUp ends a dial or its connection.
func (e *election) hangUp(number uint64) {
	d := e.dials[number]
	if d == nil {
		return
	}
	delete(e.dials, number)
	d.cancel()
	if d.link != nil {
		d.link.Close()
	}
}

// failed closes the registration after the choice has failed.
func (e *election) failed(err error) error {
	if t, ok := errors.AsType[*JoinTimeoutError](err); ok && t.Err == nil {
		t.Err = e.choice.refused
	}
	e.agent.Coord.Decide(err)
	switch {
	case e.k == nil:
	case e.choice.history != nil: // the time for a choice is over: a candidate that does not answer is not waited for
		e.k.hangUp()
		e.k.wg.Wait()
	default:
		e.k.Leave(err)
	}
	return err
}

// adopt hands the outcome to the agent, and closes this host's coordinator if
// another one was chosen.
func (e *election) adopt(o *outcome) error {
	a := e.agent
	a.mu.Lock()
	a.k, a.Addr = o.k, o.addr
	a.mu.Unlock()
	t, err := a.newAttempt(o.k, o.epoch, o.plan)
	if err != nil {
		return err
	}
	a.adopt(t)
	if !o.self {
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
		h, p, err := SplitAddr(s, DefaultPort)
		if err != nil {
			return BadConfig("seed %q: %v", s, err)
		}
		if n, err := strconv.Atoi(p); err != nil || n < 1 || n > 65535 {
			return BadConfig("seed %q: want a port from 1 to 65535", s)
		}
		e.seeds = append(e.seeds, net.JoinHostPort(h, p))
	}
	if err := a.cfg.Sys.checkBind(a.cfg.Bind); err != nil {
		return err
	}
	slices.SortFunc(e.seeds, naturalCompare)
	e.seeds = slices.Compact(e.seeds)
	if err := a.cfg.Sys.checkSeeds(ctx, e.seeds); err != nil {
		return err
	}
	ln, err := e.listenAsSeed(ctx)
	if err != nil {
		return err
	}
	if !a.cfg.NoGossip && env.Gossip.Value() != "no" {
		a.Gossip = openGossip(a, e.seeds, e.mine)
	}
	if ln != nil {
		a.seed = true
		a.port.open(ln, e.mine)
		a.serve(a.port.let(), nil)
		return nil
	}
	return a.port.openBeside(e.seeds)
}

// checkBind validates the address to listen on, so that a mistake is reported
// before any wait.
func (s *System) checkBind(bind string) error {
	if bind == "" {
		return nil
	}
	h, _, err := SplitAddr(bind, "0")
	if err != nil {
		return BadConfig("bind to %q: %v", bind, err)
	}
	ip := ParseIP(h)
	if ip == nil {
		return BadConfig("bind to %q: want an IP address, or IP:port", bind)
	}
	if !ip.IsUnspecified() && !s.isLocal(ip) {
		return BadConfig("bind to %q: no interface of this host has that address", bind)
	}
	return nil
}

// prepareAlone prepares a job on one host, whose coordinator is in this process.
func (e *election) prepareAlone() error {
	a := e.agent
	at := net.JoinHostPort(Loopback(), "0")
	if a.cfg.Bind != "" {
		h, p, err := SplitAddr(a.cfg.Bind, "0")
		if err != nil {
			return BadConfig("bind to %q: %v", a.cfg.Bind, err)
		}
		at = net.JoinHostPort(h, p)
	}
	ln, err := a.cfg.Sys.ListenAt(at)
	if err != nil && a.cfg.Bind != "" {
		return BadConfig("bind to %q: %v", a.cfg.Bind, errors.Unwrap(err))
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
	return net.JoinHostPort(Loopback(), strconv.Itoa(t.Port))
}

// listenAsSeed opens the seed port of this host, if it is a seed. It compares
// addresses, and host names only if this host's own name has none but loopback
// addresses (ownname.go). If another agent of this job on the same machine has
// the port, this host is not a seed.
func (e *election) listenAsSeed(ctx context.Context) (net.Listener, error) {
	a := e.agent
	for _, s := range e.seeds {
		at, ok := e.isMine(ctx, s)
		if !ok {
			continue
		}
		ln, err := a.cfg.Sys.ListenAt(at)
		if errors.Is(err, syscall.EADDRINUSE) {
			if err := a.to(s).PortTaken(ctx, err, "choose another in --seeds"); err != nil {
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
	bindIP, bindPort, _ := SplitAddr(e.agent.cfg.Bind, port)
	advIP, advPort, _ := SplitAddr(e.agent.cfg.Advertise, port)
	ips := e.agent.cfg.Sys.resolve(ctx, h)
	if e.agent.cfg.Bind == "" && isOwnName(h) && onlyLoopback(ips) {
		return net.JoinHostPort("", port), true // see ownname.go
	}
	for _, ip := range ips {
		text := ip.String()
		if len(ips) == 1 && ParseIP(h) != nil {
			text = h // with its zone
		}
		switch {
		case e.agent.cfg.Advertise != "" && ParseIP(advIP).Equal(ip) && advPort == port:
			return net.JoinHostPort(cmp.Or(bindIP, text), cmp.Or(bindPort, port)), true
		case e.agent.cfg.Bind == "" || ParseIP(bindIP).IsUnspecified():
			if !e.agent.cfg.Sys.isLocal(ip) || e.agent.cfg.Bind != "" && bindPort != port {
				continue
			}
			return net.JoinHostPort(cmp.Or(bindIP, text), port), true
		case ParseIP(bindIP).Equal(ip) && bindPort == port:
			return net.JoinHostPort(bindIP, port), true
		}
	}
	return "", false
}

func (s *System) isLocal(ip net.IP) bool {
	addrs, err := s.interfaceAddrs()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && (n.IP.Equal(ip) || n.IP.IsLoopback() && n.Contains(ip))
	})
}

// enroll registers this host over an answered connection.
func (e *election) enroll(x enroll) {
	d := e.dials[x.dial]
	delete(e.dials, x.dial)
	self := e.agent.self(d.link)
	self.History = x.history
	// The end of the client is an event, too.
	k, _ := e.agent.to(x.addr).Register(d.link, x.hello, x.addr, "", registerAgent, self, func(k *Client, m Message) { e.event(x.dial, k, m) })
	if x.history != nil { // a candidate may vanish, too, and others follow
		k.BeStrict(0)
	}
	e.k, e.said = k, nil
	e.wg.Go(func() {
		select {
		case <-k.Ctx.Done():
		case <-k.EndedC:
		case <-e.ctx.Done():
			return
		}
		e.step(linkLost{x.dial})
	})
}

// event runs on the reader goroutine of the client that has registered over a dial.
func (e *election) event(number uint64, k *Client, m Message) {
	a := e.agent
	switch m.Kind {
	case kindRequestVote:
		var by Leader
		if m.ID != 0 {
			if err := m.Record(&by); err != nil {
				k.Cancel(err)
				return
			}
		}
		e.step(voteAsked{number, m.ID, by})
	case kindPlan:
		var p plan
		err := m.Record(&p)
		k.BeStrict(startTime * k.Hello.LostAfter)
		switch {
		case a.Now.Load() != nil && (e.choice.history == nil || a.Client() == k):
			if err == nil {
				err = a.followPlan(p)
			}
			a.planned(k, m.Epoch, p, err)
		case err != nil:
			e.step(turnedAway{number, err})
		default:
			e.step(planSent{number, m.Epoch, p})
		}
	case kindElsewhere:
		var other elsewhere
		if m.Record(&other) == nil { // it is a hint
			e.step(ledElsewhere{other.At})
		}
	case KindRefuse:
		if a.Client() == k {
			a.event(k, m)
			return
		}
		var r Refusal
		err := m.Record(&r)
		if err == nil {
			err = r.Err(a.cfg.Job, k.Addr)
		}
		e.mu.Lock()
		if k == e.k {
			e.said = err
		}
		e.mu.Unlock()
		e.step(turnedAway{number, err})
	default:
		a.event(k, m)
	}
}

// notifyMissing tells the user of this host which hosts are missing.
func (e *election) notifyMissing(k *Client) {
	if r, err := k.AskMissing(); err == nil && r.Unit == unitHost { // otherwise the election learns why
		e.agent.notify(fmt.Sprintf("waiting since %v: %v", time.Since(e.begun).Round(time.Second), r))
	}
}

// timeout returns the error of a choice that ctx has ended, or for which there is no time left.
func (e *election) timeout(ctx context.Context) error {
	c := e.choice
	t := &JoinTimeoutError{Job: e.agent.cfg.Job, Waited: time.Since(e.begun), Addr: c.addr, Unit: unitHost}
	late := ctx.Err() == nil || errors.Is(ctx.Err(), context.DeadlineExceeded)
	switch {
	case e.k == nil:
		t.Addr, t.Err = strings.Join(c.candidates, ", "), c.failure
	case late:
		r, err := e.k.AskMissing()
		e.mu.Lock()
		said := e.said
		e.mu.Unlock()
		if err != nil && said != nil { // the coordinator reached the same time limit
			return said
		}
		r.Fill(t)
		t.Unit, t.Err = cmp.Or(t.Unit, unitHost), err
	}
	if late {
		return t
	}
	return JoinEnd(ctx, t)
}
