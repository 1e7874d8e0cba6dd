package job

import (
	"testing"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// A host registers again between the proposal and the begin of an epoch without it. It must agree, too: from then on it counts the end
// of the coordinator, and would otherwise not know of the epoch.
func TestHostThatComesDuringAProposalMustAgree(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j, _ := proposalWithoutB(t)
		j.take(j.hosts["b"])
		j.do(func() { j.admitHost(j.newHost("b")) })
		j.answer("a", "c")
		require.Equal(t, uint64(1), j.epoch, "b has not answered")
		b := j.agentOn(t, "b")
		require.Equal(t, []voterSet{{"a", "b", "c"}, {"a", "c"}}, b.history.voterSets())
		b.haveEnded("a", "a")
		require.Equal(t, []string{"a"}, b.ended)
		require.False(t, mayTakeOver(b), "c may go on")
		j.answer("b")
		require.Equal(t, uint64(2), j.epoch)
		require.Equal(t, []voterSet{{"a", "c"}}, j.voterSets)
	})
}

// A host that comes during a proposal and does not answer is lost, as the others are.
func TestHostThatComesDuringAProposalIsSilent(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j, _ := proposalWithoutB(t)
		j.do(func() { j.admitHost(j.newHost("b")) })
		j.answer("a", "c")
		j.sleep(prepareBy)
		require.Equal(t, peerGone, j.hosts["b"].state)
		j.answer("a", "c")
		require.Equal(t, uint64(1), j.epoch, "b may follow this coordinator for a while")
		j.sleep(j.cfg.Self.LostAfter + j.cfg.Self.LostAfter/8)
		require.Equal(t, uint64(2), j.epoch)
	})
}

// A host registers again before its coordinator has noticed that it was given up. The host must try again: its old registration would
// otherwise end with the new one.
func TestHostThatComesBackTooEarly(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c")
		b := j.agentOn(t, "b")
		old := j.hosts["b"]
		p := j.comesBack(t, b, "a")
		require.True(t, j.hungUp[p])
		require.Equal(t, []*peer{j.hosts["a"], old, j.hosts["c"]}, j.agents)
		require.Equal(t, phaseRun, j.elastic.phase)
		j.hosts["b"] = old
		j.lose("b")
		p = j.comesBack(t, b, "a")
		require.False(t, j.hungUp[p])
		require.Contains(t, j.agents, p)
		require.NotContains(t, j.agents, old)
	})
}

// An end counts only for hosts that know what the coordinator knew under which it was found: the end of the coordinator itself, and those
// that it reports.
func TestEndsOfWhichAHostMayNotKnowEnough(t *testing.T) {
	v := newVoter(1)
	hosts := plan{Hosts: []host{{UUID: "a"}, {UUID: "b"}, {UUID: "c"}, {UUID: "x"}}}
	one, two := Leader{Term: 1, Agent: "a", Run: "r"}, Leader{Term: 2, Agent: "b", Run: "r"}
	_, err := v.begins("c", 1, news{By: one, Plan: hosts, Voters: voterSet{"a", "b", "c"}}, 0)
	require.NoError(t, err)
	require.Empty(t, v.candidacy(lostSilent, Welcome{Agent: "a", Epoch: 1}, "silent", 0).Ended)

	// b has agreed to epoch 2 of a and b, takes over, and tells that later.
	require.NoError(t, v.Follow(two))
	require.NoError(t, v.proposal("c", 3, news{By: two, Voters: voterSet{"b", "c"}, Ended: []string{"a"}}))
	require.Empty(t, v.ended, "a may have begun an epoch without this host")
	v.haveEnded("b", "b")
	require.Empty(t, v.ended, "and b may have agreed to it")
	_, err = v.begins("c", 2, news{By: two, Plan: hosts, Voters: voterSet{"a", "b", "c"}, Begun: 1, Proposed: []proposal{{2, voterSet{"a", "b"}}}}, 0)
	require.NoError(t, err)
	require.NoError(t, v.proposal("c", 3, news{By: two, Voters: voterSet{"b", "c"}, Ended: []string{"a"}}))
	require.Equal(t, []string{"a"}, v.ended)
	v.haveEnded("x", "c")
	require.Equal(t, []string{"a"}, v.ended, "this host does not follow x")
	ch := v.candidacy(lostEnded, Welcome{Agent: "b", Epoch: 2}, "ended", 0)
	require.Equal(t, []string{"a", "b"}, ch.Ended)
	require.Equal(t, []voterSet{{"a", "b", "c"}, {"b", "c"}, {"a", "b"}}, ch.voterSets())

	// It registers with b again, which may have begun an epoch meanwhile.
	v.ended = nil
	require.NoError(t, v.Follow(two))
	require.Empty(t, v.candidacy(lostEnded, Welcome{Agent: "b", Epoch: 2}, "ended", 0).Ended)
}

// After a takeover, the coordinator tells the hosts which epochs have begun, perhaps or certainly.
func TestTakeoverTellsWhatItKnows(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := takenOver(func(*succession) {})
		b := j.agentOn(t, "b")
		require.Equal(t, uint64(2), b.history.Epoch)
		require.Equal(t, []voterSet{{"x", "a", "b", "c"}, {"x", "a", "b", "c"}}, b.history.voterSets())
		require.Equal(t, uint64(3), b.history.last())
		require.Equal(t, b.Followed, b.informed)
	})
}

