package cluster

import (
	"crypto/rand"
	"encoding/binary"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
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
	label := "0123456789abcdef"
	a, err := newGossipTransport("127.0.0.1", 0, label, nil, nil)
	require.NoError(t, err)
	defer a.Shutdown()
	b, err := newGossipTransport("127.0.0.1", 0, label, nil, nil)
	require.NoError(t, err)
	defer b.Shutdown()
	to := a.tcp.Addr().String()

	noise := make([]byte, 1000)
	rand.Read(noise)
	good, err := memberlist.AddLabelHeaderToPacket([]byte("hello"), label)
	require.NoError(t, err)
	other, err := memberlist.AddLabelHeaderToPacket([]byte("hello"), "0123456789abcdeF")
	require.NoError(t, err)
	for _, packet := range [][]byte{noise, other, nil, good[:5], good} {
		_, err = b.WriteTo(packet, to)
		require.NoError(t, err)
	}
	p := <-a.PacketCh()
	require.Equal(t, good, p.Buf)
	require.Equal(t, b.udp.LocalAddr().String(), p.From.String())
	for _, bad := range []string{"", "127.0.0.1", "127.0.0.1:x", "localhost:1", "127.0.0.1:65536"} {
		_, err = b.WriteTo(good, bad)
		require.Error(t, err, bad)
	}

	c, err := b.DialTimeout(to, time.Minute)
	require.NoError(t, err)
	go func() {
		_, _ = c.Write(make([]byte, maxGossipStream+1))
		c.Close()
	}()
	s := <-a.StreamCh()
	n, err := io.Copy(io.Discard, s)
	require.ErrorContains(t, err, "the stream has more than 524288 bytes")
	require.EqualValues(t, maxGossipStream, n)
	require.Len(t, a.limiter.inside, 1)
	s.Close()
	s.Close()
	require.Empty(t, a.limiter.inside)

	_, _, err = a.FinalAdvertiseAddr("nowhere", 1)
	require.Error(t, err)
	ip, port, err := a.FinalAdvertiseAddr("", 0)
	require.NoError(t, err)
	require.Equal(t, to, (&net.TCPAddr{IP: ip, Port: port}).String())
	_, err = newGossipTransport("127.0.0.1", a.port(), label, nil, nil)
	require.Error(t, err)
	_, err = newGossipTransport("host", 0, label, nil, nil)
	require.Error(t, err)
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
