package nccl

import (
	"bufio"
	"crypto/subtle"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/safe"
)

// errStopped ends an operation whose communicator was aborted or failed.
var errStopped = errors.New("the communicator was stopped")

// A link carries the data of one direction between two ranks. Operations run one
// at a time and use a link in the same order at both ends, so messages need no
// address.
type link struct {
	c    *comm
	peer int
	conn net.Conn
	r    *bufio.Reader
}

const (
	linkBuffer = 32 << 10
	// socketBuffer lets both ends run concurrently. The system may grant less,
	// which only costs time.
	socketBuffer = 1 << 20
)

func (c *comm) newLink(peer int, conn net.Conn) *link {
	if s, ok := conn.(interface {
		SetReadBuffer(int) error
		SetWriteBuffer(int) error
	}); ok {
		_, _ = s.SetReadBuffer(socketBuffer), s.SetWriteBuffer(socketBuffer)
	}
	return &link{c: c, peer: peer, conn: conn, r: bufio.NewReaderSize(conn, linkBuffer)}
}

// to returns the link to a peer and creates it at its first use.
func (c *comm) to(peer int) (*link, error) {
	c.mu.Lock()
	k, address := c.out[peer], c.members[peer].Address
	c.mu.Unlock()
	if k != nil {
		return k, nil
	}
	conn, err := greet(address, &hello{Token: c.token, Use: "data", Rank: c.rank})
	if errors.Is(err, syscall.EMFILE) {
		c.fail(&failure{ncclapi.SystemError, fmt.Sprintf("cannot connect to rank %d: %v", peer, err)})
		<-c.stop
		return nil, errStopped
	}
	if err != nil {
		return nil, c.broken(peer)
	}
	k = c.newLink(peer, conn)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		_ = conn.Close()
		return nil, errStopped
	}
	c.out[peer] = k
	return k, nil
}

// from returns the link from a peer once the peer has created it.
func (c *comm) from(peer int) (*link, error) {
	c.mu.Lock()
	k, arrival, departure := c.in[peer], c.arrival(peer), c.departure(peer)
	c.mu.Unlock()
	if k != nil {
		return k, nil
	}
	select {
	case <-arrival:
	case <-c.stop:
		return nil, errStopped
	case <-departure:
		if !c.hasSent(peer) {
			return nil, c.broken(peer)
		}
		select {
		case <-arrival:
		case <-c.stop:
			return nil, errStopped
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.in[peer], nil
}

// hasSent reports whether a peer that has left had created a link to this rank.
func (c *comm) hasSent(peer int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sentTo[peer]
}

// arrival returns a channel that closes when the link from the peer exists. c.mu is held.
func (c *comm) arrival(peer int) chan struct{} { return signalFor(c.arrivals, peer) }

func (c *comm) arrive(peer int, conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped || c.in[peer] != nil {
		_ = conn.Close()
		return
	}
	c.in[peer] = c.newLink(peer, conn)
	close(c.arrival(peer))
}

// broken handles a failed link. It returns when the operation must end; for a
// lost rank this is when the communicator is aborted.
func (c *comm) broken(peer int) error {
	c.mu.Lock()
	departure := c.departure(peer)
	c.mu.Unlock()
	timer := time.NewTimer(graceForNotice)
	defer timer.Stop()
	select {
	case <-c.stop:
		return errStopped
	case <-departure:
	case <-timer.C:
	}
	c.mu.Lock()
	text := fmt.Sprintf("rank %d was lost: its connection broke during an operation", peer)
	if c.hasLeft(peer) {
		text = fmt.Sprintf("rank %d destroyed its communicator while other ranks still wait for it", peer)
	}
	c.failLocked(&failure{ncclapi.RemoteError, text}, nil)
	c.mu.Unlock()
	<-c.stop
	return errStopped
}

// read reads large data directly from the connection, without a copy.
func (k *link) read(p []byte) error {
	from := io.Reader(k.r)
	if len(p) >= linkBuffer {
		n, _ := io.ReadFull(k.r, p[:min(len(p), k.r.Buffered())])
		p, from = p[n:], k.conn
	}
	if _, err := io.ReadFull(from, p); err != nil {
		return k.c.broken(k.peer)
	}
	return nil
}

func (k *link) write(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if _, err := k.conn.Write(p); err != nil {
		return k.c.broken(k.peer)
	}
	return nil
}

// A sender writes slices to a link in order. If the buffers of the connection may be too small for them, it writes in the
// background.
type sender struct {
	link  *link
	queue chan []byte   // to the background, or nil
	done  chan struct{} // closed when the background has ended
	err   error         // of the background until done is closed
}

// directBytes is what a sender writes at once. All ranks of a ring may do that before one of them reads.
const directBytes = 64 << 10

// newSender creates a sender for at most n slices, which are parts of total bytes that go around a ring at most twice.
func newSender(k *link, n, total int) *sender {
	s := &sender{link: k}
	if total <= directBytes {
		return s
	}
	s.queue, s.done = make(chan []byte, n), make(chan struct{})
	go func() {
		defer close(s.done)
		for p := range s.queue {
			s.write(p)
		}
	}()
	return s
}

func (s *sender) write(p []byte) {
	if s.err == nil {
		s.err = s.link.write(p)
	}
}

func (s *sender) send(p []byte) {
	if s.queue != nil {
		s.queue <- p
		return
	}
	s.write(p)
}

// finish waits for all writes and stops the sender.
func (s *sender) finish() error {
	if s.queue != nil {
		close(s.queue)
		<-s.done
	}
	return s.err
}

// Rare messages are JSON with a length prefix. The data of operations is in
// nccl_agree.go.

// greetTimeout limits the time for a new connection to authenticate.
const greetTimeout = 10 * time.Second

const (
	// longestMessage is enough for a table of thousands of ranks.
	longestMessage = 4 << 20
	// longestHello limits the first message of an unauthenticated connection.
	longestHello = 64 << 10
	// mostGreeting limits the number of unauthenticated connections. A new one
	// displaces the oldest: ranks authenticate immediately.
	mostGreeting = 256
)

// A hello is the first message of each connection.
type hello struct {
	Token token
	Use   string // join, control or data
	Rank  int    // of the sender
	Join  *joiner
}

// A joiner is a rank that joins a communicator.
type joiner struct {
	Meeting    string // which of the meetings at this address
	Ranks      int    // expected number of ranks
	Rank       int
	Color, Key int
	Member     member
	Note       string // for all members
}

// A member is the description of a rank for the other ranks.
type member struct {
	Address string
	UUID    string
	BusID   string
	Host    string // NCCL_HOSTID
	Process string // identifies the machine: ranks of one machine access each other's memory
}

// A verdict is the result of a meeting: the members of the joiner's communicator
// and its rank, or an error.
type verdict struct {
	Result  ncclapi.Result
	Text    string
	Rank    int
	Members []member
	Note    string // note of the joiners; all notes must be equal
}

// A notice informs a neighbour about an event.
type notice struct {
	Kind        string
	Rank        int          // rank that left or connects
	Links       []int        // the ranks that it has sent data to
	Connections []connection // that it issues,
	Intent      *intent      // and the collective that needs them, or nil
	Order       []position   // of the collectives that it has issued or begun
	Joined      bool         // the sender knows that all ranks are connected
	failure
}

// The kinds of notices.
const (
	noticeConnected = "connected" // the sender and the ranks before it are connected
	noticeJoined    = "joined"    // all ranks are connected
	noticeBye       = "bye"
	noticeConnects  = "connects"
	noticeFailure   = "failure"
	noticeOrder     = "order" // a rank whose device has several communicators has issued or begun collectives
)

func writeMessage(w io.Writer, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...))
	return err
}

