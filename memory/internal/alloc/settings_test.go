package alloc

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// all is a table of divisions with one number.
func all(n uint64) (d [16]uint64) {
	fill(d[:], n)
	return d
}

func TestParseSettings(t *testing.T) {
	for text, change := range map[string]func(*Settings){
		"":                          func(*Settings) {},
		" , ":                       func(*Settings) {},
		"backend:cudaMallocAsync":   func(s *Settings) { s.Backend = "cudaMallocAsync" },
		" max_split_size_mb : 128 ": func(s *Settings) { s.MaxSplit = 128 << 20 },
		"max_split_size_mb:21,max_split_size_mb:22": func(s *Settings) { s.MaxSplit = 22 << 20 },
		"max_non_split_rounding_mb:40":              func(s *Settings) { s.MaxNonSplitRounding = 40 << 20 },
		"garbage_collection_threshold:0.6":          func(s *Settings) { s.GarbageThreshold = 0.6 },
		"per_process_memory_fraction:1.0":           func(*Settings) {},
		"per_process_memory_fraction:0":             func(s *Settings) { s.ProcessFraction = 0 },
		"roundup_power2_divisions:8":                func(s *Settings) { s.Divisions = all(8) },
		"roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]": func(s *Settings) {
			s.Divisions = [16]uint64{8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1}
		},
		"roundup_power2_divisions:[ 2:4 , 8:0 ],expandable_segments:True": func(s *Settings) {
			s.Divisions = [16]uint64{4, 4}
			s.Expandable = true
		},
		"roundup_power2_divisions:[65536:2,>:4]": func(s *Settings) { s.Divisions = all(2) },
		"expandable_segments:False":              func(*Settings) {},
		"release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:True,graph_capture_record_stream_reuse:True": func(s *Settings) {
			s.UnlockedMalloc, s.ThrowOnMallocOOM, s.RecordStreamReuse = true, true, true
		},
		"large_segment_size_mb:30": func(s *Settings) { s.LargeSegment = 30 << 20 },
		"pinned_use_cuda_host_register:True,pinned_num_register_threads:16,pinned_use_background_threads:True": func(s *Settings) {
			s.PinnedRegister, s.PinnedThreads, s.PinnedBackground = true, 16, true
		},
		"pinned_reserve_segment_size_mb:1,pinned_max_round_threshold_mb:2,pinned_max_cached_size_mb:3": func(s *Settings) {
			s.PinnedReserve, s.PinnedMaxRound, s.PinnedMaxCached = 1<<20, 2<<20, 3<<20
		},
	} {
		want := DefaultSettings()
		change(&want)
		got, err := ParseSettings(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
}

func TestParseSettingsRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"max_split_size:128":                    `there is no option "max_split_size": the options are backend, expandable_segments, garbage_collection_threshold,`,
		"foo":                                   `there is no option "foo"`,
		"expandable_segments":                   "expandable_segments has no value",
		"backend:mimalloc":                      "backend:mimalloc: want native or cudaMallocAsync",
		"max_split_size_mb:20":                  "want a whole number of MiB, at least 21",
		"max_split_size_mb:-30":                 "want a whole number of MiB",
		"max_split_size_mb:2e3":                 "want a whole number of MiB",
		"max_split_size_mb:99999999999999":      "want a whole number of MiB",
		"large_segment_size_mb:10":              "at least 11",
		"garbage_collection_threshold:0":        "want a number > 0 and < 1",
		"garbage_collection_threshold:1":        "want a number > 0 and < 1",
		"garbage_collection_threshold:NaN":      "want a number > 0 and < 1",
		"per_process_memory_fraction:1.1":       "want a number >= 0 and <= 1",
		"expandable_segments:true":              "want True or False",
		"pinned_num_register_threads:3":         "want a power of two, at most 128",
		"pinned_num_register_threads:256":       "want a power of two, at most 128",
		"roundup_power2_divisions:3":            `want 0 or a power of two in place of "3"`,
		"roundup_power2_divisions:[64:8":        "want a ] at the end",
		"roundup_power2_divisions:[64:8,3:2]":   `want a power of two in MiB, or >, in place of "3"`,
		"roundup_power2_divisions:[64:8,128:6]": `want 0 or a power of two in place of "6"`,
		"roundup_power2_divisions:[64]":         `want 0 or a power of two in place of ""`,
	} {
		_, err := ParseSettings(text)
		require.ErrorContains(t, err, want, text)
	}
}
