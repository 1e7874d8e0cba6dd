package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/handle"
)

// A Session is this process's place in the world. Its methods may be called
// from several goroutines at once.
type Session struct {
	owner   handle.Owner
	job     string
	source  string
	me      Member
	members []Member
	timeout time.Duration
	store   caller
	k       *client      // nil in a world of one
	coord   *coordinator // nil unless this process holds it
	ctx     context.Context
	cancel  context.CancelCauseFunc
	closing sync.Once
}

// A caller carries out store calls: the connection to the coordinator, or in a
// world of one the engine itself.
type caller interface {
	call(ctx context.Context, c call) (call, error)
}

func newSession(cfg *JoinConfig, k *client, coord *coordinator, j *joining) *Session {
	s := &Session{job: cfg.Job, source: cfg.source, me: j.members[j.rank], members: j.members,
		timeout: cfg.Timing.Call, store: (*remote)(k), k: k, coord: coord, ctx: k.ctx, cancel: k.cancel}
	handle.Init(s, &s.owner, handle.About{Kind: "cluster.Session", On: handle.Name("job " + cfg.Job)})
	return s
}

// newSoloSession is a world of one: no socket, no goroutine.
func newSoloSession(cfg *JoinConfig) *Session {
	me := Member{LocalSize: 1, Host: cfg.Host, PID: os.Getpid(), Name: cfg.Name}
	s := &Session{job: cfg.Job, source: cfg.source, me: me, members: []Member{me},
		timeout: cfg.Timing.Call, store: &solo{engine: newEngine(1)}}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	handle.Init(s, &s.owner, handle.About{Kind: "cluster.Session", On: handle.Name("job " + cfg.Job)})
	return s
}

// Rank returns this process's number in the world, 0 to Size-1.
func (s *Session) Rank() int { return s.me.Rank }

// Size returns how many processes the world has.
func (s *Session) Size() int { return len(s.members) }

// LocalRank returns this process's number on its host. `chorus run` gives each
// the device of that ordinal.
func (s *Session) LocalRank() int { return s.me.LocalRank }

// LocalSize returns how many processes of the world this host has.
func (s *Session) LocalSize() int { return s.me.LocalSize }

// Node returns the number of this host in the job.
func (s *Session) Node() int { return s.me.Node }

// Host returns this host's name in the job.
func (s *Session) Host() string { return s.me.Host }

// Job returns the job's name.
func (s *Session) Job() string { return s.job }

// Source says in one line where the ranks came from, as in "torchrun: RANK=3,
// WORLD_SIZE=16".
func (s *Session) Source() string { return s.source }

// Members returns all processes of the world in the order of ranks. The caller
// may change the slice.
func (s *Session) Members() []Member { return slices.Clone(s.members) }

// Context ends when a process of the job is lost, with a *MemberLostError as
// its cause, or when the session is closed, with ErrClosed. It is a signal: it
// carries no values and no deadline.
func (s *Session) Context() context.Context { return s.ctx }

// Shutdown leaves together: it waits until all processes of the world have
// called Shutdown or Close, and then closes the session. It returns nil when
// they all have, and otherwise why not: a *BarrierError with the missing ranks
// when ctx, or the default deadline, ended first, or the *MemberLostError. The
// session is closed in any case.
func (s *Session) Shutdown(ctx context.Context) error {
	if s == nil || s.ctx.Err() != nil && errors.Is(context.Cause(s.ctx), ErrClosed) {
		return nil
	}
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	r, err := s.store.call(ctx, call{op: opFinish})
	if errors.Is(err, ErrEnded) {
		err = nil // the coordinator closed: it was the last, or wanted no shutdown
	}
	return errors.Join(s.barrierError("shutdown", r, err), s.Close())
}

// Close leaves the job now. The others are not disturbed, but a barrier that
// still expects this rank fails, and where this process holds the coordinator
// (without a launcher, rank 0) the store ends for all, after half a second at
// most in which the others may still read it: Shutdown avoids both.
// Close is idempotent and safe on nil, and returns when no goroutine is left.
// Its error is always nil.
func (s *Session) Close() error {
	if s == nil {
		return nil
	}
	s.closing.Do(func() {
		s.owner.Close()
		if s.k != nil {
			s.k.close()
		}
		if s.coord != nil {
			s.coord.drain()
			s.coord.close()
		}
		s.cancel(ErrClosed)
	})
	return nil
}

// deadline gives ctx the default deadline if it has none.
func (s *Session) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, s.timeout)
}

// remote is a client as a caller.
type remote client

func (r *remote) call(ctx context.Context, c call) (call, error) {
	k := (*client)(r)
	m, id, err := k.ask(ctx, kindCall, c.encode())
	if err == nil {
		return decodeCall(m.body)
	}
	if ctx.Err() == nil || k.ctx.Err() != nil {
		k.drop(id)
		return call{}, err
	}
	return k.giveUp(id, c.op, err)
}

// last reads a key also when the job has failed, while the connection lasts.
func (r *remote) last(ctx context.Context, c call) (call, error) {
	k := (*client)(r)
	m, id, err := k.askUntil(ctx, k.down, kindCall, c.encode())
	if err != nil {
		k.drop(id)
		return call{}, err
	}
	return decodeCall(m.body)
}

// giveUp cancels a call at the coordinator. The reply of a barrier, which says
// who was missing, is worth a short wait.
func (k *client) giveUp(id uint64, op byte, cause error) (call, error) {
	k.mu.Lock()
	ch := k.replies[id]
	k.mu.Unlock()
	defer k.drop(id)
	if err := k.send(message{kind: kindCancel, epoch: firstEpoch, id: id}); err != nil || ch == nil {
		return call{}, cause
	}
	if op != opBarrier && op != opFinish {
		return call{}, cause
	}
	ctx, cancel := context.WithTimeout(context.Background(), k.hello.LostAfter)
	defer cancel()
	m, err := k.await(ctx, k.ctx.Done(), ch)
	if err != nil {
		return call{}, cause
	}
	r, err := decodeCall(m.body)
	if err != nil {
		return call{}, fmt.Errorf("%w; %w", cause, err)
	}
	if r.op == statusOK { // it opened while this rank gave up
		return r, nil
	}
	return r, cause
}

// solo is the store of a world of one.
type solo struct {
	mu     sync.Mutex
	engine *engine
	lastID uint64
}

func (s *solo) call(ctx context.Context, c call) (call, error) {
	ch := make(chan call, 2) // a barrier that is cancelled may reply twice
	s.mu.Lock()
	s.lastID++
	t := ticket{0, s.lastID}
	s.engine.do(t, c, func(r call) { ch <- r })
	s.mu.Unlock()
	select {
	case r := <-ch:
		return r, nil
	case <-ctx.Done():
		s.mu.Lock()
		s.engine.cancel(t)
		s.mu.Unlock()
		return call{}, ctx.Err()
	}
}
