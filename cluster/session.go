package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/gochorus/chorus/internal/handle"
)

// A Session is the membership of this process in a world. It has all methods of the world's
// [Store]. Methods are safe for concurrent use.
type Session struct {
	membership
	owner   handle.Owner
	source  string
	k       *client // nil in a world of one process
	coord   *server // nil unless this process runs the coordinator
	cancel  context.CancelCauseFunc
	closing sync.Once
}

func newSession(cfg *JoinConfig, k *client, coord *server, j *joining) *Session {
	s := &Session{source: cfg.source, k: k, coord: coord, cancel: k.cancel, membership: membership{
		view: Store{calls: remote{k, j.epoch, k.ctx}, rank: j.rank, timeout: cfg.Timing.Call},
		job:  cfg.Job, me: j.members[j.rank], members: j.members, ctx: k.ctx, key: k.to.key, by: j.by, number: j.epoch}}
	handle.Init(s, &s.owner, handle.About{Kind: "cluster.Session", On: handle.Name("job " + cfg.Job)})
	return s
}

// newSoloSession returns a world of one process, without sockets and goroutines.
func newSoloSession(cfg *JoinConfig) *Session {
	s := &Session{source: cfg.source}
	s.membership, s.cancel = soloMembership(context.Background(), cfg)
	handle.Init(s, &s.owner, handle.About{Kind: "cluster.Session", On: handle.Name("job " + cfg.Job)})
	return s
}

// Source describes the origin of the ranks in one line, such as "torchrun:
// RANK=3, WORLD_SIZE=16".
func (s *Session) Source() string { return s.source }

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
	r, err := s.calls.call(ctx, call{op: opFinish})
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
// at most half a second more. Shutdown avoids both. If the coordinator does not
// answer, Close waits for it for at most four seconds. Close is idempotent and safe
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

// remote implements caller with a client, for one epoch.
type remote struct {
	k     *client
	epoch uint64
	ctx   context.Context // of the epoch
}

func (r remote) call(ctx context.Context, c call) (call, error) {
	m, id, err := r.k.ask(ctx, r.ctx.Done(), r.message(c))
	if err == nil {
		return decodeCall(m.body)
	}
	if ended := context.Cause(r.ctx); ended != nil || ctx.Err() == nil {
		r.k.drop(id)
		return call{}, cmp.Or(ended, err)
	}
	return r.k.cancelCall(id, c.op, err)
}

func (r remote) message(c call) message {
	return message{kind: kindCall, epoch: r.epoch, body: c.encode()}
}

// last reads a key even after the job has failed, while the connection is open.
func (r remote) last(ctx context.Context, c call) (call, error) {
	m, id, err := r.k.ask(ctx, r.k.open.Done(), r.message(c))
	if err != nil {
		r.k.drop(id)
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
