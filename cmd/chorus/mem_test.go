package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/launch"
)

// A short trace, of which a tenth stays allocated.
const shortTrace = `{"kind": "short", "peak_allocated": 3146240, "peak_reserved": 23068672, "events": [
	["segment_alloc", 4096, 2097152, 0, 1], ["alloc", 4096, 100, 0, 2],
	["segment_alloc", 8192, 20971520, 0, 3], ["alloc", 8192, 3145728, 7, 4],
	["free_requested", 8192, 3145728, 7, 5], ["free_completed", 8192, 3145728, 7, 6]]}`

// replayFile writes a file and returns its name.
func replayFile(t *testing.T, name, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	return file
}

func TestReplay(t *testing.T) {
	file := replayFile(t, "short.json", shortTrace)
	var out bytes.Buffer
	f := replayFlags{backend: "virtual", repeat: 3, sequence: -1}
	require.NoError(t, f.run(&out, []string{file}))
	for _, want := range []string{file + ", short: calls 3, streams 2, on virtual:0", "RATIO", "3146240", "23068672", "1.0000",
		"fragmentation ", "ns a call, the median of 3 runs; "} {
		require.Contains(t, out.String(), want)
	}
	out.Reset()
	f.repeat = 0
	require.NoError(t, f.run(&out, []string{file}))
	require.Contains(t, out.String(), "ns a call in one run")
}

// TestFilesForgeNoLines replays files whose texts a terminal would obey.
func TestFilesForgeNoLines(t *testing.T) {
	for _, text := range []string{
		strings.Replace(shortTrace, `"short"`, `"\u001b[2J\rchorus: all is well"`, 1),
		strings.Replace(shortTrace, `"alloc"`, `"\u001b[2J\rchorus: all is well"`, 1),
	} {
		cmd := exec.Command(self(t), "mem", "replay", "--backend", "virtual", "--repeat", "0", replayFile(t, "forged.json", text))
		cmd.Env = append(os.Environ(), commandVar+"=1")
		out, _ := cmd.CombinedOutput()
		require.Contains(t, string(out), "chorus: all is well")
		require.False(t, bytes.ContainsAny(out, "\r\x1b"), "%q", out)
	}
}

func TestReplayJSON(t *testing.T) {
	file := replayFile(t, "short.json", shortTrace)
	var out bytes.Buffer
	f := replayFlags{backend: "virtual", repeat: 1, sequence: -1, asJSON: true, device: 1}
	require.NoError(t, f.run(&out, []string{file, file}))
	var got struct {
		Backend string
		Device  int
		Numbers replayNumbers `json:"-"`
		Traces  []traceReport
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &got))
	require.NoError(t, json.Unmarshal(out.Bytes(), &got.Numbers))
	require.Equal(t, "virtual", got.Backend)
	require.Equal(t, 1, got.Device)
	require.Len(t, got.Traces, 2)
	for _, tr := range got.Traces {
		require.Equal(t, 3, tr.Ops)
		require.Equal(t, 2, tr.Streams)
		require.EqualValues(t, 3146240, tr.PeakAllocated, "512 bytes and 3 MiB")
		require.GreaterOrEqual(t, tr.PeakReserved, tr.PeakAllocated)
		require.EqualValues(t, 3146240, tr.RecordedPeakAllocated)
		require.EqualValues(t, 23068672, tr.RecordedPeakReserved)
		require.Equal(t, 1.0, tr.AllocatedRatio)
		require.Positive(t, tr.NsPerOp)
		require.Positive(t, tr.ColdNsPerOp)
	}
	require.Equal(t, 6, got.Numbers.Ops)
	require.Equal(t, got.Traces[0].PeakReserved, got.Numbers.PeakReserved)
	mean := (got.Traces[0].NsPerOp + got.Traces[1].NsPerOp) / 2
	require.InEpsilon(t, mean, got.Numbers.NsPerOp, 1e-9)
	for _, key := range []string{"peak_reserved", "peak_allocated", "ns_per_op", "ops", "recorded_peak_reserved", "recorded_peak_allocated"} {
		require.Contains(t, out.String(), `"`+key+`": `)
	}
}

