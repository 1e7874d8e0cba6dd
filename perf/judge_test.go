package perf

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// hosts returns GPUs of hosts a, b and so on.
func gpusOn(hosts, each int) (list []GPU) {
	for h := range hosts {
		for i := range each {
			rank := len(list)
			list = append(list, GPU{Rank: rank, Host: string(rune('a' + h)), UUID: fmt.Sprintf("GPU-%d", rank), PCI: fmt.Sprintf("0000:%02x:00.0", i), Product: "NVIDIA H200"})
		}
	}
	return list
}

// everyPair returns all pairs that meet, with a bandwidth for each.
func everyPair(gpus []GPU, bandwidth func(a, b int) float64) (list []PairResult) {
	for _, round := range roundsOf(gpus) {
		for a, b := range round {
			if b > a {
				list = append(list, PairResult{Ranks: [2]int{a, b}, Bandwidth: bandwidth(a, b)})
			}
		}
	}
	return list
}

// Each two meet once, and no one is in two pairs of a round.
func TestTournament(t *testing.T) {
	for n := 1; n <= 33; n++ {
		met := map[[2]int]int{}
		for _, round := range tournament(n) {
			require.Len(t, round, n)
			for a, b := range round {
				if b >= 0 {
					require.Equal(t, a, round[b], "%d of %d", a, n)
					met[[2]int{a, b}]++
				}
			}
		}
		require.Len(t, met, n*(n-1))
		for _, times := range met {
			require.Equal(t, 1, times)
		}
		require.LessOrEqual(t, len(tournament(n)), n+n%2-1)
	}
}

// On equal hosts the rounds grow with the hosts and not with the ranks; on unequal hosts all ranks meet.
func TestRoundsOfHosts(t *testing.T) {
	require.Len(t, roundsOf(gpusOn(1, 8)), 7)
	require.Len(t, roundsOf(gpusOn(16, 8)), 7+15)
	require.Len(t, roundsOf(gpusOn(16, 1)), 15, "one GPU has no peer on its host")
	for _, round := range roundsOf(gpusOn(4, 2))[1:] {
		for a, b := range round {
			require.Equal(t, a%2, b%2, "the same place on another host")
		}
	}
	uneven := append(gpusOn(2, 2), GPU{Host: "b"})
	require.Len(t, everyPair(uneven, func(a, b int) float64 { return 1 }), 10)
}

func TestJudgePairs(t *testing.T) {
	healthy := func(int, int) float64 { return 300 }
	slowIf := func(is func(a, b int) bool) func(a, b int) float64 {
		return func(a, b int) float64 {
			if is(a, b) {
				return 100
			}
			return 300
		}
	}
	part := Limits{Part: defaultPart}
	for name, x := range map[string]struct {
		gpus      []GPU
		bandwidth func(a, b int) float64
		limits    Limits
		want      [][]int // ranks of each finding
		hosts     []string
	}{
		"all equal":                   {gpusOn(1, 8), healthy, part, nil, nil},
		"within the spread":           {gpusOn(1, 8), func(a, b int) float64 { return 300 - float64(a+b)*4 }, part, nil, nil},
		"a GPU of eight":              {gpusOn(1, 8), slowIf(func(a, b int) bool { return a == 5 || b == 5 }), part, [][]int{{5}}, nil},
		"a GPU of three":              {gpusOn(1, 3), slowIf(func(a, b int) bool { return a == 1 || b == 1 }), part, [][]int{{1}}, nil},
		"a link":                      {gpusOn(1, 4), slowIf(func(a, b int) bool { return a == 1 && b == 3 }), part, [][]int{{1, 3}}, nil},
		"a GPU and a link":            {gpusOn(1, 8), slowIf(func(a, b int) bool { return a == 2 || b == 2 || a == 5 && b == 6 }), part, [][]int{{2}, {5, 6}}, nil},
		"all below the limit":         {gpusOn(1, 4), healthy, Limits{Pair: 350}, [][]int{nil}, nil},
		"one pair below the limit":    {gpusOn(1, 2), healthy, Limits{Pair: 350}, [][]int{{0, 1}}, nil},
		"one pair alone":              {gpusOn(1, 2), healthy, part, nil, nil},
		"no limit":                    {gpusOn(1, 4), slowIf(func(a, b int) bool { return a == 1 }), Limits{}, nil, nil},
		"a host":                      {gpusOn(4, 2), slowIf(func(a, b int) bool { return a/2 != b/2 && (a/2 == 2 || b/2 == 2) }), part, [][]int{nil}, []string{"c"}},
		"a NIC of a host":             {gpusOn(4, 2), slowIf(func(a, b int) bool { return a/2 != b/2 && (a == 5 || b == 5) }), part, [][]int{{5}}, nil},
		"a path between hosts":        {gpusOn(4, 1), slowIf(func(a, b int) bool { return a == 0 && b == 3 }), part, [][]int{{0, 3}}, nil},
		"both of two hosts":           {gpusOn(2, 2), func(a, b int) float64 { return map[bool]float64{true: 300, false: 20}[a/2 == b/2] }, Limits{Pair: 40}, [][]int{nil}, []string{"a", "b"}},
		"hosts are slower than links": {gpusOn(4, 2), func(a, b int) float64 { return map[bool]float64{true: 300, false: 40}[a/2 == b/2] }, part, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			list := judgePairs(x.gpus, everyPair(x.gpus, x.bandwidth), x.limits)
			var got [][]int
			for _, f := range list {
				require.Equal(t, Slow, f.Kind)
				require.Less(t, f.Measured, f.Limit)
				var ranks []int
				for _, g := range f.GPUs {
					ranks = append(ranks, g.Rank)
				}
				got = append(got, ranks)
			}
			require.Equal(t, x.want, got, "%+v", list)
			if x.hosts != nil {
				require.Equal(t, x.hosts, list[0].Hosts)
				require.Contains(t, list[0].Reason, "host "+x.hosts[0])
			}
		})
	}
}

