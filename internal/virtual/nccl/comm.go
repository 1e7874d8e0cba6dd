package nccl

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/sanitizer"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// graceForNotice is the time to wait after a broken connection for a notice that
// names the failed rank.
const graceForNotice = 2 * time.Second

// A failure is the asynchronous error of a communicator.
type failure struct {
	Result ncclapi.Result
	Text   string
}

// A comm is one rank of a communicator.
//
// Each rank has control connections to the next and the previous rank. Notices go
// around this ring. Data uses links, one for each direction between two
// ranks, created at their first use.
type comm struct {
	lib        *lib
	handle     ncclapi.Comm
	dev        *machine.Device
	token      token
	rank, n    int
	members    []member
	door       *acceptor
	localRanks *localRanks // guarded by the lock of the machine

	stop   chan struct{} // closed when running operations must stop
	failed chan struct{} // closed when failure is set
	wg     sync.WaitGroup

	mu         sync.Mutex
	closing    bool // this rank is closing: broken connections are not failures
	aborted    bool
	stopped    bool
	final      bool // CommFinalize was called
	finalizing bool // and has not returned
	revoked    bool
	suspended  bool
	failure    *failure
	control    map[int][]*controlConn // connections to the neighbours
	left       chan struct{}          // closed when the previous rank is connected
	counted    chan struct{}          // closed when the ranks before this one are connected
	joined     chan struct{}          // closed when all ranks are known to be connected
	out        map[int]*link
	in         map[int]*link
	arrivals   map[int]chan struct{}
	meetings   map[string]*meeting
	departed   map[int]chan struct{} // closed when the rank has left regularly
	sentTo     map[int]bool          // whether a rank that has left had sent data to this one
	children   uint64                // number of communicators created from this one
	ends       map[end]bool          // the connections that ranks have issued

	collectives uint64              // number of collectives issued
	intents     [keptIntents]intent // the last ones, by number
	connecting  *intent             // the collective that waits for connections, or nil
	theirs      map[int]intent      // by rank: the collective for which it connected last

	running int // launches that are enqueued and not done
	idle    *sync.Cond

	last   <-chan struct{} // closed when the last launch is done; guarded by the lock of the machine
	freed  bool            // freed for later launches; guarded by the lock of the machine
	before sanitizer.Stamp // the last launch that started; guarded by the lock of the machine
	issued uint64          // number of operations; guarded by the lock of the machine
	graphs int             // number of uses by live graphs; guarded by the lock of the machine

	connected map[connection]bool // guarded by the lock of the machine

	name   string
	shared int       // the other communicators of this device that share another device with it; guarded by the lock of the machine
	outbox []*notice // of orders; guarded by orders.mu

	signals   map[signalKey]*signals // guarded by the lock of the machine
	signalled chan struct{}          // closed at the next signal; guarded by the lock of the machine

	redops    map[ncclapi.RedOp]scaledSum
	redopBits ncclapi.RedOp // mixed into the numbers of redops
	regs      map[ncclapi.RegID]bool
	windows   map[ncclapi.Window]window
	opened    uint64 // number of windows
}

// A controlConn is a control connection.
type controlConn struct {
	conn net.Conn
	mu   sync.Mutex
}

func (c *controlConn) send(n *notice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_ = c.conn.SetWriteDeadline(time.Now().Add(time.Second))
	_ = writeMessage(c.conn, n)
}

