package main

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
)

// The test binary is the command when this variable is set, and the command's
// guardian by its name.
const commandVar = "CHORUS_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(hangVar) != "" && os.Getenv("RANK") != "" {
		os.Exit(hang(os.Getenv(hangVar)))
	}
	if os.Getenv(commandVar) != "" || strings.HasPrefix(os.Args[0], "chorus: ") {
		main()
	}
	if os.Getenv(env.LostAfter.Name) == "" { // a busy machine may stop a process for longer than the default
		os.Setenv(env.LostAfter.Name, "20s")
	}
	os.Exit(m.Run())
}

// TestRunKilled kills the command, which leaves its workers' children to others.
func TestRunKilled(t *testing.T) {
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "1", "--no-prefix", "--", "sh", "-c", "sleep 7777 & echo $!; wait")
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	stat := "/proc/" + strings.TrimSpace(line) + "/stat"
	require.Eventually(t, func() bool {
		b, err := os.ReadFile(stat)
		return err != nil || strings.Contains(string(b), ") Z ")
	}, time.Minute, time.Millisecond)
}

// TestRunReaderGone reads one line of the output and goes, as head does.
func TestRunReaderGone(t *testing.T) {
	dir := t.TempDir()
	// More than pipes hold, so that the first line is read before the last is
	// written.
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "2", "--", "sh", "-c",
		`i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done
sh -c 'kill -PIPE $$'; echo code $? >&2; echo done > `+dir+`/$RANK
[ $RANK = 0 ] || while [ ! -s `+dir+`/0 ]; do sleep 0.01; done; exit $RANK`)
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = bufio.NewReaderSize(io.LimitReader(out, 16), 16).ReadString('\n')
	require.NoError(t, err)
	require.NoError(t, out.Close())
	_ = cmd.Wait() // the code is looked at
	require.Equal(t, 1, cmd.ProcessState.ExitCode(), errs.String())
	for _, rank := range []string{"0", "1"} {
		b, err := os.ReadFile(filepath.Join(dir, rank))
		require.NoError(t, err, errs.String())
		require.Equal(t, "done\n", string(b))
	}
	require.Contains(t, errs.String(), "exited with code 1")
	require.Contains(t, errs.String(), "[rank 0] code 141", "workers have not got the launcher's disposition")
}

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

// TestNumbersOfRun has numbers and durations that cannot be meant. No process is started.
func TestNumbersOfRun(t *testing.T) {
	for want, args := range map[string][]string{
		"--nnodes 3:2: the range is reversed: want 2:3":                                 {"--nnodes", "3:2"},
		"--nnodes 0:2: want a number of at least 1, or a range such as 2:4":             {"--nnodes", "0:2"},
		"--nnodes 2:0: want a number of at least 1, or a range such as 2:4":             {"--nnodes", "2:0"},
		"--grace -5s: want more than 0":                                                 {"--grace", "-5s"},
		"--join-timeout -1ms: want more than 0":                                         {"--join-timeout", "-1ms"},
		"--nnodes 1048577: want at most 1048576":                                        {"--nnodes", "1048577"},
		"--nnodes 1 with --nproc-per-node 9000000000000000000: a job has at most":       {"--nproc-per-node", "9000000000000000000"},
		"--nnodes 1048576 with --nproc-per-node 2: a job has at most 1048576 processes": {"--nnodes", "1048576", "--nproc-per-node", "2"},
		"--nnodes 2:300000 with --nproc-per-node 4: a job has at most":                  {"--nnodes", "2:300000", "--nproc-per-node", "4"},
	} {
		_, errs, code := chorusCommand(t, nil, append(append([]string{"run"}, args...), "--", "false")...)
		require.Equal(t, launch.ExitUsage, code, errs)
		require.Contains(t, errs, want)
	}
}
