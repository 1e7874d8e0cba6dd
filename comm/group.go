package comm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Group is a set of ranks that call collectives together. One or more ranks are local:
// in this process, each with a device and a stream.
type Group struct {
	ref
	owner       handle.Owner
	size        int
	cfg         *Config
	members     []member // the local ranks, by rank
	firstDirect member   // the first local rank
	splits      int      // number of splits
	experts     uint32   // number of Experts, guarded by issuing
	broken      atomic.Pointer[brokenError]
	closing     atomic.Pointer[closing] // how this process closed it
	left        atomic.Bool             // by a Shutdown without an error
	issuing     sync.Mutex              // held while an operation is enqueued
	routers     route.Routers           // choose the backends; none if NCCL executes everything
	batch       *route.Batch            // for the operations of a call, guarded by issuing
	batches     sync.Pool               // of *Batch, for Group.Batch
	failing     sync.Mutex              // held while the cause of a failure is determined
	lost        context.Context         // the Rendezvous's context, which ends when a rank is lost; nil in one process
	reporter    *reporter               // the progress of the other processes; nil in one process
	unwatch     func() bool             // stops watching lost

	reportEnd sync.Once // of the last message to the other processes

	session *cluster.Session // opened by Init, nil otherwise
}

// member is one local rank.
type member struct {
	comm   *nccl.Communicator
	stream *stream.Stream
	on     nccl.Issuer // takes the rank's operations: the group's batch, or comm if there is nothing to choose or combine
}

// newGroup returns a group of initialized communicators.
func newGroup(comms []*nccl.Communicator, cfg *Config) (*Group, error) {
	g := &Group{size: comms[0].Size(), cfg: cfg, batch: route.Routers(nil).NewBatch()}
	g.ref = handle.NewRef[route.Group](internals{g})
	for _, c := range comms {
		s, err := cfg.newStream(c.Device())
		if err != nil {
			g.closeStreams()
			return nil, errors.Join(err, concurrently(comms, (*nccl.Communicator).Close))
		}
		m := member{comm: c, stream: s, on: c}
		if len(comms) > 1 {
			m.on = g.batch.On(c)
		}
		g.members = append(g.members, m)
	}
	g.firstDirect = g.members[0]
	g.firstDirect.on = g.firstDirect.comm
	handle.Init(g, &g.owner, handle.About{Kind: "group", On: g.Device(0)})
	return g, nil
}

// Size returns the number of ranks in all processes.
func (g *Group) Size() int { return g.size }

// Rank returns the rank of the first local rank.
func (g *Group) Rank() int { return g.members[0].comm.Rank() }

// Locals returns the number of local ranks.
func (g *Group) Locals() int { return len(g.members) }

// Device returns the device of local rank i.
func (g *Group) Device(i int) *device.Device { return g.members[i].comm.Device() }

// Communicator returns the NCCL communicator of local rank i, for operations that this
// package does not have; they count as operations of the group. It belongs to the group:
// do not close it.
func (g *Group) Communicator(i int) *nccl.Communicator { return g.members[i].comm }

// Stream returns the stream of local rank i, on which collectives are enqueued.
// It belongs to the group, so do not close it.
func (g *Group) Stream(i int) *stream.Stream { return g.members[i].stream }

// Streams returns the streams of all local ranks.
func (g *Group) Streams() []*stream.Stream {
	ss := make([]*stream.Stream, len(g.members))
	for i := range g.members {
		ss[i] = g.members[i].stream
	}
	return ss
}

// Err returns why the group accepts no more operations, or nil. If the group is broken,
// the error matches ErrBroken; if this process has closed it, it matches device.ErrClosed.
// While the group still asks the other ranks for the cause of a failure, Err returns the failure as this rank has noticed it
// within 0.25 s, and later errors have the cause. If NCCL does not answer, Err gives up after 10 s.
func (g *Group) Err() error {
	err, answered := firstAnswer(g.err, func() error {
		for i := range g.members {
			if noticed := collective.Of(g.members[i].comm).Noticed(); noticed != nil {
				return &brokenError{noticed}
			}
		}
		return nil
	})
	if !answered {
		return fmt.Errorf("comm: error on rank %d of %d: NCCL has not answered for %v", g.Rank(), g.size, answerTime)
	}
	return err
}

