package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Publisher sends the parts that the ranks of a group have, such as the weights of a training, to subscribers that come
// and go, such as inference engines. Ranks and subscribers may cut the tensors differently and have them in different types; see
// NewTransfer. The group has no subscribers in it: if they leave or are lost, the group and its work go on.
//
//	p, err := checkpoint.NewPublisher(ctx, g, &cluster.RegistryConfig{Addr: addr}, parts) // in each process of the training
//	names, err := p.Publish(ctx, step)
//
//	sub, err := checkpoint.Subscribe(ctx, s, &cluster.EnlistConfig{Addr: addr, Name: name}, wanted) // in each engine
//	step, err := sub.Next(ctx)
//
// The methods are collective, except Close, and for one goroutine.
type Publisher struct {
	peers    *peers // the ranks that publish
	src      [][]Part
	registry *cluster.Registry    // of rank 0's process
	at       cluster.EnlistConfig // of this process
	names    []string             // of the processes of the group, on the list of the registry

	member  *cluster.Enlistment // nil before the first push and after one that failed, in all processes
	link    *link               // nil without subscribers and after a push that failed, on all ranks
	to      []string            // the subscribers in link
	changed <-chan struct{}     // closed when the list is not that of link any more; of rank 0's process
	retired sync.WaitGroup      // links of earlier lists that end
	closed  bool
}

// NewPublisher prepares to publish the parts src of each local rank of g. The process of rank 0 serves a registry as
// cluster.Serve does, to which subscribers connect. cfg is the same in all processes of g, which must reach its Addr, too; port 0
// lets the system choose the port. The memory of the parts stays the same until Close, and the caller frees it. Collective.
func NewPublisher(ctx context.Context, g *comm.Group, cfg *cluster.RegistryConfig, src [][]Part) (*Publisher, error) {
	const op = "new publisher"
	w, err := peersOf(g)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", op, err)
	}
	if cfg == nil {
		cfg = new(cluster.RegistryConfig) // which Serve refuses
	}
	p := &Publisher{peers: w, src: src, at: cluster.EnlistConfig{
		Job: cfg.Job, Addr: cfg.Addr, Name: fmt.Sprint("publisher with rank ", g.Rank()),
		Secret: cfg.Secret, Insecure: cfg.Insecure, Timing: cfg.Timing, Notify: cfg.Notify,
	}}
	_, errs := (&Transfer{peers: w}).describe(op, nil, src)
	if g.Rank() == 0 && errs[0] == nil {
		if p.registry, errs[0] = cluster.Serve(ctx, cfg); errs[0] == nil {
			p.at.Addr = p.registry.Addr()
		}
	}
	type place struct{ Addr, Name string }
	mine := slices.Repeat([]place{{p.at.Addr, p.at.Name}}, len(w.locals))
	if err := agree(ctx, w, "checkpoint: "+op, mine, errs, func(all []collective.Said[place]) error {
		for _, said := range all {
			if name := said.Value.Name; !slices.Contains(p.names, name) {
				p.names = append(p.names, name)
			}
		}
		p.at.Addr = all[0].Value.Addr
		return firstFailed(w, op, all, errs)
	}); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Publish sends the parts to all subscribers that are on the list, whose Next returns the version of rank 0. It returns their
// names when all of them have got the parts, and waits until each of them has called Next. Without subscribers it returns none at once. The parts
// must be ordered with the group's streams, as for a collective; the work that is enqueued there from then on may change them. Subscribers
// that come meanwhile wait for the next call. Collective.
//
// If a subscriber leaves or is lost meanwhile, Publish begins again with the others. It returns an error on all ranks if
// the push fails and the list does not change within a second. Causes are a ctx that has ended on a rank, and a subscriber that
// wants a tensor that no rank has. Subscribers may then have an incomplete version. The parts have not changed, and unless the group
// is broken (comm.Group.Err), the next call begins again.
//
// A subscriber on the list that does not call Next also makes the push fail: after cfg.Timing.Join if the list has changed, and otherwise at
// the deadline of operations (nccl.Config.Timeout), unless ctx ends first. After Close or Shutdown in this process, the error matches
// device.ErrClosed, and Publish does not wait for the other ranks.
func (p *Publisher) Publish(ctx context.Context, version int64) (subscribers []string, err error) {
	if p.closed {
		return nil, fmt.Errorf("checkpoint: %s on rank %d: the publisher: %w", publishing, p.peers.group.Rank(), device.ErrClosed)
	}
	for {
		if err = p.publish(ctx, version); err == nil {
			return slices.Clone(p.to), nil
		}
		p.drop()
		again := p.listChanges(ctx)
		_ = p.member.Close() // its invitations are of worlds that have failed
		p.member = nil
		if !again {
			return nil, err
		}
	}
}

