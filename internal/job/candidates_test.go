package job

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

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
			_, _ = c.Read(make([]byte, HelloBytes))
			_ = Reject(c, errOtherJob)
			c.Close()
		}
	}()
	return ln.Addr().String()
}

// choosing lets a host choose among candidates after the loss of a coordinator, until it registers or limit has passed. answer returns
// what a candidate answers after a millisecond, or false if it is silent.
func choosing(candidates []string, lostAfter, limit time.Duration, answer func(addr string) (answered, bool)) (c *choice, took time.Duration) {
	v := newVoter(1)
	c = newSuccession(&v, &history{Epoch: 1, Voters: candidates, lostAfter: lostAfter}, "", "lost", lostSilent, 1)
	c.candidates = candidates
	type arrival struct {
		at instant
		e  choiceEvent
	}
	var due []arrival
	handle := func(as []action) {
		for _, a := range as {
			if d, ok := a.(dial); ok {
				e, answers := answer(d.addr)
				e.dial = d.dial
				if at := c.now + time.Millisecond; answers {
					due = append(due, arrival{at, e})
				} else {
					due = append(due, arrival{c.now + d.limit, answered{dial: d.dial, err: context.DeadlineExceeded}})
				}
			}
		}
	}
	for handle(c.step(1, nil)); c.link == 0 && !c.over && c.now < limit; {
		at, _ := c.next()
		i := -1
		for j, x := range due {
			if x.at <= at {
				i, at = j, x.at
			}
		}
		var e choiceEvent
		if i >= 0 {
			e = due[i].e
			due = slices.Delete(due, i, i+1)
		}
		handle(c.step(at, e))
	}
	return c, c.now - c.begun
}

// Several hosts have vanished together with the coordinator. Candidates are dialled side by side, so that their number
// costs no time.
func TestCandidatesSideBySide(t *testing.T) {
	const lostAfter = 3 * time.Second // one host is waited for a part of it
	for _, n := range []int{0, 1, 14, 40} {
		var candidates []string
		for i := range n {
			candidates = append(candidates, fmt.Sprintf("silent %d", i))
		}
		c, took := choosing(append(candidates, "next"), lostAfter, time.Minute, func(addr string) (answered, bool) {
			return answered{hello: Welcome{Elects: true}}, addr == "next"
		})
		require.Equal(t, "next", c.addr)
		batches := n / atOnce
		require.Less(t, took, time.Duration(batches+1)*lostAfter/slowPart+10*time.Millisecond, "%d hosts have vanished", n)
	}
}

// Of several candidates that answer, the first is registered with, and a leader before all of them.
func TestFirstCandidate(t *testing.T) {
	for name, tc := range map[string]struct {
		hello map[string]Welcome // of the candidates that answer
		refer map[string]string
		want  string
	}{
		"first":                  {map[string]Welcome{"b": {Elects: true}, "c": {Elects: true}}, nil, "b"},
		"leader":                 {map[string]Welcome{"a": {Elects: true}, "c": {Running: true}}, nil, "c"},
		"leader of another one":  {map[string]Welcome{"x": {Running: true}}, map[string]string{"b": "x"}, "x"},
		"candidate of another":   {map[string]Welcome{"x": {Elects: true}, "c": {Elects: true}}, map[string]string{"b": "x"}, "c"},
		"refers to the lost one": {map[string]Welcome{"lost": {Running: true}}, map[string]string{"b": "lost"}, ""},
		"another run":            {map[string]Welcome{"a": {Elects: true, Run: "other"}, "b": {Elects: true}}, nil, "b"},
		"does not elect":         {map[string]Welcome{"a": {}, "c": {Elects: true}}, nil, "c"},
	} {
		t.Run(name, func(t *testing.T) {
			c, took := choosing([]string{"a", "b", "c"}, time.Second, 1500*time.Millisecond, func(addr string) (answered, bool) {
				if at := tc.refer[addr]; at != "" {
					return answered{refers: &Referral{At: at, Over: "its job has ended"}, err: &Referral{At: at}}, true
				}
				hello, ok := tc.hello[addr]
				return answered{hello: hello}, ok
			})
			require.Equal(t, tc.want, c.addr)
			if tc.want != "" {
				require.Less(t, took, 100*time.Millisecond)
			}
		})
	}
}

