package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
)

// memberlist reads up to 20 MiB of a stream before decryption, on any number of
// streams. These limits bound the memory that unauthenticated connections can
// use: maxGossipStreams × maxGossipStream, doubled while a buffer grows.
const (
	maxGossipStreams = 16
	// maxGossipStream is enough for the state of about 1,500 hosts.
	maxGossipStream = 512 << 10
	maxPacket       = 64 << 10
	labelHeader     = 244 // memberlist's first byte of a packet with a label
)

// A gossipTransport is memberlist's network transport: a TCP and a UDP socket
// with the same port. It drops packets without the job's label, which only
// members know.
type gossipTransport struct {
	tcp     *net.TCPListener
	udp     *net.UDPConn
	label   []byte // with its header, as at the start of packets
	limiter *connLimiter
	control func(net.Conn) // takes the control connections of Chorus
	packets chan *memberlist.Packet
	streams chan net.Conn
	quit    chan struct{}
	wg      sync.WaitGroup
	closing sync.Once
}

// newGossipTransport opens the sockets; port 0 means any port.
func newGossipTransport(ip string, port int, label string, notify func(string), control func(net.Conn)) (*gossipTransport, error) {
	addr := net.ParseIP(ip)
	if addr == nil {
		return nil, fmt.Errorf("%q is not an IP address", ip)
	}
	t := &gossipTransport{label: append([]byte{labelHeader, byte(len(label))}, label...), limiter: newConnLimiter(maxGossipStreams), control: control,
		packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), quit: make(chan struct{})}
	var err error
	for range 10 { // a port that is free for TCP may be taken for UDP
		if t.tcp, err = net.ListenTCP("tcp", &net.TCPAddr{IP: addr, Port: port}); err != nil {
			return nil, err
		}
		if t.udp, err = net.ListenUDP("udp", &net.UDPAddr{IP: addr, Port: t.port()}); err == nil {
			break
		}
		_ = t.tcp.Close()
		if port != 0 || !errors.Is(err, syscall.EADDRINUSE) {
			return nil, err
		}
	}
	if err != nil {
		return nil, err
	}
	_ = t.udp.SetReadBuffer(1 << 20) // so that a flood displaces fewer packets; the system may grant less
	_ = keepLabelled(t.udp, t.label) // receive compares again, because a sandbox may refuse filters
	t.wg.Go(func() { acceptAll(t.tcp, notify, t.accept) })
	t.wg.Go(t.receive)
	return t, nil
}

func (t *gossipTransport) port() int { return t.tcp.Addr().(*net.TCPAddr).Port }

// accept takes a connection.
func (t *gossipTransport) accept(c net.Conn) {
	t.limiter.enter(c)
	t.wg.Go(func() { t.sort(c) })
}

// sort gives a connection to the control port or to memberlist, by its first byte.
func (t *gossipTransport) sort(c net.Conn) {
	leave := func() { t.limiter.leave(c) }
	first := make([]byte, 1)
	_ = c.SetReadDeadline(time.Now().Add(handshakeTimeout)) // the read fails if this does
	n, err := c.Read(first)
	if err != nil || n == 0 {
		leave()
		c.Close()
		return
	}
	_ = c.SetReadDeadline(time.Time{}) // as above
	begun := &begunConn{Conn: c, first: first}
	if first[0] == magic[0] && t.control != nil {
		leave()
		t.control(begun)
		return
	}
	s := &gossipStream{Conn: begun, left: maxGossipStream, leave: leave}
	select {
	case t.streams <- s:
	case <-t.quit:
		_ = s.Close()
	}
}

// receive reads packets into one buffer, and allocates memory only for packets with the job's label.
func (t *gossipTransport) receive() {
	buf := make([]byte, maxPacket)
	for {
		n, from, err := t.udp.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !bytes.HasPrefix(buf[:n], t.label) {
			if err != nil && !t.pause(time.Millisecond) {
				return
			}
			continue
		}
		p := &memberlist.Packet{Buf: bytes.Clone(buf[:n]), From: net.UDPAddrFromAddrPort(from), Timestamp: time.Now()}
		select {
		case t.packets <- p:
		case <-t.quit:
			return
		}
	}
}

// pause waits and reports whether the transport is still open.
func (t *gossipTransport) pause(d time.Duration) bool {
	select {
	case <-t.quit:
		return false
	case <-time.After(d):
		return true
	}
}

// FinalAdvertiseAddr and the following methods implement memberlist's Transport.
func (t *gossipTransport) FinalAdvertiseAddr(ip string, port int) (net.IP, int, error) {
	if ip == "" {
		return t.tcp.Addr().(*net.TCPAddr).IP, t.port(), nil
	}
	addr := net.ParseIP(ip)
	if addr == nil {
		return nil, 0, fmt.Errorf("%q is not an IP address", ip)
	}
	if four := addr.To4(); four != nil {
		addr = four
	}
	return addr, port, nil
}

func (t *gossipTransport) WriteTo(b []byte, addr string) (time.Time, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return time.Time{}, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return time.Time{}, err
	}
	to := &net.UDPAddr{IP: net.ParseIP(host), Port: int(n)} // hosts use IP addresses, not names
	if to.IP == nil {
		return time.Time{}, fmt.Errorf("%q is not an IP address", host)
	}
	_, err = t.udp.WriteTo(b, to)
	return time.Now(), err
}

func (t *gossipTransport) PacketCh() <-chan *memberlist.Packet { return t.packets }
func (t *gossipTransport) StreamCh() <-chan net.Conn           { return t.streams }

func (t *gossipTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	c, err := net.DialTimeout("tcp", addr, timeout)
	if err != nil {
		return nil, err
	}
	return &gossipStream{Conn: c, left: maxGossipStream, leave: func() {}}, nil
}

func (t *gossipTransport) Shutdown() error {
	t.closing.Do(func() {
		close(t.quit)
		_ = t.tcp.Close()
		_ = t.udp.Close()
		t.limiter.clear()
	})
	t.wg.Wait()
	return nil
}

// A gossipStream is a connection that fails after maxGossipStream bytes.
type gossipStream struct {
	net.Conn
	left  int
	leave func()
	once  sync.Once
}

func (s *gossipStream) Read(b []byte) (int, error) {
	if s.left <= 0 {
		return 0, fmt.Errorf("the stream has more than %d bytes", maxGossipStream)
	}
	n, err := s.Conn.Read(b[:min(len(b), s.left)])
	s.left -= n
	return n, err
}

func (s *gossipStream) Close() error {
	s.once.Do(s.leave)
	return s.Conn.Close()
}
