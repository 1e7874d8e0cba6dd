package memory_test

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

// The tables are those of testdata/summary.py, which knows the layout by itself.
func TestSummary(t *testing.T) {
	f, err := os.Open(filepath.Join("testdata", "summary.json.gz"))
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	var cases []struct {
		Device      int
		Abbreviated bool
		Stats       map[string]int64
		Table       string
	}
	require.NoError(t, json.NewDecoder(z).Decode(&cases))
	require.Len(t, cases, 30)
	for i, c := range cases {
		s := unflat(c.Stats)
		require.Equal(t, c.Stats, s.Flat())
		require.Equal(t, c.Table, s.Summary(c.Device, c.Abbreviated), "case %d", i)
	}
}

// unflat makes statistics of torch's flat keys.
func unflat(flat map[string]int64) (s memory.Stats) {
	stat := func(key string, to *memory.Stat) {
		*to = memory.Stat{Current: flat[key+".current"], Peak: flat[key+".peak"],
			Allocated: flat[key+".allocated"], Freed: flat[key+".freed"]}
	}
	for key, to := range map[string]*memory.PoolStats{
		"allocation": &s.Allocation, "segment": &s.Segment, "active": &s.Active, "inactive_split": &s.InactiveSplit,
		"allocated_bytes": &s.AllocatedBytes, "reserved_bytes": &s.ReservedBytes, "active_bytes": &s.ActiveBytes,
		"inactive_split_bytes": &s.InactiveSplitBytes, "requested_bytes": &s.RequestedBytes,
	} {
		stat(key+".all", &to.All)
		stat(key+".small_pool", &to.Small)
		stat(key+".large_pool", &to.Large)
	}
	stat("oversize_allocations", &s.OversizeAllocations)
	stat("oversize_segments", &s.OversizeSegments)
	s.AllocRetries, s.OOMs, s.SyncAllStreams = flat["num_alloc_retries"], flat["num_ooms"], flat["num_sync_all_streams"]
	s.DeviceAllocs, s.DeviceFrees, s.MaxSplitSize = flat["num_device_alloc"], flat["num_device_free"], flat["max_split_size"]
	return s
}

func TestSummaryLines(t *testing.T) {
	for _, abbreviated := range []bool{false, true} {
		text := memory.Stats{}.Summary(3, abbreviated)
		lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
		require.Len(t, lines, map[bool]int{false: 6 + 9*4 + 2*2 + 1, true: 6 + 9*2 + 2*2 + 1}[abbreviated])
		for _, l := range lines {
			require.Len(t, l, 77, l)
		}
	}
}

func ExampleStats_Summary() {
	var s memory.Stats
	s.AllocatedBytes.All = memory.Stat{Current: 184648 << 10, Peak: 3 << 30, Allocated: 5 << 40, Freed: 512}
	s.Allocation.All = memory.Stat{Current: 12, Peak: 999, Allocated: 2_500_000, Freed: 900_000}
	s.OOMs = 2
	fmt.Println(s.Summary(0, true)[:13*78])
	// Output:
	// |===========================================================================|
	// |                  Chorus CUDA memory summary, device ID 0                  |
	// |---------------------------------------------------------------------------|
	// |            CUDA OOMs: 2            |        cudaMalloc retries: 0         |
	// |===========================================================================|
	// |        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
	// |---------------------------------------------------------------------------|
	// | Allocated memory      | 184648 KiB |   3072 MiB |   5120 GiB |    512 B   |
	// |---------------------------------------------------------------------------|
	// | Active memory         |      0 B   |      0 B   |      0 B   |      0 B   |
	// |---------------------------------------------------------------------------|
	// | Requested memory      |      0 B   |      0 B   |      0 B   |      0 B   |
	// |---------------------------------------------------------------------------|
}
