package job

import (
	"context"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// These tests split a job into parts and let real coordinators without sockets decide on both sides. At most one part may
// begin another epoch.

// agentOn returns the agent of a host, which has heard all that the coordinator has sent to it so far.
func (j *paperJob) agentOn(t *testing.T, u string) *Agent {
	t.Helper()
	a := &Agent{UUID: u, cfg: Config{Notify: func(string) {}, LocalSize: 1}, voter: newVoter(1)}
	a.Now.Store(&attempt{})
	j.hear(t, a)
	require.NotNil(t, a.history)
	return a
}

// mayTakeOver reports whether hosts that have lost a coordinator may choose another one among themselves.
func mayTakeOver(as ...*Agent) bool {
	here, ch := map[string]bool{}, *as[0].history
	var ended []string
	for _, a := range as {
		here[a.UUID] = true
		ch.merge(a.history)
		ended = append(ended, a.ended...)
	}
	return allow(ch.voterSets(), here, setOf(ended))
}

// A host whose worker has exited is connected. It must answer a proposal like all others: otherwise the coordinator could begin an
// epoch by it, and the host, which does not know, another one with the rest.
func TestHostWithoutWorkersMustAnswer(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := endedHost(t) // epoch 2 has the workers of a and b; a, b and c decide
		b, c := j.agentOn(t, "b"), j.agentOn(t, "c")
		j.lose("b") // the network splits into a, and b and c; a notices the silence of b first
		j.settle("a")
		require.Equal(t, phasePropose, j.elastic.phase)
		j.answer("a")
		require.Equal(t, uint64(2), j.epoch, "c has not answered")
		require.True(t, mayTakeOver(b, c))
		j.ends(j.hosts["c"], io.ErrNoProgress)
		j.settle("a")
		j.answer("a")
		require.Equal(t, uint64(2), j.epoch)
		require.NotNil(t, j.faults.stop, "a is a minority")
	})
}

// If c answers, the epoch begins, and c cannot go on with b.
func TestHostWithoutWorkersAnswers(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := endedHost(t)
		b, c := j.agentOn(t, "b"), j.agentOn(t, "c")
		j.lose("b")
		j.settle("a")
		j.hear(t, c)
		j.answer("a", "c")
		require.Equal(t, uint64(3), j.epoch)
		require.False(t, mayTakeOver(b, c))
	})
}

// A host without workers leaves while a proposal with it waits for its answer. The next proposal does not have it.
func TestHostWithoutWorkersLeavesDuringAProposal(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := endedHost(t)
		j.lose("b")
		j.settle("a")
		j.answer("a")
		require.NoError(t, j.handle(j.hosts["c"], Message{Kind: kindLeave, Epoch: FirstEpoch}))
		j.answer("a")
		require.Equal(t, uint64(3), j.epoch)
		require.Equal(t, []voterSet{{"a"}}, j.voterSets)
	})
}

// Histories and news of another run of the job, or that contradict themselves, are refused with the reason.
func TestHistoryThatIsRefused(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		hosts := plan{Hosts: []host{{UUID: "a"}, {UUID: "b"}}}
		for want, ch := range map[string]history{
			"another run of the job":   {Run: "other", Epoch: 1},
			"host number 2 of 2":       {Epoch: 1, Plan: hosts, Members: []Member{{Node: 2}}},
			`host "a" decides twice`:   {Epoch: 1, Voters: voterSet{"a", "a"}},
			"is not a host of the job": {Epoch: 1, Plan: hosts, Voters: voterSet{"c"}},
			"epochs start with 1":      {},
			"a proposal of epoch 0":    {Epoch: 1, Proposed: []proposal{{0, voterSet{"a"}}}},
		} {
			j := newPaperJob("a", "b")
			p := j.newHost("c")
			p.state, p.host.History = peerNew, &ch
			j.do(func() { require.NoError(t, j.registerAgent(p)) })
			require.Equal(t, peerGone, p.state, want)
			var r Refusal
			require.NoError(t, j.take(p)[0].Record(&r))
			require.Contains(t, r.Reason, want)
		}
		a := &Agent{UUID: "a", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
		a.Now.Store(&attempt{})
		require.NoError(t, a.news(1, news{By: Leader{Term: 1, Run: "one"}, Plan: hosts, Voters: voterSet{"a", "b"}}))
		require.ErrorContains(t, a.news(2, news{By: Leader{Term: 2, Run: "two", Name: "host x"}, Plan: hosts}), "host x in term 2 leads another run of the job")
		require.ErrorContains(t, a.news(2, news{By: Leader{Term: 2, Run: "one"}, Plan: hosts, Members: []Member{{Node: 5}}}), "rank 0 is on host number 5 of 2")
		require.Equal(t, uint64(1), a.history.Epoch)
	})
}