// newComm creates this rank of a communicator that it is about to join.
func (l *lib) newComm(dev *machine.Device, t token) (*comm, member, error) {
	ln, address, err := l.listen()
	if err != nil {
		return nil, member{}, err
	}
	c := &comm{
		lib: l, dev: dev, token: t,
		stop: make(chan struct{}), failed: make(chan struct{}), left: make(chan struct{}),
		counted: make(chan struct{}), joined: make(chan struct{}),
		control: map[int][]*controlConn{}, out: map[int]*link{}, in: map[int]*link{},
		arrivals: map[int]chan struct{}{}, meetings: map[string]*meeting{}, departed: map[int]chan struct{}{}, sentTo: map[int]bool{},
		ends: map[end]bool{}, connected: map[connection]bool{}, theirs: map[int]intent{},
		signals: map[signalKey]*signals{}, signalled: make(chan struct{}),
		redopBits: ncclapi.RedOp(rand.Int32()), redops: map[ncclapi.RedOp]scaledSum{}, regs: map[ncclapi.RegID]bool{}, windows: map[ncclapi.Window]window{},
	}
	c.idle = sync.NewCond(&c.mu)
	c.door = newAcceptor(ln, t, c.welcome, func(err error) {
		c.fail(&failure{ncclapi.SystemError, fmt.Sprintf("cannot accept a connection: %v", err)})
	})
	return c, member{Address: address, UUID: fmt.Sprintf("%x", dev.UUID()), BusID: dev.BusID(), Host: ncclapi.HostID(), Process: l.process}, nil
}

// welcome accepts a connection from another rank.
func (c *comm) welcome(conn net.Conn, h *hello) {
	switch h.Use {
	case "control":
		c.attend(h.Rank, conn)
		c.mu.Lock()
		closeOnce(c.left)
		c.mu.Unlock()
	case "data":
		c.arrive(h.Rank, conn)
	case "join":
		if h.Join == nil {
			_ = conn.Close()
			return
		}
		if g := c.host(h.Join.Meeting); g != nil {
			g.admit(conn, h.Join)
		} else {
			_ = conn.Close()
		}
	default:
		_ = conn.Close()
	}
}

// host returns the meeting with the given name, hosted by this rank.
// It returns nil if this rank is closing, because nobody would end the meeting any more.
func (c *comm) host(name string) *meeting {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return nil
	}
	g := c.meetings[name]
	if g == nil {
		g = newMeeting()
		c.meetings[name] = g
	}
	return g
}

// attend reads notices from a neighbour until its connection closes.
func (c *comm) attend(rank int, conn net.Conn) *controlConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	cc := &controlConn{conn: conn}
	if c.closing {
		_ = conn.Close()
		return cc
	}
	c.control[rank] = append(c.control[rank], cc)
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		for {
			var n notice
			if err := readMessage(conn, &n, longestMessage); err != nil {
				c.vanished(rank)
				return
			}
			c.hear(cc, &n)
		}
	}()
	return cc
}

// hear handles a notice, and forwards it if it is new.
func (c *comm) hear(from *controlConn, n *notice) {
	c.mu.Lock()
	defer c.mu.Unlock()
	news := n.Joined && closeOnce(c.joined)
	switch n.Kind {
	case noticeConnected:
		closeOnce(c.counted)
	case noticeJoined:
		if news {
			c.tell(n, from)
		}
	case noticeFailure:
		c.failLocked(&n.failure, from)
	case noticeBye:
		c.sentTo[n.Rank] = slices.Contains(n.Links, c.rank)
		if closeOnce(c.departure(n.Rank)) {
			c.tell(n, from)
			c.idle.Broadcast()
		}
	case noticeOrder:
		if c.hearOrder(n) {
			c.tell(n, from)
		}
	case noticeConnects:
		if c.hearConnections(n) {
			c.tell(n, from)
		}
	}
}

// departure returns a channel that closes when the rank leaves regularly. c.mu is held.
func (c *comm) departure(rank int) chan struct{} { return signalFor(c.departed, rank) }

func (c *comm) hasLeft(rank int) bool { return isClosed(c.departure(rank)) }

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// closeOnce closes a channel and reports whether it was open. The caller holds the lock of the channel.
func closeOnce(ch chan struct{}) bool {
	if isClosed(ch) {
		return false
	}
	close(ch)
	return true
}

func signalFor(m map[int]chan struct{}, rank int) chan struct{} {
	ch := m[rank]
	if ch == nil {
		ch = make(chan struct{})
		m[rank] = ch
	}
	return ch
}

