package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/sockets"
)

// JoinConfig holds the arguments of Join, which Attach reads from the environment.
type JoinConfig struct {
	Job  string // name of the job; empty means "chorus"
	Size int    // world size; 0 means 1

	// Rank is the rank of this process. If it is nil in all processes, the
	// coordinator orders them by host, local rank and name. Set it in all
	// processes or in none.
	Rank *int
	// LocalRank and LocalSize are the rank of this process on its host and the
	// number of processes there. If they are nil and 0, the coordinator counts.
	LocalRank *int
	LocalSize int
	// Node is the index of this host and Host its name, in messages and for the numbers of ranks. Nil lets
	// the coordinator number the hosts; "" means CHORUS_HOST or the system's host name. The UUIDs of
	// virtual devices do not depend on Host: set CHORUS_HOST if processes of one machine are to have the
	// virtual devices of several hosts.
	Node *int
	Host string
	Name string // breaks ties between processes if the coordinator assigns ranks

	// Addr is the coordinator's host:port. Serve is true if this process runs
	// the coordinator: exactly one process, or none if a launcher runs it.
	Addr  string
	Serve bool
	// Listen is the address that the coordinator listens on; empty means Addr.
	Listen string

	// Secret is as in Config. Without a secret and without Insecure, Addr must be
	// a loopback address. The processes then connect through a Unix socket, named
	// after the job, the port and the user, that accepts only processes of this
	// user and of root.
	Secret   []byte
	Insecure bool

	Timing Timing
	Notify func(line string) // as in Config

	token *credential // from a launcher
	agent string      // UUID of the launcher; "" without one
	// agentAt is the launcher's address in a job on several hosts: it knows the coordinator.
	agentAt string
	pid     int // of this process; 0 means os.Getpid
	sys     *system
	epoch   uint64 // in which the launcher started this process; 0: unknown
	at      string // address to dial: Addr, or a Unix socket of this user
	source  string
	// keepOpen is how long the coordinator tells members that come after a failure; 0 means lastMessageTimeout.
	keepOpen time.Duration
}

// Attach joins this process to the job that started it. It reads the variables of,
// in this order, `chorus run`, torchrun, Open MPI, MPICH and Intel MPI, Slurm and a
// Kubernetes indexed Job; Session.Source returns the result. If several of them are set,
// because one launcher has started another one, the first that has started more than one process
// decides. MPI's launchers need CHORUS_SEEDS for several hosts. Without such variables the world
// is this process alone.
//
// Attach returns when all processes of the world have attached. It fails with
//   - a *JoinTimeoutError that lists the missing processes, after CHORUS_JOIN_TIMEOUT,
//   - a *DuplicateError if another process has the same rank (before the world is
//     complete, the join then fails in all processes),
//   - an *AuthError if the coordinator has another secret or job,
//   - a *MemberLostError if a process of the job ended during the join,
//   - a *ConfigError if variables contradict each other or some are missing.
//
// A process attaches once. Without a launcher it may attach again after Close,
// while the job has not ended.
func Attach(ctx context.Context) (*Session, error) {
	cfg, err := detect(env.Lookup)
	if err != nil {
		return nil, err
	}
	return Join(ctx, cfg)
}

// Join joins this process to the job described by cfg; see Attach for the result.
// A nil cfg is a world of one process.
func Join(ctx context.Context, cfg *JoinConfig) (*Session, error) {
	c, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if c.Addr == "" {
		return newSoloSession(c), nil
	}
	key, err := c.key()
	if err != nil {
		return nil, err
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, c.Timing.Join)
	defer cancel()
	var coord *server
	if c.Serve {
		if coord, err = c.serve(ctx, key); err != nil {
			return nil, err
		}
	}
	s, err := c.join(ctx, key, coord, start)
	if err != nil && coord != nil {
		coord.close()
	}
	return s, err
}

func (cfg *JoinConfig) complete() (*JoinConfig, error) {
	var c JoinConfig
	if cfg != nil {
		c = *cfg
	}
	c.Size = max(c.Size, 1)
	if c.Job == "" {
		c.Job = "chorus"
	}
	if c.Host == "" {
		c.Host = hostName()
	}
	if c.source == "" {
		c.source = "JoinConfig"
	}
	if c.Notify == nil {
		c.Notify = func(line string) { slog.Info("cluster: " + line) }
	}
	if c.Addr == "" && c.Size > 1 {
		return nil, badConfig("join job %q: a world of size %d needs the coordinator's address", c.Job, c.Size)
	}
	if c.Rank != nil && (*c.Rank < 0 || *c.Rank >= c.Size) {
		return nil, badConfig("join job %q: rank %d in a world of size %d", c.Job, *c.Rank, c.Size)
	}
	if err := cmp.Or(checkName("job", c.Job), checkName("host", c.Host), checkName("process", c.Name)); err != nil {
		return nil, err
	}
	var err error
	c.Timing, err = c.Timing.complete()
	return &c, err
}

