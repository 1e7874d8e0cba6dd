package job

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestVoters(t *testing.T) {
	for name, tc := range map[string]struct {
		present, ended string
		goesOn         bool
	}{
		"majority":                        {"abc", "", true},
		"majority without the first":      {"cde", "", true},
		"minority":                        {"de", "", false},
		"minority with the first":         {"ab", "", false},
		"all":                             {"abcde", "", true},
		"none":                            {"", "", false},
		"first has ended":                 {"bcd", "a", true},
		"half, next to the first":         {"bc", "a", true},
		"half, without the next":          {"de", "a", false},
		"two of three that are left":      {"de", "ab", true},
		"the only one that is left":       {"e", "abcd", true},
		"half that is left, with first":   {"a", "bcd", true},
		"half that is left, not the next": {"e", "abc", false},
		"only hosts of other epochs":      {"xyz", "", false},
	} {
		e := voterSet(strings.Split("abcde", ""))
		require.Equal(t, tc.goesOn, e.suffices(setOf(strings.Split(tc.present, "")), setOf(strings.Split(tc.ended, ""))), name)
	}
	two := voterSet{"a", "b"}
	require.True(t, two.suffices(setOf([]string{"a"}), nil), "the coordinator of two, after silence of the other")
	require.False(t, two.suffices(setOf([]string{"b"}), nil), "the other one, after silence of the coordinator")
	require.True(t, two.suffices(setOf([]string{"b"}), setOf([]string{"a"})), "the other one, after the end of the coordinator")
	require.True(t, two.suffices(setOf([]string{"a"}), setOf([]string{"b"})), "the coordinator, after the end of the other one")
}

// Of all ways to split five hosts of which one has ended or not, at most one part goes on.
func TestVotersAreExclusive(t *testing.T) {
	e := voterSet(strings.Split("abcde", ""))
	pick := func(mask int) map[string]bool {
		m := map[string]bool{}
		for i, u := range e {
			m[u] = mask>>i&1 == 1
		}
		return m
	}
	for ended := range 1 << len(e) {
		for part := range 1 << len(e) {
			one, other := part&^ended, ^part&^ended&(1<<len(e)-1)
			if e.suffices(pick(one), pick(ended)) && e.suffices(pick(other), pick(ended)) {
				require.Fail(t, "two parts go on", "%05b and %05b, ended %05b", one, other, ended)
			}
			// The parts may know of different ends: what one part has not seen counts as absent.
			if e.suffices(pick(one), pick(ended)) && e.suffices(pick(other), nil) {
				require.Fail(t, "two parts go on", "%05b and %05b, only the first knows that %05b ended", one, other, ended)
			}
		}
	}
}

// An epoch that was proposed may have begun: both voter sets must agree.
func TestProposedEpochCounts(t *testing.T) {
	c := history{Epoch: 4, Voters: voterSet(strings.Split("abcde", "")), Proposed: []proposal{{5, strings.Split("abc", "")}}}
	require.False(t, allow(c.voterSets(), setOf(strings.Split("cde", "")), nil), "a and b may be in epoch 5")
	require.True(t, allow(c.voterSets(), setOf(strings.Split("bcd", "")), nil))
	require.Contains(t, minority(c.voterSets(), setOf(strings.Split("cde", "")), nil, 4), "1 of the 3 hosts")
	c.Epoch, c.Voters = 5, strings.Split("abcde", "") // it has begun
	require.True(t, allow(c.voterSets(), setOf(strings.Split("cde", "")), nil))
	other := history{Epoch: 6, Voters: voterSet{"a", "b"}}
	c.merge(&other)
	require.Equal(t, uint64(6), c.Epoch)
	require.Equal(t, voterSet{"a", "b"}, c.Voters)
}

// One epoch may be proposed several times, and the agents may have got different proposals: all
// count, because any of them may have begun.
func TestAllProposalsCount(t *testing.T) {
	hosts := func(s string) voterSet { return strings.Split(s, "") }
	c := history{Epoch: 1, Voters: hosts("abcde")}
	c.propose(proposal{2, hosts("abcde")})
	c.merge(&history{Epoch: 1, Proposed: []proposal{{2, hosts("abe")}, {2, hosts("abcde")}}})
	require.Equal(t, []voterSet{hosts("abcde"), hosts("abcde"), hosts("abe")}, c.voterSets())
	require.False(t, allow(c.voterSets(), setOf(hosts("cde")), nil), "a and b may be in the epoch of a, b and e")
	c.propose(proposal{3, hosts("abc")}) // it says nothing about epoch 2
	require.Equal(t, []voterSet{hosts("abcde"), hosts("abcde"), hosts("abe"), hosts("abc")}, c.voterSets())
	require.Equal(t, uint64(3), c.last())
	c.merge(&history{Epoch: 2, Voters: hosts("abe")})
	require.Equal(t, []voterSet{hosts("abe"), hosts("abc")}, c.voterSets())
	c.propose(proposal{2, hosts("cd")})
	c.merge(&history{Epoch: 3, Voters: hosts("abc"), Proposed: []proposal{{2, hosts("abe")}}})
	require.Equal(t, []voterSet{hosts("abc")}, c.voterSets())
	require.Empty(t, c.Proposed)
}

