package comm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Group is a set of ranks that call collectives together. One or more of them
// are local: in this process, each with a device and a stream.
type Group struct {
	owner   handle.Owner
	size    int
	cfg     *Config
	members []member // the local ranks, by rank
	splits  int      // how often it was split
	broken  atomic.Pointer[brokenError]
	closing atomic.Pointer[closing] // how this process ends it
	issuing sync.Mutex              // held while an operation is enqueued
	failing sync.Mutex              // held while the cause of a failure is looked for
	lost    context.Context         // the Rendezvous's, which ends when a rank is lost; nil in one process
	words   *words                  // what the other processes say; nil in one process
	unwatch func() bool             // stops watching lost

	farewell sync.Once // the other processes are told of the end
}

// member is one local rank.
type member struct {
	comm   *nccl.Communicator
	stream *stream.Stream
	ways   *ways // nil where NCCL does it all
}

// newGroup makes a group of communicators that are ready.
func newGroup(comms []*nccl.Communicator, cfg *Config) (*Group, error) {
	g := &Group{size: comms[0].Size(), cfg: cfg}
	for _, c := range comms {
		s, err := stream.New(c.Device(), nil)
		if err != nil {
			g.closeStreams()
			return nil, errors.Join(err, eachAtOnce(comms, (*nccl.Communicator).Close))
		}
		g.members = append(g.members, member{comm: c, stream: s})
	}
	handle.Init(g, &g.owner, handle.About{Kind: "group", On: g.Device(0)})
	return g, nil
}

// Size returns the number of ranks in all processes.
func (g *Group) Size() int { return g.size }

// Rank returns the first local rank.
func (g *Group) Rank() int { return g.members[0].comm.Rank() }

// Locals returns the number of local ranks.
func (g *Group) Locals() int { return len(g.members) }

// Device returns the device of local rank i.
func (g *Group) Device(i int) *device.Device { return g.members[i].comm.Device() }

// Communicator returns local rank i's end of the group in NCCL, for operations that
// this package does not have; they count as the group's. It belongs to the group: do
// not close it.
func (g *Group) Communicator(i int) *nccl.Communicator { return g.members[i].comm }

// Stream returns the stream of local rank i, on which collectives are enqueued.
// It belongs to the group: do not close it.
func (g *Group) Stream(i int) *stream.Stream { return g.members[i].stream }

// Streams returns the streams of all local ranks.
func (g *Group) Streams() []*stream.Stream {
	ss := make([]*stream.Stream, len(g.members))
	for i := range g.members {
		ss[i] = g.members[i].stream
	}
	return ss
}

// Err returns why the group can have no operations any more, or nil: it is broken, which
// matches ErrBroken, or this process has closed it, which matches device.ErrClosed.
func (g *Group) Err() error {
	if err := g.check("error"); err != nil {
		return err
	}
	// A rank that this process has ended is the cause of the failures of the others.
	for _, look := range []func(*nccl.Communicator) error{(*nccl.Communicator).Ended, (*nccl.Communicator).Err} {
		for i := range g.members {
			if err := look(g.members[i].comm); err != nil {
				return g.undone("error", err)
			}
		}
	}
	return nil
}

// Wait waits until everything that is enqueued on the group's streams has
// completed. nil means that the collectives have completed: not only that the
// streams have passed them, which they also do when the group ends. Wait
// ends early when a rank fails or is lost, and breaks the group then, and when this
// process closes the group. When ctx ends it returns the cause, names the first local rank that is
// not done, and leaves the operations running: Close ends them. A rank that is alive
// but never issues the operation is waited for until its deadline
// (nccl.Config.Timeout); then the error names it and its last operation: a
// *CulpritError where it is in another process.
func (g *Group) Wait(ctx context.Context) error {
	if err := g.checkWait("wait"); err != nil {
		return err
	}
	begun := time.Now()
	for i := range g.members {
		m := &g.members[i]
		if err := m.stream.RefuseWait("comm: wait"); err != nil {
			return err
		}
		end := m.comm.Point(m.stream)
		err := poll.Until(ctx, func() (bool, error) {
			done, err := m.stream.Query()
			if err != nil || done {
				return done, err
			}
			return false, g.Err()
		})
		switch {
		case err == nil:
			err = end.Passed()
		case ctx.Err() != nil && g.broken.Load() == nil && g.closing.Load() == nil:
			return fmt.Errorf("comm: wait: rank %d of %d (%s) is not done after %v: %w",
				m.comm.Rank(), g.size, m.comm.Device(), time.Since(begun).Round(time.Millisecond), err)
		}
		if err != nil {
			return g.undone("wait", err)
		}
	}
	if err := g.Err(); err != nil {
		return g.undone("wait", err)
	}
	return nil
}

