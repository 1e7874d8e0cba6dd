package job

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// register lets a process in the place of a host register, after it was a member of epoch seat.
func (j *paperJob) register(host string, pid int, seat uint64) *peer {
	p := &peer{addr: host}
	p.role, p.home = roleWorker, place{host, 0}
	p.reg = Registration{Member: Member{LocalSize: 1, Host: host, PID: pid}, Agent: host, Elastic: true, Seat: seat}
	j.do(func() { j.registerNewcomer(p) })
	return p
}

// takenOver returns a job in which host a has taken over from host x. All hosts have the proposal of epoch 3, in which process 103 of host c is new: the last
// one, 3, was killed. change changes what the hosts know.
func takenOver(change func(*succession)) *paperJob {
	j := newPaperJob("a", "b", "c")
	j.do(func() {
		j.workers = nil
		p := plan{Hosts: []host{{UUID: "x"}, {UUID: "a"}, {UUID: "b"}, {UUID: "c"}}}
		var ms []Member
		for i := range p.Hosts {
			ms = append(ms, Member{Rank: i, Node: i, PID: i, LocalSize: 1})
		}
		ch := history{Epoch: 2, Proposed: []proposal{{3, voterSet{"x", "a", "b", "c"}}}, Voters: voterSet{"x", "a", "b", "c"}, Lost: "x", Reason: "it burned", Plan: p, Members: ms}
		j.succession = &succession{history: ch, begun: j.now, hosts: map[string]*history{"a": {Running: []int{0}}, "b": {Running: []int{0}},
			"c": {Running: []int{0}, Exits: map[int][]Exit{0: {{PID: 3, Reason: "killed"}}}, NewMembers: map[int]int{0: 103}}}}
		change(j.succession)
		j.takeOver()
	})
	return j
}

// The next coordinator waits for all functions: also for those of new members, because the epoch that was proposed has perhaps
// begun. It does not wait for a process in whose place its launcher has started another one.
func TestTakeoverAwaitsNewMembers(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := takenOver(func(*succession) {})
		j.register("a", 1, 2)
		j.register("b", 2, 3)
		require.Equal(t, phaseRevoke, j.elastic.phase)
		j.register("c", 103, 3)
		require.Equal(t, phasePropose, j.elastic.phase)
		require.Equal(t, []int{2}, j.elastic.next.New)
		require.Equal(t, []string{"its host was lost: it burned", "killed"}, []string{j.elastic.next.Left[0].Reason, j.elastic.next.Left[1].Reason})
	})
}

// A member that has not begun the last epoch is new, and has not left.
func TestTakeoverFindsMembersThatHaveNotBegun(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := takenOver(func(*succession) {})
		j.register("c", 103, 0)
		j.register("a", 1, 2)
		j.register("b", 2, 0)
		require.Equal(t, phasePropose, j.elastic.phase)
		require.Equal(t, []int{1, 2}, j.elastic.next.New)
		require.Len(t, j.elastic.next.Left, 2)
	})
}

// A new member that was proposed exits, instead of registering.
func TestTakeoverWithoutNewMember(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := takenOver(func(*succession) {})
		j.register("a", 1, 2)
		j.register("b", 2, 2)
		j.do(func() { j.elasticExit(j.hosts["c"], Exit{PID: 103, Code: 1, Reason: "exited with code 1"}) })
		require.Equal(t, phasePropose, j.elastic.phase)
		require.Empty(t, j.elastic.next.New)
		require.Len(t, j.elastic.next.Left, 2)
	})
}

// The host of the lost coordinator had no members: the line of the next epoch says why it begins.
func TestTakeoverWithoutLostMembers(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := takenOver(func(s *succession) {
			s.history.Members = s.history.Members[1:3]
			s.hosts["c"] = &history{}
		})
		j.register("a", 1, 2)
		j.register("b", 2, 2)
		require.Equal(t, phasePropose, j.elastic.phase)
		require.Equal(t, "epoch 4: 2 processes on 2 hosts; host a took over from a coordinator that was lost: it burned; the job stood still for 0s", j.epochLine())
	})
}