// Epochs that do not grow, and two coordinators in one term, are reported, and name both coordinators.
func TestTwoCoordinatorsAreReported(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		one, other := Leader{Term: 2, Agent: "a", Name: "host a (pid 1)"}, Leader{Term: 2, Agent: "b", Name: "host b (pid 2)"}
		a := &Agent{UUID: "c", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
		a.Now.Store(&attempt{})
		n := news{By: one, Plan: plan{Hosts: []host{{UUID: "c"}}}, Voters: voterSet{"c"}}
		require.NoError(t, a.news(3, n))
		n.By.Term++
		err := a.news(2, n)
		require.ErrorContains(t, err, "host a (pid 1) in term 2 has begun epoch 3, and host a (pid 1) in term 3 comes with epoch 2")
		n.By = other
		err = a.news(3, n)
		require.ErrorContains(t, err, "host a (pid 1) in term 2 and host b (pid 2) in term 2")
		n.By.Term--
		require.ErrorContains(t, a.news(3, n), "host b (pid 2) in term 1 does not coordinate the job any more: host a (pid 1) in term 2 has replaced it")

		j := newPaperJob("a", "b")
		p := j.register("b", 300, 9)
		require.Equal(t, peerGone, p.state)
		var f Refusal
		sent := j.take(p)
		require.NoError(t, sent[len(sent)-1].Record(&f))
		require.Contains(t, f.Reason, "has begun epoch 9, and host a (pid 0) in term 0 comes with epoch 1")
	})
}

// drained returns a job of five hosts of which d and e leave, and all functions have returned: the coordinator proposes an epoch
// without them.
func drained(t *testing.T) *paperJob {
	j := newPaperJob("a", "b", "c", "d", "e")
	for _, u := range []string{"d", "e"} {
		require.NoError(t, j.handle(j.hosts[u], Note(kindDrain, Fault{Reason: "received SIGTERM", Code: 143})))
	}
	j.settle("c", "d", "e")
	return j
}

// Hosts that leave must answer the proposal without them: until then they could choose another coordinator with others.
func TestDrainedHostsMustAnswer(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := drained(t)
		c, d, e := j.agentOn(t, "c"), j.agentOn(t, "d"), j.agentOn(t, "e")
		j.settle("a", "b") // after the network has split into a and b, and c, d and e
		require.Equal(t, phasePropose, j.elastic.phase)
		require.Equal(t, voterSet{"a", "b", "c"}, j.elastic.voters)
		j.lose("c")
		j.answer("a", "b")
		require.Equal(t, uint64(1), j.epoch)
		require.True(t, mayTakeOver(c, d, e))
		j.lose("d")
		j.lose("e")
		j.answer("a", "b")
		require.Equal(t, uint64(1), j.epoch)
		require.NotNil(t, j.faults.stop, "a and b are a minority")
	})
}

// When they have answered, they are told to stop, and count no longer. Their launchers may also end before they answer.
func TestDrainedHostsAreDismissed(t *testing.T) {
	for name, last := range map[string]func(*paperJob){
		"answers": func(j *paperJob) { j.answer("e") },
		"leaves": func(j *paperJob) {
			j.do(func() { j.loseAgent(j.hosts["e"], agentEnd{ended: true, left: true}) })
			j.answer("a", "b", "c", "d")
		},
	} {
		t.Run(name, func(t *testing.T) {
			testhost.Bubble(t, func(t *testing.T) {
				j := drained(t)
				j.settle("a", "b")
				require.Equal(t, KindDismiss, j.take(j.procs["d"])[2].Kind)
				j.take(j.hosts["d"])
				j.answer("a", "b", "c", "d")
				require.Equal(t, uint64(1), j.epoch)
				require.Empty(t, j.ended)
				last(j)
				require.Equal(t, uint64(2), j.epoch)
				require.Equal(t, []voterSet{{"a", "b", "c"}}, j.voterSets)
				require.Len(t, j.agents, 3)
				sent := j.take(j.hosts["d"])
				var o Order
				require.NoError(t, sent[len(sent)-1].Record(&o))
				require.Equal(t, Order{Stop: true}, o)
				require.Len(t, j.world.Left, 2)
				require.Empty(t, j.flappers)
			})
		})
	}
}

