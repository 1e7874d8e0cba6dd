package monitor

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/status"
)

// exampleStatus is a job of 4 ranks, of which rank 2 has issued one collective less than the others.
func exampleStatus(t testing.TB) *job.Status {
	s := &job.Status{Job: "mnist", Epoch: 2, Restarts: 1, Hosts: []string{"n1", "n2"}}
	for rank := range 4 {
		g := status.Group{ID: "a1", Name: "data", Rank: rank, Size: 4, WorldRank: rank, Device: fmt.Sprintf("virtual:%d", rank%2), Issued: 8, Completed: 7,
			IdleNanos: int64(3 * time.Second), Totals: []status.Total{{Op: "all_reduce", Strategy: "nccl", Size: "le_1MiB", Count: 8, Bytes: 8 << 20}}}
		if rank == 2 {
			g.Issued, g.IdleNanos = 7, int64(time.Minute)
		} else {
			g.Oldest = &status.Op{Text: "ncclAllReduce(1 x float32, sum) as collective 8", Kind: "all-reduce", Collective: 8, AgeNanos: int64(time.Duration(rank+4) * time.Second)}
		}
		s.Members = append(s.Members, member(t, rank, status.Process{Groups: []status.Group{g},
			Devices: []status.Device{{Name: g.Device, UUID: "GPU-1", Product: "virtual device", PCI: "0000:01:00.0", Backend: "virtual", Driver: "13.0",
				Allocated: 1 << 30, Reserved: 2 << 30, PeakAllocated: 1 << 30, Total: 8 << 30, Free: 6 << 30,
				Pools: []status.Pool{{Name: "small", Allocated: 1 << 20, Reserved: 2 << 20, InactiveSplit: 512, PeakAllocated: 2 << 20}, {Name: "large", Allocated: 2 << 20, PeakAllocated: 3 << 20}}}}, NCCL: "2.28.3"}))
	}
	return s
}

func member(t testing.TB, rank int, p status.Process) job.MemberStatus {
	report, err := json.Marshal(p)
	require.NoError(t, err)
	return job.MemberStatus{Member: cluster.Member{Rank: rank, Host: fmt.Sprintf("n%d", 1+rank/2), Node: rank / 2, LocalRank: rank % 2, PID: 100 + rank}, State: "running", Report: report}
}

func TestRankThatIsBehind(t *testing.T) {
	j := newJob(exampleStatus(t), time.Now())
	require.Equal(t, []string{"rank 2 (host n2, process 102) is behind in group data since 7.0 s: it has issued 7 collectives, another rank 8"}, j.Findings)
	require.Equal(t, []Group{{ID: "a1", Name: "data", Size: 4, Answered: 4, Issued: 8, Completed: 7}}, j.Groups)
	require.Equal(t, 7*time.Second, j.Ranks[2].Groups[0].Lag, "since the first rank issued it")
	require.Equal(t, 2, j.byLag()[0].Rank)
	var text strings.Builder
	require.NoError(t, j.Print(&text, 0))
	lines := strings.Split(text.String(), "\n")
	require.Equal(t, j.Findings[0], lines[1])
	require.Regexp(t, `^2 +n2 +102 +running +data +7 +7 +1 for 7\.0 s +- +- +- +virtual:0 +1 GiB of 8 GiB +- +-$`, lines[4])
	require.Regexp(t, `^0 +n1 +100 +running +data +8 +7 +- +all-reduce +4\.0 s`, lines[5])
	text.Reset()
	require.NoError(t, j.Print(&text, 6))
	require.Equal(t, 6, strings.Count(text.String(), "\n"))
	require.Contains(t, text.String(), "and 3 more lines")
}

