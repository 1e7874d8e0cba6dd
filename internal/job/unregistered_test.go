package job

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func unregistered(since instant) *conn {
	k := newConn(NewStream(nil, NewRunClock(time.Second), 0), "", false)
	k.peer.since = since
	return k
}

// TestGuestsAreLimited fills the coordinator with processes that have a worker's token and
// do not register, or have left. Members stay.
func TestGuestsAreLimited(t *testing.T) {
	j, agent, worker := judged()
	s, of := j.served()
	members := []*conn{of(agent), of(worker(0)), of(worker(1)), of(worker(2))}
	var peers []*conn
	for i := range maxUnregistered {
		k := unregistered(0)
		if i%2 == 0 {
			k.peer.role, k.peer.state = roleWorker, peerGone
		}
		require.True(t, s.admits(k))
		k.peer.since = instant(i - maxUnregistered)
		peers = append(peers, k)
	}
	require.Len(t, s.conns, maxUnregistered+len(members))
	for i := range 3 {
		require.True(t, s.admits(unregistered(0)))
		require.Len(t, s.conns, maxUnregistered+len(members))
		require.True(t, peers[i].isClosed(), "the oldest")
		require.False(t, peers[i+1].isClosed())
	}
	for _, k := range members {
		require.Same(t, k, s.conns[k.peer.id])
		require.False(t, k.isClosed())
	}
	s.handedOver = true
	require.False(t, s.admits(unregistered(0)), "another coordinator continues")
}

// TestGuestsAreLate lets a process send heartbeats and never register.
func TestGuestsAreLate(t *testing.T) {
	j, _, worker := judged()
	s, of := j.served()
	limit := s.silenceLimit()
	late, early, member := unregistered(-limit-1), unregistered(-limit/2), of(worker(0))
	member.peer.since = -2 * limit
	s.conns[late.peer.id], s.conns[early.peer.id] = late, early
	s.expireSilent()
	select {
	case <-late.expired:
	default:
		require.Fail(t, "it stays")
	}
	for _, k := range []*conn{early, member} {
		select {
		case <-k.expired:
			require.Fail(t, "it was expired")
		default:
		}
	}
}

// register writes the first frame of a worker, which registers it.
func register(t *testing.T, l *Link) {
	t.Helper()
	m := Note(kindRegister, Registration{Member: Member{Rank: 0, Host: "a", PID: 7}})
	require.NoError(t, l.Write(Frame{number: 1, Body: m.Encode()}, time.Minute))
}

// setKey lets a worker that has registered set a key to a value of so many bytes, and waits for the answer.
func setKey(t *testing.T, l *Link, number uint64, size int) {
	t.Helper()
	m := Message{Kind: KindCall, Epoch: FirstEpoch, ID: number, Body: Call{Op: OpSet, Fields: [][]byte{[]byte("k"), make([]byte, size)}}.Encode()}
	require.NoError(t, l.Write(Frame{number: number, Body: m.Encode()}, time.Minute))
	answer, _, err := l.readMessage(time.Minute)
	for err == nil && (answer.Kind != kindReply || answer.ID != number) {
		answer, _, err = l.readMessage(time.Minute)
	}
	require.NoError(t, err)
}

// requireTooLong sends a long frame before the registration: the coordinator hangs up.
func requireTooLong(t *testing.T, l *Link) {
	t.Helper()
	m := Message{Kind: kindBeat, Epoch: FirstEpoch, ID: 1, Body: make([]byte, maxUnregisteredFrame)}
	require.NoError(t, l.Write(Frame{number: 1, Body: m.Encode()}, time.Minute))
	_, _, err := l.readMessage(time.Minute)
	require.Error(t, err)
}

