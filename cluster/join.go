package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/job"
)

// JoinConfig holds the arguments of Join, which Attach reads from the environment.
type JoinConfig struct {
	Job  string // name of the job; empty means "chorus"
	Size int    // world size, at most 1048576; 0 means 1

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

	// Peers are the addresses of all processes by rank, for processes that know each other and have no launcher,
	// such as the pods of a gang. Rank is then the index of this process; Size, Addr and Serve follow from the list:
	// the first peer coordinates, so its address is host:port. The ports of the others are not used, and
	// may be left out. All processes need the same list. A *JoinTimeoutError names the peers that did not come,
	// and those that came with another list or size; Timing.Join is the limit.
	Peers []string

	// Secret authenticates the members of the job to each other, with at least 16 bytes. Without a secret and without Insecure, Addr must be
	// a loopback address. The processes then connect through a Unix socket, named
	// after the job, the port and the user, that accepts only processes of this
	// user and of root.
	Secret   []byte
	Insecure bool

	Timing Timing
	// Notify is called with one line of text about every 5 s while members are missing. It must not block. Nil means
	// slog's default logger.
	Notify func(line string)

	token *job.Credential // from a launcher
	agent string          // UUID of the launcher; "" without one
	// agentAt is the launcher's address in a job on several hosts: it knows the coordinator.
	agentAt string
	pid     int // of this process; 0 means os.Getpid
	sys     *job.System
	epoch   uint64 // in which the launcher started this process; 0: unknown
	at      string // address to dial: Addr, or a Unix socket of this user
	source  string
	peersID string // of Peers
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
	var coord *job.Server
	if c.Serve {
		if coord, err = c.serve(ctx, key); err != nil {
			return nil, err
		}
	}
	s, err := c.join(ctx, key, coord, start)
	if err != nil && coord != nil {
		coord.Close()
	}
	return s, err
}

func (cfg *JoinConfig) complete() (*JoinConfig, error) {
	c := *cmp.Or(cfg, new(JoinConfig))
	if c.Job == "" {
		c.Job = "chorus"
	}
	if c.Peers != nil {
		if err := c.fromPeers(); err != nil {
			return nil, err
		}
	}
	if c.Size < 0 || c.Size > job.MaxSize {
		return nil, job.BadConfig("join job %q: Size is %d: want 1 to %d, or 0 for 1", c.Job, c.Size, job.MaxSize)
	}
	if c.LocalSize < 0 || c.LocalSize > job.MaxSize {
		return nil, job.BadConfig("join job %q: LocalSize is %d: want at most the size of the world, or 0 if it is not known", c.Job, c.LocalSize)
	}
	c.Size = max(c.Size, 1)
	if c.Host == "" {
		c.Host = job.HostName()
	}
	if c.source == "" {
		c.source = "JoinConfig"
	}
	if c.Notify == nil {
		c.Notify = func(line string) { slog.Info("cluster: " + line) }
	}
	if _, port, err := net.SplitHostPort(c.Addr); c.Addr != "" && (err != nil || port == "") {
		return nil, job.BadConfig("join job %q: the address is %q: want host:port", c.Job, c.Addr)
	}
	if c.Addr == "" && c.Size > 1 {
		return nil, job.BadConfig("join job %q: a world of size %d needs the coordinator's address", c.Job, c.Size)
	}
	if c.Rank != nil && (*c.Rank < 0 || *c.Rank >= c.Size) {
		return nil, job.BadConfig("join job %q: rank %d in a world of size %d", c.Job, *c.Rank, c.Size)
	}
	if err := cmp.Or(job.CheckName("job", c.Job), job.CheckName("host", c.Host), job.CheckName("process", c.Name)); err != nil {
		return nil, err
	}
	var err error
	c.Timing, err = job.CompleteTiming(c.Timing)
	return &c, err
}

