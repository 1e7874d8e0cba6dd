package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/job"
)

// ErrDelisted matches the errors of Enlistment.World after which the process is not on the list any more: the registry has ended, it
// has lost this process, or this process has called Close. Call Enlist again to return.
var ErrDelisted = errors.New("not on the list of the registry any more")

// EnlistConfig holds the arguments of Enlist.
type EnlistConfig struct {
	Job   string // as in RegistryConfig
	Addr  string // host:port of the registry
	Name  string // of this process, unique among the members
	Value []byte // for Registry.Members; at most 16 KiB
	Host  string // as in JoinConfig
	// Secret and Insecure are as in RegistryConfig.
	Secret   []byte
	Insecure bool
	// Timing.Join limits the time for Enlist, and for a world to become complete.
	Timing Timing
	// Notify is called with one line of text about every 5 s while the registry does not answer. It must not block. Nil
	// means slog's default logger.
	Notify func(line string)
}

// An Enlistment is the place of this process on the list of a registry. Methods are safe for concurrent use.
type Enlistment struct {
	owner   handle.Owner
	cfg     *JoinConfig
	k       *job.Client
	worlds  chan invitation
	answer  chan error      // of the registry
	ctx     context.Context // ends with the cause when the process is not on the list any more
	watched chan struct{}   // closed when nothing ends ctx any more
}

// An invitation is a place in a world.
type invitation struct {
	job.Invitation
	rank uint64
}

// Enlist puts this process on the list of a registry, until Close. It waits until the registry answers, at most for Timing.Join.
//
// A second process with the name of one on the list is refused with a *DuplicateError, which has the host of the first one. A
// process that has ended without Close keeps its name until the registry has noticed that, so Enlist tries again for LostAfter.
func Enlist(ctx context.Context, cfg *EnlistConfig) (*Enlistment, error) {
	if cfg == nil || cfg.Addr == "" || cfg.Name == "" {
		return nil, job.BadConfig("enlist: no address or no name: set EnlistConfig.Addr and Name")
	}
	if len(cfg.Value) > job.MaxEnlistedBytes {
		return nil, job.BadConfig("enlist as %s: the value has %d bytes: want at most %d", cfg.Name, len(cfg.Value), job.MaxEnlistedBytes)
	}
	c, err := (&JoinConfig{Job: cfg.Job, Addr: cfg.Addr, Name: cfg.Name, Host: cfg.Host, Secret: cfg.Secret, Insecure: cfg.Insecure, Timing: cfg.Timing, Notify: cfg.Notify}).complete()
	if err != nil {
		return nil, err
	}
	key, err := c.key()
	if err != nil {
		return nil, err
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, c.Timing.Join)
	defer cancel()
	for {
		m, err := enlist(ctx, c, key, cfg.Value, begun)
		taken, ok := errors.AsType[*DuplicateError](err)
		itself := ok && taken.First.PID == taken.Second.PID && taken.First.Host == taken.Second.Host
		if !ok || itself || time.Since(begun) > c.Timing.LostAfter*5/4 || !job.Sleep(ctx, nameRetry) {
			return m, err
		}
	}
}

// nameRetry is the time between two attempts to get a name that another process has.
const nameRetry = 50 * time.Millisecond

