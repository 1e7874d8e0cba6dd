package cluster

import (
	"bytes"
	"crypto/rand"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
)

// TestUnauthenticatedPeers lets everybody who is no member talk to a running job's port.
func TestUnauthenticatedPeers(t *testing.T) {
	t.Parallel()
	ss := joinWorld(t, 2, nil)
	addr := ss[1].k.Addr
	noise := make([]byte, 4096)
	rand.Read(noise)
	tag := job.JobTag(t.Name())
	for name, b := range map[string][]byte{
		"http":  []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"tls":   {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc},
		"noise": noise,
		"huge":  bytes.Repeat([]byte{0xff}, 1<<20),
		"hello of a liar": job.Concat(job.Magic[:], []byte{job.ProtocolVersion}, tag[:],
			make([]byte, job.NonceBytes), bytes.Repeat([]byte{9}, job.PointBytes), make([]byte, 1<<20)),
		"other version": job.Concat(job.Magic[:], []byte{99}, make([]byte, job.HelloBytes)),
	} {
		t.Run(name, func(t *testing.T) {
			c, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			defer c.Close()
			go c.Write(b) // may fail: nobody has to read it all
			c.SetReadDeadline(time.Now().Add(job.HandshakeTimeout + 5*time.Second))
			got, _ := io.ReadAll(c) // a reset is as good as an end
			require.LessOrEqual(t, len(got), job.AnswerBytes)
			requireAlive(t, ss)
		})
	}
}

// TestHalfOpen holds hundreds of silent connections while members join.
func TestHalfOpen(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	cfg := func(r int) *JoinConfig {
		return &JoinConfig{Job: "flood", Size: 3, Rank: new(r), Addr: addr, Serve: r == 0, Secret: testSecret, Timing: quick}
	}
	out := make(chan *Session, 3)
	join := func(r int) {
		s, err := Join(t.Context(), cfg(r))
		if err != nil {
			t.Error(err)
		}
		out <- s
	}
	go join(0)
	const flood = 300
	for n := 0; n < flood; {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			time.Sleep(time.Millisecond) // rank 0 does not listen yet
			continue
		}
		defer c.Close()
		n++
	}
	go join(1)
	go join(2)
	ss := []*Session{<-out, <-out, <-out}
	requireAlive(t, ss)
	require.NoError(t, every(ss, func(s *Session) error { return s.Shutdown(t.Context()) }))
}

func requireAlive(t *testing.T, ss []*Session) {
	t.Helper()
	require.NoError(t, every(ss, func(s *Session) error { return s.Barrier(t.Context(), "alive") }))
}