// A proposal says which launchers have ended: if the coordinator is lost at once, the agents need not
// count them.
func TestProposalSaysWhoHasEnded(t *testing.T) {
	k := &Client{Stream: NewStream(nil, NewRunClock(time.Second), time.Minute)}
	a := &Agent{UUID: "d", voter: voter{history: &history{Epoch: 2, Voters: voterSet{"b", "c", "d"}}}}
	m := Note(KindPropose, news{Voters: voterSet{"b", "d"}, Ended: []string{"c"}})
	m.Epoch = 3
	a.proposed(k, m)
	a.proposed(k, m)
	require.Equal(t, []string{"c"}, a.ended)
	require.True(t, allow(a.history.voterSets(), setOf([]string{"d"}), setOf([]string{"b", "c"})))
}

// News of the current epoch may come while the next one is proposed: the proposal still counts.
func TestNewsKeepTheProposal(t *testing.T) {
	a := &Agent{UUID: "c"}
	a.Now.Store(&attempt{})
	n := news{Plan: plan{Hosts: []host{{UUID: "a"}, {UUID: "b"}, {UUID: "c"}}}, Voters: voterSet{"a", "b", "c"}}
	a.news(1, n)
	a.history.propose(proposal{2, voterSet{"a", "c"}})
	a.news(1, n)
	require.Equal(t, []voterSet{{"a", "b", "c"}, {"a", "c"}}, a.history.voterSets())
	a.news(2, n)
	require.Equal(t, []voterSet{{"a", "b", "c"}}, a.history.voterSets())
}

// The history of a large job fits in the registration of a launcher, whatever the coordinator knows.
func TestHistoryOfManyHosts(t *testing.T) {
	const n = 4000 // less than half of what maxHistoryFrame permits
	c := &history{Epoch: 7, Lost: newUUID(), Reason: "silent", Running: []int{0, 1, 2, 3, 4, 5, 6, 7}}
	for i := range n {
		h := host{Host: fmt.Sprint("gpu-node-", i), PID: rand.IntN(1 << 22), UUID: newUUID(), NodeRank: i, Nodes: n, MinNodes: 1, LocalSize: 8,
			MasterAddr: fmt.Sprintf("10.%d.%d.%d", rand.IntN(256), rand.IntN(256), rand.IntN(256)), MasterPort: 1024 + rand.IntN(1<<15), Control: "10.0.0.1:29478"}
		c.Plan.Hosts, c.Voters = append(c.Plan.Hosts, h), append(c.Voters, h.UUID)
		for local := range 8 {
			c.Members = append(c.Members, Member{Rank: 8*i + local, LocalRank: local, LocalSize: 8, Node: i, Host: h.Host, PID: rand.IntN(1 << 22)})
		}
	}
	c.Proposed = []proposal{{8, c.Voters}}
	for name, tc := range map[string]struct {
		to   Welcome
		most int
	}{
		"a coordinator that has taken over":      {Welcome{Running: true, Epoch: 9}, maxUnregisteredFrame},
		"a coordinator that knows the epoch":     {Welcome{Elects: true, Epoch: 7}, maxHistoryFrame / 2},
		"a coordinator that has missed an epoch": {Welcome{Elects: true, Epoch: 6}, maxHistoryFrame / 2},
	} {
		m := Note(kindRegister, host{Host: "h", UUID: newUUID(), History: c.excerpt(tc.to)})
		t.Logf("%s gets %d bytes", name, m.bytes())
		require.Less(t, m.bytes(), tc.most-1024, name)
		var got host
		require.NoError(t, m.Record(&got))
		require.Equal(t, c.Epoch, got.History.Epoch, name)
		if tc.to.Elects {
			require.Equal(t, []int{n, n}, []int{len(got.History.Proposed[0].Voters), len(got.History.Plan.Hosts) + int(tc.to.Epoch-6)*n}, name)
		}
	}
}
