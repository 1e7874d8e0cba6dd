package cluster

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/job"
)

// RunConfig configures Run.
type RunConfig struct {
	// Join describes the job; nil means that Run reads the environment, like Attach.
	Join *JoinConfig
	// MinSize is the smallest world size that the program can work with. If fewer
	// processes are left, the others wait for new ones. 0 means 1.
	MinSize int
}

// Run joins this process to its job and calls fn once for each epoch that the process is a
// member of. The epoch ends when a process of the job is lost, or when processes join.
// Then the context of fn ends with a *MemberLostError or a *ChangeError as its cause, fn
// returns, and Run calls it again with the next world. The process keeps its memory and its
// devices. `chorus run --max-restarts` starts lost processes again.
//
// The next epoch begins when fn has returned in all surviving processes. A process whose fn
// takes longer than CHORUS_REVOKE_TIMEOUT is killed by its launcher. fn must therefore
// pass its context to all calls that wait, and close the groups of its epoch before it
// returns.
//
// Run returns nil when fn has returned nil in all processes of an epoch. If the epoch ends
// before that, Run calls fn again, also in the processes where it has returned nil. Run
// returns the error of fn if the epoch does not end within CHORUS_LOST_AFTER and about two seconds after it, because a collective
// may fail before the loss of another process is noticed. The process then should exit. It returns ErrDismissed if the host leaves the job, the cause if the job has failed,
// and otherwise the errors of Attach. It leaves the job in all cases.
//
// All processes of a job must call Run, and none of them Attach. Without `chorus run`, lost
// processes are not started again, and the loss of rank 0 ends the job.
func Run(ctx context.Context, cfg *RunConfig, fn func(ctx context.Context, w *World) error) error {
	if cfg == nil {
		cfg = &RunConfig{}
	}
	if fn == nil {
		return job.BadConfig("run: no function given")
	}
	c, err := cfg.joinConfig()
	if err != nil {
		return err
	}
	if c.Addr == "" {
		return runAlone(ctx, c, fn)
	}
	key, err := c.key()
	if err != nil {
		return err
	}
	start := time.Now()
	joinCtx, cancel := context.WithTimeout(ctx, c.Timing.Join)
	defer cancel()
	var coord *job.Server
	if c.Serve {
		if coord, err = c.serve(joinCtx, key); err != nil {
			return err
		}
	}
	r := newRunner(ctx, c, key)
	r.least = max(cfg.MinSize, 1)
	w, err := r.join(joinCtx, start, coord)
	if w != nil {
		err = r.epochs(w, fn)
	}
	if coord != nil {
		coord.Drain()
		coord.Close()
	}
	return err
}

func (cfg *RunConfig) joinConfig() (*JoinConfig, error) {
	j := cfg.Join
	if j == nil {
		var err error
		if j, err = detect(env.Lookup); err != nil {
			return nil, err
		}
	}
	return j.complete()
}

// runAlone runs fn in a world of one process.
func runAlone(ctx context.Context, cfg *JoinConfig, fn func(context.Context, *World) error) error {
	w := &World{epoch: job.FirstEpoch}
	w.membership, w.cancel = soloMembership(ctx, cfg)
	defer w.cancel(ErrClosed)
	return fn(w.ctx, w)
}

// A runner is one call of Run, or of Attach or Join, whose job has one epoch.
type runner struct {
	cfg    *JoinConfig
	parent context.Context
	key    job.Credential
	once   bool        // the job has one epoch
	least  int         // RunConfig.MinSize
	k      *job.Client // replaced after the loss of a coordinator
	worlds chan *World
	end    chan error // why no world follows

	now *World // used by the reader goroutine of k, and between two
	job.Leadership
}

func newRunner(parent context.Context, cfg *JoinConfig, key job.Credential) *runner {
	return &runner{cfg: cfg, parent: parent, key: key, worlds: make(chan *World, 1), end: make(chan error, 1)}
}

// join registers this process, and waits for its first world. Without a world and an error, the program has ended. The time to join
// begins at start, and ctx ends when it is over.
func (r *runner) join(ctx context.Context, start time.Time, coord *job.Server) (*World, error) {
	l, hello, err := r.cfg.connect(ctx, r.key, start)
	if errors.Is(err, job.ErrFinished) { // this process was started again meanwhile
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := r.register(l, hello); err != nil {
		return nil, err
	}
	w, err := r.firstWorld(ctx, start)
	if w == nil {
		coord.Decide(err)
		r.k.Leave(err)
	}
	return w, err
}

// firstWorld waits for the first world of this process.
func (r *runner) firstWorld(ctx context.Context, start time.Time) (*World, error) {
	w, err := r.next(ctx)
	switch {
	case w != nil || err == nil:
		return w, nil
	case errors.Is(err, ErrEnded):
		return nil, &RefusedError{Job: r.cfg.Job, Addr: r.cfg.Addr, Reason: "it left before the world was complete"}
	case ctx.Err() == nil || !errors.Is(err, context.Cause(ctx)) || r.k.Ctx.Err() != nil:
		return nil, err
	}
	e := &JoinTimeoutError{Job: r.cfg.Job, Waited: time.Since(start), Addr: r.cfg.Addr, Unit: job.UnitProcess, Peers: r.cfg.Peers}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		a, err := r.k.AskMissing()
		if err == nil {
			a.Fill(e)
		} else if e.Err = r.said(err); e.Err != err { // the coordinator reached the same time limit
			return nil, e.Err
		}
	}
	return nil, job.JoinEnd(ctx, e)
}

