package job

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// A paperJob is a coordinator in the first epoch of a job with one worker on each host. Messages to
// its peers stay in queues, and time passes only in sleep.
type paperJob struct {
	*coordinator
	hosts, procs       map[string]*peer // by the UUID of the host
	queues             map[*peer][]Message
	hungUp             map[*peer]bool
	stores             []int // sizes of the stores that were opened
	lines              []string
	unregisteredHungUp int
	probes             []probe
}

// onPaper returns a job without processes.
func onPaper(cfg CoordConfig) *paperJob {
	j := &paperJob{coordinator: newCoordinator(cfg, "", 1), hosts: map[string]*peer{}, procs: map[string]*peer{}, queues: map[*peer][]Message{}, hungUp: map[*peer]bool{}}
	j.term = 0
	return j
}

func newPaperJob(uuids ...string) *paperJob {
	j := completePaperJob(uuids...)
	j.haveLedger()
	return j
}

// completePaperJob returns a job whose launchers have not acknowledged the first epoch yet.
func completePaperJob(uuids ...string) *paperJob {
	j := onPaper(CoordConfig{agents: len(uuids) + 1, least: 1, JoinBy: time.Hour, RevokeBy: time.Hour, DrainBy: time.Hour,
		Self: Welcome{Agent: uuids[0], Host: uuids[0], LostAfter: time.Second}})
	j.plan = &plan{}
	for i, u := range uuids {
		a := j.newHost(u)
		j.agents = append(j.agents, a)
		j.plan.Hosts = append(j.plan.Hosts, a.host)
		p := &peer{addr: u, role: roleWorker, state: peerJoined, home: place{u, 0},
			reg: Registration{Member: Member{Rank: i, LocalSize: 1, Node: i, Host: u, PID: 100 + i}, Agent: u, Elastic: true, Least: 1}}
		j.workers, j.procs[u] = append(j.workers, p), p
	}
	j.do(j.commitWorld)
	return j
}

func (j *paperJob) newHost(uuid string) *peer {
	a := &peer{addr: uuid, role: roleAgent, state: peerJoined, ready: true, heard: j.now,
		host: host{Host: uuid, UUID: uuid, NodeRank: -1, LocalSize: 1, Control: uuid + ":1"}}
	j.hosts[uuid] = a
	return a
}

// do calls a function of the coordinator and carries out its actions.
func (j *paperJob) do(f func()) {
	f()
	j.happen(nil)
}

// happen lets an event happen now.
func (j *paperJob) happen(e event) error {
	actions, err := j.step(j.now, e)
	for _, a := range actions {
		switch a := a.(type) {
		case send:
			for _, p := range a.to {
				if !j.hungUp[p] {
					j.queues[p] = append(j.queues[p], a.m.encode())
				}
			}
		case hangUp:
			j.hungUp[a.p] = true
		case hangUpUnregistered:
			j.unregisteredHungUp++
		case probe:
			j.probes = append(j.probes, a)
		case openStore:
			j.stores = append(j.stores, a.size)
		case notify:
			j.lines = append(j.lines, a.line)
		}
	}
	return err
}

// handle lets the coordinator receive a message.
func (j *paperJob) handle(p *peer, m Message) error {
	in, err := m.decode()
	if err != nil {
		return err
	}
	return j.happen(received{p, in})
}

// sleep lets time pass. All agents are heard.
func (j *paperJob) sleep(d time.Duration) {
	for end := j.now + d; j.now < end; {
		at, ok := j.next()
		if !ok {
			at = end
		}
		j.now = max(j.now, min(at, end))
		for _, a := range j.agents {
			a.heard = j.now
		}
		j.happen(nil)
	}
}

// settle lets the functions of hosts return and waits until the coordinator has noticed.
func (j *paperJob) settle(hosts ...string) {
	j.do(func() {
		for _, u := range hosts {
			j.procs[u].elastic.returned = true
		}
		j.checkReturned()
	})
	j.sleep(2 * SettleTime)
}

// answer lets hosts answer a proposal.
func (j *paperJob) answer(hosts ...string) {
	j.do(func() {
		for _, u := range hosts {
			j.accepted(j.hosts[u], j.elastic.try)
			if p := j.procs[u]; p != nil {
				j.workerPrepared(p, j.elastic.try)
			}
		}
	})
}

// lose loses a host for silence.
func (j *paperJob) lose(host string) {
	j.hosts[host].heard = j.now - 2*j.cfg.Self.LostAfter
	j.do(func() { j.loseAgent(j.hosts[host], agentEnd{reason: "it burned"}) })
}