// firstAnswer returns the answer of ask, or what was noticed if that comes
// earlier. It waits at most answerTime.
func firstAnswer(ask, noticed func() error) (err error, answered bool) {
	answer := make(chan error, 1)
	go func() { answer <- ask() }()
	tick := time.NewTicker(noticeTime)
	defer tick.Stop()
	for range answerTime / noticeTime {
		select {
		case err := <-answer:
			return err, true
		case <-tick.C:
		}
		if err := noticed(); err != nil {
			return err, true
		}
	}
	return nil, false
}

// Err waits for noticeTime before it returns a failure without its cause, and for answerTime in all. noticeTime is longer than
// endedReportTime, so that the first error already names a rank that has closed the group.
const noticeTime, answerTime = 250 * time.Millisecond, 10 * time.Second

// err is Err with the cause of a failure, which may take some seconds.
func (g *Group) err() error {
	if err := g.check("error"); err != nil {
		return err
	}
	// If this process has ended a rank, that caused the failures of the other ranks.
	ended := func(c *nccl.Communicator) error { return collective.Of(c).Ended() }
	for _, look := range []func(*nccl.Communicator) error{ended, (*nccl.Communicator).Err} {
		for i := range g.members {
			if err := look(g.members[i].comm); err != nil {
				return g.errIncomplete("error", err)
			}
		}
	}
	return nil
}

// Wait waits until everything that is enqueued on the group's streams has completed. It
// returns nil only if the collectives have completed; streams also pass collectives that
// were aborted. Wait ends early when a rank fails or is lost, which breaks the group, and
// when this process closes the group. When ctx ends, Wait returns an error that wraps the
// cause and names the first local rank that has not completed; the operations continue to
// run, and Close ends them. If a rank is alive but never issues the operation, Wait ends
// at the operation's deadline (nccl.Config.Timeout). The error then names that rank and
// its last operation; it is a *CulpritError if that rank is in another process. Wait also ends
// with ctx if the driver or NCCL does not answer.
func (g *Group) Wait(ctx context.Context) error {
	if err := g.check("wait"); err != nil {
		return err
	}
	for i := range g.members {
		if err := gpu.StreamOf(g.members[i].stream).RefuseWait("comm: wait"); err != nil {
			return err
		}
	}
	return unanswered("comm: wait", gpu.Guard(ctx, func() error { return g.wait(ctx) }))
}

// unanswered adds the operation to an error of poll.Guard.
func unanswered(op string, err error) error {
	if e, ok := err.(*poll.UnansweredError); ok {
		return fmt.Errorf("%s: %w", op, e)
	}
	return err
}

// wait is Wait without the checks.
func (g *Group) wait(ctx context.Context) error {
	begun := time.Now()
	for i := range g.members {
		m := &g.members[i]
		end := collective.Of(m.comm).Point(m.stream)
		err := gpu.DeviceOf(m.stream.Device()).Until(ctx, "comm.Group.Wait", func() (bool, error) {
			done, err := m.stream.Query()
			if err != nil || done {
				return done, err
			}
			return false, g.err()
		})
		switch {
		case err == nil:
			err = collective.Of(m.comm).Completed(end)
		case ctx.Err() != nil && g.broken.Load() == nil && g.closing.Load() == nil:
			return fmt.Errorf("comm: wait: rank %d of %d (%s) is not done after %v: %w",
				m.comm.Rank(), g.size, m.comm.Device(), time.Since(begun).Round(time.Millisecond), err)
		}
		if err != nil {
			return g.errIncomplete("wait", err)
		}
	}
	if err := g.err(); err != nil {
		return g.errIncomplete("wait", err)
	}
	return nil
}