// A host that is lost here for another reason than silence may still follow this coordinator, and count its end. No epoch begins
// without it until it has lost this coordinator.
func TestEpochWaitsForTheLeaseOfALostHost(t *testing.T) {
	for name, tc := range map[string]struct {
		lose  func(t *testing.T, j *paperJob)
		waits bool
	}{
		"its path fails": {func(t *testing.T, j *paperJob) {
			m := Note(kindPath, pathReport{UUID: "b", Before: true})
			j.hosts["a"].heard, j.hosts["b"].heard = j.now, j.now
			require.NoError(t, j.handle(j.hosts["a"], m))
		}, true},
		"its connection fails": {func(_ *testing.T, j *paperJob) {
			j.happen(disconnected{j.hosts["b"], ending{reason: "no route to host"}})
		}, true},
		"it registers again": {func(t *testing.T, j *paperJob) {
			j.happen(disconnected{j.hosts["b"], ending{reason: "no route to host"}})
			j.cfg.agents = 3
			p := j.newHost("b")
			p.state, p.host.Nodes, p.host.MinNodes = peerNew, 3, 1
			j.do(func() { require.NoError(t, j.registerAgent(p)) })
			require.Contains(t, j.agents, p)
		}, false},
		"it is silent": {func(_ *testing.T, j *paperJob) { j.lose("b") }, false},
		"it has ended": {func(_ *testing.T, j *paperJob) { j.provenEnded("b") }, false},
		"it leaves": {func(t *testing.T, j *paperJob) {
			require.NoError(t, j.handle(j.hosts["b"], Message{Kind: kindLeave, Epoch: FirstEpoch}))
		}, false},
		"it says that it has": {func(t *testing.T, j *paperJob) {
			require.NoError(t, j.handle(j.hosts["b"], Message{Kind: KindSilent, Epoch: FirstEpoch}))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			testhost.Bubble(t, func(t *testing.T) {
				j := newPaperJob("a", "b", "c")
				tc.lose(t, j)
				j.settle("a", "c")
				require.Equal(t, phasePropose, j.elastic.phase)
				j.answer("a", "b", "c")
				require.Equal(t, tc.waits, j.epoch == 1)
				j.sleep(j.cfg.Self.LostAfter + j.cfg.Self.LostAfter/8)
				require.Equal(t, uint64(2), j.epoch)
			})
		})
	}
}

// Entries of the ledger, such as the end of the program, wait for leases as epochs do: otherwise the host would go on without them.
func TestLedgerWaitsForTheLeaseOfALostHost(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c")
		recorded := false
		j.do(func() { j.loseAgent(j.hosts["c"], agentEnd{reason: "no route to host"}) })
		j.do(func() { j.record(func() { recorded = true }) })
		j.do(func() {
			j.recorded(j.hosts["a"], j.lastEntry)
			j.recorded(j.hosts["b"], j.lastEntry)
		})
		require.False(t, recorded)
		j.sleep(j.cfg.Self.LostAfter + j.cfg.Self.LostAfter/8)
		require.True(t, recorded)
	})
}

// A launcher that leaves for another coordinator has not ended, and votes there.
func TestLauncherThatMovesHasNotEnded(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c")
		require.NoError(t, j.handle(j.hosts["b"], Message{Kind: kindLeave, Epoch: FirstEpoch, ID: leaveForAnother}))
		require.Empty(t, j.ended)
		require.Equal(t, peerGone, j.hosts["b"].state)
		require.NoError(t, j.handle(j.hosts["c"], Message{Kind: kindLeave, Epoch: FirstEpoch, ID: leaveJob}))
		require.True(t, j.ended["c"])
	})
}

// A launcher that ends after the coordinator has become silent, or has ended, still counts: it may have agreed to an epoch.
func TestEndOfAHostWithoutCoordinator(t *testing.T) {
	for _, c := range []struct {
		hosts, here voterSet
		how         Loss
		goesOn      bool
	}{
		{voterSet{"a", "b", "c", "d"}, voterSet{"b", "c"}, lostSilent, false}, // 2 of 4
		{voterSet{"a", "b", "c", "d", "e"}, voterSet{"b", "c", "d"}, lostSilent, true},
		{voterSet{"a", "b", "c", "d"}, voterSet{"b", "c"}, lostEnded, true}, // 2 of 3
		{voterSet{"a", "b", "c"}, voterSet{"c"}, lostEnded, false},          // b counts, too
	} {
		v, by, all := newVoter(1), Leader{Term: 1, Agent: "a", Run: "r"}, plan{}
		for _, uuid := range c.hosts {
			all.Hosts = append(all.Hosts, host{UUID: uuid})
		}
		_, err := v.begins("c", 1, news{By: by, Plan: all, Voters: c.hosts}, 0)
		require.NoError(t, err)
		v.candidacy(c.how, Welcome{Agent: "a", Epoch: 1}, "lost", 0)
		for _, uuid := range c.hosts.without(c.here) {
			v.haveEnded("a", uuid)
		}
		h := v.candidacy(c.how, Welcome{Agent: "a", Epoch: 1}, "lost", 0)
		require.Equal(t, c.goesOn, allow(h.voterSets(), setOf(c.here), setOf(h.Ended)), c)
	}
}