// key returns the credential of this process. Without a secret it selects a Unix
// socket, which identifies the user of each process, or fails.
func (cfg *JoinConfig) key() (credential, error) {
	cfg.at = cfg.Addr
	switch {
	case cfg.token != nil:
		return *cfg.token, nil
	case len(cfg.Secret) > 0:
		if err := checkSecret(cfg.Secret); err != nil {
			return credential{}, badConfig("join job %q: %v", cfg.Job, err)
		}
	case cfg.Insecure:
		cfg.Notify(insecure)
	case !isLoopback(cfg.Addr) || cfg.Listen != "" && !isLoopback(cfg.Listen):
		return credential{}, badConfig("join job %q: no secret for the coordinator at %s: set %s in all processes, or let anyone join with %s=yes",
			cfg.Job, cfg.Addr, env.SecretFile.Name, env.Insecure.Name)
	default:
		cfg.at = userSocket(cfg.Job, cfg.Addr)
		cfg.Listen = cfg.at
	}
	k, err := deriveKeys(cfg.Secret, cfg.Job)
	return k.control, err
}

func isLoopback(addr string) bool {
	h, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := parseIP(h)
	return h == "localhost" || ip != nil && ip.IsLoopback()
}

// serve starts the coordinator in this process. It is not an error if a
// coordinator of the same job already has the port: registering there reports
// which process has the same rank.
func (cfg *JoinConfig) serve(ctx context.Context, key credential) (*server, error) {
	at := cfg.Listen
	if at == "" {
		at = cfg.sys.listenAddr(ctx, cfg.Addr)
	}
	ln, err := cfg.sys.listenAt(at)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, cfg.to(cfg.at, key).portTaken(ctx, err, "choose another MASTER_PORT or "+env.Seeds.Name)
	}
	if err != nil {
		return nil, err
	}
	if _, port, _ := net.SplitHostPort(cfg.at); port == "0" {
		cfg.Addr = ln.Addr().String()
		cfg.at = cfg.Addr
	}
	return newServer(ln, serverConfig{
		job: cfg.Job, key: key, sys: cfg.sys, notify: cfg.Notify, keepOpen: cfg.keepOpen,
		coordConfig: coordConfig{size: cfg.Size, joinBy: cfg.Timing.Join, revokeBy: cfg.Timing.Revoke, drainBy: cfg.Timing.Drain,
			self: welcome{Host: cfg.Host, PID: cfg.sys.getpid(), Rank: deref(cfg.Rank, -1),
				Heartbeat: cfg.Timing.Heartbeat, LostAfter: cfg.Timing.LostAfter}},
	}), nil
}

// portTaken returns nil if a coordinator of the job has the port to listen on, and otherwise the error. taken is the error
// of the attempt to listen, and cure says what the user can do.
func (to target) portTaken(ctx context.Context, taken error, cure string) error {
	met := to.sameJob(ctx)
	if met == nil {
		return nil
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		return joinEnd(ctx, &JoinTimeoutError{Job: to.job})
	}
	if _, other := errors.AsType[*sockets.UserError](met); other {
		return met
	}
	owner := "another program or another job has the port"
	if outOfTime(met) {
		owner = "the process that has the port does not answer"
	}
	return fmt.Errorf("%w: %s; %s", taken, owner, cure)
}

// sameJobTries limits the attempts to learn which job a coordinator has. A busy host may answer late.
const sameJobTries = 4

