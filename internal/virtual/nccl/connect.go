package nccl

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// connect connects the rank to its neighbours once the members are known, and
// returns when all ranks are connected.
//
// Rank 0 sends a count around the ring, and each rank forwards it when it is
// connected. When the count is back, rank 0 knows that all ranks are connected and
// sends a notice. A rank notifies its neighbours before it returns from here, and
// each later notice implies it. So before another rank can observe an action of a
// rank that has returned, it knows that all ranks are connected: it sees a loss as
// an error of the communicator, not of connect.
func (c *comm) connect(v *verdict) error {
	c.mu.Lock()
	c.rank, c.n, c.members = v.Rank, len(v.Members), v.Members
	c.mu.Unlock()
	if c.n == 1 {
		return nil
	}
	next := (c.rank + 1) % c.n
	conn, err := greet(c.members[next].Address, &hello{Token: c.token, Use: "control", Rank: c.rank})
	if err != nil {
		return err
	}
	forward := c.attend(next, conn)
	timeout := time.NewTimer(rootTimeout)
	defer timeout.Stop()
	if err := c.awaitNeighbour(c.left, timeout); err != nil {
		return err
	}
	if c.rank == 0 {
		forward.send(&notice{Kind: noticeConnected})
	}
	if err := c.awaitNeighbour(c.counted, timeout); err != nil {
		return err
	}
	if c.rank > 0 {
		forward.send(&notice{Kind: noticeConnected})
		return c.awaitNeighbour(c.joined, timeout)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if closeOnce(c.joined) {
		c.tell(&notice{Kind: noticeJoined}, nil)
	}
	return nil
}

// awaitNeighbour waits for a step of connect, or until all ranks are connected.
func (c *comm) awaitNeighbour(step <-chan struct{}, timeout *time.Timer) error {
	select {
	case <-step:
		return nil
	case <-c.joined:
		return nil
	case <-c.failed:
		if isClosed(c.joined) { // both became known at the same time
			return nil
		}
		return errors.New(c.state().Text)
	case <-timeout.C:
		return fmt.Errorf("rank %d did not connect", (c.rank+c.n-1)%c.n)
	}
}

// A connection is made at the first operation that needs it: the ring or the tree of
// a communicator, or one direction of the transfers with a peer. The call that issues this
// operation blocks until the ranks at the other ends have issued theirs.
type connection struct {
	Kind connectionKind
	Peer int // of a transfer
}

type connectionKind uint8

const (
	connectRing connectionKind = iota
	connectTree
	connectSend
	connectRecv
)

// treeLimit is the size of all-reduces up to which NCCL uses the tree between hosts.
const treeLimit = 64 << 10

// connections are the connections that a work uses. NCCL chooses the ring or
// the tree for an all-reduce by its size and the topology: between hosts the
// tree has fewer hops, so that the first all-reduce of another size may block,
// too. The connections of all-to-alls, gathers and scatters are those of their
// transfers.
func (w *work) connections(yield func(connection) bool) {
	c, root := w.c, int(w.sig.Root)
	switch w.sig.Kind {
	case kindSend, kindRecv:
		if root != c.rank {
			yield(connection{transferKind(w.sig.Kind == kindSend), root})
		}
	case kindAlltoAll, kindGather, kindScatter:
		for peer := range c.n {
			sends, recvs := w.sig.moves(c.rank, peer)
			if peer != c.rank && (sends && !yield(connection{connectSend, peer}) || recvs && !yield(connection{connectRecv, peer})) {
				return
			}
		}
	case kindAllReduce:
		if w.sendBytes <= treeLimit && c.lib.cfg.hosts() {
			yield(connection{Kind: connectTree})
			return
		}
		fallthrough
	default:
		yield(connection{Kind: connectRing})
	}
}

func transferKind(send bool) connectionKind {
	if send {
		return connectSend
	}
	return connectRecv
}

// An end is a connection as one of its ranks has issued it.
type end struct {
	rank int
	connection
}

// awaited returns a rank that must issue a connection before this rank has it, and has not, or -1.
// c.mu is held.
func (c *comm) awaited(k connection) int {
	if k.Kind == connectSend || k.Kind == connectRecv {
		if c.ends[end{k.Peer, connection{transferKind(k.Kind == connectRecv), c.rank}}] {
			return -1
		}
		return k.Peer
	}
	for rank := range c.n {
		if !c.ends[end{rank, k}] {
			return rank
		}
	}
	return -1
}

// addEnds records the connections that a rank has issued, and reports whether one is new. c.mu is
// held.
func (c *comm) addEnds(rank int, list []connection) (news bool) {
	for _, k := range list {
		at := end{rank, k}
		news = news || !c.ends[at]
		c.ends[at] = true
	}
	if news {
		c.idle.Broadcast()
	}
	return news
}

// An intent is a collective that a rank has issued or is about to issue. Only with equal intents
// do ranks connect the same, so they are compared before a rank waits for a connection that the others
// never make.
type intent struct {
	Number uint64 // of the collective, from 0
	Op     signature
}

// keptIntents is the number of collectives that a rank remembers.
const keptIntents = 64

// intend records that this rank issues its next collective. c.mu is held.
func (c *comm) intend(op signature) {
	i := intent{c.collectives, op}
	c.collectives++
	c.intents[i.Number%keptIntents] = i
	for rank, theirs := range c.theirs {
		c.compare(rank, theirs)
	}
}

// compare fails the communicator if another rank's collective differs from this rank's of the same
// number. c.mu is held.
func (c *comm) compare(rank int, theirs intent) {
	mine := c.intents[theirs.Number%keptIntents]
	if c.connecting != nil && c.connecting.Number == theirs.Number {
		mine = *c.connecting
	}
	if mine.Op.Kind == 0 || mine.Number != theirs.Number || mine.Op.same(&theirs.Op) {
		return
	}
	c.failLocked(difference(c.rank, &mine.Op, rank, &theirs.Op), nil)
}

// A need is what a communicator must connect before a group of works.
type need struct {
	c       *comm
	list    []connection
	connect *intent // the first of the collectives that is not captured, or nil
}

// unconnected returns the connections that works need and that do not exist
// yet. Empty collectives need none, because NCCL discards them before it
// connects. The machine is locked.
func unconnected(works []*work) (needs []*need) {
	for _, w := range works {
		if w.c.n == 1 || w.sig.Count == 0 && !w.transfer() {
			continue
		}
		for k := range w.connections {
			if w.c.connected[k] {
				continue
			}
			at := slices.IndexFunc(needs, func(n *need) bool { return n.c == w.c })
			if at < 0 {
				at, needs = len(needs), append(needs, &need{c: w.c})
			}
			if n := needs[at]; !slices.Contains(n.list, k) {
				n.list = append(n.list, k)
			}
		}
	}
	for _, n := range needs {
		at := slices.IndexFunc(works, func(w *work) bool { return w.c == n.c && !w.transfer() && !w.s.Capturing() })
		if at >= 0 {
			op := works[at].sig
			op.Seq = n.c.issued
			n.connect = &intent{Op: op}
		}
	}
	return needs
}

// connectFor opens the connections that works need, as NCCL does before their launch. The thread
// blocks until the ranks at the other ends have issued them, or until the communicator fails or is
// aborted. NCCL allocates and maps memory for them, which the calling thread's capture mode, or a global
// capture on any thread, may forbid. The machine is locked, but not while the thread waits.
func (l *lib) connectFor(works []*work) ncclapi.Result {
	needs := unconnected(works)
	if needs == nil {
		return ncclapi.Success
	}
	if r := l.m.PermitsUnsafe(); r != cudadrv.Success {
		return l.refuse(ncclapi.InternalError, "%s: failed to connect with the other ranks: %v", works[0].name, r)
	}
	l.m.InvalidateGlobalCaptures()
	l.m.Unlock()
	f := connectAll(needs)
	l.m.Lock()
	if f != nil {
		return l.refuse(f.Result, "%s: %s", works[0].name, f.Text)
	}
	for _, n := range needs {
		for _, k := range n.list {
			n.c.connected[k] = true
		}
	}
	return l.stillUsable(works)
}

// connectAll issues connections, and waits for the ranks at the other ends.
func connectAll(needs []*need) *failure {
	for _, n := range needs {
		n.issue()
	}
	for _, n := range needs {
		if f := n.await(); f != nil {
			return f
		}
	}
	return nil
}

func (n *need) issue() {
	c := n.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failure != nil || c.closing {
		return
	}
	if n.connect != nil {
		n.connect.Number = c.collectives
		c.connecting = n.connect
		for rank, theirs := range c.theirs {
			c.compare(rank, theirs)
		}
	}
	c.addEnds(c.rank, n.list)
	c.tell(&notice{Kind: noticeConnects, Rank: c.rank, Connections: n.list, Intent: n.connect}, nil)
}

// await waits until all ranks at the other ends have issued the connections.
func (n *need) await() *failure {
	c := n.c
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() { c.connecting = nil }()
	for _, k := range n.list {
		for rank := c.awaited(k); rank >= 0; rank = c.awaited(k) {
			switch {
			case c.failure != nil:
				return c.failure
			case c.stopped:
				return &failure{ncclapi.InternalError, fmt.Sprintf("the communicator was aborted before rank %d had connected", rank)}
			case c.hasLeft(rank):
				c.failLocked(&failure{ncclapi.RemoteError, fmt.Sprintf("rank %d destroyed its communicator while other ranks still wait for it", rank)}, nil)
				continue
			}
			c.idle.Wait()
		}
	}
	return nil
}

// hearConnections handles the notice of a rank that connects, and reports whether it is new and valid. c.mu is
// held.
func (c *comm) hearConnections(n *notice) bool {
	if n.Rank < 0 || n.Rank >= c.n || n.Rank == c.rank || len(n.Connections) > 2*c.n+2 || n.Intent != nil && !n.Intent.Op.valid(c.n) {
		return false
	}
	if !c.addEnds(n.Rank, n.Connections) {
		return false
	}
	if n.Intent != nil {
		c.theirs[n.Rank] = *n.Intent
		c.compare(n.Rank, *n.Intent)
	}
	return true
}
