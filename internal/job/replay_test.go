package job

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A recorder records what is written to a connection.
type recorder struct {
	net.Conn
	wrote *bytes.Buffer
}

func (c recorder) Write(b []byte) (int, error) {
	c.wrote.Write(b)
	return c.Conn.Write(b)
}

// TestReplayedHandshakes repeats all bytes of both ends of a handshake, and frames of one link on another one of the same members.
func TestReplayedHandshakes(t *testing.T) {
	key := Credential{Key: bytes.Repeat([]byte{1}, KeyBytes)}
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	var dialed, answered bytes.Buffer
	g := newConnLimiter()
	links := make(chan *Link, 1)
	go func() {
		l, _ := AcceptHandshake(g.enter(recorder{far, &answered}), "job", key)
		links <- l
	}()
	a, err := dialHandshake(recorder{near, &dialed}, "job", key)
	require.NoError(t, err)
	b := <-links
	require.NotNil(t, b)
	hello, proof := dialed.Bytes()[:HelloBytes], dialed.Bytes()[HelloBytes:]
	require.Len(t, proof, ProofBytes)
	require.Len(t, answered.Bytes(), AnswerBytes)

	replay := func(g *connLimiter) error {
		p, q := net.Pipe()
		defer p.Close()
		defer q.Close()
		go func() {
			_, _ = p.Write(hello)
			_, _ = io.CopyN(io.Discard, p, AnswerBytes)
			_, _ = p.Write(proof)
		}()
		l, err := AcceptHandshake(g.enter(q), "job", key)
		require.Nil(t, l)
		return err
	}
	require.ErrorIs(t, replay(g), errReplayed, "the listener remembers it")
	require.ErrorIs(t, replay(newConnLimiter()), errBadProof, "it has forgotten it, or is another one")

	for name, answer := range map[string][]byte{"of another handshake": answered.Bytes(), "of the dialer itself": append(bytes.Clone(hello), make([]byte, AnswerBytes-HelloBytes)...)} {
		p, q := net.Pipe()
		defer p.Close()
		defer q.Close()
		go func() {
			_, _ = io.CopyN(io.Discard, q, HelloBytes)
			_, _ = q.Write(answer)
			_, _ = io.Copy(io.Discard, q)
		}()
		l, err := dialHandshake(p, "job", key)
		require.Error(t, err, name)
		require.Nil(t, l, name)
	}

	frame := func(l *Link) []byte {
		w := &bytes.Buffer{}
		l.Conn = writeConn{l.Conn, w}
		require.NoError(t, l.Write(Frame{number: 1, Body: Note(kindLeave, nil).Encode()}, time.Second))
		return w.Bytes()
	}
	c, d, err, err2 := linked(t, "job", "job", key.Key, key.Key)
	require.NoError(t, err)
	require.NoError(t, err2)
	for name, x := range map[string]struct {
		of, to *Link
	}{"another link": {a, d}, "back to its sender": {c, c}} {
		x.to.Conn = readConn{x.to.Conn, bytes.NewReader(frame(x.of))}
		_, err := x.to.Read()
		require.ErrorContains(t, err, "changed in transit", name)
	}
	require.NoError(t, b.Close())
}
