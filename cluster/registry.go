package cluster

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/job"
)

// maxWorlds limits the worlds of a registry at a time.
const maxWorlds = 256

// RegistryConfig holds the arguments of Serve.
type RegistryConfig struct {
	Job string // name of the registry, the same in all members; empty means "chorus"
	// Addr is the host:port of the registry and of its worlds. With port 0, the system chooses a free one;
	// see Registry.Addr. Listen is the address that it listens on; empty means Addr.
	Addr, Listen string
	// Secret and Insecure are as in JoinConfig. Without both, Addr must be a loopback address.
	Secret   []byte
	Insecure bool
	// Timing.Join limits the time for all members of a world to come. Heartbeat and LostAfter
	// are those of the registry and of all its worlds.
	Timing Timing
	// Notify is called with a line of text for each member that is lost or refused. It must not
	// block. Nil means slog's default logger.
	Notify func(line string)
}

// A Registry is a list of processes that come, leave and return, and begins worlds of some of them. The process
// that serves it needs no GPU. It is no member unless it calls Enlist, too. A registry has at most 4096 members and 256 worlds at a
// time. A world counts until its members have closed or shut down their sessions, or until all of them have left the list before it was complete. If it has failed
// before that, it counts for LostAfter more, so that members that come late learn why. Methods are safe for concurrent use.
type Registry struct {
	owner  handle.Owner
	cfg    *JoinConfig // of its members and worlds
	run    string      // tells its worlds from those of another registry with the same job
	hub    *job.Hub
	list   *job.Server
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup // ends worlds

	mu     sync.Mutex
	number int // of the last world
	worlds map[int]*begun
}

// A begun world is one with a coordinator.
type begun struct {
	names     []string
	coord     *job.Server
	before    int             // departures from the list before Begin, which concern earlier members of the same names
	gone      map[string]bool // members that are not on the list any more
	abandoned chan struct{}   // closed when all are gone
}

// A Listed process is a member of a registry.
type Listed struct {
	Name  string
	Host  string
	PID   int
	Value []byte // of EnlistConfig
}

// Serve starts a registry in this process, whose one port serves the list and
// all worlds. It returns when members can come. ctx is used only until then;
// Close ends the registry.
func Serve(ctx context.Context, cfg *RegistryConfig) (*Registry, error) {
	if cfg == nil || cfg.Addr == "" {
		return nil, job.BadConfig("serve a registry: no address: set RegistryConfig.Addr to host:port")
	}
	run := hex.EncodeToString(job.RandomBytes(4))
	c, err := (&JoinConfig{Job: cfg.Job, Addr: cfg.Addr, Listen: cfg.Listen, Secret: cfg.Secret, Insecure: cfg.Insecure, Timing: cfg.Timing, Notify: cfg.Notify}).complete()
	if err != nil {
		return nil, err
	}
	if err := job.CheckName("job", worldJob(c.Job, run, 1<<62)); err != nil {
		return nil, err
	}
	key, err := c.key()
	if err != nil {
		return nil, err
	}
	ln, err := c.listen(ctx)
	if errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("%w: another registry %q, or another program, has it: choose another port, or port 0", err, c.Job)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: serve registry %q: %w", c.Job, err)
	}
	r := &Registry{cfg: c, run: run, hub: job.NewHub(ln, c.Notify), worlds: map[int]*begun{}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	r.list = job.NewServer(r.hub.Listen(c.Job), job.ServerConfig{Job: c.Job, Key: key, Sys: c.sys, Notify: c.Notify, Delisted: r.delisted,
		CoordConfig: job.CoordConfig{Registry: true, Self: r.self()}})
	handle.Init(r, &r.owner, handle.About{Kind: "cluster.Registry", On: handle.Name("job " + c.Job)})
	return r, nil
}

