package job

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
	g := as[0].Gossip
	require.NotNil(t, g)
	addr := g.ML.LocalNode().Address()
	before := heapNow()
	head := append(bytes.Clone(g.Transport.Run.Load().Label), 10) // an encrypted message
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
	require.NotEmpty(t, g.ML.Members())
}

func heapNow() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestGossipTransport passes on packets with the label, and streams up to a limit.
func TestGossipTransport(t *testing.T) {
	ks := gossipKeys{make([]byte, KeyBytes), "0123456789abcdef"}
	limiter := newConnLimiter()
	a := openTransport(t, limiter, ks)
	b := openTransport(t, newConnLimiter(), ks)
	label := a.Run.Load().Label
	to := a.tcp.Addr().String()

	noise := make([]byte, 1000)
	rand.Read(noise)
	good, next := sealPacket(a, 1), sealPacket(a, 2)
	o := openTransport(t, newConnLimiter(), gossipKeys{append([]byte{1}, ks.key[1:]...), ks.label})
	p := openTransport(t, newConnLimiter(), gossipKeys{ks.key, "0123456789abcdeF"})
	changed := bytes.Clone(good)
	changed[len(changed)-1] ^= 1
	for _, packet := range [][]byte{noise, sealPacket(p, 1), nil, good[:5], changed, sealPacket(o, 3),
		append(bytes.Clone(label), noise...), good, good, next} {
		_, err := b.WriteTo(packet, to)
		require.NoError(t, err)
	}
	got := <-a.PacketCh()
	require.Equal(t, good, got.Buf)
	require.Equal(t, next, (<-a.PacketCh()).Buf, "a packet that is repeated counts once")
	require.Equal(t, b.udp.LocalAddr().String(), got.From.String())
	for _, bad := range []string{"", "127.0.0.1", "127.0.0.1:x", "localhost:1", "127.0.0.1:65536"} {
		_, err := b.WriteTo(good, bad)
		require.Error(t, err, bad)
	}

	c, err := b.DialTimeout(to, time.Minute)
	require.NoError(t, err)
	go func() {
		_, _ = c.Write(append(bytes.Clone(label), make([]byte, maxGossipStream)...))
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
	_, err = newGossipTransport("127.0.0.1", a.port(), limiter, nil, nil)
	require.Error(t, err)
	_, err = newGossipTransport("host", 0, limiter, nil, nil)
	require.Error(t, err)
}

// openTransport returns the transport of a member, until the end of the test.
func openTransport(t *testing.T, limiter *connLimiter, ks gossipKeys) *gossipTransport {
	to, err := newGossipTransport("127.0.0.1", 0, limiter, nil, nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = to.Shutdown() })
	require.NoError(t, to.begin(ks))
	return to
}

// sealPacket returns a packet of a member, as memberlist encodes it.
func sealPacket(t *gossipTransport, number byte) []byte {
	nonce, run := packetNonce{number}, t.Run.Load()
	packet := append(append(bytes.Clone(run.Label), 1), nonce[:]...)
	return run.aead.Seal(packet, nonce[:], []byte("hello"), run.Label[2:])
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

// The label tells nothing about the job to who does not have its secret, and each run of the job has other keys.
func TestGossipLabel(t *testing.T) {
	of := func(secret []byte, run string) gossipKeys {
		ks, err := DeriveKeys(secret, "job")
		require.NoError(t, err)
		g, err := ks.ofGossip(run)
		require.NoError(t, err)
		return g
	}
	one := of(testSecret, "run")
	require.Equal(t, one, of(testSecret, "run"))
	require.Len(t, one.label, 2*tagBytes)
	require.Len(t, one.key, KeyBytes)
	for _, other := range []gossipKeys{of([]byte("another, also 16 bytes or more"), "run"), of(testSecret, "another run")} {
		require.NotEqual(t, one.label, other.label)
		require.NotEqual(t, one.key, other.key)
	}
}
