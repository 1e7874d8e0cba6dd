package comm

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/nccl"
)

// A rank is named for what it did not issue, or issued differently; a transfer has one
// peer to blame.
func TestCulprits(t *testing.T) {
	mine := word{Collectives: 7, Operation: "a"}
	all := map[int]word{
		1: {Collectives: 6, Operation: "a"},
		2: {Collectives: 7, Operation: "a"},
		3: {Collectives: 7, Operation: "b"},
		4: {Collectives: 8, Operation: "c"},
	}
	whys := func(op nccl.Operation) map[int]string {
		found := map[int]string{}
		for _, p := range culprits(op, mine, all) {
			found[p.Rank] = p.Why
		}
		return found
	}
	require.Equal(t, map[int]string{1: "is behind", 3: "differs"}, whys(nccl.Operation{Name: "ncclAllReduce", Collective: 7, Root: -1}))
	// All have issued what is not known to have completed, so a later one hangs.
	require.Equal(t, map[int]string{1: "is behind", 3: "differs"}, whys(nccl.Operation{Name: "ncclAllReduce", Collective: 5, Root: -1}))
	all[5] = word{Collectives: 4, Operation: "a"}
	require.Equal(t, map[int]string{5: "is behind", 3: "differs"}, whys(nccl.Operation{Name: "ncclAllReduce", Collective: 3, Root: -1}))
	delete(all, 5)
	delete(all, 1)
	require.Equal(t, map[int]string{3: "differs"}, whys(nccl.Operation{Name: "ncclAllReduce", Collective: 5, Root: -1}))
	require.Equal(t, map[int]string{2: "is the peer"}, whys(nccl.Operation{Name: "ncclSend", Collective: 7, Root: 2}))
	require.Equal(t, map[int]string{4: "is the peer"}, whys(nccl.Operation{Name: "ncclRecv", Collective: 7, Root: 4}))

	// Nobody has waited for those that are behind where NCCL has failed.
	all[1] = word{Collectives: 6, Operation: "a"}
	list := mismatched(nccl.Operation{Name: "ncclAllReduce", Collective: 7}, mine, all)
	require.Len(t, list, 1)
	require.Equal(t, 3, list[0].Rank)
	require.Empty(t, mismatched(nccl.Operation{Name: "ncclSend", Collective: 7, Root: 2}, mine, all))
}

// Of two operations that are carried out in two ways, what differs is the operation; not
// where something before was one in two ways.
func TestCulpritsOfTwoOperations(t *testing.T) {
	const n, i = nccl.Nothing, nccl.Instead
	mine := word{Collectives: 7, Operation: "a", First: 5, Ways: []nccl.Service{i, i, i}}
	why := func(ways ...nccl.Service) string {
		op := nccl.Operation{Name: "ncclAllReduce", Collective: 5, Root: -1}
		return culprits(op, mine, map[int]word{1: {Collectives: 7, Operation: "b", First: 5, Ways: ways}})[0].Why
	}
	require.Equal(t, "differs", why(i, i, n))
	require.Contains(t, why(i, n, n), "carries collective 6 out by NCCL")
}