func TestReplayPlot(t *testing.T) {
	file := replayFile(t, "short.json", shortTrace)
	for name, want := range map[string]string{"m.svg": "<svg", "m.html": "<!DOCTYPE html>"} {
		picture := filepath.Join(t.TempDir(), name)
		f := replayFlags{backend: "virtual", sequence: -1, plot: picture}
		require.NoError(t, f.run(&bytes.Buffer{}, []string{file}))
		text, err := os.ReadFile(picture)
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(text), want))
		require.Contains(t, string(text), "short.json, short, replayed on virtual:0")
		require.Contains(t, string(text), "recorded: reserved 22 MiB")
	}
	f := replayFlags{backend: "virtual", sequence: -1, plot: filepath.Join(t.TempDir(), "no", "m.svg")}
	require.ErrorContains(t, f.run(&bytes.Buffer{}, []string{file}), "no such file")
	require.ErrorContains(t, f.run(&bytes.Buffer{}, []string{file, file}), "--plot draws one trace, and there are 2")
}

func TestReplaySequence(t *testing.T) {
	file := filepath.Join("..", "..", "internal", "memtrace", "testdata", "alloc_stats.json.gz")
	if _, err := os.Stat(file); err != nil {
		t.Skip("no source here: ", err)
	}
	var out bytes.Buffer
	f := replayFlags{backend: "virtual", sequence: 1, asJSON: true}
	require.NoError(t, f.run(&out, []string{file}))
	require.Contains(t, out.String(), `"trace": "seed 2"`)
	require.NotContains(t, out.String(), `"trace": "seed 1"`)
	f.sequence = 3
	require.ErrorContains(t, f.run(&out, []string{file}), "has 3 traces, counted from 0")
}

func TestReplayErrors(t *testing.T) {
	t.Setenv("CHORUS_BACKEND", "virtual")
	good := replayFile(t, "short.json", shortTrace)
	twice := replayFile(t, "twice.json", `{"events": [["alloc", 4096, 1, 0, 1], ["free_completed", 4096, 1, 0, 1], ["free_completed", 4096, 1, 0, 1]]}`)
	huge := replayFile(t, "huge.json", `{"events": [["alloc", 4096, 1, 0, 1], ["alloc", 8192, 4611686018427387904, 0, 1]]}`)
	for _, c := range []struct {
		code int
		want string
		args []string
	}{
		{launch.ExitUsage, "no file given; see chorus mem replay --help", nil},
		{launch.ExitUsage, `--backend "opencl"`, []string{"--backend", "opencl", good}},
		{launch.ExitUsage, "--repeat -1", []string{"--repeat", "-1", good}},
		{launch.ExitUsage, `--plot "x.png"`, []string{"--plot", "x.png", good}},
		{launch.ExitUsage, "--sequence -2: want", []string{"--sequence", "-2", good}},
		{launch.ExitUsage, "--sequence 1", []string{"--sequence", "1", good}},
		{launch.ExitUsage, "--conf", []string{"--conf", "no_such_option:1", good}},
		{launch.ExitUsage, "unknown flag: --nope", []string{"--nope", good}},
		{launch.ExitFailed, "open device 99", []string{"--device", "99", good}},
		{launch.ExitFailed, "no such file", []string{"/nowhere.json"}},
		{launch.ExitFailed, "twice.json: trace: event 2: frees the block at 0x1000, which event 1 already freed", []string{twice}},
		{launch.ExitFailed, "huge.json: trace: event 1: allocate 4611686018427387904 bytes on stream 0", []string{huge}},
		{0, "", []string{good}},
	} {
		code, stderr := command(t, append([]string{"mem", "replay"}, c.args...)...)
		require.Equal(t, c.code, code, "%q: %s", c.args, stderr)
		require.Contains(t, stderr, c.want, "%q", c.args)
	}
	code, stderr := command(t, "mem", "play")
	require.Equal(t, launch.ExitUsage, code)
	require.Contains(t, stderr, `unknown command "play"; see chorus mem --help`)
	code, stderr = command(t, "mem")
	require.Equal(t, launch.ExitUsage, code)
	require.Contains(t, stderr, "no command given: want ledger, replay; see chorus mem --help")
}

// command runs the command in a process of its own, as options are the process's.
func command(t *testing.T, args ...string) (code int, stderr string) {
	t.Helper()
	cmd := exec.Command(self(t), args...)
	cmd.Env = append(os.Environ(), commandVar+"=1")
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Run(); err != nil {
		require.IsType(t, &exec.ExitError{}, err)
	}
	return cmd.ProcessState.ExitCode(), errs.String()
}