// fromPeers sets what follows from the list of peers.
func (cfg *JoinConfig) fromPeers() error {
	bad := func(format string, args ...any) error {
		return job.BadConfig("join job %q: %s", cfg.Job, fmt.Sprintf(format, args...))
	}
	switch {
	case len(cfg.Peers) == 0:
		return bad("the list of peers is empty: want the addresses of all processes, this one's too")
	case len(cfg.Peers) > job.MaxSize:
		return bad("%d peers: want at most %d", len(cfg.Peers), job.MaxSize)
	case cfg.Addr != "" || cfg.Serve || cfg.Size != 0 && cfg.Size != len(cfg.Peers):
		return bad("Peers and Size %d, Addr %q or Serve %t contradict each other: leave the latter out", cfg.Size, cfg.Addr, cfg.Serve)
	case cfg.Rank == nil:
		return bad("%d peers and no Rank: want the index of this process in the list", len(cfg.Peers))
	case *cfg.Rank < 0 || *cfg.Rank >= len(cfg.Peers):
		return bad("Rank is %d: want the index of this process in a list of %d peers", *cfg.Rank, len(cfg.Peers))
	}
	if _, port, err := net.SplitHostPort(cfg.Peers[0]); err != nil || port == "" {
		return bad("peer 0 is %q: want host:port, because it coordinates", cfg.Peers[0])
	}
	seen := map[string]int{}
	for i, at := range cfg.Peers {
		if strings.TrimSpace(at) != at || at == "" {
			return bad("peer %d is %q: want an address", i, at)
		}
		if first, twice := seen[at]; twice {
			return bad("peers %d and %d are both %s: each process has one place in the list", first, i, at)
		}
		seen[at] = i
	}
	cfg.Size, cfg.Addr, cfg.Serve = len(cfg.Peers), cfg.Peers[0], *cfg.Rank == 0
	cfg.peersID = job.PeersID(cfg.Peers)
	return nil
}

// key returns the credential of this process. Without a secret it selects a Unix
// socket, which identifies the user of each process, or fails.
func (cfg *JoinConfig) key() (job.Credential, error) {
	cfg.at = cfg.Addr
	switch {
	case cfg.token != nil:
		return *cfg.token, nil
	case len(cfg.Secret) > 0:
		if err := job.CheckSecret(cfg.Secret); err != nil {
			return job.Credential{}, job.BadConfig("join job %q: %v", cfg.Job, err)
		}
	case cfg.Insecure:
		cfg.Notify(job.Insecure)
	case !isLoopback(cfg.Addr) || cfg.Listen != "" && !isLoopback(cfg.Listen):
		return job.Credential{}, job.BadConfig("join job %q: no secret for the coordinator at %s: set %s in all processes, or let anyone join with %s=yes",
			cfg.Job, cfg.Addr, env.SecretFile.Name, env.Insecure.Name)
	default:
		cfg.at = job.UserSocket(cfg.Job, cfg.Addr)
		cfg.Listen = cfg.at
	}
	k, err := job.DeriveKeys(cfg.Secret, cfg.Job)
	return k.Control, err
}

func isLoopback(addr string) bool {
	h, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := job.ParseIP(h)
	return h == "localhost" || ip != nil && ip.IsLoopback()
}

// serve starts the coordinator in this process. It is not an error if a
// coordinator of the same job already has the port: registering there reports
// which process has the same rank.
func (cfg *JoinConfig) serve(ctx context.Context, key job.Credential) (*job.Server, error) {
	at := cfg.Listen
	if at == "" {
		at = cfg.sys.ListenAddr(ctx, cfg.Addr)
	}
	ln, err := cfg.sys.ListenAt(at)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, cfg.to(cfg.at, key).PortTaken(ctx, err, "choose another MASTER_PORT or "+env.Seeds.Name)
	}
	if err != nil {
		return nil, err
	}
	if _, port, _ := net.SplitHostPort(cfg.at); port == "0" {
		cfg.Addr = ln.Addr().String()
		cfg.at = cfg.Addr
	}
	return job.NewServer(ln, job.ServerConfig{
		Job: cfg.Job, Key: key, Sys: cfg.sys, Notify: cfg.Notify, KeepOpen: cfg.keepOpen,
		CoordConfig: job.CoordConfig{Size: cfg.Size, Peers: cfg.peersID, JoinBy: cfg.Timing.Join, RevokeBy: cfg.Timing.Revoke, DrainBy: cfg.Timing.Drain,
			Self: job.Welcome{Host: cfg.Host, PID: cfg.sys.Getpid(), Rank: job.Deref(cfg.Rank, -1),
				Heartbeat: cfg.Timing.Heartbeat, LostAfter: cfg.Timing.LostAfter}},
	}), nil
}

