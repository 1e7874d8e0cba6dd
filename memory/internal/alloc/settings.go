package alloc

import (
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// Settings are the options of the allocators, in torch's syntax:
//
//	max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:4]
//
// Sizes are in bytes.
type Settings struct {
	Backend string // "native" or "cudaMallocAsync"

	MaxSplit            uint64     // larger blocks are not split
	MaxNonSplitRounding uint64     // how much larger than the request an unsplit block may be
	GarbageThreshold    float64    // fraction of the allowed memory; beyond it unused blocks are freed. 0 means never
	Divisions           [16]uint64 // for sizes from 2^(20+i) on: steps up to the next power of two; 0 means no rounding
	Expandable          bool
	UnlockedMalloc      bool
	LargeSegment        uint64
	ProcessFraction     float64
	ThrowOnMallocOOM    bool
	RecordStreamReuse   bool // allow reuse within a capture of blocks with RecordStream

	PinnedRegister   bool
	PinnedThreads    int // number of goroutines that touch pages for PinnedRegister
	PinnedBackground bool
	PinnedReserve    uint64
	PinnedMaxRound   uint64 // larger blocks are not rounded to a power of two
	PinnedMaxCached  uint64 // larger blocks are not cached
}

func DefaultSettings() Settings {
	return Settings{
		Backend:             "native",
		MaxSplit:            math.MaxUint64,
		MaxNonSplitRounding: largeSegment,
		LargeSegment:        largeSegment,
		ProcessFraction:     1,
		PinnedThreads:       1,
		PinnedMaxRound:      math.MaxUint64,
		PinnedMaxCached:     math.MaxUint64,
	}
}

// A setter parses the value of one option. Its error says which values are valid.
type setter func(s *Settings, value string) error

const mb = 1 << 20

var setters = map[string]setter{
	"backend":                           word(func(s *Settings) *string { return &s.Backend }, "native", "cudaMallocAsync"),
	"max_split_size_mb":                 size(func(s *Settings) *uint64 { return &s.MaxSplit }, largeSegment/mb+1),
	"max_non_split_rounding_mb":         size(func(s *Settings) *uint64 { return &s.MaxNonSplitRounding }, largeSegment/mb+1),
	"garbage_collection_threshold":      fraction(func(s *Settings) *float64 { return &s.GarbageThreshold }, "> 0 and < 1", func(v float64) bool { return v > 0 && v < 1 }),
	"per_process_memory_fraction":       fraction(func(s *Settings) *float64 { return &s.ProcessFraction }, ">= 0 and <= 1", func(v float64) bool { return v >= 0 && v <= 1 }),
	"roundup_power2_divisions":          setDivisions,
	"expandable_segments":               toggle(func(s *Settings) *bool { return &s.Expandable }),
	"release_lock_on_cudamalloc":        toggle(func(s *Settings) *bool { return &s.UnlockedMalloc }),
	"large_segment_size_mb":             size(func(s *Settings) *uint64 { return &s.LargeSegment }, hugeLeast/mb+1),
	"throw_on_cudamalloc_oom":           toggle(func(s *Settings) *bool { return &s.ThrowOnMallocOOM }),
	"graph_capture_record_stream_reuse": toggle(func(s *Settings) *bool { return &s.RecordStreamReuse }),
	"pinned_use_cuda_host_register":     toggle(func(s *Settings) *bool { return &s.PinnedRegister }),
	"pinned_num_register_threads":       setThreads,
	"pinned_use_background_threads":     toggle(func(s *Settings) *bool { return &s.PinnedBackground }),
	"pinned_reserve_segment_size_mb":    size(func(s *Settings) *uint64 { return &s.PinnedReserve }, 0),
	"pinned_max_round_threshold_mb":     size(func(s *Settings) *uint64 { return &s.PinnedMaxRound }, 1),
	"pinned_max_cached_size_mb":         size(func(s *Settings) *uint64 { return &s.PinnedMaxCached }, 1),
}

func word(field func(*Settings) *string, known ...string) setter {
	return func(s *Settings, v string) error {
		if !slices.Contains(known, v) {
			return fmt.Errorf("want %s", strings.Join(known, " or "))
		}
		*field(s) = v
		return nil
	}
}

func toggle(field func(*Settings) *bool) setter {
	return func(s *Settings, v string) error {
		if v != "True" && v != "False" {
			return fmt.Errorf("want True or False")
		}
		*field(s) = v == "True"
		return nil
	}
}

func size(field func(*Settings) *uint64, least uint64) setter {
	return func(s *Settings, v string) error {
		n, err := strconv.ParseUint(v, 10, 44)
		if err != nil || n < least {
			return fmt.Errorf("want a whole number of MiB, at least %d", least)
		}
		*field(s) = n * mb
		return nil
	}
}

func fraction(field func(*Settings) *float64, want string, good func(float64) bool) setter {
	return func(s *Settings, v string) error {
		x, err := strconv.ParseFloat(v, 64)
		if err != nil || !good(x) {
			return fmt.Errorf("want a number %s", want)
		}
		*field(s) = x
		return nil
	}
}

func setThreads(s *Settings, v string) error {
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > 128 || !powerOfTwo(uint64(n)) {
		return fmt.Errorf("want a power of two, at most 128")
	}
	s.PinnedThreads = n
	return nil
}

// setDivisions parses one number for all sizes, or a list such as [64:8,256:4,>:1] with
// sizes in MiB. The first number also applies to smaller sizes, and > to all sizes
// after the previous one.
func setDivisions(s *Settings, v string) error {
	list, ok := strings.CutPrefix(v, "[")
	if !ok {
		n, err := division(v)
		fill(s.Divisions[:], n)
		return err
	}
	list, ok = strings.CutSuffix(list, "]")
	if !ok {
		return fmt.Errorf("want a ] at the end of the list")
	}
	rest := 0 // index after the previous size
	for i, item := range strings.Split(list, ",") {
		key, value, _ := strings.Cut(item, ":")
		n, err := division(strings.TrimSpace(value))
		if err != nil {
			return err
		}
		if key = strings.TrimSpace(key); key == ">" {
			fill(s.Divisions[rest:], n)
			continue
		}
		mib, err := strconv.ParseUint(key, 10, 64)
		if err != nil || !powerOfTwo(mib) {
			return fmt.Errorf("want a power of two in MiB, or >, in place of %q", key)
		}
		at := min(bits.Len64(mib)-1, len(s.Divisions)-1)
		if i == 0 {
			fill(s.Divisions[:at], n)
		}
		s.Divisions[at], rest = n, at+1
	}
	return nil
}

func fill(to []uint64, n uint64) {
	for i := range to {
		to[i] = n
	}
}

func division(v string) (uint64, error) {
	n, err := strconv.ParseUint(v, 10, 64)
	if err != nil || n != 0 && !powerOfTwo(n) {
		return 0, fmt.Errorf("want 0 or a power of two in place of %q", v)
	}
	return n, nil
}

func powerOfTwo(n uint64) bool { return bits.OnesCount64(n) == 1 }

// ParseSettings parses a list of options, and takes the last value of an option
// that occurs twice.
func ParseSettings(text string) (Settings, error) {
	s := DefaultSettings()
	for _, item := range splitOptions(text) {
		name, value, ok := strings.Cut(item, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		set := setters[name]
		switch {
		case set == nil:
			return s, fmt.Errorf("there is no option %q: the options are %s", name, strings.Join(slices.Sorted(maps.Keys(setters)), ", "))
		case !ok:
			return s, fmt.Errorf("%s has no value: want %s:value", name, name)
		}
		if err := set(&s, value); err != nil {
			return s, fmt.Errorf("%s:%s: %w", name, value, err)
		}
	}
	return s, nil
}

// splitOptions splits at commas outside of brackets.
func splitOptions(text string) (list []string) {
	depth, start := 0, 0
	cut := func(end int) {
		if item := strings.TrimSpace(text[start:end]); item != "" {
			list = append(list, item)
		}
		start = end + 1
	}
	for i, c := range text {
		switch {
		case c == '[':
			depth++
		case c == ']':
			depth--
		case c == ',' && depth == 0:
			cut(i)
		}
	}
	cut(len(text))
	return list
}
