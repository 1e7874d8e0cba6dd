package main

import (
	"bytes"
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
)

// Two processes measure both kinds of steps, and their gradients agree; otherwise the program fails.
func TestLayers(t *testing.T) {
	out := runLayers(t, "-high-priority", "-ctas", "2", "-carveout", "4")
	for _, want := range []string{"2 ranks, 3 layers of 16, 8 tokens, without reduction: ", "8 tokens, with reduction: "} {
		require.Contains(t, out, want)
	}
}

func TestLayersBeside(t *testing.T) {
	out := runLayers(t, "-beside", "64", "-steps", "200")
	require.Contains(t, out, "beside all-reduces of 64 bytes, which take ")
	require.Regexp(t, `ended at [0-9.]*[1-9][0-9]* of that rate`, out)
}

func TestShardedLayers(t *testing.T) {
	out := runLayers(t, "-sharded")
	require.Contains(t, out, "2 ranks, 3 layers of 16, 8 tokens, sharded: ")
	require.Contains(t, out, "largest amount of memory in use: ")
}

// The steps run once more with settings that ddp chooses among its own and those of two further groups.
func TestAutotunedLayers(t *testing.T) {
	for _, flag := range []string{"-sharded=false", "-sharded"} {
		name, of, settings := "with reduction", `buckets of \d+ bytes`, 3 // the layers fit in the first bucket
		if flag == "-sharded" {
			name, of, settings = "sharded", `a prefetch of \d units`, 6
		}
		out := runLayers(t, flag, "-autotune", "-also", "copy-engines,nccl/ctas=4/high-priority")
		require.Contains(t, out, "8 tokens, "+name+": ")
		require.Contains(t, out, "8 tokens, "+name+" as chosen: ")
		require.Len(t, regexp.MustCompile(`group (0, `+of+` \(its own|1, `+of+` \(copy-engines|2, `+of+` \(nccl/ctas=4/high-priority)\): [0-9.]+ ms a step`).FindAllString(out, -1), settings, out)
	}
}

func TestGroupsOfLayers(t *testing.T) {
	var m model
	require.NoError(t, m.parseGroups("pipelined/ctas=8,nccl/high-priority"))
	require.Equal(t, []comm.Config{{Strategy: "pipelined", NCCL: &nccl.Config{MaxCTAs: new(8)}}, {Strategy: "nccl", HighPriority: true}}, m.also)
	for _, bad := range []string{"nccl/ctas=0", "nccl/fast"} {
		require.ErrorContains(t, m.parseGroups(bad), "want ctas=NUMBER or high-priority")
	}
}

func runLayers(t *testing.T, flags ...string) string {
	self, err := os.Executable()
	require.NoError(t, err)
	var out bytes.Buffer
	code := launch.Run(testgpu.Context(t), &launch.Config{
		Program: append([]string{self, "layers", "-tokens", "8", "-width", "16", "-layers", "3", "-rounds", "1", "-steps", "2"}, flags...),
		Procs:   2,
		Devices: launch.Devices{Count: 2, Backend: "virtual", Env: []string{asRank + "=1", "CHORUS_BACKEND=virtual"}},
		Cluster: job.Config{Job: "layers"},
		Stdout:  &out,
		Stderr:  &out,
	})
	require.Zero(t, code, out.String())
	return out.String()
}
