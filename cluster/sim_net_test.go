package cluster

import (
	"cmp"
	"context"
	"crypto/cipher"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/job"
)

// A simNet is a simulated network of hosts and processes, for jobs of the real code in a bubble of testing/synctest. All
// of it is guarded by one lock. Each segment arrives at its own nanosecond, which depends on the seed, the connection and the
// number of the segment only, so that the order of goroutines has no influence on it.
type simNet struct {
	seed    uint64
	latency time.Duration

	mu      sync.Mutex
	hosts   []*simHost
	names   map[string]string // addresses, by name
	paths   map[[2]*simHost]*simPath
	lastPID int
	dials   map[string]uint64 // connections so far, by both processes
	conns   []*simConn        // of different hosts
	slowest time.Duration     // the greatest delay of a path so far
}

// A simHost is a machine.
type simHost struct {
	net       *simNet
	name, ip  string
	frozen    int // the virtual machine is paused: its kernel, too
	down      bool
	procs     []*simProc
	listeners map[int]*simListener
	lastPort  int
}

// A simPath is one direction between two hosts. The counters are of the faults that are active.
type simPath struct {
	cut    int // packets are lost
	reject int // packets are lost, and the first one of a connection is answered: the host is unreachable
	forge  int // packets are answered with a reset, as if no process of the host had the port
	delay  time.Duration
	factor float64 // of the latency
}

// A simProc is a process, with goroutines of the bubble.
type simProc struct {
	host    *simHost
	pid     int
	name    string
	stopped int
	dead    bool
	died    chan struct{}
	wake    chan struct{} // closed when it goes on
	conns   map[*simConn]bool
	sys     *job.System
}

func newSimNet(seed uint64, latency time.Duration) *simNet {
	return &simNet{seed: seed, latency: latency, names: map[string]string{}, paths: map[[2]*simHost]*simPath{}, dials: map[string]uint64{}}
}

// mix returns a pseudo-random number of x (SplitMix64).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func hashOf(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return h
}

func (n *simNet) addHost(name string) *simHost {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := &simHost{net: n, name: name, ip: fmt.Sprintf("10.0.0.%d", len(n.hosts)+1), listeners: map[int]*simListener{}, lastPort: 40000}
	n.hosts = append(n.hosts, h)
	n.names["host-"+name] = h.ip
	return h
}

// path returns one direction between two hosts. The caller holds the lock.
func (n *simNet) path(from, to *simHost) *simPath {
	p := n.paths[[2]*simHost{from, to}]
	if p == nil {
		p = &simPath{factor: 0.5 + float64(mix(n.seed^hashOf(from.name+">"+to.name))%1000)/500}
		n.paths[[2]*simHost{from, to}] = p
	}
	return p
}

const localLatency = 20 * time.Microsecond

// delay returns the time of a segment on its way.
func (n *simNet) delay(from, to *simHost, draw uint64) time.Duration {
	d := localLatency
	if from != to {
		p := n.path(from, to)
		d = time.Duration(float64(n.latency)*p.factor) + p.delay
	}
	return d + time.Duration(draw%uint64(d/4+1000))
}

// passes reports whether packets arrive.
func (n *simNet) passes(from, to *simHost) bool {
	if to.down || to.frozen > 0 || from.down || from.frozen > 0 {
		return false
	}
	if from == to {
		return true
	}
	p := n.path(from, to)
	return p.cut == 0 && p.reject == 0
}

// start creates a process.
func (h *simHost) start(name string) *simProc {
	n := h.net
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lastPID++
	p := &simProc{host: h, pid: 1000 + n.lastPID, name: name, died: make(chan struct{}), wake: make(chan struct{}), conns: map[*simConn]bool{}}
	p.sys = &job.System{Dial: p.dial, Listen: p.listen, Lookup: p.lookup, Addrs: p.addrs, Suspended: h.isStopped, PID: p.pid, Run: p.run}
	h.procs = append(h.procs, p)
	return p
}

func (h *simHost) isStopped(pid int) bool {
	h.net.mu.Lock()
	defer h.net.mu.Unlock()
	for _, p := range h.procs {
		if p.pid == pid {
			return p.stopped > 0
		}
	}
	return false
}

// run returns while the process is not stopped, or dead.
func (p *simProc) run() {
	n := p.host.net
	for {
		n.mu.Lock()
		if !p.isPaused() {
			n.mu.Unlock()
			return
		}
		wake := p.wake
		n.mu.Unlock()
		<-wake
	}
}

// isPaused reports whether the process is stopped, or its host is. The caller holds the lock.
func (p *simProc) isPaused() bool { return !p.dead && (p.stopped > 0 || p.host.frozen > 0) }

func (p *simProc) isDead() bool {
	p.host.net.mu.Lock()
	defer p.host.net.mu.Unlock()
	return p.dead
}

