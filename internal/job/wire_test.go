package job

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// linked returns both ends of an authenticated connection in memory.
func linked(t *testing.T, dialerJob, listenerJob string, dialerKey, listenerKey []byte) (a, b *Link, aErr, bErr error) {
	t.Helper()
	p, q := net.Pipe()
	t.Cleanup(func() { p.Close(); q.Close() })
	done := make(chan struct{})
	go func() {
		defer close(done)
		b, bErr = AcceptHandshake(q, listenerJob, Credential{Key: listenerKey})
		if bErr != nil {
			q.Close()
		}
	}()
	a, aErr = dialHandshake(p, dialerJob, Credential{Key: dialerKey})
	if aErr != nil {
		p.Close()
	}
	<-done
	return a, b, aErr, bErr
}

func TestHandshake(t *testing.T) {
	key, other := bytes.Repeat([]byte{1}, KeyBytes), bytes.Repeat([]byte{2}, KeyBytes)
	a, b, err, err2 := linked(t, "job", "job", key, key)
	require.NoError(t, errors.Join(err, err2))
	for _, text := range []string{"", "x", string(bytes.Repeat([]byte("y"), 1<<20))} {
		go a.Write(Frame{Body: []byte(text)}, time.Second)
		got, err := b.Read()
		require.NoError(t, err)
		require.Equal(t, text, string(got.Body))
	}
	go b.Write(Frame{number: 7, ack: 9, Body: []byte("back")}, time.Second)
	got, err := a.Read()
	require.NoError(t, err)
	require.Equal(t, Frame{number: 7, ack: 9, Body: []byte("back")}, got)
	require.ErrorIs(t, a.Write(Frame{Body: make([]byte, maxMessageBytes+1)}, time.Second), ErrTooLarge)

	_, _, err, err2 = linked(t, "job", "job", other, key)
	require.ErrorIs(t, err, errBadProof)
	require.Error(t, err2)
	_, _, err, err2 = linked(t, "other", "job", key, key)
	require.ErrorIs(t, err, errOtherJob)
	require.ErrorIs(t, err2, errOtherJob)
}

// TestLinkRefusesTampering changes, repeats and drops frames on their way.
func TestLinkRefusesTampering(t *testing.T) {
	key := bytes.Repeat([]byte{1}, KeyBytes)
	frames := func() (*Link, [][]byte) {
		a, b, err, err2 := linked(t, "job", "job", key, key)
		require.NoError(t, errors.Join(err, err2))
		var out [][]byte
		for _, text := range []string{"one", "two"} {
			w := &bytes.Buffer{}
			a.Conn = writeConn{a.Conn, w}
			require.NoError(t, a.Write(Frame{Body: []byte(text)}, time.Second))
			out = append(out, w.Bytes())
		}
		return b, out
	}
	read := func(b *Link, parts ...[]byte) error {
		b.Conn = readConn{b.Conn, bytes.NewReader(bytes.Join(parts, nil))}
		for range parts {
			if _, err := b.Read(); err != nil {
				return err
			}
		}
		return nil
	}
	b, f := frames()
	require.NoError(t, read(b, f[0], f[1]))
	b, f = frames()
	require.ErrorContains(t, read(b, f[0], f[0]), "changed in transit")
	b, f = frames()
	require.ErrorContains(t, read(b, f[1]), "changed in transit")
	b, f = frames()
	f[0][len(f[0])-1] ^= 1
	require.ErrorContains(t, read(b, f[0]), "changed in transit")
	b, f = frames()
	require.ErrorIs(t, read(b, f[0][:len(f[0])-1]), io.ErrUnexpectedEOF)
	b, _ = frames()
	require.ErrorContains(t, read(b, []byte{0xff, 0xff, 0xff, 0xff}), "frame of 4294967295 bytes")
}

type writeConn struct {
	net.Conn
	w io.Writer
}

func (c writeConn) Write(b []byte) (int, error) { return c.w.Write(b) }

type readConn struct {
	net.Conn
	r io.Reader
}

func (c readConn) Read(b []byte) (int, error) { return c.r.Read(b) }

func TestHandshakeDeadline(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		p, q := net.Pipe()
		defer p.Close()
		begin := time.Now()
		_, err := AcceptHandshake(q, "job", Credential{Key: make([]byte, KeyBytes)})
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, HandshakeTimeout, time.Since(begin))
	})
}

