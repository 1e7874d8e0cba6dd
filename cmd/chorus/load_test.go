package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/gds/safetensors"
)

const (
	shardedFixture = "../../gds/safetensors/testdata/sharded"
	dtypesFixture  = "../../gds/safetensors/testdata/all_dtypes.safetensors"
)

// TestLoad loads recorded checkpoints in every way and verifies them.
func TestLoad(t *testing.T) {
	for _, args := range [][]string{
		{shardedFixture, "--digests", shardedFixture + "/sha256.json"},
		{shardedFixture + "/model.safetensors.index.json", "--plan", "own"},
		{dtypesFixture, "-g", "3", "--plan", "shard:-1", "--digests", "../../gds/safetensors/testdata/all_dtypes.json"},
		{dtypesFixture, "-g", "1", "--engine", "direct", "--times", "3"},
	} {
		out, errs, code := chorusCommand(t, nil, append([]string{"load", "--verify"}, args...)...)
		require.Zero(t, code, "%v: %s%s", args, out, errs)
		require.Regexp(t, `^1[26] tensors, \d+ kB, in .*: [\d.]+ GB/s\n`, out)
		require.Regexp(t, `verified: the SHA-256 of \d+ tensors`, out)
		require.NotContains(t, errs, "\r", "a progress bar is for terminals")
	}
}

func TestLoadJSON(t *testing.T) {
	out, errs, code := chorusCommand(t, nil, "load", shardedFixture, "-g", "2", "--plan", "shard:0", "--dtype", "float32", "--times", "2", "--json")
	require.Zero(t, code, errs)
	var r loadReport
	require.NoError(t, json.Unmarshal([]byte(out), &r))
	require.Equal(t, []any{12, int64(147456), 2, "shard:0", "float32", 2}, []any{r.Tensors, r.Bytes, r.Ranks, r.Plan, r.DType, len(r.Seconds)})
	require.EqualValues(t, 147456, r.MaxRankBytes, "half of the elements, of twice the size")
	read := int64(0)
	for _, e := range r.Engines {
		read += e.Bytes
	}
	require.GreaterOrEqual(t, read, 2*r.Bytes)
	require.Equal(t, slices.Max(r.Seconds), r.Median, "of two the later one in order")
	require.InDelta(t, float64(r.Bytes)/1e9/r.Median, r.GBPerSecond, 1e-9)
}

func TestLoadInAJob(t *testing.T) {
	out, errs, code := chorusCommand(t, nil, "run", "--nproc-per-node", "2", "--", self(t), "load", shardedFixture, "--plan", "shard:0", "--verify")
	require.Zero(t, code, out+errs)
	require.Contains(t, out, "[rank 0] 12 tensors")
	require.Contains(t, out, "plan shard:0: 2 devices")
	require.NotContains(t, out, "[rank 1] 12 tensors")
	out, errs, code = chorusCommand(t, nil, "run", "--nproc-per-node", "2", "--", self(t), "load", shardedFixture, "-g", "2")
	require.NotZero(t, code)
	require.Contains(t, out+errs, "-g 2 in a job of 2 processes: each has one GPU")
}

// TestOwners: the plan own gives each rank about as many bytes, whatever the order of
// the tensors.
func TestOwners(t *testing.T) {
	sizes := []int{10, 70, 20, 30, 60, 50}
	var infos []checkpoint.Info
	for _, n := range sizes {
		infos = append(infos, checkpoint.Info{Name: strconv.Itoa(n), Format: safetensors.U8, Shape: []int{n}})
	}
	plan := owners(infos, 3)
	for n, rank := range map[int]int{70: 0, 60: 1, 50: 2, 30: 2, 20: 1, 10: 0} {
		got, want := fmt.Sprintf("%+v", plan(checkpoint.Info{Name: strconv.Itoa(n)})), fmt.Sprintf("rank:%d ", rank)
		require.Contains(t, got, want, "the tensor of %d bytes", n)
	}
}

func TestGigabytes(t *testing.T) {
	for n, says := range map[int64]string{0: "0 B", 999: "999 B", 1000: "1 kB", 1_500_000: "1.5 MB", 1e15: "1e+03 TB"} {
		require.Equal(t, says, gigabytes(n))
	}
}

// TestLoadMistakes: what is wrong is said, with the right code.
func TestLoadMistakes(t *testing.T) {
	whole, err := os.ReadFile(dtypesFixture)
	require.NoError(t, err)
	cut := filepath.Join(t.TempDir(), "cut.safetensors")
	require.NoError(t, os.WriteFile(cut, whole[:len(whole)-100], 0o644))
	wrong := filepath.Join(t.TempDir(), "digests.json")
	require.NoError(t, os.WriteFile(wrong, []byte(`{"layer.0.weight": "00"}`), 0o644))
	for _, tc := range []struct {
		code int
		says string
		args []string
	}{
		{64, "no file given", nil},
		{64, `--plan "shard:x": want replicate`, []string{"f", "--plan", "shard:x"}},
		{64, `--engine "fast": want auto`, []string{"f", "--engine", "fast"}},
		{64, `--dtype "int8": want one of`, []string{"f", "--dtype", "int8"}},
		{64, "--verify compares bytes", []string{"f", "--dtype", "float32", "--verify"}},
		{64, "-g -1: want 1 or more", []string{"f", "-g", "-1"}},
		{64, "--threads -1", []string{"f", "--threads", "-1"}},
		{64, "--times 0", []string{"f", "--times", "0"}},
		{64, "-g 99: this machine has", []string{dtypesFixture, "-g", "99"}},
		{1, "no such file", []string{"/no/such/file.safetensors"}},
		{1, "cut.safetensors", []string{cut}},
		{1, `tensor "layer.0.weight" of ` + shardedFixture, []string{shardedFixture, "--digests", wrong}},
		{1, "--digests", []string{shardedFixture, "--digests", cut}},
	} {
		out, errs, code := chorusCommand(t, nil, append([]string{"load"}, tc.args...)...)
		require.Equal(t, tc.code, code, "%v: %s", tc.args, errs)
		require.Contains(t, errs, tc.says)
		require.Empty(t, out)
	}
}

// TestLoadWithFewDescriptors loads more files than there are descriptors for reading each of them in two ways.
func TestLoadWithFewDescriptors(t *testing.T) {
	dir := t.TempDir()
	for i := range 200 {
		header := fmt.Sprintf(`{"t%d":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}`, i)
		b := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header+"12345678"...)
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("%03d.safetensors", i)), b, 0o600))
	}
	load := func(limit int) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "sh", "-c", fmt.Sprint("ulimit -n ", limit, `; exec "$0" load "$1"/*.safetensors -g 2`), self(t), dir)
		cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual", "CHORUS_VIRTUAL_DEVICES=2")
		out, err := cmd.CombinedOutput()
		return string(out), errors.Join(err, ctx.Err())
	}
	out, err := load(256)
	require.NoError(t, err, out)
	for _, limit := range []int{150, 206, 207, 208, 209, 210, 211, 212, 213, 214, 215, 216, 217, 218, 219, 220} { // the files, then the sockets of the ranks
		out, err := load(limit)
		require.Error(t, err, "%d: %s", limit, out)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "%d: %s", limit, out)
		require.Contains(t, out, "ulimit -n", limit)
	}
}
