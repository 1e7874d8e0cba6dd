package job

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

// endedHost returns a job of a, b and c in which the worker of c has exited with code 0, so that the next epoch has only the
// workers of a and b. The launcher of c waits for the end of the job.
func endedHost(t *testing.T) *paperJob {
	j := newPaperJob("a", "b", "c")
	j.do(func() { j.elasticExit(j.hosts["c"], Exit{PID: 102, Reason: "exited with code 0"}) })
	j.sleep(2 * ExitGrace)
	j.settle("a", "b")
	j.answer("a", "b", "c")
	require.Equal(t, uint64(2), j.epoch)
	require.NoError(t, j.handle(j.hosts["c"], Message{Kind: kindDone, Epoch: FirstEpoch}))
	require.Equal(t, peerDone, j.hosts["c"].state)
	return j
}

// requireGoesOn checks that a can go on without b, whose launcher may run.
func (j *paperJob) requireGoesOn(t *testing.T) {
	t.Helper()
	epoch := j.epoch
	j.lose("b")
	j.settle("a")
	j.answer("a")
	require.Nil(t, j.faults.stop)
	require.Equal(t, epoch+1, j.epoch)
}

// A host without workers vanishes. The others begin an epoch without it, so that it does not count as an
// absent host if another one is lost.
func TestHostWithoutWorkersVanishes(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := endedHost(t)
		j.ends(j.hosts["c"], os.ErrDeadlineExceeded)
		require.Equal(t, phaseHold, j.elastic.phase)
		j.settle("a", "b")
		require.Contains(t, j.epochLine(), "host c was lost: silent for")
		j.answer("a", "b")
		require.Equal(t, []voterSet{{"a", "b"}}, j.voterSets)
		j.requireGoesOn(t)
	})
}

// The launcher of a host without workers has lost the coordinator and says so, as other launchers do.
func TestHostWithoutWorkersLosesTheCoordinator(t *testing.T) {
	j := endedHost(t)
	require.NoError(t, j.handle(j.hosts["c"], Message{Kind: KindSilent, Epoch: FirstEpoch}))
	require.Equal(t, peerGone, j.hosts["c"].state)
	require.Equal(t, phaseHold, j.elastic.phase, "the others decide without it")
}

// The launcher of a host without workers ends. It does not count any more, and the epoch goes on.
func TestHostWithoutWorkersEnds(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := endedHost(t)
		j.provenEnded("c")
		require.Equal(t, phaseRun, j.elastic.phase)
		j.requireGoesOn(t)
	})
}

// provenEnded ends the connection of a launcher with a proof that it has ended, after it has heard from the coordinator.
func (j *paperJob) provenEnded(host string) {
	j.happen(disconnected{j.hosts[host], ending{closed: true, found: foundEnded, certain: true}})
}

// addLate adds host d to a job whose three places are taken.
func (j *paperJob) addLate(t *testing.T) {
	t.Helper()
	j.do(func() {
		j.cfg.agents = 3
		d := j.newHost("d")
		j.admitHost(d)
		require.Equal(t, []*peer{d}, j.late, "all places are taken")
	})
}

// requireInPlaceOfC checks that d, which has waited, has the place of c.
func (j *paperJob) requireInPlaceOfC(t *testing.T) {
	t.Helper()
	require.Empty(t, j.late)
	require.Equal(t, []*peer{j.hosts["a"], j.hosts["b"], j.hosts["d"]}, j.agents)
}

// The launcher of a host without workers leaves or is killed, and a host that has waited takes its place. The epoch goes
// on until the worker of that host comes.
func TestHostWithoutWorkersFreesItsPlace(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, j *paperJob){
		"leaves": func(t *testing.T, j *paperJob) {
			require.NoError(t, j.handle(j.hosts["c"], Message{Kind: kindLeave, Epoch: FirstEpoch}))
		},
		"is killed": func(_ *testing.T, j *paperJob) {
			j.provenEnded("c")
		},
	} {
		t.Run(name, func(t *testing.T) {
			testhost.Bubble(t, func(t *testing.T) {
				j := endedHost(t)
				j.addLate(t)
				end(t, j)
				j.requireInPlaceOfC(t)
				require.Equal(t, phaseRun, j.elastic.phase)
				j.lose("b")
				j.settle("a")
				j.answer("a", "d")
				require.Equal(t, uint64(3), j.epoch)
				require.Negative(t, j.plan.nodeOf("c"))
				require.GreaterOrEqual(t, j.plan.nodeOf("d"), 0)
			})
		})
	}
}

// A job that needs all its hosts loses one while another host waits. The job waits for the worker of that host.
func TestLateHostSavesTheJob(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b", "c")
		j.cfg.least = 3
		j.addLate(t)
		j.lose("c")
		j.requireInPlaceOfC(t)
		j.settle("a", "b")
		require.Equal(t, phaseWait, j.elastic.phase)
		require.Nil(t, j.faults.stop)
	})
}

// A job that has too few hosts left says so while it waits for others, and who has left.
func TestShortageIsReported(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		j := newPaperJob("a", "b")
		j.cfg.least = 2
		require.Empty(t, j.waitingLine())
		j.lose("b")
		j.settle("a")
		require.Equal(t, phaseWait, j.elastic.phase)
		require.Empty(t, j.waitingLine())
		j.sleep(10 * time.Second)
		require.Regexp(t, `^epoch 1 has ended 10s ago, and the next one waits for more processes: it has 1 process on 1 host, and needs at least 1 process on 2 hosts; rank 1 \(host b pid 101\) left: `, j.waitingLine())
	})
}

// All launchers are done in the middle of a program. It has ended if its workers have exited with code 0, and otherwise the job
// waits for the host that may still come.
func TestAllLaunchersAreDone(t *testing.T) {
	for _, code := range []int{0, 137} {
		testhost.Bubble(t, func(t *testing.T) {
			j := newPaperJob("a", "b")
			for i, u := range []string{"a", "b"} {
				j.do(func() { j.elasticExit(j.hosts[u], Exit{PID: 100 + i, Code: code, Reason: "exited"}) })
				require.NoError(t, j.handle(j.hosts[u], Message{Kind: kindDone, Epoch: FirstEpoch}))
			}
			require.Nil(t, j.faults.stop)
			for _, u := range []string{"a", "b"} {
				require.Equal(t, code == 0, slices.Contains(kindsOf(j.take(j.hosts[u])), kindEnded), code)
			}
		})
	}
}
