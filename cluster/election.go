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

// seekAgain is how often an agent that is not yet bound looks for a smaller
// seed than the one it has registered with.
const seekAgain = time.Second

// An election finds the host that coordinates: the smallest reachable seed, by
// the natural order of the addresses as they were configured, which is the same
// on all hosts. Every seed runs a coordinator; the one with which all hosts
// have registered commits the plan, and the others are closed.
type election struct {
	agent *Agent
	seeds []string // sorted
	mine  string   // the seed that this host is, or ""

	// Of the present registration.
	k     *client
	addr  string
	reply chan outcome

	mu     sync.Mutex
	bound  *client // has asked us to stay
	moving *client // we are leaving it and do not agree to stay any more
}

// An outcome ends a registration: with a plan or with why there is none.
type outcome struct {
	k    *client
	plan plan
	err  error
}

func (e *election) run(ctx context.Context) error {
	start := time.Now()
	if err := e.prepare(ctx); err != nil {
		return err
	}
	e.reply = make(chan outcome, 4)
	for {
		if err := e.register(ctx, start); err != nil {
			return e.failed(err)
		}
		o, err := e.await(ctx, start)
		if err != nil {
			return e.failed(err)
		}
		if o == nil { // the coordinator went before it had a plan: try again
			e.k.close()
			e.k = nil
			continue
		}
		return e.adopt(o)
	}
}

func (e *election) failed(err error) error {
	e.agent.coord.decide(err)
	if e.k != nil {
		e.k.leave(err)
	}
	return err
}

// adopt makes the outcome the agent's. A coordinator of this host that was not
// chosen has no use any more.
func (e *election) adopt(o *outcome) error {
	a := e.agent
	a.k, a.addr, a.plan = o.k, e.addr, o.plan
	if a.node = o.plan.nodeOf(a.uuid); a.node < 0 {
		return fmt.Errorf("cluster: join job %q: the coordinator's plan leaves out this host, %s", a.cfg.Job, a.cfg.Host)
	}
	if a.coord != nil && e.addr != e.mine {
		a.coord.close()
		a.coord = nil
	}
	return nil
}

// prepare opens this host's own coordinator, if it is to have one, and gossip.
func (e *election) prepare(ctx context.Context) error {
	a := e.agent
	if a.cfg.Nodes == 1 {
		return e.prepareAlone()
	}
	for _, s := range a.cfg.Seeds {
		h, p, err := splitAddr(s, DefaultPort)
		if err != nil {
			return badConfig("seed %q: %v", s, err)
		}
		if n, err := strconv.Atoi(p); err != nil || n < 1 || n > 65535 {
			return badConfig("seed %q: want a port from 1 to 65535", s)
		}
		e.seeds = append(e.seeds, net.JoinHostPort(h, p))
	}
	if err := checkBind(a.cfg.Bind); err != nil {
		return err
	}
	slices.SortFunc(e.seeds, naturalCompare)
	e.seeds = slices.Compact(e.seeds)
	ln, err := e.listenAsSeed(ctx)
	if err != nil {
		return err
	}
	if !a.cfg.NoGossip && env.Gossip.Value() != "no" {
		a.gossip = startGossip(a, e.seeds, e.mine)
	}
	if ln != nil {
		a.serve(ln)
	}
	return nil
}

// checkBind finds an address that this host cannot listen on before anybody is
// waited for.
func checkBind(bind string) error {
	if bind == "" {
		return nil
	}
	h, _, err := splitAddr(bind, "0")
	if err != nil {
		return badConfig("bind to %q: %v", bind, err)
	}
	ip := net.ParseIP(h)
	if ip == nil {
		return badConfig("bind to %q: want an IP address, or IP:port", bind)
	}
	if !ip.IsUnspecified() && !isLocal(ip) {
		return badConfig("bind to %q: no interface of this host has that address", bind)
	}
	return nil
}

