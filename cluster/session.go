package cluster

import (
	"context"
	"errors"
	"sync"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/job"
)

// A Session is the membership of this process in a world. It has all methods of the world's
// [Store]. Methods are safe for concurrent use.
type Session struct {
	membership
	owner   handle.Owner
	source  string
	k       *job.Client // nil in a world of one process
	coord   *job.Server // nil unless this process runs the coordinator
	cancel  context.CancelCauseFunc
	closing sync.Once
}

func newSession(cfg *JoinConfig, k *job.Client, coord *job.Server, j *joining) *Session {
	s := &Session{source: cfg.source, k: k, coord: coord, cancel: k.Cancel, membership: membership{
		view: Store{calls: job.NewRemote(k.Ctx, k, j.epoch), rank: j.rank, timeout: cfg.Timing.Call},
		job:  cfg.Job, me: j.members[j.rank], members: j.members, ctx: k.Ctx, key: k.To.Key, by: j.by, number: j.epoch}}
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
	r, err := s.calls.Call(ctx, job.Call{Op: job.OpFinish})
	if errors.Is(err, ErrEnded) && s.Size() == 2 && s.coordinates(s.members[1-s.Rank()]) {
		err = nil // both have left
	}
	return errors.Join(s.barrierError("shutdown", r, err), s.Close())
}

// coordinates reports whether the process of a member runs the coordinator.
func (s *Session) coordinates(m Member) bool {
	return s.k.Hello.PID == m.PID && s.k.Hello.Host == m.Host
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
			s.k.Close()
		}
		if s.coord != nil {
			s.coord.Drain()
			s.coord.Close()
		}
		s.cancel(ErrClosed)
	})
	return nil
}
