package job

import (
	"bytes"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
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
// with the same port. Packets from strangers do not reach memberlist. The kernel drops packets without the job's label,
// which a stranger can read in another packet. Then receive drops packets that the job's key does not decrypt, that have come
// before, or that are too many.
type gossipTransport struct {
	tcp     *net.TCPListener
	udp     *net.UDPConn
	Run     atomic.Pointer[gossipRun] // nil until this host knows the run of the job
	seen    recent[packetNonce]
	budget  packetBudget
	limiter *connLimiter
	control func(*limitedConn) // takes the control connections of Chorus; may be nil
	packets chan *memberlist.Packet
	streams chan net.Conn
	quit    chan struct{}
	wg      sync.WaitGroup
	closing sync.Once
}

// A gossipRun is what the packets and streams of one run of the job have in common.
type gossipRun struct {
	Label []byte // with its header, as at the start of packets
	aead  cipher.AEAD
}

// newGossipTransport opens the sockets, whose connections take places of
// limiter; port 0 means any port. Until begin, it accepts only control
// connections, because gossip of an earlier run of the job could not be
// recognized.
func newGossipTransport(ip string, port int, limiter *connLimiter, notify func(string), control func(*limitedConn)) (t *gossipTransport, err error) {
	addr := net.ParseIP(ip)
	if addr == nil {
		return nil, fmt.Errorf("%q is not an IP address", ip)
	}
	t = &gossipTransport{seen: recent[packetNonce]{most: 1 << 14},
		limiter: limiter, control: control, packets: make(chan *memberlist.Packet), streams: make(chan net.Conn), quit: make(chan struct{})}
	for range 10 { // a port that is free for TCP may be taken for UDP
		ln, err := listening.Listen(context.Background(), "tcp", net.JoinHostPort(addr.String(), strconv.Itoa(port)))
		if err != nil {
			return nil, err
		}
		t.tcp = ln.(*net.TCPListener)
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
	_ = keepNone(t.udp)              // receive compares again, because a sandbox may refuse filters
	t.wg.Go(func() { acceptAll(t.tcp, notify, t.accept) })
	return t, nil
}

// begin accepts the packets and streams of one run of the job.
func (t *gossipTransport) begin(ks gossipKeys) error {
	block, err := aes.NewCipher(ks.key)
	if err != nil {
		return err
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return err
	}
	run := &gossipRun{append([]byte{labelHeader, byte(len(ks.label))}, ks.label...), aead}
	_ = keepLabelled(t.udp, run.Label)
	t.Run.Store(run)
	t.wg.Go(func() { t.receive(run) })
	return nil
}

func (t *gossipTransport) port() int { return t.tcp.Addr().(*net.TCPAddr).Port }

// accept takes a connection.
func (t *gossipTransport) accept(c net.Conn) {
	s := t.limiter.enter(c)
	t.wg.Go(func() { t.sort(s) })
}

// sort gives a connection to the control port or to memberlist, by its first bytes.
func (t *gossipTransport) sort(c *limitedConn) {
	var first [1]byte
	if _, err := io.ReadFull(c.Conn, first[:]); err != nil {
		c.Close()
		return
	}
	if first[0] == Magic[0] && t.control != nil {
		c.first = first[:]
		t.control(c)
		return
	}
	run := t.Run.Load()
	if run == nil || first[0] != run.Label[0] {
		c.Close()
		return
	}
	label := make([]byte, len(run.Label))
	label[0] = first[0]
	if _, err := io.ReadFull(c.Conn, label[1:]); err != nil || !bytes.Equal(label, run.Label) || !c.advance(stageGossip) {
		c.Close()
		return
	}
	c.first = label
	select {
	case t.streams <- &gossipStream{Conn: c, left: maxGossipStream}: // memberlist sets its own deadline
	case <-t.quit:
		c.Close()
	}
}

// receive reads packets into one buffer, and allocates memory only for packets from members.
func (t *gossipTransport) receive(run *gossipRun) {
	buf, plain := make([]byte, maxPacket), make([]byte, maxPacket)
	for {
		n, from, err := t.udp.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !t.isFromMember(run, buf[:n], plain) {
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

// A packetNonce is the part of a packet that no other packet has.
type packetNonce [12]byte

// isFromMember reports whether a packet has the label, was encrypted with the
// run's key, and has not come before. memberlist's packets have a version, a
// nonce and the encrypted text after the label, which is authenticated, too.
// The text is decrypted into room.
func (t *gossipTransport) isFromMember(run *gossipRun, packet, room []byte) bool {
	rest, ok := bytes.CutPrefix(packet, run.Label)
	if !ok || len(rest) < 1+len(packetNonce{})+run.aead.Overhead() {
		return false
	}
	nonce := packetNonce(rest[1:])
	if _, err := run.aead.Open(room[:0], nonce[:], rest[1+len(nonce):], run.Label[2:]); err != nil {
		return false
	}
	return t.seen.isNew(nonce) && t.budget.allows(time.Now())
}

// packetsPerSecond limits the packets that memberlist decodes. A stranger can repeat old packets, when they are
// forgotten; hosts of a large job send less than a tenth of it to each other.
const packetsPerSecond = 2000

// A packetBudget permits packetsPerSecond, and as many at once.
type packetBudget struct {
	left float64
	at   time.Time
}

func (b *packetBudget) allows(now time.Time) bool {
	b.left = min(b.left+now.Sub(b.at).Seconds()*packetsPerSecond, packetsPerSecond)
	b.at = now
	if b.left < 1 {
		return false
	}
	b.left--
	return true
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

func (t *gossipTransport) StreamCh() <-chan net.Conn { return t.streams }

func (t *gossipTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	c, err := net.DialTimeout("tcp", addr, timeout)
	if err != nil {
		return nil, err
	}
	return &gossipStream{Conn: c, left: maxGossipStream}, nil
}

func (t *gossipTransport) Shutdown() error {
	t.closing.Do(func() {
		close(t.quit)
		_ = t.tcp.Close()
		_ = t.udp.Close()
		t.limiter.closeWhere(func(s *limitedConn) bool { return portOf(s.LocalAddr().String()) == t.port() })
	})
	t.wg.Wait()
	return nil
}

// A gossipStream is a connection that fails after maxGossipStream bytes.
type gossipStream struct {
	net.Conn
	left int
}

func (s *gossipStream) Read(b []byte) (int, error) {
	if s.left <= 0 {
		return 0, fmt.Errorf("the stream has more than %d bytes", maxGossipStream)
	}
	n, err := s.Conn.Read(b[:min(len(b), s.left)])
	s.left -= n
	return n, err
}
