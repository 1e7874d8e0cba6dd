package nccl

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// InProcess is the Config.Network of ranks that are all in this process. They are connected by memory, so that tests
// can run them in virtual time: the bubbles of testing/synctest do not know what a socket waits for.
const InProcess = "process"

// doors are the listeners of ranks in this process, by address.
var doors sync.Map

// A door accepts connections of this process.
type door struct {
	name   address
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

type address string

func (a address) Network() string { return InProcess }
func (a address) String() string  { return string(a) }

func newDoor() *door {
	d := &door{name: address(randomToken().String()), conns: make(chan net.Conn), closed: make(chan struct{})}
	doors.Store(d.name.String(), d)
	return d
}

func (d *door) Accept() (net.Conn, error) {
	select {
	case conn := <-d.conns:
		return conn, nil
	case <-d.closed:
		return nil, net.ErrClosed
	}
}

func (d *door) Addr() net.Addr { return d.name }

func (d *door) Close() error {
	d.once.Do(func() {
		doors.Delete(d.name.String())
		close(d.closed)
	})
	return nil
}

// enter connects to the door at an address.
func enter(at string) (net.Conn, error) {
	d, there := doors.Load(at)
	if !there {
		return nil, syscall.ECONNREFUSED
	}
	here, other := newPipe()
	select {
	case d.(*door).conns <- other:
		return here, nil
	case <-d.(*door).closed:
		return nil, syscall.ECONNREFUSED
	}
}

// A pipe is one end of a connection in memory. Unlike net.Pipe it keeps what is written until it is read, as a socket
// does: a rank writes while it holds its lock.
type pipe struct{ in, out *flow }

func newPipe() (a, b *pipe) {
	x, y := newFlow(), newFlow()
	return &pipe{x, y}, &pipe{y, x}
}

func (p *pipe) Read(b []byte) (int, error)  { return p.in.read(b) }
func (p *pipe) Write(b []byte) (int, error) { return p.out.write(b) }
func (p *pipe) LocalAddr() net.Addr         { return address("") }
func (p *pipe) RemoteAddr() net.Addr        { return address("") }

func (p *pipe) Close() error {
	p.in.close()
	p.out.close()
	return nil
}

func (p *pipe) SetDeadline(t time.Time) error {
	return errors.Join(p.SetReadDeadline(t), p.SetWriteDeadline(t))
}

func (p *pipe) SetReadDeadline(t time.Time) error {
	p.in.limit(&p.in.reads, t)
	return nil
}

func (p *pipe) SetWriteDeadline(t time.Time) error {
	p.out.limit(&p.out.writes, t)
	return nil
}

// A flow is one direction of a pipe.
type flow struct {
	mu            sync.Mutex
	changed       *sync.Cond
	data          []byte
	closed        bool
	reads, writes deadline
}

type deadline struct {
	passed bool
	timer  *time.Timer
}

func newFlow() *flow {
	f := &flow{}
	f.changed = sync.NewCond(&f.mu)
	return f
}

func (f *flow) read(b []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(f.data) == 0 {
		switch {
		case f.closed:
			return 0, io.EOF
		case f.reads.passed:
			return 0, os.ErrDeadlineExceeded
		}
		f.changed.Wait()
	}
	n := copy(b, f.data)
	if f.data = f.data[n:]; len(f.data) == 0 {
		f.data = nil
	}
	f.changed.Broadcast()
	return n, nil
}

func (f *flow) write(b []byte) (n int, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for len(b) > 0 {
		switch room := socketBuffer - len(f.data); {
		case f.closed:
			return n, syscall.EPIPE
		case f.writes.passed:
			return n, os.ErrDeadlineExceeded
		case room == 0:
			f.changed.Wait()
		default:
			k := min(room, len(b))
			f.data = append(f.data, b[:k]...)
			n, b = n+k, b[k:]
			f.changed.Broadcast()
		}
	}
	return n, nil
}

func (f *flow) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	f.changed.Broadcast()
}

// limit sets a deadline of the flow; the zero time is none.
func (f *flow) limit(d *deadline, t time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
	}
	d.passed = false
	if t.IsZero() {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(time.Until(t), func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		if d.timer == timer { // not another deadline since
			d.passed = true
			f.changed.Broadcast()
		}
	})
	d.timer = timer
}
