package memory_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
)

// numbered returns statistics in which every number is another one: fill goes
// over the fields in their order.
func numbered(next func() int64) (s memory.Stats) {
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		if v.Kind() == reflect.Int64 {
			v.SetInt(next())
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	}
	fill(reflect.ValueOf(&s).Elem())
	return s
}

// The keys are made here from torch's documentation, and the numbers from the
// order of the fields.
func TestStatsKeys(t *testing.T) {
	n := int64(0)
	s := numbered(func() int64 { n++; return n })
	want := map[string]int64{}
	n = 0
	stat := func(key string) {
		for _, k := range strings.Fields("current peak allocated freed") {
			n++
			want[key+"."+k] = n
		}
	}
	for _, key := range strings.Fields("allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes inactive_split_bytes requested_bytes") {
		for _, pool := range strings.Fields("all small_pool large_pool") {
			stat(key + "." + pool)
		}
	}
	stat("oversize_allocations")
	stat("oversize_segments")
	for _, key := range strings.Fields("num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free max_split_size") {
		n++
		want[key] = n
	}
	require.Len(t, want, 108+8+6)
	require.Equal(t, want, s.Flat())

	for key, v := range s.Flat() {
		var at any = s.Nested()
		for _, k := range strings.Split(key, ".") {
			at = at.(map[string]any)[k]
		}
		require.Equal(t, v, at, key)
	}
}
