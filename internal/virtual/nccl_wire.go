package virtual

import (
	"crypto/subtle"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/sameuser"
)

// Messages that are rare are JSON behind their length; what travels with each
// operation is in nccl_agree.go.

// greetTimeout is how long a new connection may take to say who it is.
const greetTimeout = 10 * time.Second

const (
	// longestMessage is enough for a table of thousands of ranks.
	longestMessage = 4 << 20
	// longestHello bounds what a connection says before its token is known.
	longestHello = 64 << 10
	// mostGreeting bounds the connections that have not shown the token. The oldest has to
	// go when one more comes: ranks say who they are at once.
	mostGreeting = 256
)

// A hello opens each connection.
type hello struct {
	Token token
	Use   string // join, control or data
	Rank  int    // of the sender
	Join  *joiner
}

// A joiner is a rank on its way into a communicator.
type joiner struct {
	Meeting    string // which of the meetings at this address
	Ranks      int    // how many it expects
	Rank       int
	Color, Key int
	Member     member
	Note       string // for all who meet
}

// A member is what ranks know of each other.
type member struct {
	Address string
	UUID    string
	BusID   string
}

// A verdict ends a meeting: the members of the joiner's communicator and its
// rank among them, or why there is none.
type verdict struct {
	Result  ncclapi.Result
	Text    string
	Rank    int
	Members []member
	Note    string // of the joiners that had one, which must be the same
}

// A notice tells a neighbour what became of a rank.
type notice struct {
	Kind   string
	Rank   int  // that said bye
	Joined bool // the sender knows that all ranks are connected
	failure
}

// The kinds of notices.
const (
	noticeConnected = "connected" // the sender and the ranks before it are connected
	noticeJoined    = "joined"    // all ranks are connected
	noticeBye       = "bye"
	noticeFailure   = "failure"
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

// greet dials an address and says who is there.
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

// An acceptor listens for ranks. Connections that do not show the token are
// dropped and harm nobody.
type acceptor struct {
	ln     net.Listener
	token  token
	handle func(net.Conn, *hello)

	mu       sync.Mutex
	closed   bool
	greeting []net.Conn // by age
	wg       sync.WaitGroup
}

func newAcceptor(ln net.Listener, t token, handle func(net.Conn, *hello)) *acceptor {
	a := &acceptor{ln: ln, token: t, handle: handle}
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
			time.Sleep(time.Millisecond) // out of descriptors, most likely
			continue
		}
		if u, ok := conn.(*net.UnixConn); ok && sameuser.Check(u) != nil {
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

// close ends the acceptor and waits for its goroutines.
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