// prepareAlone is a job on one host: its coordinator is here and nobody has to
// be found.
func (e *election) prepareAlone() error {
	a := e.agent
	at := "127.0.0.1:0"
	if a.cfg.Bind != "" {
		h, p, err := splitAddr(a.cfg.Bind, "0")
		if err != nil {
			return badConfig("bind to %q: %v", a.cfg.Bind, err)
		}
		at = net.JoinHostPort(h, p)
	}
	ln, err := listen(at)
	if err != nil && a.cfg.Bind != "" {
		return badConfig("bind to %q: %v", a.cfg.Bind, errors.Unwrap(err))
	}
	if err != nil {
		return err
	}
	e.mine = reachable(ln.Addr())
	e.seeds = []string{e.mine}
	a.serve(ln)
	return nil
}

// reachable is a listener's address as this host can dial it.
func reachable(addr net.Addr) string {
	t, ok := addr.(*net.TCPAddr)
	if !ok || !t.IP.IsUnspecified() {
		return addr.String()
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(t.Port))
}

// listenAsSeed opens the port of the seed that this host is, if it is one. Only
// addresses decide that; names of hosts are not guessed at. A port that another
// agent of this job has, on the same machine, makes this one no seed.
func (e *election) listenAsSeed(ctx context.Context) (net.Listener, error) {
	a := e.agent
	for _, s := range e.seeds {
		at, ok := e.isMine(ctx, s)
		if !ok {
			continue
		}
		ln, err := listen(at)
		if errors.Is(err, syscall.EADDRINUSE) {
			j := JoinConfig{Job: a.cfg.Job, at: s}
			if j.sameJobAt(a.keys.control) == nil {
				continue
			}
			return nil, fmt.Errorf("%w: another program, or another job, has the port; choose another in --seeds", err)
		}
		if err != nil {
			return nil, err
		}
		e.mine = s
		return ln, nil
	}
	return nil, nil
}

// isMine reports whether a seed's address is this host's, and where to listen.
func (e *election) isMine(ctx context.Context, seed string) (at string, ok bool) {
	h, port, _ := net.SplitHostPort(seed)
	bindIP, bindPort, _ := splitAddr(e.agent.cfg.Bind, port)
	advIP, advPort, _ := splitAddr(e.agent.cfg.Advertise, port)
	ips := resolve(ctx, h)
	for _, ip := range ips {
		switch {
		case e.agent.cfg.Advertise != "" && net.ParseIP(advIP).Equal(ip) && advPort == port:
			return net.JoinHostPort(cmp.Or(bindIP, ip.String()), cmp.Or(bindPort, port)), true
		case e.agent.cfg.Bind == "" || net.ParseIP(bindIP).IsUnspecified():
			if !isLocal(ip) || e.agent.cfg.Bind != "" && bindPort != port {
				continue
			}
			return net.JoinHostPort(cmp.Or(bindIP, ip.String()), port), true
		case net.ParseIP(bindIP).Equal(ip) && bindPort == port:
			return net.JoinHostPort(bindIP, port), true
		}
	}
	return "", false
}

// resolve returns the addresses of a name; none when it has none yet, which
// happens for half a minute after a pod's start.
func resolve(ctx context.Context, name string) []net.IP {
	if ip := net.ParseIP(name); ip != nil {
		return []net.IP{ip}
	}
	ctx, cancel := context.WithTimeout(ctx, dialAttempt)
	defer cancel()
	ips, err := net.DefaultResolver.LookupIP(ctx, "ip", name)
	if err != nil {
		return nil
	}
	return ips
}

func isLocal(ip net.IP) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && (n.IP.Equal(ip) || n.IP.IsLoopback() && n.Contains(ip))
	})
}

// candidates are the addresses to try before limit, in order: the seeds, then
// coordinators that only gossip knows.
func (e *election) candidates(limit string) []string {
	all := slices.Clone(e.seeds)
	if g := e.agent.gossip; g != nil {
		for _, addr := range g.coordinators() {
			if !slices.Contains(all, addr) {
				all = append(all, addr)
			}
		}
	}
	if i := slices.Index(all, limit); i >= 0 {
		all = all[:i]
	}
	return all
}