func readMessage(r io.Reader, v any, limit uint32) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > limit {
		return errors.New("not a message")
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return err
	}
	return json.Unmarshal(body, v)
}

// greet dials an address and sends a hello.
func greet(address string, h *hello) (net.Conn, error) {
	conn, err := dial(address)
	if err != nil {
		return nil, err
	}
	if err := writeMessage(conn, h); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// An acceptor accepts connections from ranks. It drops connections without the
// token.
type acceptor struct {
	ln     net.Listener
	token  token
	handle func(net.Conn, *hello)
	failed func(error) // called when the process has no descriptor for a connection; may be nil

	mu       sync.Mutex
	closed   bool
	greeting []net.Conn // oldest first
	wg       sync.WaitGroup
}

func newAcceptor(ln net.Listener, t token, handle func(net.Conn, *hello), failed func(error)) *acceptor {
	a := &acceptor{ln: ln, token: t, handle: handle, failed: failed}
	a.wg.Add(1)
	go a.loop()
	return a
}

func (a *acceptor) loop() {
	defer a.wg.Done()
	for {
		conn, err := a.ln.Accept()
		if err != nil {
			if a.isClosed() || errors.Is(err, net.ErrClosed) {
				return
			}
			if errors.Is(err, syscall.EMFILE) && a.failed != nil {
				a.failed(withCure(err))
			}
			time.Sleep(time.Millisecond) // probably out of file descriptors
			continue
		}
		if u, ok := conn.(*net.UnixConn); ok && safe.CheckUser(u) != nil {
			_ = conn.Close()
			continue
		}
		a.mu.Lock()
		if a.closed {
			_ = conn.Close()
		} else {
			if len(a.greeting) == mostGreeting {
				_ = a.greeting[0].Close()
				a.greeting = a.greeting[1:]
			}
			a.greeting = append(a.greeting, conn)
			a.wg.Add(1)
			go a.welcome(conn)
		}
		a.mu.Unlock()
	}
}

func (a *acceptor) isClosed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

func (a *acceptor) welcome(conn net.Conn) {
	defer a.wg.Done()
	var h hello
	_ = conn.SetDeadline(time.Now().Add(greetTimeout))
	err := readMessage(conn, &h, longestHello)
	_ = conn.SetDeadline(time.Time{})
	a.mu.Lock()
	a.greeting = slices.DeleteFunc(a.greeting, func(c net.Conn) bool { return c == conn })
	drop := a.closed || err != nil || subtle.ConstantTimeCompare(h.Token[:], a.token[:]) != 1
	a.mu.Unlock()
	if drop {
		_ = conn.Close()
		return
	}
	a.handle(conn, &h)
}

// close stops the acceptor and waits for its goroutines.
func (a *acceptor) close() {
	a.mu.Lock()
	a.closed = true
	_ = a.ln.Close()
	for _, conn := range a.greeting {
		_ = conn.Close()
	}
	a.mu.Unlock()
	a.wg.Wait()
}
