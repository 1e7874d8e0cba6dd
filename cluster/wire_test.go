package cluster

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// linked returns both ends of an authenticated connection in memory.
func linked(t *testing.T, dialerJob, listenerJob string, dialerKey, listenerKey []byte) (a, b *link, aErr, bErr error) {
	t.Helper()
	p, q := net.Pipe()
	t.Cleanup(func() { p.Close(); q.Close() })
	done := make(chan struct{})
	go func() {
		defer close(done)
		b, bErr = acceptHandshake(q, listenerJob, credential{key: listenerKey})
		if bErr != nil {
			q.Close()
		}
	}()
	a, aErr = dialHandshake(p, dialerJob, credential{key: dialerKey})
	if aErr != nil {
		p.Close()
	}
	<-done
	return a, b, aErr, bErr
}

func TestHandshake(t *testing.T) {
	key, other := bytes.Repeat([]byte{1}, keyBytes), bytes.Repeat([]byte{2}, keyBytes)
	a, b, err, err2 := linked(t, "job", "job", key, key)
	require.NoError(t, errors.Join(err, err2))
	for _, text := range []string{"", "x", string(bytes.Repeat([]byte("y"), 1<<20))} {
		go a.write(frame{body: []byte(text)}, time.Second)
		got, err := b.read()
		require.NoError(t, err)
		require.Equal(t, text, string(got.body))
	}
	go b.write(frame{number: 7, ack: 9, body: []byte("back")}, time.Second)
	got, err := a.read()
	require.NoError(t, err)
	require.Equal(t, frame{number: 7, ack: 9, body: []byte("back")}, got)
	require.ErrorIs(t, a.write(frame{body: make([]byte, maxMessageBytes+1)}, time.Second), ErrTooLarge)

	_, _, err, err2 = linked(t, "job", "job", other, key)
	require.ErrorIs(t, err, errBadProof)
	require.Error(t, err2)
	_, _, err, err2 = linked(t, "other", "job", key, key)
	require.ErrorIs(t, err, errOtherJob)
	require.ErrorIs(t, err2, errOtherJob)
}

// TestLinkRefusesTampering changes, repeats and drops frames on their way.
func TestLinkRefusesTampering(t *testing.T) {
	key := bytes.Repeat([]byte{1}, keyBytes)
	frames := func() (*link, [][]byte) {
		a, b, err, err2 := linked(t, "job", "job", key, key)
		require.NoError(t, errors.Join(err, err2))
		var out [][]byte
		for _, text := range []string{"one", "two"} {
			w := &bytes.Buffer{}
			a.c = writeConn{a.c, w}
			require.NoError(t, a.write(frame{body: []byte(text)}, time.Second))
			out = append(out, w.Bytes())
		}
		return b, out
	}
	read := func(b *link, parts ...[]byte) error {
		b.c = readConn{b.c, bytes.NewReader(bytes.Join(parts, nil))}
		for range parts {
			if _, err := b.read(); err != nil {
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
	synctest.Test(t, func(t *testing.T) {
		p, q := net.Pipe()
		defer p.Close()
		begin := time.Now()
		_, err := acceptHandshake(q, "job", credential{key: make([]byte, keyBytes)})
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, handshakeTimeout, time.Since(begin))
	})
}

func TestCallRoundTrip(t *testing.T) {
	for _, c := range []call{{op: opSet, fields: [][]byte{[]byte("k"), {}}}, {op: opSwap, n: -7, fields: [][]byte{[]byte("k"), nil, []byte("v")}}, {op: opFinish, fields: [][]byte{}}} {
		got, err := decodeCall(c.encode())
		require.NoError(t, err)
		require.Equal(t, c, got)
	}
}

func FuzzDecodeMessage(f *testing.F) {
	f.Add(note(kindRegister, registration{Size: 2}).encode())
	f.Add(note(kindPlan, plan{Hosts: []host{{Host: "a", LocalSize: 1}}}).encode())
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMessage(b)
		if err != nil {
			return
		}
		require.Equal(t, b, m.encode())
		// No record may bring a decoder down, whatever it is taken for.
		for _, v := range []any{&registration{}, &host{}, &welcome{}, &world{}, &plan{}, &fault{}, &refusal{}, &attendance{}, &Exit{}} {
			_ = m.record(v)
		}
	})
}

func FuzzDecodeCall(f *testing.F) {
	f.Add(call{op: opSwap, n: 1, fields: [][]byte{[]byte("k"), nil, []byte("v")}}.encode())
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := decodeCall(b)
		if err != nil {
			return
		}
		require.Equal(t, b, c.encode())
		e := newEngine(2, new(atomic.Int64))
		e.do(ticket{0, 1}, c, func(call) {})
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
	tag := jobTag("job")
	f.Add(concat(magic[:], []byte{protocolVersion}, tag[:], make([]byte, nonceBytes+pointBytes+proofBytes)))
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, q := net.Pipe()
		go func() { p.Write(b); p.Close() }()
		go io.Copy(io.Discard, p)
		l, err := acceptHandshake(q, "job", credential{key: make([]byte, keyBytes)})
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
	l := &link{c: q}
	l.finish()
	defer l.close()
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
	key := bytes.Repeat([]byte{1}, keyBytes)
	a, b, err, err2 := linked(t, "job", "job", key, key)
	require.NoError(t, errors.Join(err, err2))
	a.c, b.c = far, near
	require.NoError(t, a.write(frame{body: []byte("my last words")}, time.Second))
	require.NoError(t, far.(*net.TCPConn).SetLinger(0)) // a reset, as of a process that ends
	require.NoError(t, far.Close())
	p := newStream(b, newRunClock(time.Second), time.Second)
	p.send(note(kindEnded, nil))
	for range 2 { // the first write may not see the reset
		p.send(note(kindEnded, nil))
	}
	go p.writeLoop()
	require.Eventually(t, func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.link == nil }, time.Minute, time.Millisecond)
	got, err := b.read()
	require.NoError(t, err)
	require.Equal(t, "my last words", string(got.body))
	require.False(t, p.hasHungUp())
	p.stopRenewing()
	p.closeAfterQueue()
	<-p.done
	b.close()
}
