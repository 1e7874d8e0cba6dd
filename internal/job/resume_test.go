package job

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// TestAwaitLink judges how the end of a connection is told from the end of its process.
func TestAwaitLink(t *testing.T) {
	reset := errors.New("connection reset by peer")
	for name, tc := range map[string]struct {
		err   error
		event string
		took  time.Duration
	}{
		"closed":            {io.EOF, "", resumeGrace},
		"reset":             {reset, "", resumeGrace + 500*time.Millisecond},
		"its launcher says": {io.EOF, "exit", 10 * time.Millisecond},
		"left":              {io.EOF, "leave", 0},
		"silent":            {os.ErrDeadlineExceeded, "", 0},
		"silent at last":    {reset, "expire", 10 * time.Millisecond},
		"closed and silent": {io.EOF, "expire", 10 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			testhost.Bubble(t, func(t *testing.T) {
				j, agent, worker := judged()
				j.cfg.Self = Welcome{Heartbeat: 500 * time.Millisecond, LostAfter: 3 * time.Second}
				s, of := j.served()
				p := of(worker(1))
				a, b := net.Pipe()
				defer a.Close()
				defer b.Close()
				p.reading = &Link{Conn: a}
				if tc.event == "leave" {
					p.peer.state = peerGone
				}
				begin := time.Now()
				time.AfterFunc(10*time.Millisecond, func() {
					switch tc.event {
					case "exit":
						m, err := Note(kindExit, Exit{Rank: 1, PID: 101, Code: 9}).decode()
						require.NoError(t, err)
						require.NoError(t, s.happen(received{agent, m}))
					case "expire":
						p.expire()
					}
				})
				_, err := s.awaitLink(p, tc.err)
				require.Error(t, err)
				require.Equal(t, tc.took, time.Since(begin))
				if tc.event == "expire" && tc.err == io.EOF {
					require.Equal(t, "its connection closed, and it did not connect again within 3s", reasonOf(err, 3*time.Second))
				}
				time.Sleep(time.Second)
			})
		})
	}
}

// TestResumeNeedsTheStream refuses members of the job that do not know the stream's id, or
// have it and only a worker's credential.
func TestResumeNeedsTheStream(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, onLoopback(t, 2, 1)...)
	require.NoError(t, errors.Join(errs...))
	worker, err := as[0].keys.Control.forWorkers(as[0].promise().Run)
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		key Credential
		id  string
	}{
		"unknown id":         {as[0].keys.Control, newUUID()},
		"worker as an agent": {worker, as[1].k.Hello.Stream},
	} {
		l, _ := Target{Job: as[0].Job(), Addr: as[0].Addr, Key: tc.key}.persist(t)
		defer l.Close()
		k := &Client{Stream: NewStream(nil, NewRunClock(time.Second), 0), Hello: Welcome{Stream: tc.id}, To: Target{Job: "j"}}
		_, err := k.resume(l, 1, time.Minute)
		var r *RefusedError
		require.ErrorAs(t, err, &r, name)
		require.Contains(t, r.Reason, "not a member of the job any more")
	}
	require.NoError(t, as[1].Context().Err())
	require.Equal(t, 1, as[1].k.Stream.Generation())
}

// TestBackpressure fills the queue of a stream that nobody reads: send waits for space.
func TestBackpressure(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	s := NewStream(&Link{Conn: a}, NewRunClock(time.Second), time.Minute)
	big := Message{Kind: KindCall, Body: make([]byte, MaxValueBytes-messageBytes)}
	for range maxUnackedBytes / big.cost() {
		require.NoError(t, s.sendWait(big))
	}
	sent := make(chan error, 1)
	go func() { sent <- s.sendWait(big) }()
	select {
	case <-sent:
		require.FailNow(t, "did not wait")
	case <-time.After(20 * time.Millisecond):
	}
	fresh, err := s.accept(Frame{ack: 1})
	require.NoError(t, err)
	require.True(t, fresh)
	require.NoError(t, <-sent)
	s.send(big) // a peer that does not read is lost
	require.True(t, s.isClosed())
	require.ErrorIs(t, s.sendWait(Message{}), errStreamClosed)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	go func() { s.Flush(time.Hour); cancel() }()
	<-ctx.Done()
	require.ErrorIs(t, ctx.Err(), context.Canceled, "nothing to wait for")
}
