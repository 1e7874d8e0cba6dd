package job

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// A stallingConn stalls its writer once.
type stallingConn struct {
	*wireConn
	stall atomic.Int64 // of the next write
}

func (c *stallingConn) Write(b []byte) (int, error) {
	time.Sleep(time.Duration(c.stall.Swap(0)))
	return c.wireConn.Write(b)
}

// stallWorld starts a coordinator for two processes on a simulated network.
func stallWorld(t *testing.T) (*Server, *wireListener, Credential) {
	ks, err := DeriveKeys(testSecret, "stall")
	require.NoError(t, err)
	ln := newWireListener()
	return NewServer(ln, ServerConfig{Job: "stall", Key: ks.Control, Notify: func(string) {}, CoordConfig: CoordConfig{Size: 2, JoinBy: time.Hour, Self: Welcome{Host: "h", Heartbeat: 500 * time.Millisecond, LostAfter: 20 * time.Second}}}), ln, ks.Control
}

// connectTo returns a target that connects to a simulated listener.
func connectTo(ln *wireListener, key Credential) (Target, *stallingConn) {
	near, far := newWires(1, time.Millisecond, 0)
	conn := &stallingConn{wireConn: near}
	return Target{Job: "stall", Key: key, connect: func(context.Context) (net.Conn, error) {
		ln.conns <- far
		return conn, nil
	}}, conn
}

func joinOver(t *testing.T, ln *wireListener, key Credential, rank int) (*Client, *stallingConn) {
	to, conn := connectTo(ln, key)
	l, hello, err := to.Dial(t.Context())
	require.NoError(t, err)
	k := newClient(l, to, "", "", hello, func(k *Client, m Message) {
		if m.Kind == KindWorld {
			k.BeStrict(0)
		}
	})
	m := Note(kindRegister, Registration{Member: Member{Rank: rank, Host: "h", PID: os.Getpid()}})
	m.ID = RegisterWorker
	require.NoError(t, k.Send(m))
	return k, conn
}

// A process that leaves the job is not lost if its writer stalls for longer than close waits for the
// coordinator's answer.
func TestCloseOfAStalledProcess(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		c, ln, key := stallWorld(t)
		defer c.Close()
		stays, _ := joinOver(t, ln, key, 0)
		defer stays.Close()
		leaves, conn := joinOver(t, ln, key, 1)
		time.Sleep(time.Second)
		c.mu.Lock()
		require.NotNil(t, c.world)
		c.mu.Unlock()
		conn.stall.Store(int64(3 * lastMessageTimeout))
		leaves.Close()
		time.Sleep(time.Minute)
		require.NoError(t, context.Cause(stays.Ctx))
		require.ErrorIs(t, context.Cause(leaves.Ctx), ErrClosed)
	})
}

// A process leaves soon although the coordinator reads nothing: also if the queue of messages has no room for another one.
func TestCloseWithoutReader(t *testing.T) {
	for _, n := range []int{1, 64} {
		testhost.Bubble(t, func(t *testing.T) {
			key := bytes.Repeat([]byte{1}, KeyBytes)
			l, _, err, err2 := linked(t, "job", "job", key, key)
			require.NoError(t, errors.Join(err, err2))
			k := newClient(l, Target{}, "", "", Welcome{Heartbeat: time.Second, LostAfter: time.Minute}, func(*Client, Message) {})
			for body := make([]byte, maxUnackedBytes/64-Message{}.cost()); n > 0; n-- {
				require.NoError(t, k.Send(Message{Kind: kindBeat, Epoch: FirstEpoch, Body: body}))
			}
			begun := time.Now()
			k.Close()
			require.LessOrEqual(t, time.Since(begun), closeBy)
			require.ErrorIs(t, context.Cause(k.Ctx), ErrClosed)
		})
	}
}

// A coordinator that answers too late once is still known as one of the same job.
func TestSameJobIsAskedAgain(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		c, ln, key := stallWorld(t)
		defer c.Close()
		to, _ := connectTo(ln, key)
		next, stalls := to.connect, 2
		to.connect = func(ctx context.Context) (net.Conn, error) {
			if stalls--; stalls >= 0 {
				silent, other := net.Pipe()
				t.Cleanup(func() { other.Close() })
				return silent, nil
			}
			return next(ctx)
		}
		require.NoError(t, to.SameJob(t.Context()))
		stalls = 100
		require.ErrorIs(t, to.SameJob(t.Context()), os.ErrDeadlineExceeded)

		begun := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := to.PortTaken(ctx, syscall.EADDRINUSE, "choose another")
		require.EqualError(t, err, "address already in use: the process that has the port does not answer; choose another")
		require.Equal(t, time.Second, time.Since(begun))
	})
}

// A host that closes the connection of a probe while data is still on its way has answered.
func TestProbeThatIsReset(t *testing.T) {
	small := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error { // the receiver's window holds a part of the data
		return raw.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	}}
	ln, err := small.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		if c, err := ln.Accept(); err == nil {
			_, _ = c.Read(make([]byte, 1))
			c.Close()
		}
	}()
	require.Equal(t, pathGood, probePath(t.Context(), ln.Addr().String()))
}
