package main

import (
	"os"
	"os/exec"
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
)

// flagsOf parses a command line of chorus run under torchrun's variables.
func flagsOf(t *testing.T, vars map[string]string, args ...string) (*runFlags, error) {
	t.Helper()
	for _, p := range petFlags {
		t.Setenv(p.name, vars[p.name])
	}
	for _, name := range []string{"PET_MASTER_ADDR", "PET_MASTER_PORT", env.Seeds.Name} {
		t.Setenv(name, vars[name])
	}
	f := new(runFlags)
	c := &cobra.Command{}
	f.add(c)
	require.NoError(t, c.ParseFlags(args))
	return f, f.setPET(c)
}

// TestPET has the variables of Kubeflow's torch policy.
func TestPET(t *testing.T) {
	kubeflow := map[string]string{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "gpu", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29400"}
	f, err := flagsOf(t, kubeflow)
	require.NoError(t, err)
	require.Equal(t, []any{"2", "auto", 1, []string{"train-node-0-0.train:29400"}}, []any{f.nnodes, f.nproc, f.nodeRank, f.seeds})
	f, err = flagsOf(t, kubeflow, "--nnodes", "3", "--seeds", "a,b", "--node-rank", "0")
	require.NoError(t, err)
	require.Equal(t, []any{"3", 0, []string{"a", "b"}}, []any{f.nnodes, f.nodeRank, f.seeds})
	kubeflow[env.Seeds.Name] = "c"
	f, err = flagsOf(t, kubeflow)
	require.NoError(t, err)
	require.Empty(t, f.seeds, "CHORUS_SEEDS has them")
	f, err = flagsOf(t, map[string]string{"PET_NNODES": "1", "PET_MASTER_ADDR": "localhost"})
	require.NoError(t, err)
	require.Empty(t, f.seeds)
	f, err = flagsOf(t, nil)
	require.NoError(t, err)
	require.Equal(t, []any{"1", "auto", -1}, []any{f.nnodes, f.nproc, f.nodeRank})
	for name, value := range map[string]string{"PET_NNODES": "many", "PET_NPROC_PER_NODE": "cpu", "PET_NODE_RANK": "first", "PET_MAX_RESTARTS": "-1"} {
		_, err := flagsOf(t, map[string]string{name: value})
		require.IsType(t, &launch.UsageError{}, err)
		require.ErrorContains(t, err, name+`="`+value+`": `)
	}
}

// TestMistakesAsJSON has a mistake in a flag, with and without --log-format json.
func TestMistakesAsJSON(t *testing.T) {
	for format, want := range map[string]string{
		"json": `{"time":"[^"]+","level":"ERROR","msg":"--nnodes 0: want a number of at least 1, or a range such as 2:4","job":"j","host":"h"}`,
		"text": "chorus: --nnodes 0: want ", "xml": "chorus: --log-format xml: want text or json",
	} {
		cmd := exec.Command(self(t), "run", "--log-format", format, "--job", "j", "--nnodes", map[bool]string{true: "0", false: "1"}[format != "xml"], "--", "true")
		cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual", "CHORUS_HOST=h")
		out, _ := cmd.CombinedOutput() // the code is looked at
		require.Regexp(t, "^"+want, string(out))
		require.Equal(t, launch.ExitUsage, cmd.ProcessState.ExitCode())
	}
}
