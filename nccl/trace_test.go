package nccl_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

func TestTrace(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connectWith(t, devs, &nccl.Config{TraceSize: 4, Name: "ring", TraceFrames: true, Timeout: time.Minute})
	xs, _ := buffers(t, ranks, 8)
	require.Empty(t, ranks[0].c.Trace())
	begun := time.Now()
	all := func(issue func(i int, r rank) error) { run(t, ranks, xs, issue) }
	for range 3 {
		all(func(i int, r rank) error { return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Avg) })
	}
	all(func(i int, r rank) error {
		if i == 0 {
			return nccl.Send(r.on(), r.s, xs[0].Slice(0, 3), 1)
		}
		return nccl.Recv(r.on(), r.s, xs[1].Slice(0, 3), 0)
	})
	all(func(i int, r rank) error { return nccl.AllGather(r.on(), r.s, xs[i], xs[i].Slice(4*i, 4*i+4)) })

	list := ranks[1].c.Trace()
	require.Len(t, list, 4, "the ring is full")
	var texts []string
	for i, o := range list {
		texts = append(texts, o.String())
		require.EqualValues(t, i+2, o.Record)
		require.WithinRange(t, o.Created, begun.Round(0).Add(-time.Millisecond), time.Now())
		require.Equal(t, ranks[1].s.Handle(), o.Stream)
		require.NotEmpty(t, o.Frames)
		require.Contains(t, o.Frames[0].Name, "nccl_test.")
		require.Contains(t, o.Frames[0].Filename, "_test.go")
	}
	require.Equal(t, []string{
		"ncclAllReduce(8 x int64, avg) as collective 2", "ncclAllReduce(8 x int64, avg) as collective 3",
		"ncclRecv(3 x int64, from rank 0) as transfer 1", "ncclAllGather(4 x int64) as collective 4",
	}, texts)
	require.Equal(t, []int{4, 8, -1}, []int{list[3].In, list[3].Out, list[3].Root})
	require.Equal(t, memory.Int64, list[0].DType)

	checkDump(t, ranks)
	checkDumpedSource(t, ranks[1])
}

// checkDumpedSource checks the object that tells where a dump comes from.
func checkDumpedSource(t *testing.T, r rank) {
	var b bytes.Buffer
	require.NoError(t, r.c.DumpTrace(&b))
	type clock struct {
		Wall      int64 `json:"wall_ns"`
		Monotonic int64 `json:"monotonic_ns"`
	}
	var d struct {
		Chorus struct {
			Format int              `json:"format"`
			Host   string           `json:"host"`
			PID    int              `json:"pid"`
			Clock  clock            `json:"clock"`
			Origin clock            `json:"clock_origin"`
			Groups []map[string]any `json:"groups"`
		} `json:"chorus"`
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &d))
	host, err := os.Hostname()
	require.NoError(t, err)
	c := d.Chorus
	require.Equal(t, []any{1, host, os.Getpid()}, []any{c.Format, c.Host, c.PID})
	require.WithinRange(t, time.Unix(0, c.Clock.Wall), time.Now().Add(-time.Minute), time.Now())
	require.InDelta(t, c.Clock.Wall-c.Origin.Wall, c.Clock.Monotonic-c.Origin.Monotonic, float64(time.Second))
	require.Len(t, c.Groups, 1)
	for field, want := range map[string]any{
		"rank": 1.0, "world_rank": nil, "world_ranks": nil, "world_size": 0.0, "device": "virtual:1", "capacity": 4.0, "issued": 5.0, "accepted": 5.0,
	} {
		require.Equal(t, want, c.Groups[0][field], field)
	}
	require.Contains(t, c.Groups[0]["uuid"], "GPU-")
}

// checkDump reads what TestTrace has left as a tool of PyTorch would.
func checkDump(t *testing.T, ranks []rank) {
	until(t, func() bool { return ranks[0].c.Progress().Completed.Record == 5 })
	var b bytes.Buffer
	require.NoError(t, ranks[0].c.DumpTrace(&b))
	var d struct {
		Version string                       `json:"version"`
		Library string                       `json:"comm_lib_version"`
		Config  map[string]map[string]any    `json:"pg_config"`
		Status  map[string]map[string]string `json:"pg_status"`
		Entries []map[string]any             `json:"entries"`
	}
	require.NoError(t, json.Unmarshal(b.Bytes(), &d))
	require.Equal(t, []string{"2.10", "2.28.3"}, []string{d.Version, d.Library})
	require.Len(t, d.Config, 1)
	for id, g := range d.Config {
		require.Equal(t, []any{"ring", "[0, 1]"}, []any{g["desc"], g["ranks"]})
		require.Equal(t, map[string]string{"last_enqueued_collective": "4", "last_started_collective": "4", "last_completed_collective": "4"}, d.Status[id])
	}
	require.Len(t, d.Entries, 4)
	e := d.Entries[2]
	require.Equal(t, "nccl:send 0->1", e["profiling_name"])
	require.Equal(t, true, e["is_p2p"])
	require.Equal(t, []any{3.0, 1.0, 3.0}, []any{e["collective_seq_id"], e["p2p_seq_id"], e["input_sizes"].([]any)[0].([]any)[0]})
	e = d.Entries[3]
	for field, want := range map[string]any{
		"record_id": 5.0, "collective_seq_id": 4.0, "op_id": 5.0, "profiling_name": "nccl:_all_gather_base", "state": "completed",
		"retired": true, "timeout_ms": 60000.0, "is_p2p": false, "input_dtypes": []any{"Long"}, "output_dtypes": []any{"Long"},
		"input_sizes": []any{[]any{4.0}}, "output_sizes": []any{[]any{8.0}},
	} {
		require.Equal(t, want, e[field], field)
	}
	require.NotZero(t, e["time_created_ns"])
	require.GreaterOrEqual(t, e["time_discovered_completed_ns"], e["time_created_ns"])
	require.Equal(t, "ring", e["process_group"].([]any)[1])
	require.Contains(t, e["frames"].([]any)[0].(map[string]any)["name"], "nccl_test.")

	b.Reset()
	require.NoError(t, nccl.DumpTrace(&b))
	require.NoError(t, json.Unmarshal(b.Bytes(), &d))
	require.Len(t, d.Entries, 8, "of both ranks")
	groups := map[any]bool{}
	for _, e := range d.Entries {
		groups[e["process_group"].([]any)[0]] = true
	}
	require.Len(t, groups, 1, "which tools must see to be of one group")
}