// change changes the state of processes and wakes those that may go on.
func (n *simNet) change(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f()
	for _, h := range n.hosts {
		for _, p := range h.procs {
			if !p.isPaused() {
				close(p.wake)
				p.wake = make(chan struct{})
			}
		}
	}
}

// sleep waits, also while the process is stopped, and reports whether the process lives.
func (p *simProc) sleep(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-p.died:
	}
	p.run()
	return !p.isDead()
}

// kill ends a process. Its kernel closes its connections, unless the host has lost its power.
func (p *simProc) kill(power bool) {
	p.host.net.change(func() {
		if p.dead {
			return
		}
		p.dead = true
		close(p.died)
		for c := range p.conns {
			if power {
				c.vanish()
			} else {
				c.shut()
			}
		}
		for port, l := range p.host.listeners {
			if l.proc == p {
				delete(p.host.listeners, port)
				l.end()
			}
		}
	})
}

var errSimDead = errors.New("this process is dead")

func (p *simProc) addrs() ([]net.Addr, error) {
	return []net.Addr{&net.IPNet{IP: net.ParseIP(p.host.ip), Mask: net.CIDRMask(24, 32)}, &net.IPNet{IP: net.IPv4(127, 0, 0, 1), Mask: net.CIDRMask(8, 32)}}, nil
}

func (p *simProc) lookup(_ context.Context, name string) ([]net.IP, error) {
	p.host.net.mu.Lock()
	defer p.host.net.mu.Unlock()
	if at := p.host.net.names[name]; at != "" {
		return []net.IP{net.ParseIP(at)}, nil
	}
	return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
}

// find returns the host that has an address.
func (n *simNet) find(from *simHost, name string) *simHost {
	if ip := net.ParseIP(name); ip != nil && ip.IsLoopback() {
		return from
	}
	at := cmp.Or(n.names[name], name)
	for _, h := range n.hosts {
		if h.ip == at {
			return h
		}
	}
	return nil
}

func (p *simProc) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n := p.host.net
	p.run()
	ctx, cancel := context.WithTimeout(ctx, job.DialAttempt)
	defer cancel()
	name, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	number, _ := strconv.Atoi(port)
	for try := 0; ; try++ {
		n.mu.Lock()
		to := n.find(p.host, name)
		if p.dead {
			n.mu.Unlock()
			return nil, errSimDead
		}
		if to == nil {
			n.mu.Unlock()
			return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
		}
		key := fmt.Sprint(p.pid, ">", to.name, ":", number)
		n.dials[key]++
		draw := mix(n.seed ^ hashOf(key) ^ n.dials[key]<<32)
		there, back := n.delay(p.host, to, draw), n.delay(to, p.host, draw>>16)
		n.mu.Unlock()
		if !job.Sleep(ctx, there) {
			return nil, ctx.Err()
		}
		c, err := n.connect(p, to, number, draw)
		if c == nil && err == nil { // nobody has answered
			if !job.Sleep(ctx, time.Second<<try) {
				return nil, ctx.Err()
			}
			continue
		}
		if !job.Sleep(ctx, back) {
			if c != nil {
				c.Close()
			}
			return nil, ctx.Err()
		}
		p.run()
		if err != nil {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.ParseIP(to.ip), Port: number}, Err: os.NewSyscallError("connect", err)}
		}
		return c, nil
	}
}

// connect connects a process to a port. Without an answer, it returns nil.
func (n *simNet) connect(p *simProc, to *simHost, port int, draw uint64) (*simConn, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p.host != to && n.path(p.host, to).reject > 0 {
		return nil, syscall.EHOSTUNREACH
	}
	if !n.passes(p.host, to) || !n.passes(to, p.host) || p.host != to && n.path(to, p.host).forge > 0 {
		return nil, nil
	}
	if p.host != to && n.path(p.host, to).forge > 0 {
		return nil, syscall.ECONNREFUSED
	}
	l := to.listeners[port]
	if l == nil {
		return nil, syscall.ECONNREFUSED
	}
	p.host.lastPort++
	from, at := &net.TCPAddr{IP: net.ParseIP(p.host.ip), Port: p.host.lastPort}, &net.TCPAddr{IP: net.ParseIP(to.ip), Port: port}
	a := &simConn{net: n, proc: p, local: from, remote: at, changed: make(chan struct{}, 1), draw: draw}
	b := &simConn{net: n, proc: l.proc, local: at, remote: from, changed: make(chan struct{}, 1), draw: mix(draw)}
	a.other, b.other = b, a
	select {
	case l.conns <- b:
	default:
		return nil, nil
	}
	p.conns[a], l.proc.conns[b] = true, true
	if p.dead {
		a.shut()
	}
	if p.host != to {
		n.conns = append(n.conns, a, b)
	}
	return a, nil
}

