package cluster

import (
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// A relay is a network between members and a coordinator: it forwards connections, and
// resets or freezes them.
type relay struct {
	ln net.Listener
	to string
	wg sync.WaitGroup
	// down forwards what the coordinator sends on a connection; nil means copy.
	down func(to, from net.Conn)

	mu     sync.Mutex
	frozen bool // new connections get no answer
	conns  map[net.Conn]bool
	held   []*gate
}

// A gate holds the bytes of a connection.
type gate struct {
	mu   sync.Mutex
	shut chan struct{} // nil: open
}

func newRelay(t *testing.T, to string) *relay { return newRelayWith(t, to, nil) }

func newRelayWith(t *testing.T, to string, down func(to, from net.Conn)) *relay {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{ln: ln, to: to, down: down, conns: map[net.Conn]bool{}}
	r.wg.Go(r.accept)
	t.Cleanup(func() {
		r.ln.Close()
		r.end()
		r.wg.Wait()
	})
	return r
}

func (r *relay) addr() string { return r.ln.Addr().String() }

func (r *relay) accept() {
	for {
		near, err := r.ln.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", r.to)
		if err != nil {
			_ = near.(*net.TCPConn).SetLinger(0)
			near.Close()
			continue
		}
		g := &gate{}
		r.mu.Lock()
		r.conns[near], r.conns[far] = true, true
		r.held = append(r.held, g)
		if r.frozen {
			g.shut = make(chan struct{})
		}
		r.mu.Unlock()
		r.wg.Go(func() {
			if r.down != nil {
				r.down(near, far)
				return
			}
			r.copy(near, far, g)
		})
		r.wg.Go(func() { r.copy(far, near, g) })
	}
}

// copy forwards one direction. An end is forwarded, too.
func (r *relay) copy(to, from net.Conn, g *gate) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		g.mu.Lock()
		shut := g.shut
		g.mu.Unlock()
		if shut != nil {
			<-shut
			return
		}
		if n > 0 {
			if _, werr := to.Write(buf[:n]); werr != nil {
				err = werr
			}
		}
		if err != nil {
			if err == io.EOF {
				_ = to.(*net.TCPConn).CloseWrite()
				return
			}
			to.Close()
			return
		}
	}
}

// freeze lets nothing through any more: not on the connections of now, even after thaw,
// as if TCP waited for longer and longer until it tries again; and not on new ones before thaw.
func (r *relay) freeze() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frozen = true
	for _, g := range r.held {
		g.mu.Lock()
		if g.shut == nil {
			g.shut = make(chan struct{})
		}
		g.mu.Unlock()
	}
}

// thaw lets new connections through.
func (r *relay) thaw() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frozen = false
}

// reset resets all connections at both ends.
func (r *relay) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		_ = c.(*net.TCPConn).SetLinger(0)
	}
	for c := range r.conns { // the close of one end makes copy close the other one
		c.Close()
	}
	clear(r.conns)
}

// end closes everything.
func (r *relay) end() {
	r.reset()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.held {
		g.mu.Lock()
		if g.shut != nil {
			close(g.shut)
		}
		g.mu.Unlock()
	}
	r.held = nil
}