// A leader that others have replaced is told so, and not registered with. Terms of its successor are.
func TestReplacedLeader(t *testing.T) {
	v := newVoter(1)
	v.promised = Leader{Term: 3}
	c := newSuccession(&v, &history{Epoch: 1, Voters: voterSet{"a", "b", "x"}, Lost: "x", lostAfter: time.Second}, "", "lost", lostSilent, 1)
	c.candidates = []string{"a", "b"}
	as := c.step(1, begin{})
	require.Equal(t, []action{dial{1, "a", time.Second / 4}, dial{2, "b", time.Second / 4}}, as)
	require.Equal(t, []action{announce{1}}, c.step(2, answered{dial: 1, hello: Welcome{Running: true, Term: 2}}))
	as = c.step(3, answered{dial: 2, hello: Welcome{Running: true, Term: 3}})
	require.Equal(t, []action{enroll{dial: 2, addr: "b", hello: Welcome{Running: true, Term: 3}, history: &history{Term: 3, Epoch: 1, Lost: "x"}}, prefer{"b"}}, as)
	require.Empty(t, c.step(4, planSent{dial: 1}), "only the registration counts")
	require.Equal(t, []action{notChosen{v.Follow(Leader{Term: 2})}}, c.step(5, planSent{dial: 2, plan: plan{By: Leader{Term: 2}}}))
}

// A host that has found no other coordinator looks for the one that it has lost, or that has lost it, and registers with it: it may lead the others.
func TestReturnToASilentCoordinator(t *testing.T) {
	for _, how := range []Loss{lostSilent, lostByIt, lostEnded} {
		v := newVoter(1)
		v.promised = Leader{Term: 3, Agent: "x"}
		c := newSuccession(&v, &history{Epoch: 1, Voters: voterSet{"a", "b", "x"}, Lost: "x", lostAfter: time.Second}, "", "lost", how, 1)
		c.candidates = []string{"a"}
		c.step(1, begin{})
		c.step(2, answered{dial: 1, hello: Welcome{Elects: true}})
		require.EqualValues(t, 1, c.link)
		as := c.step(2+slowAfter(time.Second), nil)
		if how == lostEnded {
			require.Empty(t, as)
			continue
		}
		require.Equal(t, []action{dial{2, "a", time.Second / 4}, dial{3, "lost", time.Second / 4}}, as)
		require.Empty(t, c.step(c.now+1, answered{dial: 2, hello: Welcome{Elects: true}}))
		require.Equal(t, []action{hangUpDial{2}}, c.step(c.now+1, answered{dial: 3, err: errors.New("silent")}))
		require.EqualValues(t, 1, c.link)
		require.Equal(t, []action{dial{4, "a", time.Second / 4}, dial{5, "lost", time.Second / 4}}, c.step(c.now+time.Second/4, nil))
		leads := Welcome{Running: true, Term: 3}
		require.Equal(t, []action{hangUpDial{4}, leave{1}, enroll{dial: 5, addr: "lost", hello: leads, history: &history{Term: 3, Epoch: 1, Lost: "x"}}, prefer{"lost"}},
			c.step(c.now+1, answered{dial: 5, hello: leads}))
	}
}

