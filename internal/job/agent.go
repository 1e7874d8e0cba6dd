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
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/safe"
)

// An Agent is the member of one host in a job; it runs in the host's launcher. It
// does not use devices, because heartbeats must not depend on a driver that may
// hang. Methods are safe for concurrent use.
type Agent struct {
	owner   handle.Owner
	cfg     Config
	keys    keys
	token   string // for workers
	UUID    string
	Coord   *Server // nil unless this host runs a coordinator
	Gossip  *gossip // nil in a job on one host
	pairs   *pairs  // nil without gossip
	reserve *reservation
	port    *port
	life    context.Context // ends with Close
	die     context.CancelFunc
	wg      sync.WaitGroup
	k       *Client
	Addr    string // address of the coordinator
	closing sync.Once
	killed  chan struct{}
	killing sync.Once
	// concluded is closed when the program has ended and the coordinator is lost.
	concluded  chan struct{}
	lingers    atomic.Bool // the job has succeeded, and this host only waits for others to learn that
	concluding sync.Once
	// byOwnName is true if this host is a seed whose name is the loopback here.
	byOwnName bool
	seed      bool
	begun     time.Time

	Now    atomic.Pointer[attempt]
	plans  chan *attempt // that follow the first
	orders chan Order
	mu     sync.Mutex
	early  *placement // of news that came before the first attempt
	voter
	choosing bool          // another coordinator is chosen
	moved    chan struct{} // closed when another coordinator has taken over
}

// Start joins this host to a job, and returns when all hosts have joined. It fails with
//   - a *JoinTimeoutError if hosts are missing after Timing.Join,
//   - an *AuthError if the seeds have another secret or job,
//   - a *DuplicateError if another host has the same node rank,
//   - a *RefusedError for other differences between hosts.
//
// A job on one host starts within a few milliseconds. A nil cfg
// means a job of one process on this host.
func Start(ctx context.Context, cfg *Config) (*Agent, error) {
	c, ks, err := cfg.Complete()
	if err != nil {
		return nil, err
	}
	a := &Agent{cfg: c, begun: time.Now(), keys: ks, UUID: newUUID(), killed: make(chan struct{}), concluded: make(chan struct{}), plans: make(chan *attempt, 1), orders: make(chan Order, maxLocalSize), voter: newVoter(c.LocalSize), moved: make(chan struct{})}
	a.life, a.die = context.WithCancel(context.Background())
	a.port = newPort(a)
	if a.reserve, err = reservePort(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.Timing.Join)
	defer cancel()
	e := &election{agent: a}
	if err := e.run(ctx); err != nil {
		a.release()
		return nil, err
	}
	run := a.promise().Run
	worker, err := ks.Control.forWorkers(run)
	if err != nil {
		a.release()
		return nil, err
	}
	a.token = encodeToken(worker)
	if a.Gossip != nil {
		a.Gossip.begin(a, run)
		a.pairs = startPairs(a)
	}
	handle.Init(a, &a.owner, handle.About{Kind: "job.Agent", On: handle.Name("job " + a.cfg.Job)})
	return a, nil
}

// serve starts this host's coordinator on ln, with a first event, if it is not nil.
func (a *Agent) serve(ln net.Listener, first event) {
	c := ServerConfig{
		Job: a.cfg.Job, Key: a.keys.Control, Notify: a.cfg.Notify, Sys: a.cfg.Sys, probe: a.probe,
		CoordConfig: CoordConfig{agents: a.cfg.Nodes, Self: a.greeting(), least: a.cfg.MinNodes,
			JoinBy: a.cfg.Timing.Join, RevokeBy: a.cfg.Timing.Revoke, DrainBy: a.cfg.Timing.Drain,
			again: restartPolicy{most: a.cfg.MaxRestarts, backoff: a.cfg.Timing.Backoff}},
	}
	if g := a.Gossip; g != nil {
		c.path = g.path
	}
	coord := NewServer(ln, c, first)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Coord = coord
}

// to returns the coordinator, or a launcher, at an address.
func (a *Agent) to(addr string) Target {
	return Target{Job: a.cfg.Job, Addr: addr, Key: a.keys.Control, Sys: a.cfg.Sys}
}

