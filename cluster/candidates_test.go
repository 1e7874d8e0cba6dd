package cluster

import (
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// silentHosts returns addresses whose kernels accept connections, and at which nobody answers.
func silentHosts(t *testing.T, n int) (addrs []string) {
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { ln.Close() })
		addrs = append(addrs, ln.Addr().String())
	}
	return addrs
}

// refusingHost returns the address of a stranger who answers that this is another job.
func refusingHost(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, helloBytes))
			_ = reject(c, errOtherJob)
			c.Close()
		}
	}()
	return ln.Addr().String()
}

// choosing returns the election of an agent that has lost its coordinator, and the address of a candidate.
func choosing(t *testing.T, lostAfter time.Duration) (*election, string) {
	t.Helper()
	ks, err := deriveKeys(testSecret, "choice")
	require.NoError(t, err)
	a := &Agent{cfg: Config{Job: "choice", Notify: func(string) {}}, keys: ks, voter: newVoter(1)}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	c := newServer(ln, serverConfig{job: "choice", key: ks.control, notify: func(string) {}, coordConfig: coordConfig{agents: 20, self: welcome{Agent: "next", Heartbeat: time.Second, LostAfter: time.Hour}}},
		candidacy{history: history{Epoch: 1}})
	t.Cleanup(c.close)
	return &election{agent: a, history: &history{lostAfter: lostAfter}, patience: time.Now().Add(time.Hour)}, ln.Addr().String()
}

// Several hosts have vanished together with the coordinator. Candidates are dialled side by side, so that their number
// costs no time.
func TestCandidatesSideBySide(t *testing.T) {
	t.Parallel()
	const lostAfter = 40 * time.Second // one host is waited for a part of it
	for _, n := range []int{0, 1, 14, 40} {
		e, next := choosing(t, lostAfter)
		begun := time.Now()
		got := e.firstOf(t.Context(), append(silentHosts(t, n), next), false)
		took := time.Since(begun)
		require.NoError(t, got.err)
		require.Equal(t, next, got.addr)
		got.link.close()
		require.ErrorIs(t, e.firstOf(t.Context(), []string{next}, true).err, errNotRunning)
		batches := (n + atOnce - 1) / atOnce
		require.Less(t, took, time.Duration(batches+1)*lostAfter/slowPart, "%d hosts have vanished", n)
	}
}

// Strangers at the ports of hosts that have ended refuse a host that looks for the next coordinator. That
// proves nothing, and the candidate after them is found.
func TestRefusalOfAStrangerDuringAChoice(t *testing.T) {
	t.Parallel()
	e, next := choosing(t, 40*time.Second)
	got := e.firstOf(t.Context(), []string{refusingHost(t), refusingHost(t), next}, false)
	require.NoError(t, got.err)
	require.Equal(t, next, got.addr)
	got.link.close()
	got = e.firstOf(t.Context(), []string{refusingHost(t), freeAddr(t)}, false)
	require.Error(t, got.err)
	require.False(t, isRefusal(got.err), "one candidate has only not started yet")
}

// At the join, a stranger at one seed's port keeps no host from another seed. If all seeds refuse a host, it fails.
func TestRefusalOfAStrangerAtTheJoin(t *testing.T) {
	t.Parallel()
	cfgs := onLoopback(t, 2, 1)
	stranger := refusingHost(t)
	for _, c := range cfgs {
		c.NoGossip = true
		c.Seeds = append([]string{stranger}, c.Seeds...)
	}
	as, errs := startAll(t, cfgs...)
	require.NoError(t, errors.Join(errs...))
	for _, a := range as {
		a.Close()
	}
	cfgs[1].Seeds = []string{stranger}
	_, err := Start(t.Context(), cfgs[1])
	var auth *AuthError
	require.ErrorAs(t, err, &auth)
}

// A candidate with enough hosts takes over without those that have vanished, waits for those that answer, and does not count
// those that have ended.
func TestCandidateLooksForVoters(t *testing.T) {
	for name, tc := range map[string]struct {
		found map[string]finding
		took  time.Duration
		term  uint64 // of the proposal; 0: none
	}{
		"vanished":    {map[string]finding{}, time.Second / slowPart, 2},
		"not noticed": {map[string]finding{"e": foundAlive}, time.Second / 2, 2},
		// c and d may have agreed to an epoch with e.
		"others have ended": {map[string]finding{"c": foundEnded, "d": foundEnded}, time.Second / slowPart, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := newPaperJob("a", "b", "c", "d", "e")
				ch := *j.agentOn(t, "b").history
				ch.Lost, ch.Term = "a", 1
				k := newPaperJob("b", "c", "d")
				k.plan, k.elastic, k.agents, k.workers, k.cfg.probes = nil, nil, nil, nil, true
				voters := []string{"b", "c", "d"}
				if tc.found["c"] == foundEnded {
					ch.Ended = []string{"a"}
					voters = voters[:1] // it would be half of b and e, if the others did not count
				}
				k.happen(candidacy{history: ch})
				for _, u := range voters {
					own := ch
					p := k.hosts[u]
					p.state, p.host.History = peerNew, &own
					k.do(func() { require.NoError(t, k.registerAgent(p)) })
				}
				answered, asked := map[string]bool{}, time.Duration(0)
				for u, f := range tc.found {
					answered[u] = f == foundAlive
				}
				// probes answers the probe of voters when its time is over, as hosts that have vanished do not answer.
				probes := func() {
					if len(k.probes) > 0 && asked == 0 {
						asked = k.now
					}
					if len(k.probes) > 0 && k.now >= asked+k.probes[0].limit {
						asked, k.probes = 0, k.probes[1:]
						k.happen(probed{answered})
					}
				}
				for end := k.now + tc.took - time.Millisecond; k.now < end; probes() {
					k.sleep(time.Millisecond)
				}
				require.Zero(t, k.attempt)
				for end := k.now + 2*time.Second/slowPart; k.now < end; probes() {
					k.sleep(time.Millisecond)
				}
				require.Equal(t, tc.term != 0, k.attempt != 0)
				if tc.term != 0 {
					require.Equal(t, tc.term, k.term)
				}
			})
		})
	}
}
