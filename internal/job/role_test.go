package job

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestTokenIsForWorkers takes what a worker has in its environment, as any program does that
// it starts, and tries to be a launcher.
func TestTokenIsForWorkers(t *testing.T) {
	as, errs := startAll(t, onLoopback(t, 2, 2)...)
	for _, err := range errs {
		require.NoError(t, err)
	}
	worker := tokenOf(t, as[0])
	var err error
	require.NotEqual(t, as[0].keys.Control.Key, worker.Key)

	// As if it were the launchers' key, it is none.
	require.Eventually(t, func() bool {
		_, _, err := Target{Job: as[0].Job(), Addr: as[0].Addr, Key: Credential{Key: worker.Key}}.Dial(t.Context())
		_, auth := errors.AsType[*AuthError](err)
		return auth
	}, time.Minute, time.Millisecond)

	l, _ := Target{Job: as[0].Job(), Addr: as[0].Addr, Key: worker}.persist(t)
	defer l.Close()
	m := Note(kindRegister, host{Host: "worker", UUID: "u", Nodes: 2, LocalSize: 1, NodeRank: -1})
	m.ID = registerAgent
	require.NoError(t, l.Write(Frame{Body: m.Encode()}, time.Minute))
	for err == nil { // the coordinator hangs up, and refuses nothing in words
		var f Frame
		if f, err = l.Read(); err == nil {
			answer, bad := DecodeMessage(f.Body)
			require.NoError(t, bad)
			require.NotContains(t, []Kind{kindPlan, kindRequestVote, KindRefuse}, answer.Kind)
		}
	}
	require.NoError(t, as[0].Context().Err())
	require.NoError(t, as[1].Context().Err())

	again, err := worker.forWorkers("another")
	require.NoError(t, err)
	require.Equal(t, worker, again, "a worker's children are workers")
}

// tokenOf returns what a launcher gives to its workers.
func tokenOf(t *testing.T, a *Agent) Credential {
	for _, v := range a.WorkerEnv(0) {
		if token, ok := strings.CutPrefix(v, "CHORUS_TOKEN="); ok {
			worker, err := DecodeToken(token)
			require.NoError(t, err)
			return *worker
		}
	}
	t.Fatal("no token")
	return Credential{}
}

// TestNothingOutlivesItsRun starts the same job twice: the token, the keys of workers and the packets of gossip of the
// first run are worth nothing in the second one.
func TestNothingOutlivesItsRun(t *testing.T) {
	t.Parallel()
	run := func() []*Agent {
		cfgs := onLoopback(t, 2, 1)
		for _, c := range cfgs {
			c.Job, c.Secret, c.Insecure = "again", testSecret, false
		}
		as, errs := startAll(t, cfgs...)
		require.NoError(t, errors.Join(errs...))
		return as
	}
	old := run()
	token, label := tokenOf(t, old[0]), old[0].Gossip.Transport.Run.Load().Label
	require.Equal(t, token, tokenOf(t, old[1]), "all workers of a run have one token")
	packet := sealPacket(old[0].Gossip.Transport, 1)
	key, err := token.Derive("again", old[0].promise().Run, "test")
	require.NoError(t, err)
	for _, a := range old {
		require.NoError(t, a.Close())
	}

	as := run()
	require.NotEqual(t, old[0].promise().Run, as[0].promise().Run)
	for _, a := range as { // the coordinator, and a host that names it
		require.NotEqual(t, token, tokenOf(t, a))
		_, _, err := Target{Job: "again", Addr: a.port.at, Key: token}.Dial(t.Context())
		var refused *AuthError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, errOldToken.Error(), refused.Reason)
		_, _, err = Target{Job: "again", Addr: a.port.at, Key: tokenOf(t, a)}.Dial(t.Context())
		if _, refers := errors.AsType[*Referral](err); !refers {
			require.NoError(t, err)
		}
	}
	now, err := tokenOf(t, as[0]).Derive("again", as[0].promise().Run, "test")
	require.NoError(t, err)
	require.NotEqual(t, key, now)
	for _, a := range as {
		require.NoError(t, a.Close()) // it receives no packets any more, and the test asks about some
		to := a.Gossip.Transport
		room := make([]byte, maxPacket)
		require.False(t, to.isFromMember(to.Run.Load(), packet, room))
		require.True(t, to.isFromMember(to.Run.Load(), sealPacket(to, 1), room))
		require.NotEqual(t, label, to.Run.Load().Label)
	}
}

// TestGossipBeforeTheRun: a host that does not know the run of the job takes no packet and no stream of gossip.
func TestGossipBeforeTheRun(t *testing.T) {
	t.Parallel()
	ks := gossipKeys{make([]byte, KeyBytes), "0123456789abcdef"}
	limiter := newConnLimiter()
	control := make(chan *limitedConn, 1)
	to, err := newGossipTransport("127.0.0.1", 0, limiter, nil, func(s *limitedConn) { control <- s })
	require.NoError(t, err)
	defer to.Shutdown()
	member := openTransport(t, newConnLimiter(), ks)
	_, err = member.WriteTo(sealPacket(member, 1), to.tcp.Addr().String())
	require.NoError(t, err)
	c, err := net.Dial("tcp", to.tcp.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write(member.Run.Load().Label[:1])
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	c, err = net.Dial("tcp", to.tcp.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write(Magic[:1])
	require.NoError(t, err)
	(<-control).Close()

	require.NoError(t, to.begin(ks))
	_, err = member.WriteTo(sealPacket(member, 2), to.tcp.Addr().String())
	require.NoError(t, err)
	require.Equal(t, sealPacket(member, 2), (<-to.PacketCh()).Buf, "the packet that came before is lost")
	other := openTransport(t, newConnLimiter(), gossipKeys{ks.key, "0123456789abcdeF"})
	c, err = net.Dial("tcp", to.tcp.Addr().String())
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Write(other.Run.Load().Label)
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "a stream of another run, which nobody takes")
	require.Empty(t, to.StreamCh())
}