func TestCallRoundTrip(t *testing.T) {
	for _, c := range []Call{{Op: OpSet, Fields: [][]byte{[]byte("k"), {}}}, {Op: OpSwap, N: -7, Fields: [][]byte{[]byte("k"), nil, []byte("v")}}, {Op: OpFinish, Fields: [][]byte{}}} {
		got, err := decodeCall(c.Encode())
		require.NoError(t, err)
		require.Equal(t, c, got)
	}
}

func FuzzDecodeMessage(f *testing.F) {
	f.Add(Note(kindRegister, Registration{Size: 2}).Encode())
	f.Add(Note(kindPlan, plan{Hosts: []host{{Host: "a", LocalSize: 1}}}).Encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeMessage(b)
		if err != nil {
			return
		}
		require.Equal(t, b, m.Encode())
		// No record may bring a decoder down, whatever it is taken for.
		for _, v := range []any{&Registration{}, &host{}, &Welcome{}, &World{}, &plan{}, &Fault{}, &Refusal{}, &attendance{}, &Exit{}} {
			_ = m.Record(v)
		}
	})
}

func FuzzDecodeCall(f *testing.F) {
	f.Add(Call{Op: OpSwap, N: 1, Fields: [][]byte{[]byte("k"), nil, []byte("v")}}.Encode())
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeCall(b)
		if err != nil {
			return
		}
		require.Equal(t, b, c.Encode())
		e := newEngine(2, new(atomic.Int64))
		e.do(ticket{0, 1}, c, func(Call) {})
		e.cancel(ticket{0, 1})
		require.Empty(t, e.waiting)
	})
}

func FuzzDecodeMeta(f *testing.F) {
	f.Add(gossipMeta{Tag: "t", UUID: "u", Host: "h"}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := decodeMeta(b); err == nil {
			require.NotEmpty(t, m.UUID)
		}
	})
}

// FuzzAcceptHandshake feeds a listener what a stranger may send.
func FuzzAcceptHandshake(f *testing.F) {
	tag := JobTag("job")
	f.Add(Concat(Magic[:], []byte{ProtocolVersion}, tag[:], make([]byte, NonceBytes+PointBytes+ProofBytes)))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, q := net.Pipe()
		go func() { p.Write(b); p.Close() }()
		go io.Copy(io.Discard, p)
		l, err := AcceptHandshake(q, "job", Credential{Key: make([]byte, KeyBytes)})
		q.Close()
		require.Error(t, err)
		require.Nil(t, l)
	})
}

// TestFinish ends a connection with something unread: the other end reads what
// was sent, and no reset.
func TestFinish(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	p, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	defer p.Close()
	q, err := ln.Accept()
	require.NoError(t, err)
	_, err = p.Write([]byte("unread"))
	require.NoError(t, err)
	_, err = q.Write([]byte("last"))
	require.NoError(t, err)
	l := &Link{Conn: q}
	l.finish()
	defer l.Close()
	got, err := io.ReadAll(p)
	require.NoError(t, err)
	require.Equal(t, "last", string(got))
}

// TestLastWordsOfTheGone reads what a peer said before it went, although writing
// to it has failed.
func TestLastWordsOfTheGone(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	far, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	near, err := ln.Accept()
	require.NoError(t, err)
	key := bytes.Repeat([]byte{1}, KeyBytes)
	a, b, err, err2 := linked(t, "job", "job", key, key)
	require.NoError(t, errors.Join(err, err2))
	a.Conn, b.Conn = far, near
	require.NoError(t, a.Write(Frame{Body: []byte("my last words")}, time.Second))
	require.NoError(t, far.(*net.TCPConn).SetLinger(0)) // a reset, as of a process that ends
	require.NoError(t, far.Close())
	p := NewStream(b, NewRunClock(time.Second), time.Second)
	p.send(Note(kindEnded, nil))
	for range 2 { // the first write may not see the reset
		p.send(Note(kindEnded, nil))
	}
	go p.writeLoop()
	require.Eventually(t, func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.link == nil }, time.Minute, time.Millisecond)
	got, err := b.Read()
	require.NoError(t, err)
	require.Equal(t, "my last words", string(got.Body))
	require.False(t, p.hasHungUp())
	p.stopRenewing()
	p.closeAfterQueue()
	<-p.done
	b.Close()
}
