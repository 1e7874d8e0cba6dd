package job

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNaturalCompare(t *testing.T) {
	want := []string{"", "01", "1", "2", "10", "a", "a1", "a1b2", "a1b10", "a002", "a2", "a10", "b", "node9-2", "node09-10", "node10"}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, naturalCompare)
	require.Equal(t, want, got)
	for _, s := range want {
		require.Zero(t, naturalCompare(s, s))
	}
}

func TestAssignRanks(t *testing.T) {
	m := func(rank, local int, host, name string) Member {
		return Member{Rank: rank, LocalRank: local, Node: -1, Host: host, Name: name}
	}
	type place struct {
		name                       string
		rank, local, localSize, nd int
	}
	for _, tc := range []struct {
		text string
		in   []Member
		want []place
	}{
		{"by host, then local rank", []Member{m(-1, 1, "n10", "d"), m(-1, 0, "n10", "c"), m(-1, 1, "n2", "b"), m(-1, 0, "n2", "a")},
			[]place{{"a", 0, 0, 2, 0}, {"b", 1, 1, 2, 0}, {"c", 2, 0, 2, 1}, {"d", 3, 1, 2, 1}}},
		{"by name", []Member{m(-1, -1, "n", "w10"), m(-1, -1, "n", "w9")},
			[]place{{"w9", 0, 0, 2, 0}, {"w10", 1, 1, 2, 0}}},
		{"explicit ranks are kept", []Member{m(1, -1, "a", "x"), m(0, -1, "b", "y"), m(2, -1, "b", "z")},
			[]place{{"y", 0, 0, 2, 0}, {"x", 1, 0, 1, 1}, {"z", 2, 1, 2, 0}}},
		{"uneven hosts", []Member{m(-1, 0, "a", "1"), m(-1, 0, "b", "2"), m(-1, 1, "b", "3"), m(-1, 2, "b", "4")},
			[]place{{"1", 0, 0, 1, 0}, {"2", 1, 0, 3, 1}, {"3", 2, 1, 3, 1}, {"4", 3, 2, 3, 1}}},
	} {
		t.Run(tc.text, func(t *testing.T) {
			var got []place
			for _, m := range assignRanks(tc.in) {
				got = append(got, place{m.Name, m.Rank, m.LocalRank, m.LocalSize, m.Node})
			}
			require.Equal(t, tc.want, got)
		})
	}
}

func TestAssignNodes(t *testing.T) {
	h := func(rank int, name string, procs int) host {
		return host{NodeRank: rank, Host: name, LocalSize: procs, UUID: name}
	}
	p := plan{Hosts: assignNodes([]host{h(-1, "n10", 4), h(-1, "n9", 2), h(-1, "n11", 1)})}
	require.Equal(t, []int{0, 1, 2}, []int{p.nodeOf("n9"), p.nodeOf("n10"), p.nodeOf("n11")})
	require.Equal(t, []int{0, 2, 6}, []int{p.firstRank(0), p.firstRank(1), p.firstRank(2)})
	require.Equal(t, 7, p.size())
	p = plan{Hosts: assignNodes([]host{h(1, "a", 1), h(0, "b", 1)})}
	require.Equal(t, 0, p.nodeOf("b"))
}

func TestRollText(t *testing.T) {
	r := attendance{Unit: UnitProcess, Want: 4, Have: []Member{{Rank: 0, Host: "a", PID: 1}, {Rank: 1, Host: "b", PID: 2}}, Missing: []int{2, 3}}
	require.Equal(t, "2 of 4 processes have joined: rank 0 (host a pid 1), rank 1 (host b pid 2); missing ranks 2, 3", r.String())
	r = attendance{Unit: unitHost, Want: 2, Have: []Member{{Rank: -1, Host: "a", PID: 1}}}
	require.Equal(t, "1 of 2 hosts have joined: host a pid 1", r.String())
	many := make([]int, 100)
	require.Contains(t, attendance{Want: 101, Unit: UnitProcess, Missing: many}.String(), "and 84 more")
}