// notify tells the user of something that has happened to the job.
func (a *Agent) notify(text string) { a.cfg.Notify(fmt.Sprintf("job %s: %s", a.cfg.Job, text)) }

// greeting is the first message of this host to processes that connect to it.
func (a *Agent) greeting() Welcome {
	return Welcome{Host: a.cfg.Host, PID: a.cfg.Sys.Getpid(), Rank: -1, Agent: a.UUID, Several: a.cfg.Nodes > 1,
		Heartbeat: a.cfg.Timing.Heartbeat, LostAfter: a.cfg.Timing.LostAfter}
}

// self describes this host to the coordinator at the other end of l.
func (a *Agent) self(l *Link) host {
	h := host{Host: a.cfg.Host, PID: a.cfg.Sys.Getpid(), UUID: a.UUID, NodeRank: Deref(a.cfg.NodeRank, -1),
		Nodes: a.cfg.Nodes, MinNodes: a.cfg.MinNodes, Restarts: a.cfg.MaxRestarts, LocalSize: a.cfg.LocalSize, Control: a.port.at, Seed: a.seed, MasterPort: a.reserve.port, Unfit: a.cfg.Unfit}
	h.MasterAddr = addrIP(l.Conn.LocalAddr())
	if ip := ParseIP(h.MasterAddr); a.byOwnName && ip.IsLoopback() {
		h.MasterAddr = cmp.Or(addrText(a.cfg.Sys.ownAddress()), h.MasterAddr)
	}
	if ip, _, err := SplitAddr(a.cfg.Advertise, ""); err == nil {
		h.MasterAddr = ip
	}
	return h
}

// addrText returns the text of an address, or "" for nil.
func addrText(ip net.IP) string {
	if ip == nil {
		return ""
	}
	return ip.String()
}

func addrIP(a net.Addr) string {
	h, _, _ := net.SplitHostPort(a.String())
	return h
}

// Job returns the job's name.
func (a *Agent) Job() string { return a.cfg.Job }

// Host returns this host's name in the job.
func (a *Agent) Host() string { return a.cfg.Host }

// Nodes returns the number of hosts in the job.
func (a *Agent) Nodes() int { return len(a.Now.Load().Place.Load().plan.Hosts) }

// Namesakes describes this launcher and the others of the job whose hosts have the same name. It returns "" for others if there are none.
func (a *Agent) Namesakes() (self, others string) {
	var list []string
	for _, h := range a.Now.Load().Place.Load().plan.Hosts {
		text := fmt.Sprintf("pid %d", h.PID)
		if h.Control != "" {
			text += " at " + h.Control
		}
		switch {
		case h.UUID == a.UUID:
			self = text
		case h.Host == a.cfg.Host:
			list = append(list, text)
		}
	}
	return self, strings.Join(list[:min(len(list), maxNamed)], ", ") + andMore(len(list))
}

// Launchers returns an identifier of each launcher in the job. Two launchers of one job have common ones, and those of two jobs none.
func (a *Agent) Launchers() (ids []string) {
	for _, h := range a.Now.Load().Place.Load().plan.Hosts {
		ids = append(ids, PeersID([]string{h.UUID}))
	}
	return ids
}

// Size returns the world size: the number of processes on all hosts.
func (a *Agent) Size() int { return a.Now.Load().Place.Load().plan.size() }

// LocalSize returns the number of processes on this host.
func (a *Agent) LocalSize() int { return a.cfg.LocalSize }

// Rank returns the rank of worker number local of this host, or -1 if the worker calls
// Run and is not a member of the epoch.
func (a *Agent) Rank(local int) int { return a.Now.Load().Place.Load().rank(local) }