// Close ends the group at once: it aborts what is in flight on the local ranks
// and frees the group's streams. It waits for no peer, but for a moment to tell other
// processes so, and for no device, unless that has had operations of OwnKernels. It is
// idempotent. The other ranks notice it as the loss of a peer, so Shutdown is the polite
// way to leave. While a graph has its collectives it stays open: Close
// returns a *nccl.InUseError; and a *nccl.GroupError within a group of NCCL that has
// operations of it.
func (g *Group) Close() error {
	if g == nil || g.owner.Closed() {
		return nil
	}
	if err := g.inUse("close"); err != nil {
		return err
	}
	g.closing.CompareAndSwap(nil, &closing{"closed the group", time.Now()})
	if !g.owner.Close() {
		return nil
	}
	g.stopWatching("closed the group")
	return errors.Join(eachAtOnce(g.comms(), (*nccl.Communicator).Close), g.closeWays(), g.closeStreams())
}

// Shutdown waits until all operations have completed and leaves the group
// together with the other ranks, which call it too. When ctx ends first, or the
// group is broken, it closes it and returns the cause.
func (g *Group) Shutdown(ctx context.Context) error {
	if g == nil || g.owner.Closed() {
		return nil
	}
	if err := g.inUse("shut down"); err != nil {
		return err
	}
	if err := nccl.RefuseGroup("comm: shut down"); err != nil {
		return err
	}
	if err := g.Wait(ctx); err != nil {
		_ = g.Close()
		return err
	}
	g.closing.CompareAndSwap(nil, &closing{"shut the group down", time.Now()})
	// From here on a peer that is gone has left, and was not lost.
	g.stopWatching("shut the group down")
	err := eachAtOnce(g.comms(), func(c *nccl.Communicator) error { return c.Shutdown(ctx) })
	if err != nil && ctx.Err() != nil { // what the ranks then say is of each other's end
		err = fmt.Errorf("comm: shut down on rank %d of %d: %w", g.Rank(), g.size, context.Cause(ctx))
	}
	return errors.Join(err, g.Close())
}

// fail breaks the group with its first cause and aborts what is in flight, so
// that nothing waits for ranks that will not come.
func (g *Group) fail(cause error) error {
	if g.settleOn(cause) {
		_ = eachAtOnce(g.comms(), (*nccl.Communicator).Abort)
	}
	return g.broken.Load()
}

// settleOn makes a cause that of the group, with what is known about it, and reports
// false if there is one already.
func (g *Group) settleOn(first error) bool {
	g.failing.Lock()
	defer g.failing.Unlock()
	if g.broken.Load() != nil {
		return false
	}
	cause := g.cause(first)
	if g.words != nil {
		g.farewell.Do(func() { g.words.farewell(g.members[0].comm, endBy(cause)) })
	}
	g.broken.Store(&brokenError{cause})
	return true
}

// cause is what is known of a failure that was noticed.
func (g *Group) cause(noticed error) error {
	if g.words == nil {
		return noticed
	}
	if found := g.words.verdict(); found != nil {
		return found
	}
	if g.lost.Err() != nil {
		if own := g.ownFailure(); own != nil {
			return own
		}
	}
	return g.words.lost(g.members[0].comm, g.rootCause(noticed))
}

// foresight is how long a group with operations in flight that lost a rank waits to be
// told by NCCL what went wrong before.
const foresight = 200 * time.Millisecond