// join joins a world of a job with one epoch. The time to join begins at start, and ctx ends when it is over.
func (cfg *JoinConfig) join(ctx context.Context, key job.Credential, coord *job.Server, start time.Time) (*Session, error) {
	r := newRunner(context.Background(), cfg, key)
	r.once = true
	w, err := r.join(ctx, start, coord)
	if w == nil {
		return nil, cmp.Or(err, ErrEnded)
	}
	return newSession(r, coord, w), nil
}

// to returns the coordinator, or a launcher, at an address.
func (cfg *JoinConfig) to(addr string, key job.Credential) job.Target {
	return job.Target{Job: cfg.Job, Addr: addr, Key: key, Sys: cfg.sys}
}

// register registers this process.
func (cfg *JoinConfig) register(l *job.Link, hello job.Welcome, key job.Credential, reg job.Registration, events func(*job.Client, job.Message)) (*job.Client, error) {
	to := cfg.to(cfg.at, key)
	if reg.Elastic && cfg.agentAt != "" {
		to.Follows = func(ctx context.Context, since time.Time) bool {
			at, follows, _ := cfg.whereabouts(ctx, key)
			return at == to.Addr && follows.Before(since)
		}
	}
	return to.Register(l, hello, cfg.Addr, cfg.Host, job.RegisterWorker, reg, events)
}

// connect dials until the coordinator answers, the time limit passes, or a retry
// cannot succeed. The error is job.ErrFinished if the launcher of this process knows that the program has ended.
func (cfg *JoinConfig) connect(ctx context.Context, key job.Credential, start time.Time) (*job.Link, job.Welcome, error) {
	delay, lastLine := job.FirstRetry, start
	var why error // the last error other than a timeout, if there was one
	for refused := 0; ; {
		l, hello, err := cfg.to(cfg.at, key).Dial(ctx)
		if err == nil && hello.Elects {
			l.Close()
			err = &job.Referral{}
		}
		if err == nil {
			return l, hello, nil
		}
		if cfg.agentAt != "" {
			at, _, over := cfg.whereabouts(ctx, key)
			if over == job.ErrFinished.Error() {
				return nil, hello, job.ErrFinished
			}
			if at != "" {
				cfg.at, cfg.Addr = at, at
			}
		}
		if refused++; !job.IsRefusal(err) {
			refused = 0
		}
		if refused == job.Refusals {
			return nil, hello, err
		}
		if time.Since(lastLine) >= job.WaitLine {
			lastLine = time.Now()
			cfg.Notify(fmt.Sprintf("job %s: waiting since %v for the coordinator: %v", cfg.Job, time.Since(start).Round(time.Second), err))
		}
		if why == nil || !job.OutOfTime(err) {
			why = err
		}
		if !job.Sleep(ctx, delay) {
			return nil, hello, job.JoinEnd(ctx, &JoinTimeoutError{Job: cfg.Job, Waited: time.Since(start), Addr: cfg.Addr, Unit: job.UnitProcess, Err: why})
		}
		delay = min(2*delay, job.LastRetry)
	}
}

func (cfg *JoinConfig) registration() job.Registration {
	return job.Registration{Size: cfg.Size, Epoch: cfg.epoch, Peers: cfg.peersID, Member: Member{
		Rank: job.Deref(cfg.Rank, -1), LocalRank: job.Deref(cfg.LocalRank, -1), LocalSize: cfg.LocalSize,
		Node: job.Deref(cfg.Node, -1), Host: cfg.Host, PID: cmp.Or(cfg.pid, cfg.sys.Getpid()), Name: cfg.Name,
	}}
}