// WorkerEnv returns the environment, as NAME=value, that worker number local of
// this host needs for Attach. It includes torchrun's variables for programs
// that know only those.
func (a *Agent) WorkerEnv(local int) []string {
	now := a.Now.Load().Place.Load()
	rank, size := now.plan.firstRank(now.Node)+local, now.plan.size() // Run ignores them
	master := now.plan.Hosts[0]
	a.mu.Lock()
	addr := a.Addr
	a.mu.Unlock()
	vars := []struct {
		name  string
		value any
	}{
		{env.Job.Name, a.cfg.Job},
		{env.Rank.Name, rank},
		{env.WorldSize.Name, size},
		{env.LocalRank.Name, local},
		{env.LocalSize.Name, a.LocalSize()},
		{env.Node.Name, now.Node},
		{env.Nodes.Name, a.Nodes()},
		{env.HostName.Name, a.cfg.Host},
		{env.Epoch.Name, now.Epoch},
		{env.RestartCount.Name, now.plan.Restarts},
		{env.Agent.Name, a.UUID},
		{env.Addr.Name, addr},
		{env.AgentAddr.Name, a.port.local},
		{env.Token.Name, a.token},
		{env.JoinTimeout.Name, a.cfg.Timing.Join},
		{env.CallTimeout.Name, a.cfg.Timing.Call},
		{"RANK", rank},
		{"WORLD_SIZE", size},
		{"LOCAL_RANK", local},
		{"LOCAL_WORLD_SIZE", a.LocalSize()},
		{"GROUP_RANK", now.Node},
		{"GROUP_WORLD_SIZE", a.Nodes()},
		{"ROLE_RANK", rank},
		{"ROLE_WORLD_SIZE", size},
		{"ROLE_NAME", "default"},
		{"MASTER_ADDR", master.MasterAddr},
		{"MASTER_PORT", master.MasterPort},
		{"TORCHELASTIC_RUN_ID", a.cfg.Job},
		{"TORCHELASTIC_RESTART_COUNT", now.plan.Restarts},
		{"TORCHELASTIC_MAX_RESTARTS", a.cfg.MaxRestarts},
	}
	out := make([]string, 0, len(vars))
	for _, v := range vars {
		out = append(out, fmt.Sprintf("%s=%v", v.name, v.value))
	}
	return out
}

// Context is cancelled when the processes must stop. Its cause is the
// *MemberLostError of the first process that failed on any host, a *StopError,
// or ErrClosed. If the job goes on, Restarting returns true, and Next returns
// when the processes can start again, after which Context returns another
// context.
func (a *Agent) Context() context.Context { return a.Now.Load().ctx }

// Note returns a loss that was reported to sessions but does not stop the
// hosts, or nil: a worker exited with code 0 without closing its session, which
// may explain later failures.
func (a *Agent) Note() *MemberLostError { return a.Now.Load().noted.Load() }

// Report reports the exit of worker number local of this host. It sets Rank and
// Host of e, and an empty Reason is derived from the code. A code other than 0
// stops the job on all hosts, except if the launcher had asked the worker to
// exit.
func (a *Agent) Report(local int, e Exit) error {
	e.Rank, e.Local, e.Host = a.Rank(local), local, a.cfg.Host
	if e.Reason == "" {
		e.Reason = describe(e.Code)
	}
	e.Reason = safe.Clip(e.Reason, MaxText) // the next coordinator gets it, too
	a.mu.Lock()
	a.exited(e)
	k := a.k
	a.mu.Unlock()
	if err := k.Send(Note(kindExit, e)); err != nil {
		return fmt.Errorf("cluster: report the exit of rank %d: %w", e.Rank, err)
	}
	return nil
}

// Stop stops the job on all hosts. reason completes the phrase "the launcher on
// host a ...", for example "received SIGTERM". All launchers should exit with
// code. Stop also reaches the next coordinator if this one is lost meanwhile.
func (a *Agent) Stop(reason string, code int) error {
	f := Fault{Reason: safe.Clip(reason, MaxText), Code: code}
	a.mu.Lock()
	a.stops = &f
	k := a.k
	a.mu.Unlock()
	if err := k.Send(Note(kindStop, f)); err != nil {
		return fmt.Errorf("cluster: stop job %q: %w", a.cfg.Job, err)
	}
	return nil
}

// Kill asks the launchers of all hosts to kill their workers, instead of waiting for them after
// Stop.
func (a *Agent) Kill() error {
	a.mu.Lock()
	a.kills = true
	k := a.k
	a.mu.Unlock()
	if err := k.Send(Message{Kind: kindKill, Epoch: FirstEpoch}); err != nil {
		return fmt.Errorf("cluster: kill job %q: %w", a.cfg.Job, err)
	}
	return nil
}