// ownFailure is what the local ranks have failed with by themselves, or nil. The rank
// that is lost may have ended because of the same, and the loss be heard of first.
func (g *Group) ownFailure() (own error) {
	ctx, cancel := context.WithTimeout(context.Background(), foresight)
	defer cancel()
	idle := make(chan struct{})
	go func() { // the driver may not answer before the group is aborted
		if poll.Until(ctx, g.idle) == nil {
			close(idle)
		}
	}()
	_ = poll.Until(ctx, func() (bool, error) {
		for i := range g.members {
			if own = g.members[i].comm.Err(); own != nil {
				return true, nil
			}
		}
		select {
		case <-idle:
			return true, nil
		default:
			return false, nil
		}
	})
	if errors.Is(own, nccl.ErrorRemote) {
		return nil // it is the loss
	}
	return own
}

// idle reports whether nothing is in flight on the group's streams.
func (g *Group) idle() (bool, error) {
	for i := range g.members {
		if done, err := g.members[i].stream.Query(); !done && err == nil {
			return false, nil
		}
	}
	return true, nil
}

// hindsight is how long a group whose connection to a peer broke waits to be
// told what became of the peer.
const hindsight = time.Second

// rootCause prefers what the Rendezvous knows about a lost rank to NCCL's word
// that a connection broke. The connection is often the first to notice, and a
// process that gave up at once would look like the one to blame.
func (g *Group) rootCause(err error) error {
	if g.lost == nil || !errors.Is(err, nccl.ErrorRemote) {
		return err
	}
	told := time.NewTimer(hindsight)
	defer told.Stop()
	select {
	case <-g.lost.Done():
		return context.Cause(g.lost)
	case <-told.C:
		return err
	}
}

// watch tells the other processes how far this one has come, and breaks the group
// when the Rendezvous loses a rank.
func (g *Group) watch(w *words) {
	w.speak(g.members[0].comm)
	g.words, g.lost = w, w.r.Context()
	g.unwatch = context.AfterFunc(g.lost, func() { _ = g.fail(context.Cause(g.lost)) })
}

// listen is watch for a group that was split from another one over processes.
func (g *Group) listen(ctx context.Context, w *words) error {
	world, err := GatherValues(ctx, g, Gob, w.r.Rank())
	if err != nil {
		return errors.Join(err, g.Close())
	}
	w.finding.Lock() // the communicator may fail meanwhile
	w.world = world
	w.finding.Unlock()
	g.watch(w)
	return nil
}

// stopWatching is the end of watch; the other processes are told how the group ends
// here, if it has not ended before.
func (g *Group) stopWatching(end string) {
	if g.unwatch != nil {
		g.unwatch()
		g.farewell.Do(func() { g.words.farewell(g.members[0].comm, end) })
	}
}

func (g *Group) check(op string) error {
	if g == nil {
		return fmt.Errorf("comm: %s: no group given", op)
	}
	if g.owner.Closed() {
		return g.closed(op)
	}
	if b := g.broken.Load(); b != nil {
		return b
	}
	return nil
}

// checkWait is check for calls that wait for operations or use what they made, which
// they can't within nccl.Group.
func (g *Group) checkWait(op string) error {
	if err := g.check(op); err != nil {
		return err
	}
	return nccl.RefuseGroup("comm: " + op)
}

func (g *Group) comms() []*nccl.Communicator {
	cs := make([]*nccl.Communicator, len(g.members))
	for i := range g.members {
		cs[i] = g.members[i].comm
	}
	return cs
}

// inUse returns an error that names a graph, or a group of NCCL, that uses the group.
func (g *Group) inUse(op string) error {
	for i := range g.members {
		if err := g.members[i].comm.InUse(op); err != nil {
			return fmt.Errorf("comm: %w", err)
		}
	}
	return nil
}

func (g *Group) closeStreams() error {
	var errs []error
	for i := range g.members {
		errs = append(errs, g.members[i].stream.Close())
	}
	return errors.Join(errs...)
}

// eachAtOnce ends communicators side by side: one after another, each would
// wait for the next.
func eachAtOnce(comms []*nccl.Communicator, end func(*nccl.Communicator) error) error {
	errs := make([]error, len(comms))
	var wg sync.WaitGroup
	for i, c := range comms {
		wg.Go(func() { errs[i] = end(c) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
