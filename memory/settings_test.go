package memory

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/stream"
)

// all is a table of divisions with one number.
func all(n uint64) (d [16]uint64) {
	fill(d[:], n)
	return d
}

func TestParseSettings(t *testing.T) {
	for text, change := range map[string]func(*settings){
		"":                          func(*settings) {},
		" , ":                       func(*settings) {},
		"backend:native":            func(s *settings) { s.backend = "native" },
		" max_split_size_mb : 128 ": func(s *settings) { s.maxSplit = 128 << 20 },
		"max_split_size_mb:21,max_split_size_mb:22": func(s *settings) { s.maxSplit = 22 << 20 },
		"max_non_split_rounding_mb:40":              func(s *settings) { s.maxNonSplitRounding = 40 << 20 },
		"garbage_collection_threshold:0.6":          func(s *settings) { s.garbageThreshold = 0.6 },
		"per_process_memory_fraction:1.0":           func(*settings) {},
		"per_process_memory_fraction:0":             func(s *settings) { s.processFraction = 0 },
		"roundup_power2_divisions:8":                func(s *settings) { s.divisions = all(8) },
		"roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]": func(s *settings) {
			s.divisions = [16]uint64{8, 8, 8, 8, 8, 8, 8, 2, 4, 2, 4, 1, 1, 1, 1, 1}
		},
		"roundup_power2_divisions:[ 2:4 , 8:0 ],expandable_segments:True": func(s *settings) {
			s.divisions = [16]uint64{4, 4}
			s.expandable = true
		},
		"roundup_power2_divisions:[65536:2,>:4]": func(s *settings) { s.divisions = all(2) },
		"expandable_segments:False":              func(*settings) {},
		"release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:True,graph_capture_record_stream_reuse:True": func(s *settings) {
			s.unlockedMalloc, s.throwOnMallocOOM, s.recordStreamReuse = true, true, true
		},
		"large_segment_size_mb:30": func(s *settings) { s.largeSegment = 30 << 20 },
		"pinned_use_cuda_host_register:True,pinned_num_register_threads:16,pinned_use_background_threads:True": func(s *settings) {
			s.pinnedRegister, s.pinnedThreads, s.pinnedBackground = true, 16, true
		},
		"pinned_reserve_segment_size_mb:1,pinned_max_round_threshold_mb:2,pinned_max_cached_size_mb:3": func(s *settings) {
			s.pinnedReserve, s.pinnedMaxRound, s.pinnedMaxCached = 1<<20, 2<<20, 3<<20
		},
	} {
		want := defaultSettings()
		change(&want)
		got, err := parseSettings(text)
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
		_, err := parseSettings(text)
		require.ErrorContains(t, err, want, text)
	}
}

// The environment is read by the first allocation of a process.
func TestSettingsOfTheEnvironment(t *testing.T) {
	if os.Getenv("CHORUS_TEST_ALLOC") != "" {
		sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
		require.NoError(t, err)
		s, err := stream.New(sys.Devices()[0], nil)
		require.NoError(t, err)
		b, err := Alloc(s, 8)
		fmt.Println("result:", err)
		require.NoError(t, errors.Join(b.Close(), s.Close()))
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	for _, c := range []struct {
		vars []string
		want string
	}{
		{nil, "result: <nil>"},
		{[]string{"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}, "result: <nil>"},
		{[]string{"PYTORCH_CUDA_ALLOC_CONF=bad:1"}, `result: memory: PYTORCH_CUDA_ALLOC_CONF: there is no option "bad"`},
		{[]string{"CHORUS_ALLOC_CONF=worse:1", "PYTORCH_CUDA_ALLOC_CONF=bad:1"}, `result: memory: CHORUS_ALLOC_CONF: there is no option "worse"`},
		{[]string{"CHORUS_ALLOC_CONF=", "PYTORCH_CUDA_ALLOC_CONF=bad:1"}, "result: <nil>"},
	} {
		cmd := exec.Command(self, "-test.run", "^TestSettingsOfTheEnvironment$", "-test.v")
		cmd.Env = append(os.Environ(), append(c.vars, "CHORUS_TEST_ALLOC=1")...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), c.want)
	}
}