// Killed returns a channel that is closed after a launcher called Kill.
func (a *Agent) Killed() <-chan struct{} { return a.killed }

// Shutdown reports that all workers of this host have exited, and waits for the
// workers of the other hosts. If the job fails, it returns the cause. Close
// must be called also after Shutdown.
func (a *Agent) Shutdown(ctx context.Context) error {
	a.mu.Lock()
	a.done = true
	k, moved := a.k, a.moved
	a.mu.Unlock()
	if err := k.Send(Message{Kind: kindDone, Epoch: FirstEpoch}); err != nil && k.Loss.Load() == int32(NotLost) && !k.ended.Load() {
		return fmt.Errorf("cluster: shut down job %q: %w", a.cfg.Job, err)
	}
	for {
		select {
		case <-k.EndedC:
			a.mu.Lock()
			coord, away := a.Coord, instant(0)
			if a.finished {
				away = a.away(k.Hello.LostAfter, time.Since(a.begun))
			}
			a.mu.Unlock()
			missed := func() time.Duration { return away - time.Since(a.begun) } // the coordinator may vanish before they come back
			if coord != nil {
				missed = coord.missed
			}
			a.awaitStragglers(ctx, missed)
			return cmp.Or(context.Cause(a.Context()), context.Cause(k.Ctx)) // a failure is reported before the end
		case <-a.Context().Done():
			return context.Cause(a.Context())
		case <-a.concluded:
			end := time.Now().Add(returnTime(k.Hello.LostAfter))
			a.awaitStragglers(ctx, func() time.Duration { return time.Until(end) })
			return context.Cause(a.Context())
		case <-moved:
			a.mu.Lock()
			k, moved = a.k, a.moved
			a.mu.Unlock()
		case <-ctx.Done():
			return fmt.Errorf("cluster: shut down job %q: waiting for the other hosts: %w", a.cfg.Job, endOf(ctx))
		}
	}
}

// awaitStragglers lets hosts that were lost a moment ago come back to this one, to learn that the program has ended. missed is the time
// that they still have.
func (a *Agent) awaitStragglers(ctx context.Context, missed func() time.Duration) {
	d := missed()
	if d > 0 {
		a.lingers.Store(true)
		a.cfg.Notify(fmt.Sprintf("job %s: waiting up to %v for a host that was lost to come back and learn that the program has ended", a.cfg.Job, d.Round(100*time.Millisecond)))
	}
	for ; d > 0 && Sleep(ctx, min(d, returnCheck)); d = missed() {
	}
}

// Lingers reports whether the job has succeeded, and Shutdown only waits for hosts that were lost to learn that.
func (a *Agent) Lingers() bool { return a.lingers.Load() }

// returnCheck is the time between two looks whether the hosts that were lost have come back.
const returnCheck = 100 * time.Millisecond

// Close leaves the job immediately. If Shutdown has not reported the exit of this
// host's workers, the job fails on the other hosts. If this host coordinates, the
// job ends there. Close is idempotent and safe on nil. It returns when all
// goroutines have ended, except memberlist's, which end within a second.
func (a *Agent) Close() error {
	if a == nil {
		return nil
	}
	a.closing.Do(func() {
		a.owner.Close()
		a.release()
	})
	return nil
}

// awaitSuccessor waits for the next coordinator, if it must learn that the job was stopped here.
func (a *Agent) awaitSuccessor() {
	a.mu.Lock()
	pending, moved := a.choosing && (a.stops != nil || a.kills), a.moved
	a.mu.Unlock()
	if pending {
		select {
		case <-moved:
		case <-a.concluded:
		case <-a.Context().Done(): // no other follows
		}
	}
}

// release releases the resources of Start in reverse order.
func (a *Agent) release() {
	a.awaitSuccessor()
	a.mu.Lock()
	a.die()
	a.mu.Unlock()
	a.wg.Wait()
	a.pairs.close()
	if k := a.Client(); k != nil {
		k.Close()
	}
	if t := a.Now.Load(); t != nil {
		t.cancel(ErrClosed)
	}
	a.resign()
	if a.Gossip != nil {
		a.Gossip.close()
	}
	a.port.close()
	a.reserve.close()
}