// enlist tries once to get on the list.
func enlist(ctx context.Context, c *JoinConfig, key job.Credential, value []byte, begun time.Time) (*Enlistment, error) {
	l, hello, err := c.connect(ctx, key, begun)
	if e, ok := errors.AsType[*JoinTimeoutError](err); ok {
		e.Unit = job.UnitMember
	}
	if err != nil {
		return nil, err
	}
	m := &Enlistment{cfg: c, worlds: make(chan invitation, maxWorlds), answer: make(chan error, 1)}
	reg := c.registration()
	reg.Enlists, reg.Value = true, value
	m.k, err = c.register(l, hello, key, reg, m.event)
	if err == nil {
		select {
		case err = <-m.answer:
		case <-m.k.Ctx.Done():
			err = context.Cause(m.k.Ctx)
		case <-m.k.EndedC:
			err = ErrEnded
		case <-ctx.Done():
			err = job.JoinEnd(ctx, &JoinTimeoutError{Job: c.Job, Addr: c.Addr, Unit: job.UnitMember, Waited: time.Since(begun), Err: context.Cause(ctx)})
		}
	}
	if err != nil {
		m.k.Close()
		return nil, err
	}
	var cancel context.CancelCauseFunc
	m.ctx, cancel = context.WithCancelCause(context.Background())
	m.watched = make(chan struct{})
	go func() {
		defer close(m.watched)
		select {
		case <-m.k.Ctx.Done():
			cancel(context.Cause(m.k.Ctx))
		case <-m.k.EndedC:
			cancel(ErrEnded)
		}
	}()
	handle.Init(m, &m.owner, handle.About{Kind: "cluster.Enlistment", On: handle.Name("job " + c.Job)})
	return m, nil
}

// event runs on the reader goroutine of the client.
func (m *Enlistment) event(k *job.Client, msg job.Message) {
	switch msg.Kind {
	case job.KindEnlisted:
		k.BeStrict(0)
		m.finish(nil)
	case job.KindInvite:
		in := invitation{rank: msg.ID}
		if err := msg.Record(&in.Invitation); err != nil {
			k.Cancel(err)
			return
		}
		select {
		case m.worlds <- in:
		default: // the oldest one has probably ended
			select {
			case <-m.worlds:
			default:
			}
			m.worlds <- in // only this goroutine adds any
		}
	case job.KindRefuse:
		var r job.Refusal
		err := msg.Record(&r)
		if err == nil {
			err = r.Err(m.cfg.Job, m.cfg.Addr)
		}
		m.finish(err)
	}
}

func (m *Enlistment) finish(err error) {
	select {
	case m.answer <- err:
	default:
	}
}

// World waits until the registry begins the next world with this process, and returns a session in it when all its members
// have called World. Each call belongs to one call of Registry.Begin, in the same order. The session has
// its own store and its own losses. It is independent of the enlistment, and of other worlds: close it when its group is closed.
//
// If the error matches ErrDelisted, the enlistment is over. Otherwise ctx has ended, or that world has failed, for example with a
// *MemberLostError because a member was lost before it came, or with a *JoinTimeoutError: call World again for the next one.
func (m *Enlistment) World(ctx context.Context) (*Session, error) {
	var in invitation
	select {
	case in = <-m.worlds:
	case <-m.ctx.Done():
		return nil, m.delisted()
	case <-ctx.Done():
		return nil, fmt.Errorf("cluster: wait for a world of registry %q: %w", m.cfg.Job, context.Cause(ctx))
	}
	if in.Size < 1 || in.Size > job.MaxEnlisted || in.rank >= uint64(in.Size) {
		return nil, fmt.Errorf("cluster: registry %q invites to rank %d of %d", m.cfg.Job, in.rank, in.Size)
	}
	rank, c := int(in.rank), *m.cfg
	c.Job, c.Size, c.Rank = in.Job, in.Size, &rank
	keys, err := job.DeriveKeys(c.Secret, c.Job)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, c.Timing.Join)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)() // nobody may be at the port any more
	s, err := c.join(ctx, keys.Control, nil, start)
	if err != nil && m.ctx.Err() != nil {
		return nil, m.delisted()
	}
	if unknown, ok := errors.AsType[*AuthError](err); ok {
		return nil, fmt.Errorf("cluster: world %s has ended before this process came: %w", c.Job, unknown)
	}
	return s, err
}

func (m *Enlistment) delisted() error {
	return fmt.Errorf("cluster: registry %q: member %s: %w: %w", m.cfg.Job, m.cfg.Name, ErrDelisted, context.Cause(m.ctx))
}

// Close takes this process off the list, without ending the sessions of World.
// It is idempotent and safe on nil, and its error is always nil.
func (m *Enlistment) Close() error {
	if m == nil || !m.owner.Close() {
		return nil
	}
	m.k.Close()
	<-m.watched
	return nil
}