// take returns the queued messages of a peer, as it would receive them.
func (j *paperJob) take(p *peer) []Message {
	ms := j.queues[p]
	delete(j.queues, p)
	return ms
}

// hear lets an agent handle the news and proposals that are queued for a host.
func (j *paperJob) hear(t *testing.T, a *Agent) {
	t.Helper()
	for _, m := range j.take(j.hosts[a.UUID]) {
		switch m.Kind {
		case kindNews, KindPropose, kindLedger:
			a.event(&Client{Stream: NewStream(nil, NewRunClock(time.Second), time.Minute)}, m)
		}
	}
}

// proposalWithoutB returns a job of a, b and c that has lost b and proposes the next epoch, and the agent of c.
func proposalWithoutB(t *testing.T) (*paperJob, *Agent) {
	j := newPaperJob("a", "b", "c")
	agent := &Agent{UUID: "c", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
	agent.Now.Store(&attempt{})
	j.hear(t, agent)
	j.lose("b")
	j.settle("a", "c")
	require.Equal(t, phasePropose, j.elastic.phase)
	return j, agent
}

// A host joins while the coordinator proposes an epoch without a host that was lost. If the coordinator
// is lost then, the agents still know which member of the current epoch is on which host.
func TestHostJoinsDuringAProposal(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j, agent := proposalWithoutB(t)
		j.do(func() { j.admitHost(j.newHost("d")) })
		j.hear(t, agent)
		for i, u := range []string{"a", "b", "c"} {
			require.Equal(t, u, agent.history.hostOf(agent.history.Members[i]), "rank %d", i)
		}
		require.Contains(t, agent.history.addresses(), "c:1")

		j.answer("a", "c", "d")
		require.Equal(t, uint64(2), j.epoch)
		j.hear(t, agent)
		require.Equal(t, uint64(2), agent.history.Epoch)
		for i, u := range []string{"a", "c"} {
			require.Equal(t, u, agent.history.hostOf(agent.history.Members[i]), "rank %d", i)
		}
		require.Equal(t, 2, agent.history.Plan.nodeOf("d"), "the host that has come since")
		require.Equal(t, voterSet{"a", "c"}, agent.history.Voters)
	})
}

// After a takeover, the coordinator tells what it knows before it begins an epoch. An agent that knows less gets the plan of the last
// epoch together with its members, its voters and the proposals. One that knows that a proposal has begun keeps that.
func TestNewsOfAnInheritedEpoch(t *testing.T) {
	a := &Agent{UUID: "b", voter: newVoter(1)}
	a.Now.Store(&attempt{})
	p := plan{Hosts: []host{{UUID: "a"}, {UUID: "b"}}}
	a.news(1, news{Plan: p, Members: []Member{{Rank: 0, Node: 0}, {Rank: 1, Node: 1}}, Voters: voterSet{"a", "b"}})
	later := plan{Hosts: []host{{UUID: "b"}, {UUID: "c"}, {UUID: "d"}}}
	n := news{Plan: later, Members: []Member{{Rank: 0, Node: 1}, {Rank: 1, Node: 2}}, Voters: voterSet{"c", "d"}, Begun: 2, Proposed: []proposal{{3, voterSet{"c"}}}}
	require.NoError(t, a.news(3, n))
	require.Equal(t, "c", a.history.hostOf(a.history.Members[0]))
	require.Equal(t, "d", a.history.hostOf(a.history.Members[1]))
	require.Equal(t, []voterSet{{"c", "d"}, {"c"}}, a.history.voterSets())
	require.Equal(t, uint64(3), a.history.last())
	b := &Agent{UUID: "b", voter: newVoter(1)}
	require.NoError(t, b.news(3, news{Plan: later, Voters: voterSet{"c"}}))
	require.NoError(t, b.news(3, n))
	require.Equal(t, []voterSet{{"c"}}, b.history.voterSets())
	require.ErrorContains(t, b.news(3, news{Plan: later, Proposed: []proposal{{}}}), "a proposal of epoch 0 has 0 hosts")
}

// A voter that registers again after the coordinator has taken over keeps its place.
func TestHostKeepsItsPlace(t *testing.T) {
	p := plan{Hosts: []host{{UUID: "a"}, {UUID: "b"}}}
	q := p.with(host{UUID: "a", Host: "alpha"}).with(host{UUID: "c"})
	require.Equal(t, []host{{UUID: "a", Host: "alpha"}, {UUID: "b"}, {UUID: "c"}}, q.Hosts)
	require.Equal(t, []host{{UUID: "a"}, {UUID: "b"}}, p.Hosts)
}

