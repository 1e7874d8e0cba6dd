package job

import (
	"testing"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

func kindsOf(ms []Message) (ks []Kind) {
	for _, m := range ms {
		ks = append(ks, m.Kind)
	}
	return ks
}

// The coordinator's host is drained, and the only other host is lost meanwhile: nobody is left to continue,
// so the job stops as by SIGTERM.
func TestLastSuccessorIsLost(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b")
		j.do(func() { j.drainHost(j.hosts["a"], Fault{Reason: "received SIGTERM", Code: 143}) })
		require.Equal(t, phaseHold, j.elastic.phase)
		j.lose("b")
		j.settle("a")
		require.NotNil(t, j.faults.stop)
		require.Equal(t, 143, j.faults.stop.Code)
		require.False(t, j.handedOver)
	})
}

// Two of four hosts are lost, and the coordinator's host is drained. The host that is left is not a majority
// without the coordinator, which therefore begins another epoch before it leaves.
func TestHandoverNeedsAMajority(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c", "d")
		j.lose("c")
		j.lose("d")
		j.do(func() { j.drainHost(j.hosts["a"], Fault{Reason: "received SIGTERM", Code: 143}) })
		j.settle("a", "b")
		require.False(t, j.handedOver)
		j.answer("a", "b")
		require.Equal(t, uint64(2), j.epoch)
		require.Equal(t, phaseHold, j.elastic.phase, "the host still leaves")
		j.take(j.hosts["b"])
		j.take(j.procs["a"])
		j.take(j.procs["b"])
		j.settle("a", "b")
		require.True(t, j.handedOver)
		require.Equal(t, []Kind{kindHandover}, kindsOf(j.take(j.hosts["b"])))
		require.Equal(t, []Kind{kindHandover}, kindsOf(j.take(j.procs["b"])))
		require.Equal(t, []Kind{KindDismiss}, kindsOf(j.take(j.procs["a"])))
		require.NoError(t, j.handle(j.procs["b"], Message{Kind: KindRevoked, Epoch: 2}), "it does nothing any more")
	})
}

// A proposal of all four hosts was not committed. Two of them are lost after that, and the epoch before had only
// the other two. The coordinator does not leave, because its successor cannot know that the proposal has failed.
func TestHandoverCountsProposals(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b")
		j.do(func() { j.elastic.proposed = []voterSet{{"a", "b", "c", "d"}} })
		j.do(func() { j.drainHost(j.hosts["a"], Fault{Reason: "received SIGTERM", Code: 143}) })
		j.settle("a", "b")
		require.False(t, j.handedOver)
		require.Equal(t, []voterSet{{"a", "b", "c", "d"}, {"a", "b"}}, j.elastic.proposed)
		j.answer("a", "b")
		require.Empty(t, j.elastic.proposed)
		j.settle("a", "b")
		require.True(t, j.handedOver)
		require.Equal(t, 1, j.unregisteredHungUp, "those that have not registered learn it, too")
	})
}
