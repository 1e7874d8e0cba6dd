package memory_test

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/nvml"
	"github.com/gochorus/chorus/internal/status"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
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

// unflat converts torch's flat keys to statistics.
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

// sensors is an NVML of two GPUs, of which it knows the second.
type sensors struct {
	nvml.API
	uuid string
}

func (s sensors) Device(uuid string) (nvml.Device, error) {
	if uuid != s.uuid {
		return nil, &nvml.UnsupportedError{Need: "another GPU"}
	}
	return sensorsOfOne{}, nil
}

type sensorsOfOne struct{ nvml.Device }

func (sensorsOfOne) Utilization() (gpu, memory int, err error) { return 87, 12, nil }
func (sensorsOfOne) Temperature() (int, error)                 { return 61, nil }
func (sensorsOfOne) Power() (int, error)                       { return 321_500, nil }
func (sensorsOfOne) SMClock() (int, error)                     { return 1980, nil }

// TestStatusSensors reads the sensors that chorus run exports as metrics, from NVML by the UUID of the device.
func TestStatusSensors(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	props, err := devs[1].Properties()
	require.NoError(t, err)
	gpu.DeviceOf(devs[1]).System().Sensors = sensors{uuid: props.UUID}
	for _, d := range devs {
		x, err := memory.Make[byte](streamtest.NewStream(t, d), 1)
		require.NoError(t, err)
		defer x.Close()
	}
	found := map[string]status.Device{}
	p, err := status.Decode(status.Take(time.Minute))
	require.NoError(t, err)
	for _, d := range p.Devices {
		found[d.UUID] = d
	}
	require.Equal(t, []any{87, 61, 321_500, 1980}, []any{*found[props.UUID].Utilization, *found[props.UUID].Temperature, *found[props.UUID].PowerDraw, *found[props.UUID].ClockRate})
	props, err = devs[0].Properties()
	require.NoError(t, err)
	require.Nil(t, found[props.UUID].Temperature, "a GPU without this sensor")
	require.Equal(t, "Chorus Virtual Device", found[props.UUID].Product)
}