// The coordinator and another host are drained. The coordinator leaves when the other host has agreed to an epoch without it.
func TestHandoverAfterDrainedHosts(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c")
		for _, u := range []string{"a", "b"} {
			require.NoError(t, j.handle(j.hosts[u], Note(kindDrain, Fault{Reason: "received SIGTERM", Code: 143})))
		}
		j.settle("a", "b", "c")
		require.False(t, j.handedOver)
		require.Equal(t, voterSet{"a", "c"}, j.elastic.voters)
		j.answer("a", "b", "c")
		require.Equal(t, uint64(2), j.epoch)
		j.take(j.hosts["c"])
		j.settle("a", "c")
		require.True(t, j.handedOver)
		var h handover
		require.NoError(t, j.take(j.hosts["c"])[0].Record(&h))
		require.Equal(t, []string{"a"}, h.Ended)
	})
}

// candidate lets hosts that have lost a coordinator choose the first of them. It has taken over, and proposes the next epoch
// when its workers, whose PIDs are given, have registered.
func candidate(t *testing.T, lost string, pids map[string]int, as ...*Agent) *paperJob {
	t.Helper()
	var uuids []string
	for _, a := range as {
		uuids = append(uuids, a.UUID)
	}
	k := newPaperJob(uuids...)
	for _, h := range k.hosts {
		k.take(h) // the messages of newPaperJob itself
	}
	ch := *as[0].history
	ch.Lost, ch.Reason = lost, "silent"
	k.do(func() {
		k.workers, k.elastic, k.plan, k.agents, k.voterSets = nil, nil, nil, nil, nil
		k.succession = &succession{history: ch, begun: k.now, hosts: map[string]*history{}}
		for _, a := range as {
			own := *a.history
			own.Lost, own.Ended, own.Term, own.Ledger = lost, a.ended, a.promised.Term, a.book
			if pids[a.UUID] > 0 {
				own.Running = []int{0}
			}
			p := k.hosts[a.UUID]
			p.state, p.role, p.host.History = peerNew, roleAgent, &own
			require.NoError(t, k.registerAgent(p))
		}
	})
	k.sleep(time.Second) // the others have their time to come
	for _, a := range as {
		for _, m := range k.take(k.hosts[a.UUID]) {
			if m.Kind == kindRequestVote && m.ID == k.attempt {
				var by Leader
				require.NoError(t, m.Record(&by))
				require.NoError(t, a.vote(by))
			}
		}
	}
	k.do(func() {
		for _, p := range k.agents {
			k.voted(p, k.attempt)
		}
	})
	require.NotNil(t, k.elastic, "they are not enough")
	for u, pid := range pids {
		k.register(u, pid, k.epoch)
	}
	k.sleep(2 * SettleTime)
	return k
}

// allAnswer lets all hosts and workers answer the proposal.
func (j *paperJob) allAnswer() {
	j.do(func() {
		for _, a := range slices.Clone(j.agents) {
			j.accepted(a, j.elastic.try)
		}
		for _, p := range slices.Clone(j.elastic.peers) {
			j.workerPrepared(p, j.elastic.try)
		}
	})
}

// comesBack lets a host that has lost another coordinator register with this one.
func (j *paperJob) comesBack(t *testing.T, a *Agent, lost string) *peer {
	t.Helper()
	p := j.newHost(a.UUID)
	p.state, p.host.Nodes, p.host.MinNodes = peerNew, j.cfg.agents, 1
	ch := *a.history
	ch.Lost, ch.Term = lost, a.promised.Term
	p.host.History = ch.excerpt(Welcome{Running: true})
	j.do(func() { require.NoError(t, j.registerAgent(p)) })
	return p
}

// A coordinator that others have replaced wins no host back: the host that has answered the proposal of its successor does not
// register with it, and tells it that it was replaced.
func TestReplacedCoordinator(t *testing.T) {
	for name, meets := range map[string]func(t *testing.T, j *paperJob, c *Agent){
		"a host registers": func(t *testing.T, j *paperJob, c *Agent) { j.comesBack(t, c, "b") },
		"a host tells it": func(t *testing.T, j *paperJob, c *Agent) {
			p := &peer{addr: "c"}
			require.NoError(t, j.handle(p, Note(kindElsewhere, elsewhere{By: c.promise()})))
		},
	} {
		t.Run(name, func(t *testing.T) {
			testhost.Bubble(t, func(t *testing.T) {
				j := newPaperJob("a", "b", "c", "d", "e", "f")
				b, c, d, e := j.agentOn(t, "b"), j.agentOn(t, "c"), j.agentOn(t, "d"), j.agentOn(t, "e")
				// The network splits into a and f, and the others. a has not noticed that yet.
				k := candidate(t, "a", map[string]int{"b": 101, "c": 102, "d": 103, "e": 104}, b, c, d, e)
				require.Equal(t, phasePropose, k.elastic.phase)
				require.Equal(t, uint64(1), k.term)
				k.hear(t, c)
				require.Equal(t, []voterSet{{"a", "b", "c", "d", "e", "f"}, {"b", "c", "d", "e"}}, c.history.voterSets())
				require.False(t, c.accepts(Welcome{Running: true, Term: j.term}))
				require.True(t, c.accepts(Welcome{Running: true, Term: k.term}))
				require.True(t, c.accepts(Welcome{Elects: true}))
				j.take(j.hosts["f"])
				j.take(j.hosts["a"])
				meets(t, j, c)
				require.NotNil(t, j.faults.stop)
				require.Contains(t, j.faults.stop.Reason, "in term 1 coordinates the job now")
				require.True(t, j.handedOver)
				require.Equal(t, []Kind{KindFault}, kindsOf(j.take(j.hosts["a"])))
				var h handover
				sent := j.take(j.hosts["f"])
				require.Equal(t, []Kind{kindHandover}, kindsOf(sent))
				require.NoError(t, sent[0].Record(&h))
				require.Equal(t, []any{true, []string{"a"}}, []any{h.Failed, h.Ended})
				k.allAnswer()
				require.Equal(t, uint64(2), k.epoch)
			})
		})
	}
}