// Close ends the group at once: it aborts pending operations on the local ranks
// and frees the group's streams. It does not wait for other ranks, except for a
// moment to inform other processes, or for the devices, unless they ran Chorus
// kernels (OwnKernels). The group of the other ranks is then broken: if it was
// intact here, their errors match ErrLeft and name this rank, and a later
// Session.Close here is no loss for their sessions. To leave without an error
// on the other ranks, use Shutdown. While a graph uses the group's collectives,
// the group stays open and Close returns a *nccl.InUseError. Close, which is
// idempotent, also closes the session of Init.
//
// The work of a broken group that was enqueued, also if it was aborted, may use its memory until the group's streams have passed it.
// To use the memory again on another stream s, call s.WaitStream(g.Stream(i)) for each local rank before Close: the work
// enqueued on s from then on begins after all of it.
//
// If the driver or NCCL does not answer, Close returns an error after at most 20 s and
// leaves the resources allocated.
func (g *Group) Close() error {
	if g == nil || g.owner.Closed() {
		return nil
	}
	if err := g.inUse("close"); err != nil {
		return err
	}
	g.closing.CompareAndSwap(nil, &closing{closedGroup, time.Now()})
	if g.closing.Load().how == closedGroup {
		g.recordEnd("this process closed the group", false)
	}
	if !g.owner.Close() {
		return nil
	}
	if g.lost != nil {
		// The rank leaves without the others, perhaps because it has failed: their error may be a consequence.
		g.writeTraces()
	}
	err, ended := poll.Within(closeTimeout, func() error {
		g.stopWatching(closedGroup)
		return errors.Join(concurrently(g.comms(), (*nccl.Communicator).Close), g.routers.Close(), g.closeStreams())
	})
	if !ended {
		err = fmt.Errorf("comm: close on rank %d of %d: not ended after %v: a device still runs, or the driver or NCCL does not answer", g.Rank(), g.size, closeTimeout)
	}
	return errors.Join(err, g.session.Close()) // in any case, so that the other processes learn that this one has left
}

// closeTimeout limits the part of Close that needs the devices. The end of a communicator takes at most twelve seconds.
// Tests change it.
var closeTimeout = 15 * time.Second

// Shutdown waits until all operations have completed and leaves the group together with
// the other ranks, which must call it too; a group of Init then leaves the job. It returns nil only if the operations of
// all ranks have completed. If ctx ends first, the group is broken, or another rank closes it, Shutdown closes the group and
// returns the cause. After Close, and after a Shutdown that has failed, the error matches device.ErrClosed. After a Shutdown
// that returned nil, another one does nothing.
func (g *Group) Shutdown(ctx context.Context) error {
	const op = "shut down"
	if g == nil || g.left.Load() {
		return nil
	}
	if g.owner.Closed() {
		return g.errClosed(op)
	}
	if err := g.inUse(op); err != nil {
		return err
	}
	err := g.Wait(ctx) // which ends with ctx, also if the driver hangs
	if err == nil && g.lost != nil && g.lost.Err() != nil {
		err = g.fail(context.Cause(g.lost)) // the function of watch may not have run yet
	}
	if err != nil {
		_ = g.Close()
		return err
	}
	if g.reporter != nil {
		if err := g.reporter.awaitOthers(ctx, g.Rank()); err != nil {
			defer g.Close()
			g.failing.Lock() // the failure of a rank here may be the reason
			b := g.broken.Load()
			g.failing.Unlock()
			if b != nil {
				return b
			}
			if g.lost.Err() != nil {
				return g.fail(context.Cause(g.lost))
			}
			return fmt.Errorf("comm: shut down on rank %d of %d: %w", g.Rank(), g.size, err)
		}
	}
	g.closing.CompareAndSwap(nil, &closing{shutGroup, time.Now()})
	// From here on, a peer whose process ends has left and was not lost.
	g.stopWatching(shutGroup)
	// The other ranks must know that this one gives up before they notice that its communicators were aborted.
	leaving, giveUp := context.WithCancelCause(context.WithoutCancel(ctx))
	end := sync.OnceFunc(func() {
		if g.reporter != nil {
			g.reporter.finish(closedGroup)
		}
		giveUp(context.Cause(ctx))
	})
	if ctx.Err() != nil {
		end()
	}
	stop := context.AfterFunc(ctx, end)
	err = concurrently(g.comms(), func(c *nccl.Communicator) error { return c.Shutdown(leaving) })
	if !stop() && err == nil {
		err = context.Cause(ctx) // the other ranks may know already that this one gives up
	}
	giveUp(nil)
	switch { // the errors of the ranks are only consequences
	case err == nil:
	case ctx.Err() != nil:
		err = fmt.Errorf("comm: shut down on rank %d of %d: %w", g.Rank(), g.size, context.Cause(ctx))
	case g.reporter != nil:
		err = &brokenError{g.cause(err)}
	}
	if err == nil {
		err = g.session.Shutdown(ctx)
	}
	g.left.Store(err == nil)
	return errors.Join(err, g.Close())
}