// event handles messages after the plan, on the reader goroutine of the connection.
func (a *Agent) event(k *Client, m Message) {
	switch m.Kind {
	case kindKill:
		a.killing.Do(func() { close(a.killed) })
	case KindFault:
		var f Fault
		if err := m.Record(&f); err != nil {
			a.end(k, err)
			return
		}
		if t := a.Now.Load(); f.Again && t != nil {
			t.fail(f)
			return
		}
		a.end(k, f.Err())
	case kindOrder:
		var o Order
		if err := m.Record(&o); err != nil {
			a.end(k, err)
			return
		}
		a.order(k, o)
	case KindPropose:
		a.proposed(k, m)
	case kindLedger:
		a.keepLedger(k, m)
	case kindHandover:
		var h handover
		if m.Record(&h) == nil { // otherwise the client ends with the error
			a.mu.Lock()
			a.haveEnded(k.Hello.Agent, h.Ended...)
			a.mu.Unlock()
		}
	case KindRefuse: // the coordinator has lost this host
		var r Refusal
		if err := m.Record(&r); err != nil {
			a.end(k, err)
			return
		}
		k.Cancel(&MemberLostError{Rank: -1, Host: a.cfg.Host, PID: a.cfg.Sys.Getpid(), Since: time.Now(), Reason: r.Reason, ExitCode: -1})
		k.CloseConnection()
	case kindNews:
		var n news
		if err := m.Record(&n); err != nil {
			a.end(k, err)
			return
		}
		if err := a.news(m.Epoch, n); errors.As(err, new(*badNews)) {
			a.end(k, err)
			return
		} else if err != nil {
			a.refuseLeader(k, err)
		}
	case kindNote:
		var f Fault
		if m.Record(&f) == nil {
			if lost, ok := f.Err().(*MemberLostError); ok {
				a.Now.Load().noted.Store(lost)
			}
		}
	}
}

// portOf returns the port of host:port, or 0.
func portOf(addr string) int {
	_, p, err := net.SplitHostPort(addr)
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(p)
	return n
}

// An attempt is an agent's part in the job from one start of all processes to the next.
type attempt struct {
	Place  atomic.Pointer[placement]
	ctx    context.Context
	cancel context.CancelCauseFunc
	again  atomic.Bool // the processes are started again after the failure
	noted  atomic.Pointer[MemberLostError]
}

func (a *Agent) newAttempt(k *Client, epoch uint64, p plan) (*attempt, error) {
	t := &attempt{}
	at := &placement{Epoch: epoch, plan: p, Node: p.nodeOf(a.UUID)}
	if at.Node < 0 {
		return nil, fmt.Errorf("cluster: join job %q: the coordinator's plan does not include this host, %s", a.cfg.Job, a.cfg.Host)
	}
	t.Place.Store(at)
	t.ctx, t.cancel = context.WithCancelCause(context.Background())
	context.AfterFunc(k.Ctx, func() { a.coordinatorLost(k, t) })
	return t, nil
}

// news receives an epoch of workers that call Run.
func (a *Agent) news(epoch uint64, n news) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	at, err := a.begins(a.UUID, epoch, n, time.Since(a.begun))
	if at == nil || err != nil {
		return err
	}
	if t := a.Now.Load(); t != nil {
		t.Place.Store(at)
	} else {
		a.early = at
	}
	if n.Line != "" {
		a.cfg.Notify(fmt.Sprintf("job %s: %s", a.cfg.Job, n.Line))
	}
	return nil
}

// adopt begins an attempt.
func (a *Agent) adopt(t *attempt) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Now.Store(t)
	if a.early != nil {
		t.Place.Store(a.early)
	}
}

// order receives a command of the coordinator.
func (a *Agent) order(k *Client, o Order) {
	if o.Local < 0 || o.Local >= a.cfg.LocalSize || o.After < 0 {
		a.end(k, fmt.Errorf("cluster: the coordinator's order is for local rank %d of %d", o.Local, a.cfg.LocalSize))
		return
	}
	a.mu.Lock()
	a.ordered(o)
	a.mu.Unlock()
	select {
	case a.orders <- o:
	default:
		a.end(k, errors.New("cluster: the launcher does not obey the coordinator"))
	}
}

