package virtual

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// graceForNotice is how long a broken connection waits to be explained by a
// notice, which names the rank that is at fault.
const graceForNotice = 200 * time.Millisecond

// A failure is the asynchronous error of a communicator.
type failure struct {
	Result ncclapi.Result
	Text   string
}

// A comm is one rank of a communicator.
//
// Each rank is joined to the next and the previous one by control connections,
// over which notices go around. Data goes over links, one for each direction
// between two ranks, made when first used.
type comm struct {
	lib     *ncclLib
	handle  ncclapi.Comm
	dev     *device
	token   token
	rank, n int
	members []member
	door    *acceptor
	clique  *clique // guarded by m.mu

	stop   chan struct{} // closed when running operations must end
	failed chan struct{} // closed once failure is set
	wg     sync.WaitGroup

	mu        sync.Mutex
	closing   bool // by this rank: what breaks now is not a failure
	aborted   bool
	stopped   bool
	final     bool // CommFinalize was called
	revoked   bool
	suspended bool
	failure   *failure
	control   map[int][]*controlConn // of the neighbours
	left      chan struct{}          // closed when the previous rank is connected
	counted   chan struct{}          // closed when the ranks before this one are connected
	joined    chan struct{}          // closed when all ranks are known to be connected
	out       map[int]*link
	in        map[int]*link
	arrivals  map[int]chan struct{}
	meetings  map[string]*meeting
	departed  map[int]chan struct{} // closed when the rank has said bye
	children  uint64                // communicators made from this one

	running int // launches enqueued and not done
	idle    *sync.Cond

	last   <-chan struct{} // closed when the last launch is done; guarded by m.mu
	freed  bool            // for what is launched from now on; guarded by m.mu
	before stamp           // the last launch to begin; guarded by m.mu
	issued uint64          // operations so far; guarded by m.mu
	graphs int             // how often live graphs use it; guarded by m.mu
	linked [2]bool         // collectives, transfers: whether there was one before; guarded by m.mu

	redops  map[ncclapi.RedOp]scaledSum
	regs    map[ncclapi.RegID]bool
	windows map[ncclapi.Window]cudadrv.DevicePtr
	opened  uint64 // windows so far
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

// newComm makes the rank's end of a communicator that it is about to join.
func (l *ncclLib) newComm(dev *device, t token) (*comm, member, error) {
	ln, address, err := l.listen()
	if err != nil {
		return nil, member{}, err
	}
	c := &comm{
		lib: l, dev: dev, token: t,
		stop: make(chan struct{}), failed: make(chan struct{}), left: make(chan struct{}),
		counted: make(chan struct{}), joined: make(chan struct{}),
		control: map[int][]*controlConn{}, out: map[int]*link{}, in: map[int]*link{},
		arrivals: map[int]chan struct{}{}, meetings: map[string]*meeting{}, departed: map[int]chan struct{}{},
		redops: map[ncclapi.RedOp]scaledSum{}, regs: map[ncclapi.RegID]bool{}, windows: map[ncclapi.Window]cudadrv.DevicePtr{},
	}
	c.idle = sync.NewCond(&c.mu)
	c.door = newAcceptor(ln, t, c.welcome)
	return c, member{Address: address, UUID: fmt.Sprintf("%x", dev.uuid), BusID: dev.busID()}, nil
}

// welcome takes a connection from another rank.
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
		c.host(h.Join.Meeting).admit(conn, h.Join)
	default:
		_ = conn.Close()
	}
}

// host returns the meeting of the name, which takes place at this rank.
func (c *comm) host(name string) *meeting {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.meetings[name]
	if g == nil {
		g = newMeeting()
		c.meetings[name] = g
	}
	return g
}

// attend listens to a neighbour until its connection ends.
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

// hear takes a notice and passes it on if it is news.
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
		if closeOnce(c.departure(n.Rank)) {
			c.tell(n, from)
		}
	}
}

// departure is closed when the rank has said bye. c.mu is held.
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

// closeOnce closes a channel that a lock guards and reports whether it was open.
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

// vanished is told that a neighbour's connection ended.
func (c *comm) vanished(rank int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closing && !c.hasLeft(rank) {
		c.failLocked(&failure{ncclapi.RemoteError, fmt.Sprintf("rank %d was lost: its connection ended without a farewell", rank)}, nil)
	}
}

// fail makes f the communicator's asynchronous error, unless it has one, and
// lets all ranks know.
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
	// Operations go on waiting for a rank that was lost, as NCCL's kernels do,
	// until the communicator is aborted. A misuse ends them.
	if f.Result == ncclapi.InvalidUsage {
		c.halt()
	}
}

// setFailure is called with c.mu held.
func (c *comm) setFailure(f *failure) {
	c.failure = f
	close(c.failed)
	c.idle.Broadcast()
	c.lib.setError(f.Text)
}

// tell sends a notice to the neighbours but one. c.mu is held.
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

// halt ends running operations. c.mu is held.
func (c *comm) halt() {
	if c.stopped {
		return
	}
	c.stopped = true
	close(c.stop)
	for _, links := range []map[int]*link{c.out, c.in} {
		for _, k := range links {
			_ = k.conn.SetDeadline(time.Unix(1, 0))
		}
	}
}

// state returns the asynchronous error, if any.
func (c *comm) state() *failure {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failure
}

// close takes the rank out of the communicator. Aborting ends what runs and
// tells the others that they have lost a rank; otherwise the rank first does
// its part in what was enqueued.
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
		c.tell(&notice{Kind: noticeBye, Rank: c.rank}, nil)
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

// A clique is what the ranks of a communicator on one machine share: the points
// of their streams at which their operations began.
type clique struct {
	refs int
	seen clock
}

// enterClique and leaveClique are called with m.mu held.
func (c *comm) enterClique() {
	q := c.lib.cliques[c.token]
	if q == nil {
		q = &clique{}
		c.lib.cliques[c.token] = q
	}
	q.refs++
	c.clique = q
}

func (c *comm) leaveClique() {
	if c.clique.refs--; c.clique.refs == 0 {
		delete(c.lib.cliques, c.token)
	}
}