func TestTraceIsLeftByAFailure(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "trace-")
	t.Setenv("CHORUS_NCCL_TRACE_FILE", prefix)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connectWith(t, devs, &nccl.Config{Timeout: soon})
	xs, _ := buffers(t, ranks, 8)
	require.ErrorIs(t, issueAlone(t, ranks[0], xs[0]), nccl.ErrorTimeout)
	text, err := os.ReadFile(prefix + "0")
	require.NoError(t, err)
	require.Contains(t, string(text), `"state":"started"`)
	require.Contains(t, string(text), `"time_discovered_completed_ns":null`)
	require.Len(t, ranks[0].c.Trace(), 1, "it is there after the end")
	var b bytes.Buffer
	require.NoError(t, nccl.DumpTrace(&b))
	require.Contains(t, b.String(), "nccl:all_reduce")
	require.NoError(t, ranks[0].c.Close())
	until(t, func() bool { return ranks[1].c.Err() != nil })
	require.NoError(t, ranks[1].c.Close())
	b.Reset()
	require.NoError(t, nccl.DumpTrace(&b))
	require.NotContains(t, b.String(), "nccl:all_reduce", "closed ones are forgotten")
}

// Communicators that have a rank in common leave their traces in files of their names.
// The ranks have the folder of the test to themselves: its removal fails if a rank writes after its Close.
func TestTraceOfANamedCommunicator(t *testing.T) {
	prefix := filepath.Join(t.TempDir(), "trace-")
	t.Setenv("CHORUS_NCCL_TRACE_FILE", prefix)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 8})
	for _, name := range []string{"a/b", "c"} {
		ranks := connectWith(t, devs, &nccl.Config{Timeout: soon, Name: name})
		xs, _ := buffers(t, ranks, 8)
		require.ErrorIs(t, issueAlone(t, ranks[0], xs[0]), nccl.ErrorTimeout)
	}
	for file, name := range map[string]string{"0-a_b": `"a/b"`, "0-c": `"c"`} {
		text, err := os.ReadFile(prefix + file)
		require.NoError(t, err)
		require.Contains(t, string(text), name)
	}
}

func TestTraceSettings(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	off := connectWith(t, devs, &nccl.Config{TraceSize: -1})[0]
	xs, _ := buffers(t, []rank{off}, 8)
	require.NoError(t, nccl.AllReduce(off.c, off.s, xs[0], xs[0], nccl.Sum))
	require.Empty(t, off.c.Trace())
	require.EqualValues(t, 1, off.c.Progress().Issued.Record)
	id, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	_, err = nccl.NewCommunicator(t.Context(), devs[0], id, 0, 1, &nccl.Config{TraceSize: 1<<20 + 1})
	require.ErrorContains(t, err, "a flight recorder of 1048577 operations: want at most 1048576 in Config.TraceSize or CHORUS_NCCL_TRACE_SIZE")
	require.ErrorContains(t, nccl.DumpTrace(nil), "nothing to write to given")
	_, err = nccl.NewUniqueID(nil)
	require.ErrorContains(t, err, "no device given")
	_, err = off.c.Register(nil)
	require.ErrorContains(t, err, "no buffer given")
	t.Setenv("CHORUS_NCCL_TRACE_SIZE", "0")
	t.Setenv("CHORUS_NCCL_TRACE_FRAMES", "maybe")
	id, err = nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	_, err = nccl.NewCommunicator(testgpu.Context(t), devs[0], id, 0, 1, nil)
	require.ErrorContains(t, err, "CHORUS_NCCL_TRACE_FRAMES")
	t.Setenv("CHORUS_NCCL_TRACE_FRAMES", "no")
	t.Setenv("CHORUS_NCCL_TIMEOUT", "soon")
	_, err = nccl.NewCommunicator(testgpu.Context(t), devs[0], id, 0, 1, nil)
	require.ErrorContains(t, err, "CHORUS_NCCL_TIMEOUT")
}