// TestFramesOfGuests sends a long frame with a worker's token before and after registration.
func TestFramesOfGuests(t *testing.T) {
	t.Parallel()
	as, errs := startAll(t, onLoopback(t, 1, 2)...)
	require.NoError(t, errs[0])
	worker, err := as[0].keys.Control.forWorkers(as[0].promise().Run)
	require.NoError(t, err)
	for _, registers := range []bool{false, true} {
		l, _ := Target{Job: as[0].Job(), Addr: as[0].Addr, Key: worker}.persist(t)
		defer l.Close()
		if !registers {
			requireTooLong(t, l)
			continue
		}
		register(t, l)
		setKey(t, l, 2, maxUnregisteredFrame)
	}
}

// TestFramesOfResumedGuests continues the stream of a process on another link, and sends a long frame there: the process has not registered,
// registers on the other link, or has registered on the first one.
func TestFramesOfResumedGuests(t *testing.T) {
	t.Parallel()
	for _, registers := range []string{"never", "afterwards", "before"} {
		as, errs := startAll(t, onLoopback(t, 1, 2)...)
		require.NoError(t, errs[0])
		worker, err := as[0].keys.Control.forWorkers(as[0].promise().Run)
		require.NoError(t, err)
		to := Target{Job: as[0].Job(), Addr: as[0].Addr, Key: worker}
		first, hello := to.persist(t)
		defer first.Close()
		if registers == "before" {
			register(t, first)
			setKey(t, first, 2, 1) // the coordinator has read both
		}
		l, _ := to.persist(t)
		defer l.Close()
		require.NoError(t, l.Write(Frame{Body: Message{Kind: kindResume, Epoch: FirstEpoch, Body: []byte(hello.Stream)}.Encode()}, time.Minute))
		answer, _, err := l.readMessage(time.Minute)
		for err == nil && answer.Kind != kindResumed { // the welcome of the link's own stream may come before
			answer, _, err = l.readMessage(time.Minute)
		}
		require.NoError(t, err, registers)
		switch registers {
		case "never":
			requireTooLong(t, l)
		case "afterwards":
			register(t, l)
			setKey(t, l, 2, maxUnregisteredFrame)
		case "before":
			setKey(t, l, 3, maxUnregisteredFrame)
		}
	}
}

// TestResumeOnABrokenLink asks to continue a stream on a connection whose last write failed.
func TestResumeOnABrokenLink(t *testing.T) {
	j, _, worker := judged()
	s, of := j.served()
	q := of(worker(1))
	p := unregistered(0) // without a link, as after writeFailed
	require.ErrorIs(t, s.resume(p, Message{Kind: kindResume, Epoch: FirstEpoch, Body: []byte(q.peer.id)}), errOtherStream)
	require.Empty(t, q.renewals, "the stream keeps its link")
}

// A request to continue a stream that comes after a later one is of a link that the member does not use any more.
func TestLateRequestToResume(t *testing.T) {
	j, _, worker := judged()
	s, of := j.served()
	q := of(worker(1))
	ask := func(number uint64) int {
		near, far := net.Pipe()
		t.Cleanup(func() { near.Close(); far.Close() })
		p := unregistered(0)
		p.stream = NewStream(&Link{Conn: near}, NewRunClock(time.Second), time.Minute)
		require.ErrorIs(t, s.resume(p, Message{Kind: kindResume, Epoch: number, Body: []byte(q.peer.id)}), errOtherStream)
		return len(q.renewals)
	}
	require.Equal(t, 1, ask(2))
	<-q.renewals
	require.Zero(t, ask(1))
	require.Equal(t, 1, ask(3))
}

// TestMembersThatGiveUp registers without a rank and gives up, again and again.
func TestMembersThatGiveUp(t *testing.T) {
	c, _, _ := judged()
	for i := range 100 {
		p := unregistered(0).peer
		p.role, p.reg.Member = roleWorker, Member{Rank: -1, Host: strings.Repeat("h", 100), PID: i}
		c.gaveUp(p)
	}
	require.Len(t, c.gone, c.size())
	require.Equal(t, 99, c.gone[len(c.gone)-1].PID, "the last ones")
}