// A host that has registered with a candidate goes to another one that has more hosts, also if only the candidates' hosts know of that one.
func TestHostsGoWhereMoreAre(t *testing.T) {
	v := newVoter(1)
	for _, tc := range []struct {
		name string
		at   map[string]Welcome // what the candidates say
		want string
	}{
		{"more", map[string]Welcome{"b": {Hosts: 2, Agent: "b"}, "c": {Hosts: 3, Agent: "c"}}, "c"},
		{"fewer", map[string]Welcome{"b": {Hosts: 2, Agent: "b"}, "c": {Hosts: 1, Agent: "c"}}, "b"},
		{"as many", map[string]Welcome{"b": {Hosts: 2, Agent: "b"}, "c": {Hosts: 2, Agent: "c"}}, "b"},
		{"as many, smaller", map[string]Welcome{"b": {Hosts: 2, Agent: "z"}, "c": {Hosts: 2, Agent: "c"}}, "c"},
		{"unknown candidate", map[string]Welcome{"b": {Hosts: 1, Agent: "b", At: "e"}, "e": {Hosts: 3, Agent: "e"}}, "e"},
		{"unknown candidate of another one", map[string]Welcome{"b": {Hosts: 1, Agent: "b"}, "d": {Agent: "d", At: "e"}, "e": {Hosts: 2, Agent: "e"}}, "e"},
		{"unknown candidate that has fewer", map[string]Welcome{"b": {Hosts: 2, Agent: "b"}, "d": {Agent: "d", At: "e"}, "e": {Hosts: 1, Agent: "e"}}, "b"},
		{"its candidate does not answer", map[string]Welcome{"c": {Hosts: 3, Agent: "c"}}, "b"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			own := &history{Epoch: 1, Voters: voterSet{"x", "b", "c", "d"}, Lost: "x", lostAfter: time.Second}
			c := newSuccession(&v, own, "d", "lost", lostEnded, 1)
			c.candidates = []string{"b", "c", "d"}
			c.step(1, begin{})
			as := c.step(2, answered{dial: 1, hello: Welcome{Elects: true}})
			require.Equal(t, prefer{"b"}, as[len(as)-1])
			if tc.name == "its candidate does not answer" {
				tc.at["b"] = Welcome{}
			}
			for now := instant(3); now < instant(time.Second); now += instant(time.Millisecond) {
				for as = c.step(now, nil); len(as) > 0; {
					d, ok := as[0].(dial)
					as = as[1:]
					if !ok {
						continue
					}
					hello, ok := tc.at[d.addr]
					hello.Elects = hello.Agent != ""
					e := answered{dial: d.dial, hello: hello}
					if !ok || !hello.Elects {
						e.err = errors.New("no answer")
					}
					as = append(as, c.step(now, e)...)
				}
			}
			require.Equal(t, tc.want, c.addr)
		})
	}
}

// A candidate tells how many hosts it has, and with which other candidate its own host has registered.
func TestCandidateTellsOfItsHosts(t *testing.T) {
	j := newPaperJob("a", "b", "c", "d")
	ch := *j.agentOn(t, "c").history
	ch.Lost, ch.Term = "a", 1
	k := newPaperJob("c", "d", "b")
	k.plan, k.elastic, k.agents, k.workers = nil, nil, nil, nil
	k.happen(candidacy{history: ch})
	for i, u := range []string{"d", "b"} {
		require.Equal(t, i, k.welcome().Hosts)
		p := k.hosts[u]
		p.state, p.host.History = peerNew, &ch
		k.do(func() { require.NoError(t, k.registerAgent(p)) })
	}
	require.Empty(t, k.welcome().At)
	k.happen(registered{"b:1"})
	require.Equal(t, "b:1", k.welcome().At)
	require.Empty(t, k.waitingLine(), "its own host is with another candidate, so it does not say that nobody is here")
	k.happen(registered{})
	require.Empty(t, k.welcome().At)
	require.Contains(t, k.waitingLine(), "to agree to another one: 2 of 4 are here")
}

// A host that the coordinator has lost does not claim that others choose another one: the coordinator may go on.
func TestNextAfterALoss(t *testing.T) {
	ch := &history{Epoch: 3}
	require.Equal(t, "the hosts of epoch 3 choose another coordinator", ch.next(lostSilent))
	require.Equal(t, "this host looks for the job's coordinator", ch.next(lostByIt))
}

// If too few hosts are left to choose another coordinator, a host looks for the one that it has lost at once, unless that has ended.
func TestReturnIfNoChoiceIsPossible(t *testing.T) {
	for _, how := range []Loss{lostSilent, lostByIt, lostEnded} {
		v := newVoter(1)
		c := newSuccession(&v, &history{Epoch: 1, Voters: voterSet{"x", "b"}, Lost: "x", lostAfter: time.Second}, "", "lost", how, 1)
		as := c.step(1, begin{})
		if how == lostEnded {
			require.Equal(t, []action{notChosen{errNoMajority}}, as)
			continue
		}
		require.Equal(t, []action{dial{1, "lost", time.Second / 4}}, as)
		require.Equal(t, []action{notChosen{errChoiceTime}}, c.step(c.deadline, answered{dial: 1, err: errors.New("silent")}))
	}
}