const publishing = "publish"

// publish tries once to send the parts.
func (p *Publisher) publish(ctx context.Context, version int64) error {
	next, err := p.plan(ctx)
	if err != nil {
		return err
	}
	if next.Begun || len(next.To) == 0 {
		p.retire()
		p.to = next.To
	}
	if len(p.to) == 0 {
		return nil
	}
	if next.Begun {
		p.link, err = connect(ctx, p.member, p.peers.group.Streams(), nil, p.src)
	}
	if err == nil {
		_, err = p.link.begin(ctx, pushHeader{Version: version})
	}
	if err == nil {
		err = p.link.run(ctx)
	}
	if err != nil {
		p.drop() // before this rank waits for the others, which may still wait for subscribers
		err = p.nameSubscribers(err)
	}
	return p.agree(ctx, err)
}

// nameSubscribers adds to an error of the link which subscribers its ranks are,
// because the caller knows only their names.
func (p *Publisher) nameSubscribers(err error) error {
	which := fmt.Sprintf("ranks from %d on", p.peers.ranks)
	if n := len(p.names); n != p.peers.ranks { // the session of the link has processes
		which += fmt.Sprintf(", or processes from %d on", n)
	}
	return fmt.Errorf("%w (%s are the subscribers %s)", err, which, safe.Clip(strings.Join(p.to, ", "), maxNamed))
}

// maxNamed limits the names of subscribers in an error.
const maxNamed = 500

// agree returns the error of this process, or that of another one.
func (p *Publisher) agree(ctx context.Context, err error) error {
	return p.peers.agree(ctx, publishing, "to subscribers", slices.Repeat([]error{err}, len(p.peers.locals)), "")
}

// A publishPlan says which subscribers a push is for, and whether they are in a new world.
type publishPlan struct {
	To    []string
	Begun bool
}

// plan returns the plan of rank 0.
func (p *Publisher) plan(ctx context.Context) (next publishPlan, err error) {
	if p.member == nil {
		p.member, err = cluster.Enlist(ctx, &p.at)
		if err = p.agree(ctx, err); err != nil {
			return next, err
		}
	}
	mine, errs := make([]publishPlan, len(p.peers.locals)), make([]error, len(p.peers.locals))
	if p.registry != nil {
		mine[0], errs[0] = p.begin()
	}
	err = agree(ctx, p.peers, "checkpoint: "+publishing, mine, errs, func(all []collective.Said[publishPlan]) error {
		next = all[0].Value
		return firstFailed(p.peers, publishing, all, errs)
	})
	return next, err
}

// begin begins a world of the publishing processes and the subscribers if the list has changed.
func (p *Publisher) begin() (publishPlan, error) {
	if p.link != nil && !isClosed(p.changed) {
		return publishPlan{To: p.to}, nil
	}
	for {
		list, changed := p.registry.Members()
		p.changed = changed
		var to []string
		for _, m := range list {
			if !slices.Contains(p.names, m.Name) {
				to = append(to, m.Name)
			}
		}
		if len(to) == 0 {
			return publishPlan{}, nil
		}
		err := p.registry.Begin(slices.Concat(p.names, to)...)
		if err == nil {
			return publishPlan{to, true}, nil
		}
		if !isClosed(changed) {
			return publishPlan{}, err
		}
	}
}

// delistTimeout is how long the registry may take to notice that a subscriber, for which a push has failed, is gone.
const delistTimeout = time.Second