// vanished handles the end of a neighbour's connection.
func (c *comm) vanished(rank int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closing && !c.hasLeft(rank) {
		c.failLocked(&failure{ncclapi.RemoteError, fmt.Sprintf("rank %d was lost: its connection closed unexpectedly", rank)}, nil)
	}
}

// fail sets the communicator's asynchronous error, unless it has one, and
// notifies all ranks.
func (c *comm) fail(f *failure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failLocked(f, nil)
}

func (c *comm) failLocked(f *failure, from *controlConn) {
	if c.closing || c.failure != nil {
		return
	}
	c.setFailure(f)
	c.tell(&notice{Kind: noticeFailure, failure: *f}, from)
	// Operations keep waiting for a lost rank until the communicator is aborted,
	// like NCCL's kernels. After a misuse they stop immediately.
	if f.Result == ncclapi.InvalidUsage {
		c.halt()
	}
}

// setFailure records why the communicator has failed, and wakes the operations
// that wait in it. c.mu is held.
func (c *comm) setFailure(f *failure) {
	c.failure = f
	close(c.failed)
	c.idle.Broadcast()
	c.lib.setError(f.Text)
}

// tell sends a notice to all neighbours except but. c.mu is held.
func (c *comm) tell(n *notice, but *controlConn) {
	n.Joined = isClosed(c.joined)
	for _, list := range c.control {
		for _, cc := range list {
			if cc != but {
				cc.send(n)
			}
		}
	}
}

// halt stops running operations, also those that wait for another rank on a
// link. c.mu is held.
func (c *comm) halt() {
	if c.stopped {
		return
	}
	c.stopped = true
	close(c.stop)
	c.idle.Broadcast()
	for _, links := range []map[int]*link{c.out, c.in} {
		for _, k := range links {
			_ = k.conn.SetDeadline(time.Unix(1, 0))
		}
	}
}

// state returns the asynchronous error, or nil.
func (c *comm) state() *failure {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failure
}

// close removes the rank from the communicator. With abort it stops running
// operations and reports the loss of this rank to the others; otherwise it first
// waits until enqueued operations have run.
func (c *comm) close(abort bool) {
	c.mu.Lock()
	for !abort && c.running > 0 && c.failure == nil {
		c.idle.Wait()
	}
	if c.closing {
		c.mu.Unlock()
		return
	}
	if abort || c.failure != nil {
		c.aborted = true
		c.tell(&notice{Kind: noticeFailure, failure: failure{ncclapi.RemoteError, fmt.Sprintf("rank %d aborted", c.rank)}}, nil)
	} else {
		c.tell(&notice{Kind: noticeBye, Rank: c.rank, Links: slices.Sorted(maps.Keys(c.out))}, nil)
	}
	c.closing = true
	c.halt()
	for _, list := range c.control {
		for _, cc := range list {
			_ = cc.conn.Close()
		}
	}
	for _, g := range c.meetings {
		g.close()
	}
	c.mu.Unlock()
	c.door.close()
	c.wg.Wait()
	c.closeLinks()
}

func (c *comm) closeLinks() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, links := range []map[int]*link{c.out, c.in} {
		for _, k := range links {
			_ = k.conn.Close()
		}
	}
}

// localRanks is shared by the ranks of a communicator on one machine. It has the clocks
// of the points where their operations began, by rank.
type localRanks struct {
	refs  int
	began map[int]sanitizer.Clock
}

// enterLocalRanks and leaveLocalRanks require the lock of the machine.
func (c *comm) enterLocalRanks() {
	q := c.lib.localRanks[c.token]
	if q == nil {
		q = &localRanks{began: map[int]sanitizer.Clock{}}
		c.lib.localRanks[c.token] = q
	}
	q.refs++
	c.localRanks = q
	c.enterOrders()
}

func (c *comm) leaveLocalRanks() {
	c.leaveOrders()
	if c.localRanks.refs--; c.localRanks.refs == 0 {
		delete(c.lib.localRanks, c.token)
	}
}
