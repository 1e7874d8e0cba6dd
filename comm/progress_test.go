package comm

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/nccl"
)

// A rank is named for what it did not issue, or issued differently; a transfer has one
// peer to blame.
func TestCulprits(t *testing.T) {
	mine := report{Collectives: 7, Operation: "a"}
	all := map[int]report{
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
	all[5] = report{Collectives: 4, Operation: "a"}
	require.Equal(t, map[int]string{5: "is behind", 3: "differs"}, whys(nccl.Operation{Name: "ncclAllReduce", Collective: 3, Root: -1}))
	delete(all, 5)
	delete(all, 1)
	require.Equal(t, map[int]string{3: "differs"}, whys(nccl.Operation{Name: "ncclAllReduce", Collective: 5, Root: -1}))
	require.Equal(t, map[int]string{2: "is the peer"}, whys(nccl.Operation{Name: "ncclSend", Collective: 7, Root: 2}))
	require.Equal(t, map[int]string{4: "is the peer"}, whys(nccl.Operation{Name: "ncclRecv", Collective: 7, Root: 4}))

	// Nobody has waited for those that are behind where NCCL has failed.
	all[1] = report{Collectives: 6, Operation: "a"}
	list := mismatched(nccl.Operation{Name: "ncclAllReduce", Collective: 7}, mine, all)
	require.Len(t, list, 1)
	require.Equal(t, 3, list[0].Rank)
	require.Empty(t, mismatched(nccl.Operation{Name: "ncclSend", Collective: 7, Root: 2}, mine, all))
}

// A launch of a graph has no number. The ranks that have launched fewer collectives are named, and none if all have launched as many.
func TestCulpritsOfALaunch(t *testing.T) {
	late := &nccl.TimeoutError{Graph: "graph 1", Stream: "a stream", Operation: nccl.Operation{Root: -1}}
	list := lateCulprits(late, report{Collectives: 7, Launched: 12}, map[int]report{1: {Collectives: 7, Launched: 9}, 2: {Collectives: 6, Launched: 12}, 3: {Launched: 15}})
	require.Len(t, list, 1)
	require.Equal(t, []any{1, "has launched 9 collectives in graphs, and this rank 12"}, []any{list[0].Rank, list[0].Why})
	require.Empty(t, lateCulprits(late, report{Launched: 12}, map[int]report{1: {Launched: 12}}))
}

// Streams that are full have different numbers of operations. The ranks wait for the one that is far
// behind, and not for each other.
func TestCulpritOfFullStreams(t *testing.T) {
	late := &nccl.TimeoutError{
		Operation: nccl.Operation{Record: 1030, Name: "ncclAllReduce", Collective: 1030, Root: -1},
		Completed: nccl.Operation{Record: 11, Name: "ncclAllReduce", Collective: 11, Root: -1},
	}
	for _, completed := range []uint64{11, 0} { // 0: the first one hangs
		late.Completed.Record, late.Completed.Collective = completed, completed
		list := culprits(firstPending(late), report{Collectives: 1030, Operation: "a"}, map[int]report{1: {Collectives: completed}, 2: {Collectives: 1027, Operation: "a"}})
		require.Len(t, list, 1)
		require.Equal(t, []any{1, "is behind"}, []any{list[0].Rank, list[0].Why})
	}
}

// If two ranks issue different operations with different backends, the error names the
// operations. If their backends differed before, it names the backends.
func TestCulpritsOfTwoOperations(t *testing.T) {
	const n, i = collective.NCCL, collective.Kernels
	mine := report{Collectives: 7, Operation: "a", First: 5, Services: []collective.Service{i, i, i}}
	why := func(services ...collective.Service) string {
		op := nccl.Operation{Name: "ncclAllReduce", Collective: 5, Root: -1}
		return culprits(op, mine, map[int]report{1: {Collectives: 7, Operation: "b", First: 5, Services: services}})[0].Why
	}
	require.Equal(t, "differs", why(i, i, n))
	require.Contains(t, why(i, n, n), "runs collective 6 with NCCL")
}

// A rank that uses another backend is named for the first such operation, also if it is behind
// or ahead since. Operations that a report does not have do not differ.
func TestCulpritsOfTwoBackends(t *testing.T) {
	const n, i, l = collective.NCCL, collective.Kernels, collective.Windows
	mine := report{Collectives: 7, Operation: "a", First: 3, Services: []collective.Service{i, i, n, n, i}}
	whys := func(op nccl.Operation, x report) string {
		list := culprits(op, mine, map[int]report{1: x})
		if len(list) == 0 {
			return ""
		}
		return list[0].Why
	}
	reduce := func(number uint64) nccl.Operation {
		return nccl.Operation{Name: "ncclAllReduce", Collective: number, Root: -1}
	}
	const where = ", for example because it was issued by package nccl or because the batches differ"
	for _, c := range []struct {
		from uint64
		x    report
		want string
	}{
		{3, report{First: 3, Services: []collective.Service{i, i, n, n, i}}, ""},
		{3, report{First: 3, Services: []collective.Service{i, i, n, n, n}}, "runs collective 7 with NCCL and this rank with Chorus kernels" + where},
		{3, report{First: 3, Services: []collective.Service{i, n, n, n, l}}, "runs collective 4 with NCCL and this rank with Chorus kernels" + where},
		{5, report{First: 3, Services: []collective.Service{i, n, n, n, l}}, "runs collective 7 with NCCL's windows and this rank with Chorus kernels" + where},
		{5, report{First: 1, Services: []collective.Service{n, n, n, n, n, n, i, n, n}}, ""},
		{3, report{First: 5, Services: []collective.Service{i}}, "runs collective 5 with Chorus kernels and this rank with NCCL" + where},
		{3, report{First: 3, Services: []collective.Service{99}}, "runs collective 3 with an unknown backend and this rank with Chorus kernels" + where},
		{1, report{First: 1, Services: []collective.Service{n, n, i, i, n}}, "is behind"},
		{3, report{}, "is behind"},
		{3, report{Collectives: 7, Operation: "a"}, ""},
	} {
		if len(c.x.Services) > 0 {
			c.x.Operation, c.x.Collectives = "a", c.x.First+uint64(len(c.x.Services))-1
		}
		require.Equal(t, c.want, whys(reduce(c.from), c.x), "%+v", c)
	}
	differs := report{Collectives: 3, First: 3, Services: []collective.Service{n}}
	require.Equal(t, "is the peer", whys(nccl.Operation{Name: "ncclSend", Collective: 3, Root: 1}, differs))
	require.Empty(t, whys(nccl.Operation{Name: "ncclSend", Collective: 3, Root: 2}, differs))
}

// A rank that has reported no operation may have issued some.
func TestRankProgressText(t *testing.T) {
	p := RankProgress{Rank: 1, World: 1, Process: 1, Why: "was lost", Operation: "none", Reported: 400 * time.Millisecond}
	require.Equal(t, "rank 1 was lost: it had reported no operation (as of 400ms ago)", p.String())
	p = RankProgress{Rank: 1, World: 3, Process: 3, Why: "is behind", Operation: "x", Age: 2 * time.Second, Reported: time.Second, End: "closed the group"}
	require.Equal(t, "rank 1 (rank 3 of the world) is behind: its last reported operation is x, 2s ago (as of 1s ago); by then it had closed the group", p.String())
	p = RankProgress{Rank: 3, World: 3, Process: 1, Why: "was lost", Operation: "none"}
	require.Equal(t, "rank 3 (in process 1) was lost: it had reported no operation (as of 0s ago)", p.String())
}

// Of the ranks that have ended the first one is named: the others may have ended
// because of it.
func TestTheFirstThatLeft(t *testing.T) {
	now := time.Now()
	all := map[int]report{
		0: {Written: now.Add(-time.Hour)},
		1: {Written: now, End: "failed: a peer was lost"},
		2: {Written: now.Add(-time.Second), End: "closed the group"},
	}
	list := firstEnded(all)
	require.Len(t, list, 1)
	require.Equal(t, 2, list[0].Rank)
	require.Equal(t, "closed the group", list[0].End)
	delete(all, 1)
	delete(all, 2)
	require.Empty(t, firstEnded(all))

	w := &reporter{world: []int{5, 6, 7}, process: []int{0, 0, 0, 0, 1, 1, 1, 1}}
	oops := errors.New("oops")
	e, ok := errors.AsType[*CulpritError](w.culpritError(list, oops))
	require.True(t, ok)
	require.Equal(t, 7, e.Culprits[0].World)
	require.Equal(t, 1, e.Culprits[0].Process)
	require.ErrorContains(t, e, "rank 2 (rank 7 of the world, in process 1) has left")
	require.ErrorIs(t, e, ErrLeft)
	require.NotErrorIs(t, &CulpritError{[]RankProgress{{End: "failed: oops"}, {Why: "was lost"}}, oops}, ErrLeft)
	require.Equal(t, []int{0}, w.firstRanks())
	require.Equal(t, []int{0, 2}, (&reporter{world: []int{6, 5, 0, 7}, process: w.process}).firstRanks())
	require.Equal(t, oops, w.culpritError(nil, oops))
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
	all := map[int]report{1: {Collectives: 10, Written: now, End: "closed the group"}, 2: {Collectives: 11, Written: now}}
	require.Equal(t, []string{"1 has left", "2 was lost"}, whys(lossCulprits([]int{2}, report{Collectives: 11}, all)))
	require.Equal(t, []string{"2 was lost"}, whys(lossCulprits([]int{2}, report{Collectives: 10}, all)), "rank 1 has done all")
	require.Equal(t, []string{"1 was lost"}, whys(lossCulprits([]int{1}, report{Collectives: 11}, all)))
	require.Equal(t, []string{"1 has left"}, whys(lossCulprits([]int{3}, report{Collectives: 11}, all)), "rank 3 has reported nothing")
	require.Equal(t, []string{"1 was lost", "2 was lost"}, whys(lossCulprits([]int{1, 2}, report{Collectives: 11}, all)), "a process with two ranks")
}

// Only a failure of its own is what a rank tells as its end.
func TestEndBy(t *testing.T) {
	require.Equal(t, "failed: oops", endOf(errors.New("oops")))
	require.Empty(t, endOf(nccl.ErrorRemote))
	require.Empty(t, endOf(&CulpritError{Err: errors.New("oops")}))
}