// listChanges reports whether the list changes after a failure, on all ranks.
func (p *Publisher) listChanges(ctx context.Context) (changes bool) {
	mine, errs := make([]bool, len(p.peers.locals)), make([]error, len(p.peers.locals))
	if p.registry != nil && ctx.Err() == nil {
		select {
		case <-p.changed:
			mine[0] = true
		case <-ctx.Done():
		case <-time.After(delistTimeout):
		}
	}
	err := agree(ctx, p.peers, "checkpoint: "+publishing, mine, errs, func(all []collective.Said[bool]) error {
		changes = all[0].Value
		return nil
	})
	return changes && err == nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// drop ends the link, and ignores its errors, which are those of a push that
// has failed already, or of one whose subscribers have all they want.
func (p *Publisher) drop() {
	_ = p.link.close()
	p.link = nil
}

// retire ends the link of an earlier list, whose last push has succeeded. The group does not wait until NCCL has ended its communicator.
func (p *Publisher) retire() {
	if l := p.link; l != nil {
		p.link = nil
		p.retired.Go(func() { _ = l.close() }) // nothing is left to do on it
	}
}

// Shutdown ends the publication together with the subscribers of the last push,
// and closes the Publisher: Next returns an error that matches cluster.ErrEnded
// in each of them. It waits until they have called Next. If ctx ends first, or
// one of them leaves or is lost, it returns the cause, which is no failure of
// the group. Shutdown does nothing after Close. Collective.
func (p *Publisher) Shutdown(ctx context.Context) error {
	if p == nil || p.link == nil {
		return p.Close()
	}
	_, err := p.link.begin(ctx, pushHeader{Ends: true})
	if err == nil {
		err = p.link.shutdown(ctx)
		p.link = nil
	}
	if err != nil {
		err = fmt.Errorf("checkpoint: shut down the publisher: %w", err)
	}
	return errors.Join(err, p.Close())
}

// Close ends the publication at once. In the process of rank 0 it also closes
// the registry, and Next then returns an error that matches cluster.ErrEnded,
// perhaps after an error of the push. Before the first push of the subscriber,
// a Next that waits returns at once. Later it may need 3 s, whatever the
// Timing, in which its group looks for the cause of its end, and then the time
// of comm.Group.Close. Shutdown avoids that. The Publisher must be closed
// before the group. Close is idempotent and safe on nil.
func (p *Publisher) Close() error {
	if p == nil {
		return nil
	}
	p.closed = true
	err := p.link.close()
	p.link = nil
	p.retired.Wait()
	return errors.Join(err, p.member.Close(), p.registry.Close())
}

// A Subscriber gets what a Publisher publishes. Its methods are for one goroutine.
type Subscriber struct {
	stream *stream.Stream
	dst    []Part
	alone  *nccl.Communicator // of one rank; it has loaded NCCL's kernels
	member *cluster.Enlistment
	link   *link // nil before the first push, and after one that failed
	closed bool
}

// Subscribe puts this process on the list of the Publisher whose registry is at cfg.Addr, as cluster.Enlist does, until Close. dst are the
// parts that it wants, on the device of s; their memory stays the same. The device must not be that of a rank of the Publisher or of another
// Subscriber. Before it is on the list, Subscribe loads NCCL's kernels, for which the Publisher would wait in its next call.
func Subscribe(ctx context.Context, s *stream.Stream, cfg *cluster.EnlistConfig, dst []Part) (*Subscriber, error) {
	const op = "subscribe"
	if err := gpu.CheckStream("checkpoint: "+op, s, nil); err != nil {
		return nil, err
	}
	if _, errs := (&Transfer{peers: peersOn(s)}).describe(op, [][]Part{dst}, nil); errs[0] != nil {
		return nil, errs[0]
	}
	alone, err := nccl.NewCommunicators(ctx, []*device.Device{s.Device()}, nil)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", op, err)
	}
	m, err := cluster.Enlist(ctx, cfg)
	if err != nil {
		return nil, errors.Join(err, alone[0].Close())
	}
	return &Subscriber{stream: s, dst: dst, alone: alone[0], member: m}, nil
}