// Terms of another run of the job say nothing: a launcher that is left of an earlier run deposes no coordinator, and this run's hosts
// follow no leader or candidate of another one.
func TestTermsOfAnotherRun(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b")
		j.run = "new"
		tell := func(by Leader) {
			require.NoError(t, j.handle(&peer{addr: "10.0.0.9"}, Note(kindElsewhere, elsewhere{By: by})))
		}
		tell(Leader{Term: 7, Run: "old", Name: "host x (pid 9)"})
		require.Nil(t, j.faults.stop)
		require.False(t, j.handedOver)
		require.Len(t, j.lines, 1)
		require.Contains(t, j.lines[0], "refused the process at 10.0.0.9: host x (pid 9) in term 7 belongs to another run of the job")
		j.do(func() { j.checkTerm(Leader{Term: 7, Run: "old"}) })
		require.Nil(t, j.faults.stop)

		a := &Agent{UUID: "b", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
		require.NoError(t, a.Follow(Leader{Term: 2, Run: "new"}))
		require.True(t, a.accepts(Welcome{Run: "new", Running: true, Term: 2}))
		require.True(t, a.accepts(Welcome{Run: "new", Elects: true}))
		require.False(t, a.accepts(Welcome{Run: "old", Running: true, Term: 7}))
		require.False(t, a.accepts(Welcome{Run: "old", Elects: true}))

		tell(Leader{Term: 1, Run: "new", Name: "host y (pid 8)"})
		require.NotNil(t, j.faults.stop, "a greater term of the same run")
	})
}

// A coordinator that loses its majority ends at once, although functions of its epoch still run.
func TestMinorityEndsAtOnce(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c", "d")
		j.lose("b")
		require.Nil(t, j.faults.stop)
		require.Equal(t, phaseRevoke, j.elastic.phase)
		j.lose("c")
		require.Nil(t, j.faults.stop, "it is the first of two halves")
		j.take(j.hosts["d"])
		j.lose("d")
		require.NotNil(t, j.faults.stop)
		require.Contains(t, j.faults.stop.Reason, "this part of the network has 1 of the 4 hosts of epoch 1")
	})
}

// Two hosts lose a coordinator that can still send to them. It is a minority and ends, and they choose another one.
func TestHostsThatAMinorityHasLost(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c", "d", "e")
		as := map[string]*Agent{}
		for _, u := range []string{"b", "c", "d", "e"} {
			as[u] = j.agentOn(t, u)
		}
		for _, u := range []string{"b", "c", "d"} {
			j.lose(u)
			sent := j.take(j.hosts[u])
			require.Equal(t, KindRefuse, sent[len(sent)-1].Kind)
			k := &Client{Stream: NewStream(nil, NewRunClock(time.Second), time.Minute), Hello: Welcome{Agent: "a", LostAfter: time.Second}}
			k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
			k.open, k.shut = context.WithCancel(t.Context())
			k.events = as[u].event
			as[u].k, as[u].life = k, t.Context()
			k.dispatch(sent[len(sent)-1])
			ch := as[u].loseCoordinator(k, as[u].Now.Load(), context.Cause(k.Ctx))
			require.NotNil(t, ch, "it may choose another coordinator")
			require.True(t, ch.isPossible())
			require.Empty(t, ch.Ended, "the coordinator may live")
			as[u].wg.Done()
		}
		sent := j.take(j.hosts["e"])
		require.Equal(t, kindHandover, sent[len(sent)-1].Kind, "it has not lost e, which may choose, too")
		require.NotNil(t, j.faults.stop)
	})
}