// fail breaks the group with its first cause and aborts pending operations, so that no
// rank waits for a rank that failed. It does not break a group that this process has closed: the end of the ranks here then is
// the cause, and fail returns the error of a closed group.
func (g *Group) fail(cause error) error {
	if g.closing.Load() != nil && g.broken.Load() == nil {
		return g.errClosed("enqueue")
	}
	g.recordEnd(cause.Error(), g.endOf(cause) == "")
	g.writeTraces() // first, because the process may end soon
	if g.setBroken(cause) {
		_ = concurrently(g.comms(), (*nccl.Communicator).Abort)
	}
	return g.broken.Load()
}

// recordEnd records in the flight recorders how the group ended here, and
// whether it did because another rank had ended, unless an end is recorded
// already.
func (g *Group) recordEnd(end string, follows bool) {
	for i := range g.members {
		collective.Of(g.members[i].comm).RecordEnd(end, follows)
	}
}

// writeTraces writes the flight recorders, if the environment asks for it.
func (g *Group) writeTraces() {
	for i := range g.members {
		collective.Of(g.members[i].comm).WriteTraces()
	}
}

// setBroken records a cause as that of the broken group, completed by the information of
// the other processes. It returns false if the group is already broken.
func (g *Group) setBroken(first error) bool {
	g.failing.Lock()
	defer g.failing.Unlock()
	if g.broken.Load() != nil {
		return false
	}
	cause := g.cause(first)
	if g.reporter != nil {
		g.reportEnd.Do(func() { g.reporter.finish(g.endOf(cause)) })
	}
	g.broken.Store(&brokenError{cause})
	return true
}

// cause returns the best known cause of a failure that was noticed.
func (g *Group) cause(noticed error) error {
	if g.reporter == nil {
		return noticed
	}
	if found := g.reporter.result(); found != nil {
		return found
	}
	if g.lost.Err() != nil {
		if own := g.ownFailure(); own != nil {
			return own
		}
	}
	return g.reporter.explainLoss(g.members[0].comm, g.rootCause(noticed))
}

// lossDiagnosisTime is how long a group with pending operations that lost a rank waits for an
// error of NCCL that explains the loss.
const lossDiagnosisTime = 200 * time.Millisecond

// ownFailure returns the failure of a local rank that another rank did not cause, or nil.
// The lost rank may have ended because of this failure, and the loss may be noticed first.
func (g *Group) ownFailure() (own error) {
	ctx, cancel := context.WithTimeout(context.Background(), lossDiagnosisTime)
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
		return nil // a consequence of the loss
	}
	return own
}

// idle reports whether the group's streams have completed all operations.
func (g *Group) idle() (bool, error) {
	for i := range g.members {
		if done, err := g.members[i].stream.Query(); !done && err == nil {
			return false, nil
		}
	}
	return true, nil
}

// lossReportTime is how long a group whose connection to a peer broke waits for the Rendezvous
// to report the fate of the peer, unless a peer has reported how it ended.
const lossReportTime = 3 * time.Second

// endedReportTime is how long the group then still waits for the Rendezvous.
const endedReportTime = 100 * time.Millisecond

