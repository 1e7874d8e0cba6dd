package job

import (
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"
)

// A wire is one direction of a simulated TCP connection. It delivers segments in order, after a
// latency. A lost segment arrives after the time in which TCP repeats it, and those behind it wait.
type wire struct {
	latency time.Duration
	loss    float64

	mu       sync.Mutex
	rnd      *rand.Rand
	segments []segment
	bytes    int
	last     time.Time // of the last arrival
	closed   bool      // by the sender
	refused  bool      // by the receiver
	deadline time.Time
	changed  chan struct{} // closed at each change
}

type segment struct {
	at time.Time
	b  []byte
}

const (
	segmentBytes = 1460
	windowBytes  = 256 << 10 // what the sender may send before the receiver has read it
	repeatTime   = 200 * time.Millisecond
)

func (w *wire) change() {
	close(w.changed)
	w.changed = make(chan struct{})
}

// sleep waits for a change, or until at.
func (w *wire) sleep(at time.Time) {
	changed := w.changed
	w.mu.Unlock()
	defer w.mu.Lock()
	if at.IsZero() {
		<-changed
		return
	}
	t := time.NewTimer(time.Until(at))
	defer t.Stop()
	select {
	case <-changed:
	case <-t.C:
	}
}

func (w *wire) write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.bytes > 0 && w.bytes+len(b) > windowBytes && !w.closed && !w.refused {
		w.sleep(time.Time{})
	}
	if w.closed || w.refused {
		return 0, net.ErrClosed
	}
	at := time.Now().Add(w.latency)
	if lost := 1 - math.Pow(1-w.loss, float64((len(b)+segmentBytes-1)/segmentBytes)); w.rnd.Float64() < lost {
		repeat := repeatTime // TCP repeats several lost segments at once
		for at = at.Add(repeat); w.rnd.Float64() < w.loss; at = at.Add(repeat) {
			repeat *= 2
		}
	}
	if at.Before(w.last) {
		at = w.last
	}
	w.last = at
	w.segments = append(w.segments, segment{at, append([]byte(nil), b...)})
	w.bytes += len(b)
	w.change()
	return len(b), nil
}

func (w *wire) read(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		now := time.Now()
		switch {
		case w.refused:
			return 0, net.ErrClosed
		case !w.deadline.IsZero() && !now.Before(w.deadline):
			return 0, os.ErrDeadlineExceeded
		case len(w.segments) > 0 && !now.Before(w.segments[0].at):
			s := &w.segments[0]
			n := copy(b, s.b)
			if s.b = s.b[n:]; len(s.b) == 0 {
				w.segments = w.segments[1:]
			}
			w.bytes -= n
			w.change()
			return n, nil
		case len(w.segments) == 0 && w.closed:
			return 0, io.EOF
		}
		next := w.deadline
		if len(w.segments) > 0 && (next.IsZero() || w.segments[0].at.Before(next)) {
			next = w.segments[0].at
		}
		w.sleep(next)
	}
}

// A wireConn is one end of a simulated connection.
type wireConn struct{ in, out *wire }

// newWires returns the ends of a connection.
func newWires(seed uint64, latency time.Duration, loss float64) (a, b *wireConn) {
	there, back := &wire{latency: latency, loss: loss, changed: make(chan struct{})}, &wire{latency: latency, loss: loss, changed: make(chan struct{})}
	there.rnd, back.rnd = rand.New(rand.NewPCG(seed, 1)), rand.New(rand.NewPCG(seed, 2))
	return &wireConn{back, there}, &wireConn{there, back}
}

func (c *wireConn) Read(b []byte) (int, error) { return c.in.read(b) }

func (c *wireConn) Write(b []byte) (int, error) { return c.out.write(b) }

func (c *wireConn) LocalAddr() net.Addr { return &net.TCPAddr{} }

func (c *wireConn) RemoteAddr() net.Addr { return &net.TCPAddr{} }

func (c *wireConn) SetWriteDeadline(t time.Time) error { return nil } // links close if they are too slow

func (c *wireConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

func (c *wireConn) SetReadDeadline(t time.Time) error {
	c.in.mu.Lock()
	defer c.in.mu.Unlock()
	c.in.deadline = t
	c.in.change()
	return nil
}

func (c *wireConn) CloseWrite() error {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.closed = true
	c.out.change()
	return nil
}

func (c *wireConn) Close() error {
	c.in.mu.Lock()
	c.in.refused = true
	c.in.change()
	c.in.mu.Unlock()
	return c.CloseWrite()
}

// A wireListener accepts simulated connections.
type wireListener struct {
	conns chan net.Conn
	over  chan struct{}
	once  sync.Once
}

func newWireListener() *wireListener {
	return &wireListener{conns: make(chan net.Conn), over: make(chan struct{})}
}

func (l *wireListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.over:
		return nil, net.ErrClosed
	}
}

func (l *wireListener) Close() error { l.once.Do(func() { close(l.over) }); return nil }

func (l *wireListener) Addr() net.Addr { return &net.TCPAddr{} }
