package status

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/stretchr/testify/require"
)

func example() *Process {
	return &Process{
		Groups: []Group{{ID: "a1", Name: "data", Rank: 1, Size: 4, WorldRank: 1, Device: "virtual:1", Issued: 5, Completed: 4, IdleNanos: 7,
			Oldest: &Op{Text: "ncclAllReduce(1 x float32, sum) as collective 5", Kind: "all-reduce", Collective: 5, AgeNanos: 9},
			Totals: []Total{{"all_reduce", "nccl", "le_1KiB", 5, 20}, {"all_gather", "nccl", "le_1MiB", 1, 20}}}},
		Devices: []Device{{Name: "virtual:1", Allocated: 1, Reserved: 2, Total: 8, Free: 6, Uses: []Use{{"buffers", 1}},
			Product: "virtual device", PCI: "0000:01:00.0", Backend: "virtual", Driver: "13.0",
			Pools: []Pool{{Name: "small", Allocated: 1, Reserved: 2}, {Name: "large"}}}},
		NCCL: "2.28.3",
	}
}

func TestDecode(t *testing.T) {
	p := example()
	b := p.encode()
	got, err := Decode(b)
	require.NoError(t, err)
	require.Equal(t, p, got)
	require.Equal(t, "all_gather", got.Groups[0].Totals[0].Op, "in order")
}

// TestDecodeRefuses changes one part of a valid report.
func TestDecodeRefuses(t *testing.T) {
	for want, change := range map[string]func(*Process){
		"rank 4 of 4":                             func(p *Process) { p.Groups[0].Rank = 4 },
		"world rank -2":                           func(p *Process) { p.Groups[0].WorldRank = -2 },
		"6 of 5 collectives":                      func(p *Process) { p.Groups[0].Completed = 6 },
		"idle for -1 ns":                          func(p *Process) { p.Groups[0].IdleNanos = -1 },
		"an operation with the age -1":            func(p *Process) { p.Groups[0].Oldest.AgeNanos = -1 },
		"33 groups":                               func(p *Process) { p.Groups = make([]Group, maxGroups+1) },
		"129 totals":                              func(p *Process) { p.Groups[0].Totals = make([]Total, maxTotals+1) },
		"or repeat":                               func(p *Process) { p.Groups[0].Totals[1] = p.Groups[0].Totals[0] },
		"a negative number":                       func(p *Process) { p.Devices[0].Reserved = -1 },
		"counts of errors are not in order":       func(p *Process) { p.Errors = []Errors{{"b", "r", 1}, {"a", "r", 1}} },
		"129 counts of errors":                    func(p *Process) { p.Errors = make([]Errors, maxErrors+1) },
		"histograms are not in order":             func(p *Process) { p.Durations = make([]Durations, 2) },
		"durations with the sum -1":               func(p *Process) { p.Durations = []Durations{{Sum: -1}} },
		"9 pools":                                 func(p *Process) { p.Devices[0].Pools = make([]Pool, maxPools+1) },
		"want small and large, each at most once": func(p *Process) { p.Devices[0].Pools[1].Name = "small" },
		"or allocations: -3":                      func(p *Process) { p.Devices[0].Pools[1].Reserved = -3 },
		"a text of 258 bytes":                     func(p *Process) { p.NCCL = strings.Repeat("x", maxText+2) },
		"33 uses":                                 func(p *Process) { p.Devices[0].Uses = make([]Use, maxUses+1) },
		"a text of 257 bytes":                     func(p *Process) { p.Groups[0].ID = strings.Repeat("x", maxText+1) },
		"want at most 65536":                      func(p *Process) { p.Notes = []string{strings.Repeat("x", MaxBytes)} },
	} {
		p := example()
		p.limit() // sorts the totals
		change(p)
		b, err := json.Marshal(p)
		require.NoError(t, err)
		_, err = Decode(b)
		require.ErrorContains(t, err, want)
	}
	for _, text := range []string{"", "[]", `{"unknown":1}`, "{}{}", `{"groups":[{"size":-1}]}`} {
		_, err := Decode([]byte(text))
		require.Error(t, err, text)
	}
}

// TestEncodeIsBounded encodes more than a report may have. The newest groups stay.
func TestEncodeIsBounded(t *testing.T) {
	var p Process
	for i := range 2 * maxGroups {
		g := example().Groups[0]
		g.Name = fmt.Sprint(strings.Repeat("\x1b", maxText), i)
		g.Totals = nil
		for k := range 2 * maxTotals {
			g.Totals = append(g.Totals, Total{Op: fmt.Sprint("op", k), Strategy: "nccl", Size: "le_1KiB"})
		}
		g.Issued, g.Completed = uint64(i), uint64(i)
		p.Groups = append(p.Groups, g)
	}
	for range 2 * maxDevices {
		p.Devices = append(p.Devices, example().Devices[0])
	}
	got, err := Decode(p.encode())
	require.NoError(t, err)
	require.Len(t, got.Groups, maxGroups)
	require.EqualValues(t, 2*maxGroups-1, got.Groups[maxGroups-1].Issued)
	require.NotContains(t, got.Groups[0].Name, "\x1b")
}

// TestTake asks sources of which one hangs.
func TestTake(t *testing.T) { testhost.Bubble(t, testTake) }

func testTake(t *testing.T) {
	end := make(chan struct{})
	asked := 0
	defer Add("quick", func(p *Process) { p.Notes = append(p.Notes, "quick") })()
	remove := Add("the driver", func(*Process) { asked++; <-end })
	defer remove()
	for range 2 {
		p, err := Decode(Take(time.Second))
		require.NoError(t, err)
		require.Equal(t, []string{"quick", "the driver did not answer in time: the driver may hang"}, p.Notes)
	}
	synctest.Wait()
	require.Equal(t, 1, asked, "once for both questions while it hung")
	close(end)
	synctest.Wait()
	p, err := Decode(Take(time.Second))
	require.NoError(t, err)
	require.Equal(t, []string{"quick"}, p.Notes)
	require.Equal(t, 2, asked)
}

// FuzzDecode decodes the report of a hostile process. What it accepts can be encoded again.
func FuzzDecode(f *testing.F) {
	f.Add(example().encode())
	f.Add([]byte(`{"groups":[{"rank":0,"size":1,"name":"\u001b[2J"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Decode(b)
		if err != nil {
			return
		}
		again, err := json.Marshal(p)
		require.NoError(t, err)
		require.False(t, bytes.ContainsRune(again, 0x1b))
		require.LessOrEqual(t, len(p.Groups), maxGroups)
		for _, g := range p.Groups {
			require.LessOrEqual(t, g.Completed, g.Issued)
		}
	})
}