// A simListener is a port of a process.
type simListener struct {
	proc  *simProc
	at    *net.TCPAddr
	conns chan *simConn
	over  chan struct{}
	once  sync.Once
}

func (p *simProc) listen(_, addr string) (net.Listener, error) {
	n := p.host.net
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	number, _ := strconv.Atoi(port)
	n.mu.Lock()
	defer n.mu.Unlock()
	if number == 0 {
		p.host.lastPort++
		number = p.host.lastPort
	}
	switch {
	case p.dead:
		return nil, errSimDead
	case p.host.listeners[number] != nil:
		return nil, syscall.EADDRINUSE
	}
	l := &simListener{proc: p, at: &net.TCPAddr{IP: net.ParseIP(p.host.ip), Port: number}, conns: make(chan *simConn, 128), over: make(chan struct{})}
	p.host.listeners[number] = l
	return l, nil
}

func (l *simListener) end() { l.once.Do(func() { close(l.over) }) }

func (l *simListener) Accept() (net.Conn, error) {
	select {
	case <-l.over:
		return nil, net.ErrClosed
	case c := <-l.conns:
		l.proc.run()
		return c, nil
	}
}

func (l *simListener) Close() error {
	n := l.proc.host.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if l.proc.host.listeners[l.at.Port] == l {
		delete(l.proc.host.listeners, l.at.Port)
	}
	l.end()
	for {
		select {
		case c := <-l.conns:
			c.shut()
		default:
			return nil
		}
	}
}

func (l *simListener) Addr() net.Addr { return l.at }

// A simConn is one end of a connection, and the direction from it to the other end.
type simConn struct {
	net           *simNet
	proc          *simProc
	other         *simConn
	local, remote *net.TCPAddr

	// Received:
	in       []byte
	fin      bool
	reset    bool
	deadline time.Time
	changed  chan struct{}
	closed   bool // by this process

	// Sent:
	queue   []simSegment
	draw    uint64
	last    time.Time
	timer   *time.Timer
	tries   int
	ended   bool // FIN is sent
	stalled int  // faults that lose its packets
}

type simSegment struct {
	at  time.Time
	b   []byte
	fin bool
	rst bool
}

func (c *simConn) signal() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

func (c *simConn) Read(b []byte) (int, error) {
	for {
		c.proc.run()
		c.net.mu.Lock()
		n, next, err := c.take(b)
		c.net.mu.Unlock()
		if n > 0 || err != nil {
			return n, err
		}
		if next.IsZero() {
			<-c.changed
			continue
		}
		t := time.NewTimer(time.Until(next))
		select {
		case <-c.changed:
		case <-t.C:
		}
		t.Stop()
	}
}

func (c *simConn) take(b []byte) (n int, next time.Time, err error) {
	switch {
	case c.closed || c.proc.dead:
		return 0, time.Time{}, net.ErrClosed
	case !c.deadline.IsZero() && !time.Now().Before(c.deadline):
		return 0, time.Time{}, os.ErrDeadlineExceeded
	case len(c.in) > 0:
		n = copy(b, c.in)
		if c.in = c.in[n:]; len(c.in) == 0 {
			c.in = nil
		}
		return n, time.Time{}, nil
	case c.reset:
		return 0, time.Time{}, syscall.ECONNRESET
	case c.fin:
		return 0, time.Time{}, io.EOF
	}
	return 0, c.deadline, nil
}

func (c *simConn) Write(b []byte) (int, error) {
	c.proc.run()
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	switch {
	case c.closed || c.ended || c.proc.dead:
		return 0, net.ErrClosed
	case c.reset:
		return 0, syscall.EPIPE
	}
	c.push(simSegment{b: append([]byte(nil), b...)})
	return len(b), nil
}

// push sends a segment. The caller holds the lock.
func (c *simConn) push(s simSegment) {
	c.draw = mix(c.draw)
	s.at = time.Now().Add(c.net.delay(c.proc.host, c.other.proc.host, c.draw))
	if !s.at.After(c.last) {
		s.at = c.last.Add(time.Nanosecond)
	}
	c.last = s.at
	c.queue = append(c.queue, s)
	if len(c.queue) == 1 {
		c.schedule(time.Until(s.at))
	}
}

func (c *simConn) schedule(d time.Duration) {
	if c.timer == nil {
		c.timer = time.AfterFunc(d, c.arrive)
		return
	}
	c.timer.Reset(d)
}