// sameJob returns nil if a coordinator of the job or a host that refers to it answers, and otherwise the error. If no process
// answers, outOfTime reports true for the error.
func (to target) sameJob(ctx context.Context) (err error) {
	for range sameJobTries {
		one, cancel := context.WithTimeout(ctx, dialAttempt)
		var l *link
		l, _, err = to.dial(one)
		late := one.Err() != nil
		cancel()
		_, refers := errors.AsType[*referral](err)
		_, final := errors.AsType[*AuthError](err)
		switch {
		case refers:
			return nil
		case err == nil:
			return l.close()
		case outOfTime(err):
		case final || !late:
			return err
		default: // the end of the attempt has closed the connection
			err = fmt.Errorf("%w: %w", os.ErrDeadlineExceeded, err)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return err
}

// join connects to the coordinator and waits until the world is complete. The time to join begins
// at start, and ctx ends when it is over.
func (cfg *JoinConfig) join(ctx context.Context, key credential, coord *server, start time.Time) (*Session, error) {
	l, hello, err := cfg.connect(ctx, key, start)
	if err != nil {
		return nil, err
	}
	j := &joining{job: cfg.Job, addr: cfg.Addr, done: make(chan error, 1)}
	k, err := cfg.register(l, hello, key, cfg.registration(), j.event)
	if err != nil {
		k.close()
		return nil, err
	}
	if err := j.wait(ctx, k, start); err != nil {
		coord.decide(err)
		k.leave(err)
		return nil, err
	}
	return newSession(cfg, k, coord, j), nil
}

// to returns the coordinator, or a launcher, at an address.
func (cfg *JoinConfig) to(addr string, key credential) target {
	return target{job: cfg.Job, addr: addr, key: key, sys: cfg.sys}
}

// register registers this process.
func (cfg *JoinConfig) register(l *link, hello welcome, key credential, reg registration, events func(*client, message)) (*client, error) {
	return cfg.to(cfg.at, key).register(l, hello, cfg.Addr, cfg.Host, registerWorker, reg, events)
}

// connect dials until the coordinator answers, the time limit passes, or a retry
// cannot succeed.
func (cfg *JoinConfig) connect(ctx context.Context, key credential, start time.Time) (*link, welcome, error) {
	delay, lastLine := firstRetry, start
	var why error // the last error other than a timeout, if there was one
	for refused := 0; ; {
		l, hello, err := cfg.to(cfg.at, key).dial(ctx)
		if err == nil && hello.Elects {
			l.close()
			err = &referral{}
		}
		if err == nil {
			return l, hello, nil
		}
		if cfg.agentAt != "" {
			if at, _ := cfg.whereabouts(ctx, key); at != "" {
				cfg.at, cfg.Addr = at, at
			}
		}
		if refused++; !isRefusal(err) {
			refused = 0
		}
		if refused == refusals {
			return nil, hello, err
		}
		if time.Since(lastLine) >= waitLine {
			lastLine = time.Now()
			cfg.Notify(fmt.Sprintf("job %s: waiting since %v for the coordinator: %v", cfg.Job, time.Since(start).Round(time.Second), err))
		}
		if why == nil || !outOfTime(err) {
			why = err
		}
		if !sleep(ctx, delay) {
			return nil, hello, joinEnd(ctx, &JoinTimeoutError{Job: cfg.Job, Waited: time.Since(start), Addr: cfg.Addr, Unit: unitProcess, Err: why})
		}
		delay = min(2*delay, lastRetry)
	}
}

// outOfTime reports whether an attempt failed only because of its deadline.
// Connections and dialers return different errors for that.
func outOfTime(err error) bool {
	return errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded)
}

// joining receives the coordinator's messages for a worker that has registered.
type joining struct {
	job, addr string
	done      chan error // nil when the world is complete

	by      leader
	epoch   uint64
	rank    int
	members []Member
}

// event runs on the reader goroutine of the client.
func (j *joining) event(k *client, m message) {
	switch m.kind {
	case kindWorld:
		k.beStrict(0)
		j.finish(j.completeWorld(m))
	case kindFault:
		var f fault
		err := m.record(&f)
		if err == nil {
			err = f.err()
		}
		k.cancel(err)
		j.finish(err)
	case kindRefuse:
		var r refusal
		err := m.record(&r)
		if err == nil {
			err = r.err(j.job, j.addr)
		}
		j.finish(err)
	}
}

func (j *joining) completeWorld(m message) error {
	var w world
	if err := m.record(&w); err != nil {
		return err
	}
	if m.id >= uint64(len(w.Members)) {
		return fmt.Errorf("cluster: join job %q: rank %d in a list of %d", j.job, m.id, len(w.Members))
	}
	j.by, j.epoch, j.rank, j.members = w.By, m.epoch, int(m.id), w.Members
	return nil
}

// finish wakes the waiting join once.
func (j *joining) finish(err error) {
	select {
	case j.done <- err:
	default:
	}
}

// wait returns when the world is complete or cannot become complete.
func (j *joining) wait(ctx context.Context, k *client, start time.Time) error {
	select {
	case err := <-j.done:
		return err
	case <-k.ctx.Done():
		return j.lost(k)
	case <-k.endedC:
		if err := j.said(); err != nil {
			return err
		}
		return &RefusedError{Job: j.job, Addr: j.addr, Reason: "it left before the world was complete"}
	case <-ctx.Done():
	}
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return joinEnd(ctx, &JoinTimeoutError{Job: j.job})
	}
	e := &JoinTimeoutError{Job: j.job, Waited: time.Since(start), Addr: j.addr, Unit: unitProcess}
	r, err := k.askMissing()
	if err != nil {
		if said := j.said(); said != nil { // the coordinator reached the same time limit
			return said
		}
		e.Err = err
		return e
	}
	e.fill(r)
	return e
}

// lost returns the coordinator's last error if there is one, otherwise the connection's.
func (j *joining) lost(k *client) error {
	return cmp.Or(j.said(), context.Cause(k.ctx))
}

// said returns the coordinator's last message if it was an error.
func (j *joining) said() error {
	select {
	case err := <-j.done:
		return err
	default:
		return nil
	}
}

// joinEnd returns the error of a join that ended with ctx: the timeout, or the
// caller's cancellation.
func joinEnd(ctx context.Context, timeout *JoinTimeoutError) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return timeout
	}
	return fmt.Errorf("cluster: join job %q: %w", timeout.Job, context.Cause(ctx))
}

func (cfg *JoinConfig) registration() registration {
	return registration{Size: cfg.Size, Epoch: cfg.epoch, Member: Member{
		Rank: deref(cfg.Rank, -1), LocalRank: deref(cfg.LocalRank, -1), LocalSize: cfg.LocalSize,
		Node: deref(cfg.Node, -1), Host: cfg.Host, PID: cmp.Or(cfg.pid, cfg.sys.getpid()), Name: cfg.Name,
	}}
}

func deref(p *int, unset int) int {
	if p == nil {
		return unset
	}
	return *p
}

// sleep waits for d and returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