// listen opens the coordinator's port. If Addr has port 0, the system chooses a
// free one, whose number replaces it in Addr.
func (cfg *JoinConfig) listen(ctx context.Context) (net.Listener, error) {
	host, port, _ := net.SplitHostPort(cfg.Addr)
	if port == "0" && cfg.at != cfg.Addr { // a Unix socket has no port, but the name of another one has another number
		free, err := cfg.sys.ListenAt(cfg.Addr)
		if err != nil {
			return nil, err
		}
		defer free.Close()
		cfg.Addr = free.Addr().String()
		cfg.at = job.UserSocket(cfg.Job, cfg.Addr)
		return cfg.sys.ListenAt(cfg.at)
	}
	at := cfg.Listen
	if at == "" {
		at = cfg.sys.ListenAddr(ctx, cfg.Addr)
	}
	ln, err := cfg.sys.ListenAt(at)
	if err == nil && port == "0" {
		_, port, _ = net.SplitHostPort(ln.Addr().String())
		cfg.Addr = net.JoinHostPort(host, port) // Listen may be 0.0.0.0
		cfg.at = cfg.Addr
	}
	return ln, err
}

// self describes this process to those that connect.
func (r *Registry) self() job.Welcome {
	return job.Welcome{Host: r.cfg.Host, PID: r.cfg.sys.Getpid(), Rank: -1, Registry: true, Heartbeat: r.cfg.Timing.Heartbeat, LostAfter: r.cfg.Timing.LostAfter}
}

// worldJob returns the name of the job of a world.
func worldJob(registry, run string, number int) string {
	return fmt.Sprintf("%s/%s/%d", registry, run, number)
}

// Addr returns the host:port for EnlistConfig.Addr.
func (r *Registry) Addr() string { return r.cfg.Addr }

// Members returns the list in the order in which the members came. The channel
// is closed as soon as the list changes, and the caller owns the list.
func (r *Registry) Members() (list []Listed, changed <-chan struct{}) {
	all, changed := r.list.List()
	for _, m := range all {
		list = append(list, Listed{m.Name, m.Host, m.PID, slices.Clone(m.Value)})
	}
	return list, changed
}

// Await waits until all names are on the list.
func (r *Registry) Await(ctx context.Context, names ...string) error {
	for {
		list, changed := r.list.List()
		missing := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
			return slices.ContainsFunc(list, func(m job.Registration) bool { return m.Name == name })
		})
		if len(missing) == 0 {
			return nil
		}
		var err error
		select {
		case <-changed:
			continue
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-r.ctx.Done():
			err = ErrClosed
		}
		return fmt.Errorf("cluster: registry %q: %d of %d awaited members have not come, such as %s: %w", r.cfg.Job, len(missing), len(names), missing[0], err)
	}
}

// Left returns the last 64 processes that have left the list or were lost, with the reason. Planned is true for those that
// have called Close.
func (r *Registry) Left() []Departure { return slices.Clone(r.list.Departed()) }

// Begin begins a world of the named members, whose ranks are the indices of their names, and invites them: Enlistment.World
// returns it in each of them. A member may be in several worlds at a time, and other worlds go on. Begin does not wait
// for the members. It returns an error and invites none if a name is not on the list, and says whether that member
// has left or was lost.
//
// If an invited member leaves or is lost before all have come, or if they have not come within Timing.Join, World fails in all
// members that came. Later, the loss of a member ends the contexts of the worlds that it is in, and of no others.
func (r *Registry) Begin(names ...string) error {
	fails := func(err error) error {
		return fmt.Errorf("cluster: registry %q: begin a world of %d members: %w", r.cfg.Job, len(names), err)
	}
	if len(names) == 0 {
		return fails(job.BadConfig("no names given"))
	}
	r.mu.Lock()
	if r.ctx.Err() != nil {
		r.mu.Unlock()
		return fails(ErrClosed)
	}
	if len(r.worlds) >= maxWorlds && r.countWorlds() >= maxWorlds {
		r.mu.Unlock()
		return fails(fmt.Errorf("%d worlds have not ended: a world ends when its members have closed or shut down their sessions or left the registry, and one that has failed before all had come ends after %v more",
			maxWorlds, r.cfg.Timing.LostAfter))
	}
	r.number++
	number, name := r.number, worldJob(r.cfg.Job, r.run, r.number)
	keys, err := job.DeriveKeys(r.cfg.Secret, name)
	if err != nil {
		r.mu.Unlock()
		return fails(err)
	}
	over := make(chan struct{})
	w := &begun{names: slices.Clone(names), gone: map[string]bool{}, abandoned: make(chan struct{}), coord: job.NewServer(r.hub.Listen(name), job.ServerConfig{Job: name, Key: keys.Control, Sys: r.cfg.sys, Notify: r.cfg.Notify, Over: over,
		CoordConfig: job.CoordConfig{Size: len(names), JoinBy: r.cfg.Timing.Join, Self: r.self()}})}
	w.before = r.list.Departures()
	r.worlds[number] = w // before its members are looked up, so that it learns of their end from then on
	uninvited := make(chan struct{})
	r.wg.Go(func() { r.end(number, w, over, uninvited) })
	r.mu.Unlock()
	if err := r.list.Invite(names, job.Invitation{Job: name, Size: len(names)}); err != nil {
		close(uninvited)
		return fails(err)
	}
	return nil
}

