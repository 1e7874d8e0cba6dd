package cluster

import (
	"context"
	"errors"
	"os"
	"slices"
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

func newSession(r *runner, coord *job.Server, w *World) *Session {
	s := &Session{source: r.cfg.source, k: r.k, coord: coord, cancel: w.cancel, membership: w.membership}
	handle.Init(s, &s.owner, handle.About{Kind: "cluster.Session", On: handle.Name("job " + r.cfg.Job)})
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

// Shutdown waits until all processes of the world have called Shutdown or
// Close, and then closes the session. It returns nil if all have called it. If
// ctx or the default deadline ends first, it returns a *BarrierError with the
// missing ranks. After a loss it returns the *MemberLostError. It returns
// ErrEnded if the process with the coordinator has called Close before the
// others came. It closes the session in all cases, and returns nil if the
// session was closed before.
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

// A membership is the place of this process in a world, with the world's store.
type membership struct {
	view
	job     string
	me      Member
	members []Member
	ctx     context.Context
	key     job.Credential
	by      job.Leader // the coordinator that began it
	number  uint64     // of the epoch
}

// soloMembership returns a world of one process, which ends with parent.
func soloMembership(parent context.Context, cfg *JoinConfig) (membership, context.CancelCauseFunc) {
	me := Member{LocalSize: 1, Host: cfg.Host, PID: os.Getpid(), Name: cfg.Name}
	m := membership{job: cfg.Job, me: me, members: []Member{me}, key: job.Credential{Key: job.RandomBytes(job.KeyBytes), Worker: true}}
	ctx, cancel := context.WithCancelCause(parent)
	m.ctx, m.view = ctx, Store{calls: job.NewSolo(ctx), timeout: cfg.Timing.Call}
	return m, cancel
}

// Rank returns the rank of this process in the world, 0 to Size-1.
func (s *membership) Rank() int { return s.me.Rank }

// Size returns the world size.
func (s *membership) Size() int { return len(s.members) }

// LocalRank returns the rank of this process on its host. Under `chorus run` it
// is also the ordinal of its device.
func (s *membership) LocalRank() int { return s.me.LocalRank }

// LocalSize returns the number of processes on this host.
func (s *membership) LocalSize() int { return s.me.LocalSize }

// Node returns the index of this host in the job.
func (s *membership) Node() int { return s.me.Node }

// Host returns the name of this host in the job.
func (s *membership) Host() string { return s.me.Host }

// Job returns the name of the job.
func (s *membership) Job() string { return s.job }

// Fence returns a token for data outside of the job, such as files. Each start
// of the job has another run, within which a later epoch has a greater number.
// Processes that were cut off may still be in an earlier epoch than the job:
// refuse what they write if a later epoch has written. The term counts the
// coordinators of the job. In a world of one process, run is "".
func (s *membership) Fence() (run string, term, epoch uint64) {
	return s.by.Run, s.by.Term, s.number
}

// Key returns 32 bytes that all processes of the job derive from its secret for one purpose, for
// example for the encryption of their data. It is the same in all epochs of a run of the job, and another one in the
// next run: data that must outlive the run needs a key of its own. The keys of two purposes tell nothing about each other. If
// the job has no secret, Key returns a *ConfigError.
func (s *membership) Key(purpose string) ([]byte, error) {
	return s.key.Derive(s.job, s.by.Run, purpose)
}

// Members returns all processes of the world, by rank, in a slice that the
// caller may change.
func (s *membership) Members() []Member { return slices.Clone(s.members) }

// Context is cancelled when a process of the job is lost, with a
// *MemberLostError as its cause, or when the session is closed, with ErrClosed.
// The context has neither values nor a deadline.
func (s *membership) Context() context.Context { return s.ctx }

// deadline adds the default deadline if ctx has none.
func (s *Store) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, s.timeout)
}