// A try is a connection that answered, or the last reason why none did.
type try struct {
	link  *link
	hello welcome
	addr  string
	err   error
}

// isRefusal reports that a coordinator would not have this host: another seed
// that answers, such as this host's own, cannot make up for that. A program that
// is no coordinator at a seed's port can be made up for.
func isRefusal(err error) bool {
	a, auth := errors.AsType[*AuthError](err)
	return auth && a.Reason != errNotChorus.Error()
}

// first connects to the first candidate that answers or refuses.
func (e *election) first(ctx context.Context, candidates []string) try {
	var t try
	for _, addr := range candidates {
		l, hello, err := dial(ctx, e.agent.cfg.Job, addr, e.agent.keys.control)
		if err == nil {
			return try{link: l, hello: hello, addr: addr}
		}
		if isRefusal(err) {
			return try{err: err}
		}
		if _, auth := errors.AsType[*AuthError](t.err); !auth {
			t.err = err
		}
	}
	return t
}

// register connects to the smallest coordinator that answers.
func (e *election) register(ctx context.Context, start time.Time) error {
	cfg := &e.agent.cfg
	delay, lastLine := firstRetry, start
	for {
		t := e.first(ctx, e.candidates(""))
		if t.err == nil {
			return e.introduce(t)
		}
		if _, auth := errors.AsType[*AuthError](t.err); auth {
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
		delay = min(2*delay, lastRetry)
	}
}

// introduce registers this host over a connection that answered.
func (e *election) introduce(t try) error {
	e.addr = t.addr
	m := note(kindRegister, e.agent.self(t.link))
	m.id = registerAgent
	e.k = newClient(t.link, t.addr, "", t.hello, e.event)
	return e.k.send(m)
}

// event runs on a client's reader.
func (e *election) event(k *client, m message) {
	switch m.kind {
	case kindPrepare:
		e.stay(k, m.id)
	case kindPlan:
		var p plan
		err := m.record(&p)
		e.reply <- outcome{k: k, plan: p, err: err}
	case kindRefuse:
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

// stay agrees to a coordinator's proposal, unless this host is moving to a
// smaller seed. Attempt 0 sets it free again.
func (e *election) stay(k *client, attempt uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.moving == k {
		return
	}
	if attempt == 0 {
		e.bound = nil
		return
	}
	e.bound = k
	_ = k.send(message{kind: kindPrepared, epoch: firstEpoch, id: attempt}) // the reader sees a failure
}

// leave decides to move away from k, if it has not asked us to stay.
func (e *election) leave(k *client) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.bound == k {
		return false
	}
	e.moving = k
	return true
}

// await returns the outcome of the registration, or nil when its coordinator
// went. Meanwhile it moves to smaller seeds as they appear.
func (e *election) await(ctx context.Context, start time.Time) (*outcome, error) {
	seek := time.NewTicker(seekAgain)
	defer seek.Stop()
	found := make(chan try, 1)
	seeking := false
	seekCtx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		if seeking {
			if t := <-found; t.link != nil {
				t.link.close()
			}
		}
	}()
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
		case <-seek.C:
			smaller := e.candidates(e.addr)
			if seeking || len(smaller) == 0 {
				continue
			}
			seeking = true
			go func() { found <- e.first(seekCtx, smaller) }()
		case t := <-found:
			seeking = false
			if err := e.move(t); err != nil {
				return nil, err
			}
		}
	}
}

// said is the coordinator's last word if it was an error.
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

// gone decides what follows when the coordinator went before the plan: the
// final word if it said one, else another attempt.
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
	if isRefusal(t.err) && e.leave(e.k) {
		return t.err
	}
	if t.err != nil || t.link == nil {
		return nil
	}
	if !e.leave(e.k) {
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
		r, err := e.k.who()
		if said := e.said(); err != nil && said != nil { // it had the same time limit
			return said
		}
		t.fill(r)
		t.Unit, t.Err = cmp.Or(t.Unit, unitHost), err
	}
	return joinEnd(ctx, t)
}