func TestJudgeDevices(t *testing.T) {
	gpus := gpusOn(1, 4)
	gpus[3].Product = "NVIDIA L40S"
	d := []DeviceResult{{ToGPU: 55, FromGPU: 54, Product: 700}, {ToGPU: 54, FromGPU: 54, Product: 690}, {ToGPU: 20, FromGPU: 55, Product: 300}, {ToGPU: 25, FromGPU: 25, Product: 300}}
	list := judgeDevices(gpus, d, Limits{HostCopy: 22, Part: 0.75})
	require.Len(t, list, 2, "%+v", list)
	for _, f := range list {
		require.Equal(t, Slow, f.Kind)
		require.Equal(t, gpus[2:3], f.GPUs)
	}
	require.InDelta(t, 22, judgeDevices(gpus, d[:3], Limits{HostCopy: 22})[0].Limit, 1e-9)
	require.Empty(t, judgeDevices(gpus, d, Limits{}))
	d[1] = DeviceResult{Hang: "a matrix product", ToWrong: 3}
	list = judgeDevices(gpus, d, Limits{})
	require.Len(t, list, 1, "what a test that hangs has found before is not complete")
	require.Equal(t, Hang, list[0].Kind)
}

func TestJudgeAllReduce(t *testing.T) {
	gpus := gpusOn(1, 3)
	row := func(bytes int, bus float64, wrong ...int64) *Row {
		m := &Measure{BusBW: bus}
		for _, n := range wrong {
			m.Ranks = append(m.Ranks, RankMeasure{Wrong: n})
		}
		return &Row{Bytes: bytes, OutOfPlace: m}
	}
	r := &Report{Rows: []*Row{row(8, 0.001, 0, 0, 0), row(1<<28, 250, 0, 0, 0)}}
	require.Empty(t, judgeAllReduce(gpus, r, Limits{AllReduce: 200}), "only the largest size counts")
	require.Len(t, judgeAllReduce(gpus, r, Limits{AllReduce: 300}), 1)
	r.Rows[0] = row(8, 0.001, 0, 2, 0)
	list := judgeAllReduce(gpus, r, Limits{})
	require.Equal(t, gpus[1:2], list[0].GPUs)
	require.Contains(t, list[0].Reason, "while 2 ranks have right ones")
	r.Rows[0] = row(8, 0.001, 1, 2, 3)
	list = judgeAllReduce(gpus, r, Limits{})
	require.Len(t, list, 1)
	require.Empty(t, list[0].GPUs, "the sender of wrong data is not known")
}

// A rank that waits for a rank in an earlier round is a victim.
func TestJudgeStates(t *testing.T) {
	gpus := gpusOn(1, 4)
	states := []*pairState{{Round: 1, Partner: 2}, {Round: 0, Partner: 2}, {Round: 0, Partner: 1}, {Done: true}}
	list := judgeStates(gpus, states, time.Second)
	require.Len(t, list, 1)
	require.Equal(t, gpus[1:3], list[0].GPUs)
	states[2] = nil
	list = judgeStates(gpus, states, time.Second)
	require.Len(t, list, 1)
	require.Contains(t, list[0].Reason, "GPU-2 (0000:02:00.0) of host a, rank 2: its process did not answer")
	states = []*pairState{{Error: "remote", Culprit: victim}, {Error: "own", Culprit: 1}, {Error: "of rank 1", Culprit: 1}, {Error: "remote", Culprit: victim}}
	list = judgeStates(gpus, states, time.Second)
	require.Len(t, list, 1)
	require.Equal(t, gpus[1:2], list[0].GPUs)
	require.Len(t, judgeStates(gpus, states[:1], time.Second), 1, "no one is blamed, and something is wrong")
}