// countWorlds returns the number of worlds whose members have come or may come.
// It consults the list, because delisted may not have run yet for members that
// have left it. The caller holds mu.
func (r *Registry) countWorlds() (n int) {
	list, _ := r.list.List()
	listed := map[string]bool{}
	for _, m := range list {
		listed[m.Name] = true
	}
	for _, w := range r.worlds {
		if w.coord.IsComplete() || slices.ContainsFunc(w.names, func(name string) bool { return listed[name] && !w.gone[name] }) {
			n++
		}
	}
	return n
}

// end ends the coordinator of a world when nobody needs it any more.
func (r *Registry) end(number int, w *begun, over, uninvited <-chan struct{}) {
	begun, t := time.Now(), time.NewTimer(r.cfg.Timing.Join)
	defer t.Stop()
	select {
	case <-over:
	case <-uninvited:
	case <-r.ctx.Done():
	case <-t.C:
		w.coord.TimeUp(time.Since(begun))
		select {
		case <-over:
		case <-r.ctx.Done():
		}
	}
	if !w.coord.IsComplete() { // members that come late learn why the world has failed
		select {
		case <-w.abandoned: // its members only learn that they are not on the list any more
		case <-time.After(r.cfg.Timing.LostAfter):
		case <-r.ctx.Done():
		}
	}
	w.coord.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.worlds, number)
}

// delisted tells the worlds of a member about its end, which has a number. It may run late, when another member has the name.
func (r *Registry) delisted(d Departure, departure int) {
	r.mu.Lock()
	worlds := make(map[*job.Server]int)
	for number, w := range r.worlds {
		rank := slices.Index(w.names, d.Name)
		if rank < 0 || departure <= w.before {
			continue
		}
		worlds[w.coord] = rank
		w.gone[d.Name] = true
		if len(w.gone) == len(w.names) && !w.coord.IsComplete() { // nobody can come any more, so its place is free now
			close(w.abandoned)
			delete(r.worlds, number)
		}
	}
	r.mu.Unlock()
	reason := d.Reason
	if d.Planned {
		reason = "left the registry before the world was complete"
	}
	for coord, rank := range worlds {
		coord.Absent(job.Fault{Rank: rank, Host: d.Host, PID: d.PID, Reason: reason, Code: -1}, d.Planned)
	}
}

// Close ends the registry and all its worlds: calls of World return errors that
// match ErrDelisted, and calls that wait in a session return ErrEnded. Close
// returns when all goroutines have ended, with an empty list. It is idempotent
// and safe on nil, and its error is always nil.
func (r *Registry) Close() error {
	if r == nil || !r.owner.Close() {
		return nil
	}
	r.mu.Lock() // Begin has added its world, or sees the end
	r.cancel()
	r.mu.Unlock()
	r.hub.Close()
	r.wg.Wait()
	r.list.Close()
	return nil
}