// A member has exited, the process that was started after it, too, and another one is ordered: the next coordinator does not wait for the member.
func TestTakeoverAfterTwoRestarts(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		m := newVoter(1)
		for _, e := range []Exit{{PID: 3, Code: 137, Reason: "killed"}, {PID: 203, Code: 1, Reason: "exited with code 1"}} {
			m.exited(e)
			m.ordered(Order{Start: true})
		}
		j := takenOver(func(s *succession) {
			s.hosts["c"] = &history{Running: slices.Collect(maps.Keys(m.running)), Exits: m.exits}
		})
		require.Equal(t, map[place]bool{{"c", 0}: true}, j.elastic.expected)
		j.register("a", 1, 2)
		j.register("b", 2, 2)
		require.Equal(t, phasePropose, j.elastic.phase)
		require.Len(t, j.elastic.next.Left, 2)
		require.Equal(t, "killed", j.elastic.next.Left[1].Reason)
	})
}

// Another process registers in the place of a member whose exit no agent has reported: the member has left.
func TestTakeoverMeetsAnotherProcess(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := takenOver(func(s *succession) { s.hosts["c"] = &history{Running: []int{0}} })
		j.register("c", 203, 0)
		j.register("a", 1, 2)
		j.register("b", 2, 2)
		require.Equal(t, phasePropose, j.elastic.phase)
		require.Equal(t, []int{2}, j.elastic.next.New)
		require.Len(t, j.elastic.next.Left, 2)
		require.Equal(t, 3, j.elastic.next.Left[1].PID)
	})
}

// A launcher forgets the exits of processes that ran before a member of the last epoch.
func TestExitsBeforeAnEpoch(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b")
		agent := &Agent{UUID: "b", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
		agent.Now.Store(&attempt{})
		agent.exited(Exit{PID: 99, Code: 1})
		j.hear(t, agent)
		require.Empty(t, agent.exits)
		agent.exited(Exit{PID: 101, Code: 1})
		agent.exited(Exit{PID: 201, Code: 1})
		j.do(func() { j.tellNews("") }) // of the same epoch
		j.hear(t, agent)
		require.Len(t, agent.exits[0], 2)
	})
}

// A proposal tells the launcher of a new member that it is one, until the member exits.
func TestProposalNamesNewMembers(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b")
		agent := &Agent{UUID: "b", cfg: Config{Notify: func(string) {}}, voter: newVoter(1)}
		agent.Now.Store(&attempt{})
		j.hear(t, agent)
		j.do(func() { j.elasticExit(j.hosts["b"], Exit{PID: 101, Code: 1, Reason: "exited with code 1"}) })
		j.register("b", 201, 0)
		j.sleep(2 * ExitGrace)
		j.settle("a")
		require.Equal(t, phasePropose, j.elastic.phase)
		j.hear(t, agent)
		require.Equal(t, map[int]int{0: 201}, agent.newMembers)
		agent.exited(Exit{PID: 201, Code: 1})
		require.Empty(t, agent.newMembers)
		j.do(j.form) // the coordinator does not know of the exit yet
		j.hear(t, agent)
		require.Empty(t, agent.newMembers)
	})
}

// The next coordinator learns exits that the hosts did not know of when they lost the last one, and does not
// learn failures for which a start was ordered.
func TestRepeatedExits(t *testing.T) {
	m := newVoter(5)
	well, failed := Exit{PID: 10, Local: 0}, Exit{PID: 11, Local: 1, Code: 3}
	again := Exit{PID: 12, Local: 2, Code: 3}
	asked, restarted := Exit{PID: 13, Local: 3, Code: 143, Asked: true}, Exit{PID: 14, Local: 4}
	for _, e := range []Exit{well, failed, again, asked, restarted} {
		m.exited(e)
	}
	m.ordered(Order{Start: true, Local: 2})
	m.running[4] = true
	var got []Exit
	for _, x := range m.repeats() {
		require.Equal(t, kindExit, x.kind)
		var e Exit
		require.NoError(t, json.Unmarshal(x.encode().Body, &e))
		got = append(got, e)
	}
	require.Equal(t, []Exit{well, failed, asked}, got)
}
