package cluster

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// attackMemory is what strangers may make a host's gossip keep.
const attackMemory = 32 << 20

// TestGossipBounds lets a stranger who has heard the label send what memberlist would
// buffer: 20 MiB on each of many connections.
func TestGossipBounds(t *testing.T) {
	as, errs := startAll(t, onLoopback(t, 2, 2)...)
	for _, err := range errs {
		require.NoError(t, err)
	}
	g := as[0].gossip
	require.NotNil(t, g)
	addr := g.ml.LocalNode().Address()
	before := heapNow()
	head := []byte{labelHeader, byte(len(as[0].keys.label))}
	head = append(append(head, as[0].keys.label...), 10) // an encrypted message
	head = binary.BigEndian.AppendUint32(head, 20<<20)
	const attackers = 40
	conns := make([]net.Conn, attackers)
	piece := make([]byte, 1<<20)
	for i := range conns {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer c.Close()
		conns[i] = c
		_, _ = c.Write(head) // it may be shown out already
		for range 8 {
			c.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
			if _, err := c.Write(piece); err != nil {
				break
			}
		}
	}
	require.Less(t, heapNow(), before+attackMemory)
	for _, c := range conns { // all are ended: by the limit, their turn or memberlist's deadline
		c.SetReadDeadline(time.Now().Add(time.Minute))
		_, err := io.Copy(io.Discard, c)
		require.NotErrorIs(t, err, net.ErrClosed)
	}
	require.NotEmpty(t, g.ml.Members())
}

func heapNow() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestGossipTransport passes on packets with the label, and streams up to a limit.
func TestGossipTransport(t *testing.T) {
	ks := keys{label: "0123456789abcdef", gossip: make([]byte, keyBytes)}
	limiter := newConnLimiter()
	a, err := newGossipTransport("127.0.0.1", 0, ks, limiter, nil, nil)
	require.NoError(t, err)
	defer a.Shutdown()
	b, err := newGossipTransport("127.0.0.1", 0, ks, newConnLimiter(), nil, nil)
	require.NoError(t, err)
	defer b.Shutdown()
	to := a.tcp.Addr().String()

	noise := make([]byte, 1000)
	rand.Read(noise)
	good, next := sealPacket(a, ks.label, 1), sealPacket(a, ks.label, 2)
	other := ks
	other.gossip = append([]byte{1}, ks.gossip[1:]...)
	o, err := newGossipTransport("127.0.0.1", 0, other, newConnLimiter(), nil, nil)
	require.NoError(t, err)
	defer o.Shutdown()
	changed := bytes.Clone(good)
	changed[len(changed)-1] ^= 1
	for _, packet := range [][]byte{noise, sealPacket(a, "0123456789abcdeF", 1), nil, good[:5], changed, sealPacket(o, ks.label, 3),
		append(bytes.Clone(a.label), noise...), good, good, next} {
		_, err = b.WriteTo(packet, to)
		require.NoError(t, err)
	}
	p := <-a.PacketCh()
	require.Equal(t, good, p.Buf)
	require.Equal(t, next, (<-a.PacketCh()).Buf, "a packet that is repeated counts once")
	require.Equal(t, b.udp.LocalAddr().String(), p.From.String())
	for _, bad := range []string{"", "127.0.0.1", "127.0.0.1:x", "localhost:1", "127.0.0.1:65536"} {
		_, err = b.WriteTo(good, bad)
		require.Error(t, err, bad)
	}

	c, err := b.DialTimeout(to, time.Minute)
	require.NoError(t, err)
	go func() {
		_, _ = c.Write(append(bytes.Clone(a.label), make([]byte, maxGossipStream)...))
		c.Close()
	}()
	s := <-a.StreamCh()
	n, err := io.Copy(io.Discard, s)
	require.ErrorContains(t, err, "the stream has more than 524288 bytes")
	require.EqualValues(t, maxGossipStream, n)
	require.Equal(t, []int{0, 0, 1}, placesOf(limiter))
	s.Close()
	s.Close()
	require.Equal(t, []int{0, 0, 0}, placesOf(limiter))

	_, _, err = a.FinalAdvertiseAddr("nowhere", 1)
	require.Error(t, err)
	ip, port, err := a.FinalAdvertiseAddr("", 0)
	require.NoError(t, err)
	require.Equal(t, to, (&net.TCPAddr{IP: ip, Port: port}).String())
	_, err = newGossipTransport("127.0.0.1", a.port(), ks, limiter, nil, nil)
	require.Error(t, err)
	_, err = newGossipTransport("host", 0, ks, limiter, nil, nil)
	require.Error(t, err)
}

// sealPacket returns a packet of a member, as memberlist encodes it.
func sealPacket(t *gossipTransport, label string, number byte) []byte {
	nonce := packetNonce{number}
	packet := append([]byte{labelHeader, byte(len(label))}, label...)
	packet = append(append(packet, 1), nonce[:]...)
	return t.aead.Seal(packet, nonce[:], []byte("hello"), []byte(label))
}

func placesOf(g *connLimiter) []int {
	g.mu.Lock()
	defer g.mu.Unlock()
	var n []int
	for _, in := range g.inside {
		n = append(n, len(in))
	}
	return n
}

// A stranger cannot make memberlist decode more than a limit, also with packets of members that were forgotten.
func TestPacketBudget(t *testing.T) {
	var b packetBudget
	now := time.Now()
	n := 0
	for i := range 30_000 { // 10,000 in a second
		if b.allows(now.Add(time.Duration(i) * 100 * time.Microsecond)) {
			n++
		}
	}
	require.InDelta(t, 4*packetsPerSecond, n, 3)
}

// The label tells nothing about the job to who does not have its secret.
func TestGossipLabel(t *testing.T) {
	one, err := deriveKeys(testSecret, "job")
	require.NoError(t, err)
	two, err := deriveKeys([]byte("another, also 16 bytes or more"), "job")
	require.NoError(t, err)
	require.NotEqual(t, one.label, two.label)
	require.Len(t, one.label, 2*tagBytes)
}