// rootCause returns the Rendezvous's error about a lost rank, or a reported NaN, instead of NCCL's error that
// a connection broke, if there is one. The broken connection is often noticed first, and a
// process that reported it at once would look like the culprit.
func (g *Group) rootCause(err error) error {
	if g.lost == nil || !errors.Is(err, nccl.ErrorRemote) {
		return err
	}
	wait := time.NewTimer(lossReportTime)
	defer wait.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		if _, ok := g.reporter.await(ctx, g.reporter.endedKey()); ok {
			close(ended)
		}
	}()
	select {
	case <-g.lost.Done():
		return context.Cause(g.lost)
	case e := <-g.reporter.nan:
		return e
	case <-ended:
		// The process may end, too: its exit says more, and so does a NaN that it has reported before, which another goroutine reads.
		select {
		case <-g.lost.Done():
			return context.Cause(g.lost)
		case e := <-g.reporter.nan:
			return e
		case <-time.After(endedReportTime):
			return err
		}
	case <-wait.C:
		return err
	}
}

// watch starts to publish the progress of this process, and breaks the group when the
// Rendezvous loses a rank.
func (g *Group) watch(w *reporter) {
	g.reporter, g.lost = w, w.r.Context()
	for i := range g.members {
		collective.Of(g.members[i].comm).SetWorld(w.worldRanks(), len(w.process))
	}
	w.start(g.comms(), g.fail)
	g.unwatch = context.AfterFunc(g.lost, func() { _ = g.fail(context.Cause(g.lost)) })
}

// watchChild is watch for a group over processes that was split from another group, where the local ranks have
// the given ranks.
func (g *Group) watchChild(ctx context.Context, w *reporter, parents []int) error {
	for i, rank := range parents {
		parents[i] = w.worldRanks()[rank]
	}
	world, err := GatherValues(ctx, g, Gob, parents...)
	if err == nil {
		err = g.conclude(ctx, true, checkWorld(world, w.worldRanks()))
	}
	if err != nil {
		return errors.Join(err, g.Close())
	}
	w.diagnosing.Lock() // the communicator may fail at the same time
	w.world = world
	w.diagnosing.Unlock()
	g.watch(w)
	return nil
}

// checkWorld returns an error if the ranks of a new group say that they are other ranks of the world than those of the parent, or
// that two of them are the same.
func checkWorld(world, parents []int) error {
	for rank, at := range world {
		if !slices.Contains(parents, at) || slices.Contains(world[:rank], at) {
			return fmt.Errorf("comm: split: rank %d of the new group says that it is rank %d of the world: want one of %d others: %w", rank, at, len(parents), ErrMismatch)
		}
	}
	return nil
}

// stopWatching undoes watch, and informs the other processes how the group ends
// here, if it has not ended before.
func (g *Group) stopWatching(end string) {
	if g.unwatch != nil {
		g.unwatch()
		g.reportEnd.Do(func() { g.reporter.finish(end) })
		g.reporter.deleteDumps(g.size)
	}
}

func (g *Group) check(op string) error {
	if g == nil {
		return badArgument(op, "no group given")
	}
	if g.owner.Closed() {
		return g.errClosed(op)
	}
	if b := g.broken.Load(); b != nil {
		return b
	}
	return nil
}

func (g *Group) comms() []*nccl.Communicator {
	cs := make([]*nccl.Communicator, len(g.members))
	for i := range g.members {
		cs[i] = g.members[i].comm
	}
	return cs
}