func TestLimits(t *testing.T) {
	for _, l := range []Limits{{AllReduce: -1}, {Pair: math.NaN()}, {HostCopy: math.Inf(1)}, {Part: 1.1}} {
		require.Error(t, l.Check(), "%+v", l)
	}
	require.NoError(t, (&Limits{AllReduce: 1, Pair: 2, HostCopy: 3, Part: 1}).Check())
	l := Limits{}.withDefaults(gpusOn(1, 8), 256<<20)
	require.InDelta(t, 0.65*450, l.AllReduce, 1e-9)
	require.InDelta(t, defaultPart, l.Part, 1e-9)
	require.InDelta(t, 0.5*450, Limits{}.withDefaults(gpusOn(1, 2), 256<<20).AllReduce, 1e-9)
	require.Zero(t, Limits{}.withDefaults(gpusOn(2, 8), 256<<20).AllReduce, "the network is not known")
	require.Zero(t, Limits{}.withDefaults(gpusOn(1, 8), 1<<20).AllReduce, "small operations do not fill the link")
	require.InDelta(t, 7.0, Limits{AllReduce: 7}.withDefaults(gpusOn(2, 8), 8).AllReduce, 1e-9)
	mixed := gpusOn(1, 2)
	mixed[1].Product = "NVIDIA L40S"
	require.Zero(t, Limits{}.withDefaults(mixed, 256<<20).AllReduce)
}

// Lines as NCCL 2.23 to 2.28 write them.
const ncclLog = `n1:71:71 [0] NCCL INFO NCCL version 2.28.3+cuda13.0
n1:71:93 [0] NCCL INFO Channel 00/24 : 0 1
n1:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:71:93 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:71:94 [1] NCCL INFO Channel 00/1 : 1[1] -> 0[0] via P2P/IPC
n1:71:93 [0] NCCL INFO Channel 00 : 0[5000] -> 2[6000] via SHM/direct/direct
n1:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:71:93 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/1
n1:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 9[0] [send] via NET/AWS Libfabric/0/GDRDMA
n1:71:93 [0] NCCL INFO Channel 02/0 : 0[0] -> 3[3] via P2P/CUMEM
n1:71:93 [0] NCCL INFO Channel 03/0 : 0[0] -> 3[3] via SHM/direct/direct
`

func TestPaths(t *testing.T) {
	got := transports(ncclLog)
	require.Equal(t, map[[2]int]string{{0, 1}: "P2P", {1, 0}: "P2P", {0, 2}: "SHM", {0, 8}: "NET/IB", {8, 0}: "NET/Socket", {0, 9}: "NET/AWS", {0, 3}: ""}, got)
	for transport, want := range map[string]Path{"SHM": SharedMemory, "NET/IB": InfiniBand, "NET/Socket": Sockets, "NET/AWS": Network, "": UnknownPath, "COLLNET": UnknownPath, "P2P": PeerAccess} {
		require.Equal(t, want, pathBy(transport, &pairShare{Sent: 1000}), transport)
	}
	// Only counters prove NVLink, and that it was not used.
	for nvlink, want := range map[uint64]Path{1000: NVLink, 5000: NVLink, 500: NVLink, 300: PeerAccess, 50: PCIe, 0: PCIe} {
		require.Equal(t, want, pathBy("P2P", &pairShare{Sent: 1000, NVLink: nvlink, Counted: true}), nvlink)
	}
	state := func(partner int, transport string) *pairState {
		return &pairState{Results: []pairShare{{Partner: partner, Transport: transport}}}
	}
	p := &PairResult{Ranks: [2]int{0, 1}}
	require.Equal(t, SharedMemory, pathOf(p, []*pairState{state(1, "SHM"), state(0, "SHM")}))
	require.Equal(t, SharedMemory, pathOf(p, []*pairState{state(1, "SHM"), state(0, "")}))
	require.Equal(t, Sockets, pathOf(p, []*pairState{nil, state(0, "NET/Socket")}))
	require.Equal(t, UnknownPath, pathOf(p, []*pairState{state(1, "SHM"), state(0, "P2P")}), "the directions differ")
	t.Setenv("NCCL_DEBUG", "WARN")
	require.ErrorContains(t, RecordPaths(t.TempDir()), "NCCL_DEBUG=WARN is set")
}

// A single wrong element of a product is found.
func TestWrongRows(t *testing.T) {
	const n = 16
	a, b := integers(n, 1), integers(n, 2)
	require.Positive(t, slices.Max(a))
	require.Negative(t, slices.Min(a))
	c := make([]float32, n*n)
	for i := range n {
		for j := range n {
			for k := range n {
				c[i*n+j] += float32(a[i*n+k] * b[k*n+j])
			}
		}
	}
	require.Zero(t, wrongRows(a, b, c, n))
	for _, at := range []int{0, 17, n*n - 1} {
		was := c[at]
		for _, v := range []float32{was + 1, was - 256, was * 1.0000001, float32(math.NaN()), float32(math.Inf(1)), -was - 1} {
			if c[at] = v; v != was {
				require.Equal(t, 1, wrongRows(a, b, c, n), "%v instead of %v at %d", v, was, at)
			}
		}
		c[at] = was
	}
}