// TestFindings describes jobs in which no rank is behind by its reports.
func TestFindings(t *testing.T) {
	healthy := exampleStatus(t)
	for rank := range 4 {
		healthy.Members[rank] = member(t, rank, status.Process{Groups: []status.Group{{ID: "a1", Rank: rank, Size: 4, Issued: uint64(7 + rank), Completed: 7, IdleNanos: 1e6}}})
	}
	require.Empty(t, newJob(healthy, time.Now()).Findings, "ranks differ by some operations all the time")

	slow := exampleStatus(t)
	slow.Members[2] = slow.Members[1]
	slow.Members[2].Rank = 2
	require.Equal(t, []string{"all ranks have issued ncclAllReduce(1 x float32, sum) as collective 8 in group data, and it does not complete since 7.0 s: a device or a link is slow, or work before it on a stream"},
		newJob(slow, time.Now()).Findings)

	states := func(list ...string) string {
		s := exampleStatus(t)
		for rank, state := range list {
			s.Members[rank] = member(t, rank, status.Process{Groups: []status.Group{{ID: "a1", Name: "data", Rank: rank, Size: 4, Issued: 8, Completed: 7,
				Oldest: &status.Op{Text: "an operation", State: state, Collective: 8, AgeNanos: 7e9}}}})
		}
		findings := newJob(s, time.Now()).Findings
		require.Len(t, findings, 1)
		return findings[0]
	}
	require.Contains(t, states("started", "queued", "started", "started"), "7.0 s: work that was enqueued before it still runs or waits on the stream of rank 1 (host n1, process 101)")
	require.Contains(t, states("started", "started", "started", "started"), "7.0 s: it has started on all ranks, so a device or a link is slow, or other work occupies a device")
	require.Contains(t, states("started", "scheduled", "started", "started"), "or work before it on a stream")

	silent := exampleStatus(t)
	silent.Members[2].Report, silent.Members[2].Missing, silent.Members[2].Silent = nil, "it did not answer", 2*time.Second
	silent.Members[3].State, silent.Members[3].Report, silent.Members[3].Missing = "lost", nil, "killed by SIGKILL"
	j := newJob(silent, time.Now())
	require.Equal(t, []string{"rank 2 (host n2, process 102) has no report: it did not answer; its last message came 2.0 s ago", "rank 3 (host n2) is lost: killed by SIGKILL"}, j.Findings)
	require.Equal(t, 2, j.byLag()[0].Rank)

	hostile := exampleStatus(t)
	hostile.Members[0].Report = []byte(`{"groups":[{"size":-1}]}`)
	require.Equal(t, "its report is not valid: status: group 0: rank 0 of -1, world rank 0", newJob(hostile, time.Now()).Ranks[0].Missing)
}

// Launches of graphs are no operations. A rank that has launched less than another one is named if the launches of that one do not end.
func TestFindingsOfLaunches(t *testing.T) {
	findings := func(waits time.Duration, launched ...uint64) []string {
		s := exampleStatus(t)
		for rank := range 4 {
			g := status.Group{ID: "a1", Name: "data", Rank: rank, Size: 4, Issued: 8, Completed: 8, Launched: launched[rank]}
			if rank != 1 {
				g.WaitNanos = int64(waits)
			}
			s.Members[rank] = member(t, rank, status.Process{Groups: []status.Group{g}})
		}
		return newJob(s, time.Now()).Findings
	}
	require.Equal(t, []string{"rank 1 (host n1, process 101) has launched 9 collectives of group data in graphs, and rank 0 12, whose launches have not ended since 7.0 s"},
		findings(7*time.Second, 12, 9, 12, 12))
	require.Empty(t, findings(time.Second, 12, 9, 12, 12), "the watchdog notices ends every second")
	require.Empty(t, findings(7*time.Second, 12, 12, 12, 12))
	require.Empty(t, findings(0, 12, 9, 12, 12))
}

func TestRates(t *testing.T) {
	now := time.Now()
	before, after := newJob(exampleStatus(t), now), newJob(exampleStatus(t), now.Add(2*time.Second))
	after.Ranks[0].Groups[0].Totals[0].Bytes += 4 << 20
	after.Ranks[0].Groups[0].Totals[0].Count += 6
	after.Ranks[1].PID++ // another process began from 0
	after.setRates(before)
	require.Equal(t, 2*time.Second, after.Interval)
	require.Equal(t, float64(2<<20), after.Ranks[0].Groups[0].BytesPerSecond)
	require.Equal(t, 3.0, after.Ranks[0].Groups[0].OperationsPerSecond)
	require.Zero(t, after.Ranks[1].Groups[0].BytesPerSecond)
	before.Epoch++
	other := newJob(exampleStatus(t), now)
	other.setRates(before)
	require.Zero(t, other.Interval)
}