// A launcher that was stopped while another coordinator is chosen does not wait any more once it is known that the program has ended.
func TestStopBeforeTheEndIsKnown(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		a := &Agent{voter: newVoter(1), moved: make(chan struct{}), concluded: make(chan struct{}), orders: make(chan Order, 1)}
		at := &attempt{}
		at.ctx, at.cancel = context.WithCancelCause(t.Context())
		a.Now.Store(at)
		a.choosing, a.stops = true, &Fault{}
		waits := make(chan struct{})
		go func() {
			defer close(waits)
			a.awaitSuccessor()
		}()
		synctest.Wait()
		a.conclude()
		<-waits
	})
}

// A host that has promised its vote to one candidate gives it to no other one of that term or of a smaller one, and leaves it.
func TestPromisedVote(t *testing.T) {
	for _, other := range []Leader{{Term: 3, Agent: "b"}, {Term: 2, Agent: "b"}} {
		v := newVoter(1)
		v.promised = Leader{Term: 3, Agent: "a"}
		c := newSuccession(&v, &history{Epoch: 1, Voters: voterSet{"a", "b", "x"}, Lost: "x", lostAfter: time.Second}, "", "lost", lostSilent, 1)
		c.candidates = []string{"b"}
		c.step(1, begin{})
		c.step(2, answered{dial: 1, hello: Welcome{Elects: true}})
		require.EqualValues(t, 1, c.link)
		require.Equal(t, []action{leave{1}}, c.step(3, voteAsked{dial: 1, attempt: 1, by: other}), "%v", other)
		require.Equal(t, Leader{Term: 3, Agent: "a"}, v.promised)
		require.False(t, c.bound)
	}
}

// A host that agreed to stay with a coordinator does not move, and it moves again after that.
func TestBoundHostStays(t *testing.T) {
	v := newVoter(1)
	c := newChoice(&v, []string{"a", "b"}, "", 1)
	require.Equal(t, []action{dial{1, "a", 0}}, c.step(1, begin{}))
	require.Equal(t, []action{dial{2, "b", 0}}, c.step(2, answered{dial: 1, err: errors.New("no answer")}))
	require.Equal(t, []action{enroll{dial: 2, addr: "b"}}, c.step(3, answered{dial: 2}))
	require.Equal(t, []action{dial{3, "a", 0}}, c.step(2*searchInterval, nil), "it looks for a smaller seed")
	require.Equal(t, []action{vote{2, 1}}, c.step(2*searchInterval+1, voteAsked{dial: 2, attempt: 1}))
	require.Equal(t, []action{hangUpDial{3}}, c.step(2*searchInterval+2, answered{dial: 3}))
	require.Empty(t, c.step(4*searchInterval, nil))
	require.Empty(t, c.step(4*searchInterval+1, voteAsked{dial: 2}))
	require.Equal(t, []action{dial{4, "a", 0}, reportMissing{}}, c.step(6*searchInterval, nil))
	require.Equal(t, []action{leave{2}, enroll{dial: 4, addr: "a"}}, c.step(6*searchInterval+1, answered{dial: 4}))
	require.Empty(t, c.step(6*searchInterval+2, voteAsked{dial: 2, attempt: 2}), "it has left")
}

// A coordinator that reaches the same time limit refuses this host and closes, while this host asks it who is missing. Its reason counts.
func TestRefusalAtTheTimeLimit(t *testing.T) {
	k := &Client{Stream: NewStream(nil, NewRunClock(time.Second), time.Minute), replies: map[uint64]chan Message{}}
	k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
	v := newVoter(1)
	e := &election{agent: &Agent{cfg: Config{Job: "j"}}, choice: newChoice(&v, []string{"a"}, "", 1), k: k, timer: time.NewTimer(time.Hour)}
	e.choice.over = true
	e.event(1, k, Note(KindRefuse, Refusal{Reason: "two hosts are missing"}))
	k.Cancel(errors.New("closed"))
	require.ErrorContains(t, e.timeout(t.Context()), "two hosts are missing")
	e.said = nil
	require.ErrorContains(t, e.timeout(t.Context()), "closed")
}