// Next waits for the next call of Publish, and returns its version when the parts have it. It does not write to them before the work that
// was enqueued on the stream by then has completed. The Publisher waits for this call.
//
// If the error matches cluster.ErrEnded, the publication has ended, and the parts have the version of the last call. If it matches
// cluster.ErrDelisted, this process is not on the list any more; see cluster.Enlistment.World. Otherwise ctx has ended or a push has
// failed, for example because another subscriber was lost: the parts are undefined until Next returns a version. Call it again.
// After Close, the error matches device.ErrClosed and cluster.ErrDelisted.
func (s *Subscriber) Next(ctx context.Context) (version int64, err error) {
	if s.closed {
		return 0, fmt.Errorf("checkpoint: next version: the subscriber: %w: %w", device.ErrClosed, cluster.ErrDelisted)
	}
	for {
		header, err := s.begin(ctx)
		switch {
		case err == nil && header.Ends:
			err = s.link.shutdown(ctx)
			s.link = nil
		case err == nil:
			if err = s.link.run(ctx); err == nil {
				return header.Version, nil
			}
		case othersFailed(ctx, err): // the parts have what they had
			s.drop()
			continue
		}
		if err != nil {
			s.drop()
			return 0, fmt.Errorf("checkpoint: next version: %w", err)
		}
	}
}

// begin waits for the header of the next push.
func (s *Subscriber) begin(ctx context.Context) (header pushHeader, err error) {
	if s.link == nil {
		s.link, err = connect(ctx, s.member, []*stream.Stream{s.stream}, [][]Part{s.dst}, nil)
	}
	if err == nil {
		header, err = s.link.begin(ctx, header)
	}
	return header, err
}

// othersFailed reports whether an error is that of another rank that has left or was lost: the next world is without it.
func othersFailed(ctx context.Context, err error) bool {
	_, lost := errors.AsType[*cluster.MemberLostError](err)
	return (lost || errors.Is(err, comm.ErrBroken)) && !errors.Is(err, cluster.ErrDelisted) && ctx.Err() == nil
}

// drop ends the link after an error.
func (s *Subscriber) drop() {
	_ = s.link.close()
	s.link = nil
}

// Close takes this process off the list, and leaves the Publisher, which goes on with the other subscribers. It is idempotent and safe on nil.
func (s *Subscriber) Close() error {
	if s == nil {
		return nil
	}
	s.closed = true
	err := errors.Join(s.member.Close(), s.link.close()) // in this order, so that the Publisher knows why the link breaks
	s.link = nil
	err = errors.Join(err, s.alone.Close())
	return err
}

// A pushHeader is what rank 0 of a link sends before each push.
type pushHeader struct {
	Version int64
	Ends    bool // no push follows
}

// A link is a place in a group of the ranks that publish and of subscribers.
type link struct {
	streams  []*stream.Stream // that the parts are ordered with, by local rank
	session  *cluster.Session
	group    *comm.Group
	transfer *Transfer
}

// connect joins the next world of a member.
func connect(ctx context.Context, m *cluster.Enlistment, streams []*stream.Stream, dst, src [][]Part) (_ *link, err error) {
	l := &link{streams: streams}
	if l.session, err = m.World(ctx); err != nil {
		return nil, err
	}
	var devs []*device.Device
	for _, s := range streams {
		devs = append(devs, s.Device())
	}
	if l.group, err = comm.JoinDevices(ctx, l.session, devs, nil); err == nil {
		l.transfer, err = NewTransfer(ctx, l.group, dst, src, nil)
	}
	if err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

// begin returns the header of rank 0 when all ranks have called it. After a broadcast, some would begin the transfer while others have not come,
// and a subscriber that leaves then would cost the others their parts.
func (l *link) begin(ctx context.Context, mine pushHeader) (pushHeader, error) {
	all, err := comm.GatherValues(ctx, l.group, nil, slices.Repeat([]pushHeader{mine}, len(l.streams))...)
	if err != nil {
		return pushHeader{}, err
	}
	return all[0], nil
}

// run transfers the parts, and returns when all ranks have what they want.
func (l *link) run(ctx context.Context) error {
	if err := l.group.Between(l.streams, l.transfer.Run); err != nil {
		return err
	}
	return l.group.Barrier(ctx)
}

// close ends the link at once. The streams already wait for work that is aborted, because run ordered them with it.
func (l *link) close() error {
	if l == nil {
		return nil
	}
	return errors.Join(l.transfer.Close(), l.group.Close(), l.session.Close())
}

// shutdown ends the link together with the other ranks.
func (l *link) shutdown(ctx context.Context) error {
	err := errors.Join(l.transfer.Close(), l.group.Shutdown(ctx))
	if err == nil {
		err = l.session.Shutdown(ctx)
	}
	return errors.Join(err, l.session.Close())
}