// inUse returns an error that names a graph that uses the group, or nil.
func (g *Group) inUse(op string) error {
	for i := range g.members {
		if err := collective.Of(g.members[i].comm).InUse(op); err != nil {
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

// concurrently calls end for all communicators concurrently: sequential calls would wait for
// each other's ranks.
func concurrently(comms []*nccl.Communicator, end func(*nccl.Communicator) error) error {
	errs := make([]error, len(comms))
	var wg sync.WaitGroup
	for i, c := range comms {
		wg.Go(func() { errs[i] = end(c) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// openRouters opens everything that the strategy needs and the devices support, and lets it
// execute the collectives of the group. hosts has the host of each rank; nil means one host.
func (g *Group) openRouters(ctx context.Context, s route.Strategy, hosts []int, exchange func(rank int) collective.Exchange) (err error) {
	blocks := 0
	if n := g.cfg.nccl(nil).MaxCTAs; n != nil {
		blocks = *n
	}
	g.routers, err = route.Open(ctx, s, g.cfg.order(hosts), blocks, g.comms(), g.Streams(), exchange)
	if err != nil || len(g.routers) == 0 {
		return err
	}
	g.batch = g.routers.NewBatch()
	g.members = withIssuer(g.members, g.batch)
	return nil
}

// maxNaNReport is the maximum size of the report of a NaN, in bytes.
const maxNaNReport = 4096

func (w *reporter) nanKey() string { return w.prefix + "nan" }

// reportNaN tells the other processes that the input of a local rank was not a number: they may
// have completed the operation, and would not notice.
func (w *reporter) reportNaN(e *nccl.NaNError) {
	ctx, cancel := context.WithTimeout(context.Background(), lastReportTime)
	defer cancel()
	_ = put(ctx, w.r, w.nanKey(), e) // if the store is gone, the job has ended
}

// awaitNaN calls fail with the first NaN that another process reports, until ctx ends.
func (w *reporter) awaitNaN(ctx context.Context, fail func(error) error) {
	b, ok := w.await(ctx, w.nanKey())
	if !ok {
		return // the group ends
	}
	c := w.comms[0]
	e := readNaN(b, c.Rank(), c.Size())
	if e != nil && !slices.ContainsFunc(w.comms, func(c *nccl.Communicator) bool { return c.Rank() == e.Rank }) {
		w.nan <- e // for a failure that the end of the other rank causes at the same time
		_ = fail(e)
	}
}

// readNaN returns the error in the report of another rank, or nil if the report is invalid or
// this rank's own.
func readNaN(b []byte, rank, size int) *nccl.NaNError {
	e := new(nccl.NaNError)
	if len(b) > maxNaNReport || json.Unmarshal(b, e) != nil || e.Rank < 0 || e.Rank >= size || e.Rank == rank || e.Size != size || e.Index < 0 {
		return nil
	}
	e.Device, e.Operation = safe.Text(e.Device), safe.Text(e.Operation)
	return e
}

// ref is how packages above comm reach the inside of a group.
type ref = handle.Ref[route.Group]

// An internals is a group as packages above comm see it.
type internals struct{ g *Group }

func (x internals) Check(op string) error { return x.g.check(op) }

func (x internals) CheckSame(ctx context.Context, op, given string) error {
	return x.g.checkSame(ctx, op, given, sameArguments)
}

func (x internals) Exchange(ctx context.Context, mine [][]byte) ([][]byte, error) {
	if len(x.g.members) == x.g.size {
		return mine, context.Cause(ctx)
	}
	return GatherValues(ctx, x.g, Gob, mine...)
}

func (x internals) Conclude(ctx context.Context, err error) error {
	return x.g.conclude(ctx, true, err)
}

func (x internals) Chosen(k collective.Op) string { return string(x.g.chosen(k)) }

func (x internals) Fail(cause error) error { return x.g.fail(cause) }

func (x internals) NewBatch() *route.Batch { return x.g.routers.NewBatch() }

func (x internals) Rendezvous() any {
	if x.g.reporter == nil {
		return nil
	}
	return x.g.reporter.r
}

func (x internals) TunePlan(cfg route.PlanConfig) ([]route.Choice, error) { return x.g.plan(cfg) }

func (x internals) UseWhole(ctx context.Context, strategy string) error {
	return x.g.changeStrategy(ctx, Strategy(strategy), func(s route.Strategy) { x.g.routers.UseOnly(s) })
}

// SetTimeout changes the timeout of the operations that this process issues
// from now on (torch's _set_pg_timeout). Operations that are already issued
// keep their timeout. d is as in nccl.Config.Timeout: 0 means
// CHORUS_NCCL_TIMEOUT, and a negative value no timeout. Batch.SetTimeout is for
// single operations. SetTimeout enqueues nothing, may be called at any time,
// and does not affect groups of Split and Sub.
func (g *Group) SetTimeout(d time.Duration) error {
	if err := g.check("set timeout"); err != nil {
		return err
	}
	for i := range g.members {
		if err := g.members[i].comm.SetTimeout(d); err != nil {
			return err
		}
	}
	return nil
}