// A host that has not noticed the loss will be a candidate soon, and those after it are not registered with, unless it takes too long.
func TestCandidateHasNotNoticed(t *testing.T) {
	c, took := choosing([]string{"a", "b"}, time.Second, time.Minute, func(addr string) (answered, bool) {
		if addr == "a" {
			return answered{refers: &Referral{At: "lost"}, err: &Referral{At: "lost"}}, true
		}
		return answered{hello: Welcome{Elects: true}}, true
	})
	require.Equal(t, "b", c.addr)
	require.InDelta(t, time.Second, took, float64(100*time.Millisecond))
}

// Strangers at the ports of hosts that have ended refuse a host that looks for the next coordinator. That
// proves nothing, and the candidate after them is found.
func TestUnauthenticatedRefusalDuringAChoice(t *testing.T) {
	refuses := answered{refused: true, err: errOtherJob}
	c, _ := choosing([]string{"stranger", "stranger 2", "next"}, time.Second, time.Minute, func(addr string) (answered, bool) {
		if addr == "next" {
			return answered{hello: Welcome{Elects: true}}, true
		}
		return refuses, true
	})
	require.Equal(t, "next", c.addr)
	c, _ = choosing([]string{"stranger", "starts"}, time.Second, time.Minute, func(addr string) (answered, bool) {
		if addr == "starts" {
			return answered{err: errors.New("refused")}, true
		}
		return refuses, true
	})
	require.ErrorContains(t, c.failure, "refused", "one candidate has only not started yet")
	require.True(t, c.over)
	require.Equal(t, SuccessionTime(time.Second), c.now-c.begun)
}

// At the join, a stranger at one seed's port keeps no host from another seed. If all seeds refuse a host, it fails.
func TestUnauthenticatedRefusalAtTheJoin(t *testing.T) {
	t.Parallel()
	cfgs := onLoopback(t, 2, 1)
	refusing := refusingHost(t)
	for _, c := range cfgs {
		c.NoGossip = true
		c.Seeds = append([]string{refusing}, c.Seeds...)
	}
	as, errs := startAll(t, cfgs...)
	require.NoError(t, errors.Join(errs...))
	for _, a := range as {
		a.Close()
	}
	cfgs[1].Seeds = []string{refusing}
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
			testhost.Bubble(t, func(t *testing.T) {
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

// A host that comes during a vote is asked, too. If it knows of an epoch whose hosts are not enough here, the others are released.
func TestVoterThatComesDuringAVote(t *testing.T) {
	for name, proposed := range map[string][]proposal{"asked": nil, "released": {{FirstEpoch + 1, voterSet{"e", "f", "g"}}}} {
		t.Run(name, func(t *testing.T) {
			j := newPaperJob("a", "b", "c", "d", "e")
			ch := *j.agentOn(t, "b").history
			ch.Lost, ch.Term = "a", 1
			k := newPaperJob("b", "c", "d", "e")
			k.plan, k.elastic, k.agents, k.workers = nil, nil, nil, nil
			k.happen(candidacy{history: ch})
			registers := func(u string, own history) {
				p := k.hosts[u]
				p.state, p.host.History = peerNew, &own
				k.do(func() { require.NoError(t, k.registerAgent(p)) })
			}
			for _, u := range []string{"b", "c", "d"} {
				registers(u, ch)
			}
			k.sleep(time.Second)
			require.NotZero(t, k.attempt)
			first := k.attempt
			for _, u := range []string{"b", "c"} {
				k.do(func() { k.voted(k.hosts[u], first) })
			}
			late := ch
			late.Proposed = proposed
			registers("e", late)
			if proposed != nil {
				require.Zero(t, k.attempt)
				k.do(func() { k.voted(k.hosts["d"], first) })
				require.Nil(t, k.plan, "the vote is over")
				return
			}
			require.Contains(t, kindsOf(k.take(k.hosts["e"])), kindRequestVote)
			for _, u := range []string{"b", "c", "d", "e"} {
				require.Nil(t, k.plan)
				k.do(func() { k.voted(k.hosts[u], k.attempt) })
			}
			require.NotNil(t, k.plan, "it has taken over")
		})
	}
}