// TestPrintMemory checks the table of all ranks.
func TestPrintMemory(t *testing.T) {
	j := &Job{Ranks: []Rank{
		{Rank: 0, Host: "a", Devices: []status.Device{{Name: "cuda:0", Total: 80 << 30, Free: 20 << 30, Uses: []status.Use{{Owner: "buffers", Bytes: 56 << 30}, {Owner: "NCCL", Bytes: 4 << 30}}}}},
		{Rank: 1, Host: "a", Missing: "it did not answer"},
		{Rank: 2, Host: "b"},
		{Rank: 3, Host: "b", Devices: []status.Device{{Name: "cuda:1", Total: 80 << 30, Free: 79 << 30}}},
	}}
	var out strings.Builder
	require.NoError(t, j.PrintMemory(&out))
	require.Equal(t, `RANK  HOST  DEVICE  BYTES   SHARE  USE
0     a     cuda:0  56 GiB  70.0%  buffers
0     a     cuda:0  4 GiB   5.0%   NCCL
0     a     cuda:0  20 GiB  25.0%  free
1     a     -       -       -      it did not answer
2     b     -       -       -      this rank has no device yet
3     b     cuda:1  1 GiB   1.2%   in use; the process did not tell for what
3     b     cuda:1  79 GiB  98.8%  free
`, out.String())
}

// A rank that comes 5 ms late is named after one state with the last steps of each rank, on one host and on several, and its
// counts go on in later states.
func TestStragglers(t *testing.T) {
	state := func(clocks func(rank int) string, took bool, from int) *Job {
		s := exampleStatus(t)
		for rank := range 4 {
			g := status.Group{ID: "a1", Name: "data", Rank: rank, Size: 4, WorldRank: rank, Device: "virtual:0", Issued: 200, Completed: 200, Clock: clocks(rank)}
			for i := range 20 {
				late := int64(0)
				if rank == 3 {
					late = 5e6
				}
				a := [3]int64{int64(from + i), int64(from+i)*20e6 + late, 0}
				if took {
					a[2] = 6e6 + int64(rank)*1e3 - late
				}
				g.Arrivals = append(g.Arrivals, a)
			}
			s.Members[rank] = member(t, rank, status.Process{Groups: []status.Group{g}})
		}
		return newJob(s, time.Now())
	}
	host := func(int) string { return "one" }
	hosts := func(rank int) string { return fmt.Sprint(rank / 2) }
	var late tallies
	j := state(host, false, 100)
	late.add(j)
	require.Equal(t, []string{"rank 3 (host n2, process 103) arrives last in group data: in 20 of 20 collectives that were compared, 5.0 ms after the others on average (by the times of the calls on one host: work on the device may come later)"}, j.Findings)
	text, err := json.Marshal(j)
	require.NoError(t, err)
	require.Contains(t, string(text), `"last_arrivals":{"compared":20,"on_streams":0,"last":20,"held_up_ns":100000000}`)
	require.NotContains(t, string(text), `"arrivals":[[`, "readers get the counts")
	j = state(host, false, 110)
	late.add(j)
	require.Equal(t, uint64(30), j.Ranks[3].Groups[0].Tally.Last, "each collective counts once")
	j = state(host, false, 110)
	j.Restarts++
	late.add(j)
	require.Equal(t, uint64(20), j.Ranks[3].Groups[0].Tally.Last, "other processes begin from 0")

	late = tallies{}
	j = state(hosts, false, 100)
	late.add(j)
	require.Empty(t, j.Findings, "hosts have no common clock")
	j = state(hosts, true, 100)
	late.add(j)
	require.Len(t, j.Findings, 1)
	require.Regexp(t, `^rank 3 .* in 20 of 20 .* 5\.0 ms .*\(by the times on the streams: the rank that arrives last waits least\)$`, j.Findings[0])
	j = state(hosts, true, 200)
	j.Ranks[1].Groups = nil
	late.add(j)
	require.Equal(t, uint64(20), j.Ranks[3].Groups[0].Tally.Compared, "nothing is compared without all ranks")
}
