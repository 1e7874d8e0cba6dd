package job

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// starting returns a job of 2 to 3 hosts, of which some have come and are asked to stay.
func starting(hosts ...string) *paperJob {
	j := onPaper(CoordConfig{agents: 3, least: 2, Self: Welcome{Agent: hosts[0], Host: hosts[0], LostAfter: time.Second}})
	for _, u := range hosts {
		j.joins(u)
	}
	j.sleep(lastCallTime + time.Second)
	return j
}

// joins registers a host of a job of 2 to 3.
func (j *paperJob) joins(uuid string) { j.joinsJobOf(uuid, 3) }

func (j *paperJob) joinsJobOf(uuid string, most int) {
	p := &peer{addr: uuid, since: j.now, heard: j.now}
	j.hosts[uuid] = p
	h := host{Host: uuid, UUID: uuid, NodeRank: -1, Nodes: most, MinNodes: j.cfg.leastHosts(), LocalSize: 1}
	m := Note(kindRegister, h)
	m.ID = registerAgent
	if err := j.handle(p, m); err != nil {
		panic(err)
	}
}

// stays lets hosts answer the last request to stay that they have got.
func (j *paperJob) stays(hosts ...string) {
	for _, u := range hosts {
		attempt := uint64(0)
		for _, m := range j.take(j.hosts[u]) {
			if m.Kind == kindRequestVote {
				attempt = m.ID
			}
		}
		if attempt != 0 {
			_ = j.happen(received{j.hosts[u], msg{kind: kindVote, id: attempt}})
		}
	}
}

// A host that comes while the others are asked to stay is asked, too.
func TestHostComesDuringTheFirstVote(t *testing.T) {
	j := starting("a", "b")
	require.NotZero(t, j.attempt)
	j.joins("c")
	j.stays("a", "b", "c")
	j.sleep(time.Minute)
	j.stays("a", "b", "c")
	require.NotNil(t, j.plan)
	require.Len(t, j.plan.Hosts, 3)
}

// If a host leaves while it is asked to stay, the others are asked again.
func TestHostLeavesDuringTheFirstVote(t *testing.T) {
	j := starting("a", "b", "c")
	require.NotZero(t, j.attempt)
	_ = j.happen(received{j.hosts["c"], msg{kind: kindLeave}})
	j.sleep(time.Minute)
	j.stays("a", "b")
	require.NotNil(t, j.plan)
	require.Len(t, j.plan.Hosts, 2)
}

// A host for which the job has no place waits for one until the hosts are complete.
func TestOneHostTooMany(t *testing.T) {
	j := starting("a", "b", "c")
	j.joins("d")
	j.joins("e")
	_ = j.happen(received{j.hosts["c"], msg{kind: kindLeave}})
	j.stays("a", "b", "c", "d", "e")
	require.NotNil(t, j.plan)
	require.Equal(t, []string{"a", "b", "d"}, []string{j.plan.Hosts[0].UUID, j.plan.Hosts[1].UUID, j.plan.Hosts[2].UUID})
	require.Equal(t, []*peer{j.hosts["e"]}, j.late, "it may replace a host that is lost")
	_ = j.happen(received{j.hosts["e"], msg{kind: KindSilent}}) // it has lost the coordinator, which was starved
	require.Empty(t, j.late)
	require.Nil(t, j.faults.stop, "the job does not need it")

	j = onPaper(CoordConfig{agents: 2, Self: Welcome{Agent: "a", Host: "a", LostAfter: time.Second}})
	j.joinsJobOf("a", 2)
	j.joinsJobOf("b", 2)
	j.joinsJobOf("c", 2)
	j.stays("a", "b")
	require.Len(t, j.plan.Hosts, 2)
	require.Empty(t, j.late)
	m := j.take(j.hosts["c"])[0]
	var r Refusal
	require.NoError(t, m.Record(&r))
	require.Equal(t, "the job's 2 hosts are complete (epoch 1)", r.Reason)
}