// A host comes back while the coordinator proposes an epoch without it. The members of the epoch
// keep their places, and the host gets one after them.
func TestHostComesBackDuringAProposal(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j, agent := proposalWithoutB(t)
		j.do(func() { j.admitHost(j.newHost("b")) })
		j.answer("a", "c", "b")
		require.Equal(t, uint64(2), j.epoch)
		j.hear(t, agent)
		for i, u := range []string{"a", "c"} {
			require.Equal(t, u, agent.history.hostOf(agent.history.Members[i]), "rank %d", i)
		}
		require.Equal(t, 2, agent.history.Plan.nodeOf("b"))
	})
}

// A launcher that was asked to stop the job or to kill its workers tells the next coordinator, too.
func TestStopIsRepeated(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		clock := NewRunClock(time.Second)
		open := func() *Client {
			k := &Client{Stream: NewStream(nil, clock, time.Minute), replies: map[uint64]chan Message{}}
			k.Ctx, k.Cancel = context.WithCancelCause(t.Context())
			k.open, k.shut = context.WithCancel(t.Context())
			return k
		}
		a := &Agent{UUID: "b", cfg: Config{Nodes: 2, LocalSize: 1}, voter: newVoter(1), k: open(), moved: make(chan struct{})}
		a.life, a.die = context.WithCancel(t.Context())
		a.die() // no other choice follows
		a.history = &history{}
		now := &attempt{ctx: t.Context(), cancel: func(error) {}}
		a.Now.Store(now)
		a.k.Cancel(ErrClosed)
		a.k.shut()
		require.True(t, a.CanDrain(), "the coordinator cannot be asked")
		_ = a.Stop("received SIGINT", 130)
		_ = a.Kill()
		next := open()
		a.followNext(now, next, "next")
		sent := next.Stream.out
		require.Equal(t, []Kind{kindStop, kindKill}, kindsOf(sent))
		var f Fault
		require.NoError(t, sent[0].Record(&f))
		require.Equal(t, Fault{Reason: "received SIGINT", Code: 130}, f)
		a.over = true
		next.Cancel(ErrClosed)
		require.False(t, a.CanDrain(), "the program has ended")
		a.over = false
		failed, fail := context.WithCancel(t.Context())
		fail()
		a.Now.Store(&attempt{ctx: failed})
		require.False(t, a.CanDrain(), "the job has failed")
		synctest.Wait()
	})
}

// The next epoch waits for the exit of a process that a launcher was told to kill, but not for ever.
func TestNextEpochWaitsForAKilledProcess(t *testing.T) {
	for name, exits := range map[string]bool{"its exit is reported": true, "its exit is never reported": false} {
		t.Run(name, func(t *testing.T) {
			testhost.Bubble(t, func(t *testing.T) {
				j := newPaperJob("a", "b", "c")
				j.do(func() { j.revoke(Fault{Rank: -1, Code: -1, Reason: "a test"}) })
				j.sleep(j.cfg.RevokeBy - time.Millisecond) // the function of c does not return
				j.settle("a", "b")
				j.do(func() {
					require.Equal(t, map[place]int{{"c", 0}: 102}, j.elastic.dying)
					require.Equal(t, phaseRevoke, j.elastic.phase)
				})
				if exits {
					j.do(func() { j.elasticExit(j.hosts["c"], Exit{PID: 102, Code: 137, Reason: "killed by SIGKILL"}) })
					j.sleep(2 * SettleTime)
				} else {
					j.sleep(killTime)
				}
				j.do(func() {
					require.Empty(t, j.elastic.dying)
					require.Equal(t, phasePropose, j.elastic.phase)
				})
			})
		})
	}
}

// A launcher that is stopped on this host is waited for, unless the job has other hosts: they go on without it.
func TestStoppedLauncherOfSeveralHosts(t *testing.T) {
	for several, waits := range map[bool]bool{false: true, true: false} {
		k := &Client{host: "a", To: Target{Sys: &System{Suspended: func(int) bool { return true }}}}
		k.Hello = Welcome{Host: "a", Rank: -1, Several: several}
		require.Equal(t, waits, k.isSuspended())
		k.host = "b"
		require.False(t, k.isSuspended(), "it runs on another host")
	}
}