// Orders returns the coordinator's commands, which the launcher must obey in
// their order, and which come only if the workers call Run.
func (a *Agent) Orders() <-chan Order { return a.orders }

// CanDrain reports whether the job can go on without this host: it has several hosts, and its workers call
// Run. It asks the coordinator unless it knows of an epoch.
func (a *Agent) CanDrain() bool {
	if a.cfg.Nodes == 1 || a.Context().Err() != nil {
		return false
	}
	a.mu.Lock()
	k, begun := a.k, a.history != nil && !a.over
	a.mu.Unlock()
	if begun {
		return true
	}
	r, err := k.AskMissing()
	return err == nil && r.Elastic
}

// Drain asks the other hosts to go on without this one after the current step. If this host
// coordinates, another one does so afterwards. The launcher gets an Order with Stop when its workers have left. If too few hosts would
// remain, the job is stopped as by Stop.
func (a *Agent) Drain(reason string, code int) error {
	f := Fault{Reason: safe.Clip(reason, MaxText), Code: code}
	a.mu.Lock()
	a.drains = &f
	a.mu.Unlock()
	if err := a.Client().Send(Note(kindDrain, f)); err != nil {
		return fmt.Errorf("cluster: leave job %q: %w", a.cfg.Job, err)
	}
	return nil
}

// fail ends the attempt with a failure after which the job goes on.
func (t *attempt) fail(f Fault) {
	t.again.Store(true)
	t.cancel(f.Err())
}

// planned receives a plan after the first, on the reader goroutine.
func (a *Agent) planned(k *Client, epoch uint64, p plan, err error) {
	if err == nil {
		var t *attempt
		if t, err = a.newAttempt(k, epoch, p); err == nil {
			a.adopt(t)
			a.plans <- t // the coordinator sends one plan for each call of Next
			return
		}
	}
	a.end(k, err)
}

// Restarting reports whether all processes of the job are started again after the failure
// that ended Context. The launcher must then stop its workers and call Next.
func (a *Agent) Restarting() bool { return a.Now.Load().again.Load() }

// Next reports that all workers of this host have exited after a failure, and returns when
// the job's processes can start again. The agent then has new ranks, and Context returns a new context.
// Next fails with the cause if the job is stopped meanwhile, and with a *JoinTimeoutError if
// hosts are missing after Timing.Join.
func (a *Agent) Next(ctx context.Context) error {
	begun, k := time.Now(), a.Client()
	ctx, cancel := context.WithTimeout(ctx, a.cfg.Timing.Join)
	defer cancel()
	if err := k.Send(Message{Kind: kindReady, Epoch: a.Now.Load().Place.Load().Epoch}); err != nil {
		return fmt.Errorf("cluster: restart job %q: %w", a.cfg.Job, err)
	}
	select {
	case t := <-a.plans:
		if n := t.Place.Load().plan.News; n != "" {
			a.cfg.Notify(fmt.Sprintf("job %s: %s", a.cfg.Job, n))
		}
		return nil
	case <-k.Ctx.Done():
		return context.Cause(k.Ctx)
	case <-ctx.Done():
		return a.restartEnd(ctx, begun)
	}
}

// restartEnd returns the error of a Next whose context has ended.
func (a *Agent) restartEnd(ctx context.Context, begun time.Time) error {
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("cluster: restart job %q: %w", a.cfg.Job, context.Cause(ctx))
	}
	e := &JoinTimeoutError{Job: a.cfg.Job, Waited: time.Since(begun), Addr: a.Addr, Unit: unitHost}
	r, err := a.Client().AskMissing()
	r.Fill(e)
	e.Err = err
	return e
}

// Needed reports whether this host coordinates other hosts, which would lose the job's coordinator if its launcher ended
// now. A host that was asked to leave coordinates until an epoch without it begins, or until the limits of the coordinator end
// the job.
func (a *Agent) Needed() bool {
	a.mu.Lock()
	c := a.Coord
	a.mu.Unlock()
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.agents, func(p *peer) bool { return p.state == peerJoined && p.host.UUID != a.UUID })
}