// A rank that carries an operation out otherwise is named for the first one, also when it is
// behind since, or ahead; what a word does not tell is no difference.
func TestCulpritsOfTwoWays(t *testing.T) {
	const n, i, l = nccl.Nothing, nccl.Instead, nccl.Lending
	mine := word{Collectives: 7, Operation: "a", First: 3, Ways: []nccl.Service{i, i, n, n, i}}
	whys := func(op nccl.Operation, x word) string {
		list := culprits(op, mine, map[int]word{1: x})
		if len(list) == 0 {
			return ""
		}
		return list[0].Why
	}
	reduce := func(number uint64) nccl.Operation {
		return nccl.Operation{Name: "ncclAllReduce", Collective: number, Root: -1}
	}
	const where = ", as for another stream than the group's or with others in one Group"
	for _, c := range []struct {
		from uint64
		x    word
		want string
	}{
		{3, word{First: 3, Ways: []nccl.Service{i, i, n, n, i}}, ""},
		{3, word{First: 3, Ways: []nccl.Service{i, i, n, n, n}}, "carries collective 7 out by NCCL and this rank by own kernels" + where},
		{3, word{First: 3, Ways: []nccl.Service{i, n, n, n, l}}, "carries collective 4 out by NCCL and this rank by own kernels" + where},
		{5, word{First: 3, Ways: []nccl.Service{i, n, n, n, l}}, "carries collective 7 out by NCCL's windows and this rank by own kernels" + where},
		{5, word{First: 1, Ways: []nccl.Service{n, n, n, n, n, n, i, n, n}}, ""},
		{3, word{First: 5, Ways: []nccl.Service{i}}, "carries collective 5 out by own kernels and this rank by NCCL" + where},
		{1, word{First: 1, Ways: []nccl.Service{n, n, i, i, n}}, "is behind"},
		{3, word{}, "is behind"},
		{3, word{Collectives: 7, Operation: "a"}, ""},
	} {
		if len(c.x.Ways) > 0 {
			c.x.Operation, c.x.Collectives = "a", c.x.First+uint64(len(c.x.Ways))-1
		}
		require.Equal(t, c.want, whys(reduce(c.from), c.x), "%+v", c)
	}
	differs := word{Collectives: 3, First: 3, Ways: []nccl.Service{n}}
	require.Equal(t, "is the peer", whys(nccl.Operation{Name: "ncclSend", Collective: 3, Root: 1}, differs))
	require.Empty(t, whys(nccl.Operation{Name: "ncclSend", Collective: 3, Root: 2}, differs))
}

// What a rank has not told of is not said to have not been.
func TestRankProgressText(t *testing.T) {
	p := RankProgress{Rank: 1, World: 1, Why: "was lost", Operation: "none", Told: 400 * time.Millisecond}
	require.Equal(t, "rank 1 was lost: it had told of no operation (as of 400ms ago)", p.String())
	p = RankProgress{Rank: 1, World: 3, Why: "is behind", Operation: "x", Age: 2 * time.Second, Told: time.Second, End: "closed the group"}
	require.Equal(t, "rank 1 (rank 3 of the world) is behind: the last operation that it told of is x, 2s ago (as of 1s ago); by then it had closed the group", p.String())
}

// Of the ranks that have ended the first one is named: the others may have ended
// because of it.
func TestTheFirstThatLeft(t *testing.T) {
	now := time.Now()
	all := map[int]word{
		0: {Told: now.Add(-time.Hour)},
		1: {Told: now, End: "failed: a peer was lost"},
		2: {Told: now.Add(-time.Second), End: "closed the group"},
	}
	list := left(all)
	require.Len(t, list, 1)
	require.Equal(t, 2, list[0].Rank)
	require.Equal(t, "closed the group", list[0].End)
	delete(all, 1)
	delete(all, 2)
	require.Empty(t, left(all))

	w := &words{world: []int{5, 6, 7}}
	oops := errors.New("oops")
	e, ok := errors.AsType[*CulpritError](w.blame(list, oops))
	require.True(t, ok)
	require.Equal(t, 7, e.Culprits[0].World)
	require.Equal(t, oops, w.blame(nil, oops))
}

// A rank that was lost is named with the one that has left before it had done its part.
func TestWhoIsGone(t *testing.T) {
	now := time.Now()
	whys := func(list []RankProgress) (s []string) {
		for _, p := range list {
			s = append(s, fmt.Sprint(p.Rank, " ", p.Why))
		}
		return s
	}
	all := map[int]word{1: {Collectives: 10, Told: now, End: "closed the group"}, 2: {Collectives: 11, Told: now}}
	require.Equal(t, []string{"1 has left", "2 was lost"}, whys(gone(2, word{Collectives: 11}, all)))
	require.Equal(t, []string{"2 was lost"}, whys(gone(2, word{Collectives: 10}, all)), "rank 1 has done all")
	require.Equal(t, []string{"1 was lost"}, whys(gone(1, word{Collectives: 11}, all)))
	require.Equal(t, []string{"1 has left"}, whys(gone(3, word{Collectives: 11}, all)), "rank 3 had told nothing")
}

// Only a failure of its own is what a rank tells as its end.
func TestEndBy(t *testing.T) {
	require.Equal(t, "failed: oops", endBy(errors.New("oops")))
	require.Empty(t, endBy(nccl.ErrorRemote))
	require.Empty(t, endBy(&CulpritError{Err: errors.New("oops")}))
}
