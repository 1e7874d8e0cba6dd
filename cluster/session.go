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

// A Session is the membership of this process in a world. Methods are safe for
// concurrent use.
type Session struct {
	owner   handle.Owner
	job     string
	source  string
	me      Member
	members []Member
	timeout time.Duration
	store   caller
	k       *client      // nil in a world of one process
	coord   *coordinator // nil unless this process runs the coordinator
	ctx     context.Context
	cancel  context.CancelCauseFunc
	closing sync.Once
}

// A caller runs store calls, either over the connection to the coordinator or, in
// a world of one process, directly in the engine.
type caller interface {
	call(ctx context.Context, c call) (call, error)
}

func newSession(cfg *JoinConfig, k *client, coord *coordinator, j *joining) *Session {
	s := &Session{job: cfg.Job, source: cfg.source, me: j.members[j.rank], members: j.members,
		timeout: cfg.Timing.Call, store: (*remote)(k), k: k, coord: coord, ctx: k.ctx, cancel: k.cancel}
	handle.Init(s, &s.owner, handle.About{Kind: "cluster.Session", On: handle.Name("job " + cfg.Job)})
	return s
}

// newSoloSession returns a world of one process, without sockets and goroutines.
func newSoloSession(cfg *JoinConfig) *Session {
	me := Member{LocalSize: 1, Host: cfg.Host, PID: os.Getpid(), Name: cfg.Name}
	s := &Session{job: cfg.Job, source: cfg.source, me: me, members: []Member{me}, timeout: cfg.Timing.Call}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.store = &solo{engine: newEngine(1), session: s.ctx}
	handle.Init(s, &s.owner, handle.About{Kind: "cluster.Session", On: handle.Name("job " + cfg.Job)})
	return s
}

// Rank returns the rank of this process in the world, 0 to Size-1.
func (s *Session) Rank() int { return s.me.Rank }

// Size returns the world size.
func (s *Session) Size() int { return len(s.members) }

// LocalRank returns the rank of this process on its host. Under `chorus run` it
// is also the ordinal of its device.
func (s *Session) LocalRank() int { return s.me.LocalRank }

// LocalSize returns the number of processes on this host.
func (s *Session) LocalSize() int { return s.me.LocalSize }

// Node returns the index of this host in the job.
func (s *Session) Node() int { return s.me.Node }

// Host returns the name of this host in the job.
func (s *Session) Host() string { return s.me.Host }

// Job returns the name of the job.
func (s *Session) Job() string { return s.job }

// Source describes the origin of the ranks in one line, such as "torchrun:
// RANK=3, WORLD_SIZE=16".
func (s *Session) Source() string { return s.source }

// Members returns all processes of the world in the order of ranks. The caller
// may change the slice.
func (s *Session) Members() []Member { return slices.Clone(s.members) }

// Context is cancelled when a process of the job is lost, with a *MemberLostError
// as its cause, or when the session is closed, with ErrClosed. It has no values
// and no deadline.
func (s *Session) Context() context.Context { return s.ctx }

// Shutdown waits until all processes of the world have called Shutdown or Close,
// and then closes the session. It returns nil if all have called it. If ctx or the
// default deadline ends first, it returns a *BarrierError with the missing ranks. After a
// loss it returns the *MemberLostError. It returns ErrEnded if the process with the
// coordinator has called Close before the others came. It closes the session in all
// cases. If the session was closed before, Shutdown returns nil.
func (s *Session) Shutdown(ctx context.Context) error {
	if s == nil || s.ctx.Err() != nil && errors.Is(context.Cause(s.ctx), ErrClosed) {
		return nil
	}
	ctx, cancel := s.deadline(ctx)
	defer cancel()
	r, err := s.store.call(ctx, call{op: opFinish})
	if errors.Is(err, ErrEnded) && s.Size() == 2 && s.coordinates(s.members[1-s.Rank()]) {
		err = nil // both have left
	}
	return errors.Join(s.barrierError("shutdown", r, err), s.Close())
}

// coordinates reports whether the process of a member runs the coordinator.
func (s *Session) coordinates(m Member) bool {
	return s.k.hello.PID == m.PID && s.k.hello.Host == m.Host
}

// Close leaves the job immediately. The other processes continue, but a barrier
// that needs this rank fails. If this process runs the coordinator (rank 0
// without a launcher), the store closes for all processes; they can read it for
// at most half a second more. Shutdown avoids both. Close is idempotent and safe
// on nil, and returns when all goroutines have ended. Its error is always nil.
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

// deadline adds the default deadline if ctx has none.
func (s *Session) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, s.timeout)
}

// remote implements caller with a client.
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
	return k.cancelCall(id, c.op, err)
}

// last reads a key even after the job has failed, while the connection is open.
func (r *remote) last(ctx context.Context, c call) (call, error) {
	k := (*client)(r)
	m, id, err := k.askUntil(ctx, k.open.Done(), kindCall, c.encode())
	if err != nil {
		k.drop(id)
		return call{}, err
	}
	return decodeCall(m.body)
}

// cancelCall cancels a call at the coordinator. For a barrier it waits briefly for
// the reply, which lists the missing ranks.
func (k *client) cancelCall(id uint64, op byte, cause error) (call, error) {
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
	if r.op == statusOK { // the barrier opened during the cancellation
		return r, nil
	}
	return r, cause
}

// solo is the store of a world of one process.
type solo struct {
	session context.Context
	mu      sync.Mutex
	engine  *engine
	lastID  uint64
}

func (s *solo) call(ctx context.Context, c call) (call, error) {
	if s.session.Err() != nil {
		return call{}, context.Cause(s.session)
	}
	ch := make(chan call, 2) // a cancelled barrier may reply twice
	s.mu.Lock()
	s.lastID++
	t := ticket{0, s.lastID}
	s.engine.do(t, c, func(r call) { ch <- r })
	s.mu.Unlock()
	select {
	case r := <-ch:
		return r, nil
	case <-s.session.Done():
		return call{}, context.Cause(s.session)
	case <-ctx.Done():
		s.mu.Lock()
		s.engine.cancel(t)
		s.mu.Unlock()
		return call{}, ctx.Err()
	}
}