// arrive delivers the segments that are due. Lost ones are sent again at growing intervals.
func (c *simConn) arrive() {
	n := c.net
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	for len(c.queue) > 0 && !c.queue[0].at.After(now) {
		from, to := c.proc.host, c.other.proc.host
		rejected := from != to && n.path(from, to).forge > 0
		gone := c.other.closed || c.other.reset || c.other.proc.dead
		if lost := !n.passes(from, to) || c.stalled > 0; lost && c.queue[0].rst {
			c.queue = nil // it is not sent again
			return
		} else if lost || gone && !c.queue[0].rst && !n.passes(to, from) {
			c.schedule(200 * time.Millisecond << min(c.tries, 6))
			c.tries++
			return
		}
		c.tries = 0
		s := c.queue[0]
		c.queue = c.queue[1:]
		switch {
		case s.rst:
			c.other.reset, c.other.queue = true, nil
			c.other.signal()
		case rejected:
			c.queue, c.reset = nil, true
			c.signal()
			return
		case gone && !s.fin:
			c.other.refuse()
		case gone:
		case s.fin:
			c.other.fin = true
			c.other.signal()
		default:
			c.other.in = append(c.other.in, s.b...)
			c.other.signal()
		}
	}
	if len(c.queue) > 0 {
		c.schedule(time.Until(c.queue[0].at))
	}
}

// shut closes the connection. The caller holds the lock.
func (c *simConn) shut() {
	if c.closed {
		return
	}
	c.closed = true
	delete(c.proc.conns, c)
	if len(c.in) > 0 && !c.reset { // the kernel resets a connection with unread data
		c.refuse()
	} else if !c.ended && !c.reset {
		c.ended = true
		c.push(simSegment{fin: true})
	}
	c.signal()
}

// refuse answers data that no process will read with a reset, which does not overtake segments on their way. Segments that
// were lost are not sent again. The caller holds the lock.
func (c *simConn) refuse() {
	if c.tries > 0 {
		c.queue = nil
	}
	c.ended = true
	c.push(simSegment{rst: true})
}

// vanish ends the connection without a word. The caller holds the lock.
func (c *simConn) vanish() {
	c.closed, c.queue = true, nil
	c.signal()
}

func (c *simConn) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.shut()
	return nil
}

func (c *simConn) CloseWrite() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if !c.closed && !c.ended && !c.reset && !c.proc.dead {
		c.ended = true
		c.push(simSegment{fin: true})
	}
	return nil
}

func (c *simConn) LocalAddr() net.Addr { return c.local }

func (c *simConn) RemoteAddr() net.Addr { return c.remote }

func (c *simConn) SetWriteDeadline(t time.Time) error { return nil } // writes do not wait

func (c *simConn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

func (c *simConn) SetReadDeadline(t time.Time) error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	c.deadline = t
	c.signal()
	return nil
}

// Handshake exchanges the messages of the real handshake without keys.
func (c *simConn) Handshake(name string, by job.Credential, dialer bool) (*job.Link, error) {
	if err := c.SetDeadline(time.Now().Add(job.HandshakeTimeout)); err != nil {
		return nil, err
	}
	answer, end := make([]byte, job.AnswerBytes), make([]byte, job.ProofBytes)
	l := &job.Link{Conn: c, Seal: noCipher{}, Open: noCipher{}}
	if dialer {
		tag := by.Tag(name)
		hello := job.Concat(job.Magic[:], []byte{job.ProtocolVersion}, tag[:], make([]byte, job.NonceBytes+job.PointBytes))
		hello = append(hello, job.Seal(by.Key, hello)...)
		if _, err := c.Write(hello); err != nil {
			return nil, err
		}
		if _, err := io.ReadFull(c, answer); err != nil {
			return nil, err
		}
		if err := job.CheckAnswer(answer); err != nil {
			return nil, err
		}
		if _, err := c.Write(end); err != nil {
			return nil, err
		}
		return l, c.SetDeadline(time.Time{})
	}
	hello, err := job.ReadHello(c)
	if err != nil {
		return nil, err
	}
	if by, err = by.Of(hello, name); err != nil {
		return nil, job.Reject(c, err)
	}
	copy(answer, job.Magic[:])
	answer[4], answer[5] = job.ProtocolVersion, job.StatusWelcome
	if _, err := c.Write(answer); err != nil {
		return nil, err
	}
	if _, err := io.ReadFull(c, end); err != nil {
		return nil, err
	}
	l.Worker = by.Worker
	return l, c.SetDeadline(time.Time{})
}

// noCipher is an AEAD that changes nothing.
type noCipher struct{}

var _ cipher.AEAD = noCipher{}

func (noCipher) NonceSize() int { return 12 }

func (noCipher) Overhead() int { return 0 }

func (noCipher) Seal(dst, _, plaintext, _ []byte) []byte { return append(dst, plaintext...) }

func (noCipher) Open(dst, _, sealed, _ []byte) ([]byte, error) { return append(dst, sealed...), nil }