// next waits for the next world, or returns why none follows. Both are nil if all functions
// have returned nil.
func (r *runner) next(ctx context.Context) (*World, error) {
	for {
		w, err := r.nextFrom(ctx)
		if w != nil || err == nil || !r.hasLostCoordinator() {
			return w, err
		}
		if err := r.followAgent(); errors.Is(err, job.ErrFinished) {
			return nil, nil
		} else if err != nil {
			return nil, err
		}
	}
}

// nextFrom is next for the current coordinator.
func (r *runner) nextFrom(ctx context.Context) (*World, error) {
	select {
	case w := <-r.worlds:
		return w, nil
	case err := <-r.end:
		return nil, err
	case <-r.k.Ctx.Done():
		return nil, r.said(context.Cause(r.k.Ctx))
	case <-r.k.EndedC:
		return nil, r.said(ErrEnded)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// said returns why the coordinator has said that no world follows, or otherwise if it has said nothing.
func (r *runner) said(otherwise error) error {
	select {
	case err := <-r.end:
		return err
	default:
		return otherwise
	}
}

// epochs calls fn for each world.
func (r *runner) epochs(w *World, fn func(context.Context, *World) error) error {
	returned := false
	defer func() {
		if !returned { // fn panics: this process is lost, and has not left the job
			r.k.CloseConnection()
		}
		r.k.Close()
	}()
	for {
		returned = false
		err := fn(w.ctx, w)
		returned = true
		if err := r.answer(w, err); err != nil {
			return err
		}
		if w, err = r.next(r.parent); w == nil {
			return err
		}
	}
}

// answer tells the coordinator that fn has returned err in w. It returns an error if this
// process leaves the job.
func (r *runner) answer(w *World, err error) error {
	if err == nil && w.ctx.Err() == nil && !w.isLeaving() {
		return r.send(w, job.Message{Kind: job.KindFinished})
	}
	begun := time.Now()
	if !w.isLeaving() && !r.awaitEnd(w) {
		m := job.Note(job.KindFailed, job.Fault{Reason: "its function failed: " + strings.ReplaceAll(err.Error(), "\n", "; "), Ago: time.Since(begun)})
		return cmp.Or(err, r.send(w, m))
	}
	switch {
	case r.parent.Err() != nil:
		return cmp.Or(err, context.Cause(r.parent))
	case r.hasLostCoordinator():
		return nil
	case r.k.Ctx.Err() != nil:
		return r.said(context.Cause(r.k.Ctx))
	}
	return r.send(w, job.Message{Kind: job.KindRevoked})
}

func (r *runner) send(w *World, m job.Message) error {
	m.Epoch = w.epoch
	_ = r.k.Send(m) // if the connection is lost, next returns why
	return nil
}

// awaitEnd waits until the epoch of w has ended, and reports whether it has. The error of a
// collective may come before the coordinator has noticed the loss.
func (r *runner) awaitEnd(w *World) bool {
	t := time.NewTimer(r.k.Hello.LostAfter + job.ExtraSilence(r.k.Hello.LostAfter) + job.ExitGrace + time.Second)
	defer t.Stop()
	select {
	case <-w.ctx.Done():
		return true
	case <-t.C:
		return false
	}
}

// event runs on the reader goroutine of the client.
func (r *runner) event(k *job.Client, m job.Message) {
	switch m.Kind {
	case job.KindWorld:
		r.begin(m)
	case job.KindPropose:
		_ = k.Send(job.Message{Kind: job.KindPrepared, Epoch: m.Epoch, ID: m.ID}) // the reader handles a failure
	case job.KindRevoke:
		var f job.Fault
		if err := m.Record(&f); err != nil {
			r.over(err)
		} else if w := r.now; w != nil && w.epoch == m.Epoch {
			w.cancel(endOf(f, w))
		}
	case job.KindHold:
		if w := r.now; w != nil && w.epoch == m.Epoch {
			_ = k.Send(job.Message{Kind: job.KindHeld, Epoch: m.Epoch, ID: w.hold()}) // as above
		}
	case job.KindUntil:
		if w := r.now; w != nil && w.epoch == m.Epoch {
			w.runUntil(m.ID)
		}
	case job.KindFault:
		var f job.Fault
		err := m.Record(&f)
		if err == nil {
			err = f.Err()
		}
		r.over(err)
		k.Cancel(err)
	case job.KindRefuse:
		var f job.Refusal
		err := m.Record(&f)
		if err == nil {
			err = f.Err(r.cfg.Job, r.cfg.Addr)
		}
		if e, ok := errors.AsType[*JoinTimeoutError](err); ok {
			e.Peers = r.cfg.Peers
		}
		r.over(err)
	case job.KindFinish:
		r.over(nil)
	case job.KindDismiss:
		r.over(ErrDismissed)
	}
}

// begin starts an epoch.
func (r *runner) begin(m job.Message) {
	r.k.BeStrict(0)
	w, err := newWorld(r.parent, r, m)
	if err == nil && r.now != nil && w.epoch <= r.now.epoch {
		err = job.EpochsMustGrow(r.now.epoch, r.Followed, w.epoch, w.by)
	}
	if err == nil {
		err = r.Follow(w.by)
	}
	if err != nil {
		if r.now != nil {
			r.now.cancel(err)
		}
		r.over(err)
		return
	}
	w.addMissed(r.now)
	if r.now != nil {
		r.now.cancel(&ChangeError{Epoch: int(r.now.epoch), Reason: "the world changes"})
	}
	r.now = w
	r.worlds <- w // the coordinator begins one after this process has answered for the last
}

// over records why no world follows; nil means that all functions have returned nil.
func (r *runner) over(err error) {
	select {
	case r.end <- err:
	default:
	}
}

// endOf returns the cause of the end of w.
func endOf(f job.Fault, w *World) error {
	if f.Planned {
		return &ChangeError{Epoch: int(w.epoch), Reason: f.Reason}
	}
	return f.Err()
}
