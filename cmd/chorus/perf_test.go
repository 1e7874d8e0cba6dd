package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cmd/chorus/internal/results"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testhost"
)

// self is the test binary, which is the command when commandVar says so.
func self(t *testing.T) string {
	t.Helper()
	name, err := os.Executable()
	require.NoError(t, err)
	return name
}

func chorusPerf(t *testing.T, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return chorusCommand(t, env, append([]string{"perf"}, args...)...)
}

// chorusCommand runs the command on virtual devices in a process of its own.
func chorusCommand(t *testing.T, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.Command(self(t), args...)
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual", "CHORUS_TUNING_FILE="+filepath.Join(t.TempDir(), "tuning.json"))
	cmd.Env = append(cmd.Env, env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		require.IsType(t, &exec.ExitError{}, err, errs.String())
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// TestPerfInterrupted sends signals while the command measures.
func TestPerfInterrupted(t *testing.T) {
	for s, want := range map[syscall.Signal]string{syscall.SIGINT: "chorus: interrupted by SIGINT\n", syscall.SIGTERM: "chorus: interrupted by SIGTERM\n"} {
		cmd := exec.Command(self(t), "perf", "all_reduce", "-b", "4K", "-n", "1000000000")
		cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		require.NoError(t, cmd.Start())
		_, err = out.Read(make([]byte, 1)) // the header
		require.NoError(t, err)
		require.NoError(t, cmd.Process.Signal(s))
		_, err = io.Copy(io.Discard, out)
		require.NoError(t, err)
		require.Error(t, cmd.Wait())
		require.Equal(t, 128+int(s), cmd.ProcessState.ExitCode(), errs.String())
		require.Contains(t, errs.String(), want)
	}
}

func TestPerf(t *testing.T) {
	page, table := filepath.Join(t.TempDir(), "report.html"), filepath.Join(t.TempDir(), "table")
	out, errs, code := chorusPerf(t, nil, "all", "-b", "3K", "-g", "3", "-n", "1", "--output", table)
	require.Zero(t, code, errs)
	require.Empty(t, out)
	text, err := os.ReadFile(table)
	require.NoError(t, err)
	require.Contains(t, string(text), "# sendrecv")
	require.NotContains(t, string(text), "hypercube", "three ranks are no power of two")
	out, errs, code = chorusPerf(t, nil, "all_reduce", "sendrecv", "-b", "1K", "-e", "4K", "-f", "4", "-g", "2", "-n", "2", "--html", page)
	require.Zero(t, code, errs)
	require.Contains(t, out, "# chorus perf: 2 ranks, ")
	require.Regexp(t, `(?m)^ +4096 +1024 +float +sum +-1 .* 0 `, out)
	require.Regexp(t, `(?m)^ +1024 +256 +float +none +-1 .* N/A`, out)
	require.Contains(t, out, "# Out of bounds values : 0 OK")
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(html), "<svg ")
}

// TestPerfDeterministic measures deterministic reductions by each strategy.
func TestPerfDeterministic(t *testing.T) {
	out, errs, code := chorusPerf(t, nil, "all_reduce", "reduce_scatter", "-b", "4K", "-g", "3", "-n", "2", "-o", "mulsum", "-d", "bfloat16", "--deterministic")
	require.Zero(t, code, errs)
	require.Regexp(t, "# chorus perf: 3 ranks, .*, deterministic, ", out)
	out, errs, code = chorusPerf(t, nil, "all_reduce", "-b", "4K", "-g", "2", "-n", "2", "--deterministic", "--strategies")
	require.Zero(t, code, errs)
	require.Contains(t, out, ", deterministic, ")
}

func TestPerfPairs(t *testing.T) {
	out, errs, code := chorusPerf(t, nil, "pairs", "-b", "4K", "-g", "3", "-n", "1")
	require.Zero(t, code, errs)
	require.Contains(t, out, "from row to column, GB/s, 4096 bytes")
	out, errs, code = chorusPerf(t, nil, "pairs", "-b", "4K", "-g", "2", "-n", "1", "--format", "csv")
	require.Zero(t, code, errs)
	require.Regexp(t, `(?s)^from,to,size,bandwidth,latency_us\n0,1,4096,.*\n1,0,4096,`, out)
}

// One rank alone is never a success, whatever it prints.
func TestPerfOfOneRankFails(t *testing.T) {
	out, errs, code := chorusPerf(t, nil, "all_reduce", "-b", "1K", "-g", "1")
	require.Equal(t, launch.ExitFailed, code)
	require.Contains(t, out, "NOT GOOD: one rank")
	require.Contains(t, errs, "use more GPUs")
}

// What another launcher says of several processes is taken up, or refused: there are
// never several groups of one rank.
func TestPerfInTornJob(t *testing.T) {
	_, errs, code := chorusPerf(t, []string{"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=1", "CHORUS_JOIN_TIMEOUT=200ms"}, "all_reduce", "-b", "1K")
	require.NotZero(t, code)
	require.NotEmpty(t, errs)
}

func TestPerfOfProcesses(t *testing.T) {
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "3", "--no-prefix", "--", self(t), "perf", "all_gather", "-b", "3K", "-n", "2", "--format", "json")
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
	out, err := cmd.Output()
	require.NoError(t, err)
	r, err := results.Read(bytes.NewReader(out))
	require.NoError(t, err, "only rank 0 prints")
	require.Equal(t, 3, r.Ranks)
	require.Equal(t, 1, r.Locals)
	require.Zero(t, r.Wrong)
	require.Len(t, r.Rows, 1)
}

// The others of a process that is killed name it and its last operation, and not that the
// launcher told them to end.
func TestPerfOfAKilledProcess(t *testing.T) {
	cmd := exec.Command(self(t), "run", "--nproc-per-node", "3", "--", "sh", "-c",
		`echo pid $RANK $$; exec "$0" perf all_reduce -b 1K -e 32M -f 2 -n "$1"`, self(t), fmt.Sprint(testhost.Rounds(150, 1500)))
	cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var victim int
	killed := false
	for lines := bufio.NewScanner(out); lines.Scan(); {
		_, _ = fmt.Sscanf(lines.Text(), "[rank 1] pid 1 %d", &victim)
		if strings.Contains(lines.Text(), " sum ") && !killed { // a row is done
			require.Positive(t, victim)
			require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
			killed = true
		}
	}
	require.Error(t, cmd.Wait())
	for _, rank := range []int{0, 2} {
		require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] chorus: .*rank 1 was lost: (its last reported operation is|it had reported no operation).*SIGKILL`, rank), errs.String())
	}
}

func TestPerfBaseline(t *testing.T) {
	args := []string{"all_reduce", "-b", "1K", "-g", "2", "-n", "2"}
	out, errs, code := chorusPerf(t, nil, append(args, "--format", "json")...)
	require.Zero(t, code, errs)
	base := filepath.Join(t.TempDir(), "base.json")
	write := func(out1, in1 float64) {
		var tree map[string]any
		require.NoError(t, json.Unmarshal([]byte(out), &tree))
		for side, time := range map[string]float64{"out_of_place": out1, "in_place": in1} {
			tree["results"].([]any)[0].(map[string]any)[side].(map[string]any)["time"] = time
		}
		text, err := json.Marshal(tree)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(base, text, 0o600))
	}
	write(1e9, 1e9)
	got, errs, code := chorusPerf(t, nil, append(args, "--baseline", base)...)
	require.Zero(t, code, errs)
	require.Contains(t, got, "2 faster, 0 slower")
	write(1e-6, 1e9)
	got, errs, code = chorusPerf(t, nil, append(args, "--baseline", base)...)
	require.Equal(t, launch.ExitFailed, code, errs)
	require.Contains(t, got, "slower: AllReduce/type=float/redop=sum/bytes=1024")
	for _, c := range []struct{ text, want string }{
		{out + "{}", "unexpected data after the report"},
		{strings.Repeat("[{},{},", 1<<16), "bytes of JSON: want at most"},
		{strings.Replace(out, `"out_of_bounds": 0`, `"out_of_bounds": 5`, 1), "the baseline has wrong results"},
	} {
		require.NoError(t, os.WriteFile(base, []byte(c.text), 0o600))
		_, errs, code = chorusPerf(t, nil, append(args, "--baseline", base)...)
		require.Equal(t, launch.ExitUsage, code)
		require.Contains(t, errs, c.want)
	}
	write(1e-6, 1e9)
	got, errs, code = chorusPerf(t, nil, "all_reduce", "-b", "1K", "-g", "3", "-n", "1", "--baseline", base)
	require.Equal(t, launch.ExitUsage, code)
	require.Contains(t, errs, "another setting: ranks 2 in the baseline, 3 here")
	require.NotContains(t, got, "busbw", "it is known before anything is measured")
	for _, other := range [][]string{{"all_reduce", "-b", "2K"}, {"all_gather", "-b", "1K"}, {"all_reduce", "-b", "1K", "-o", "max"}, {"all_reduce", "-b", "1K", "--strategies"}} {
		got, errs, code = chorusPerf(t, nil, append(other, "-g", "2", "-n", "1", "--baseline", base)...)
		require.Equal(t, launch.ExitUsage, code)
		require.Contains(t, errs, "the baseline has none of the rows of this run")
		require.NotContains(t, got, "busbw")
	}
}

func TestPerfMistakes(t *testing.T) {
	for want, args := range map[string]string{
		"no operation given":                     "",
		"-i with -f":                             "all_reduce -b 1K -e 4K -i 1K -f 2",
		`unknown operation "foo"`:                "foo",
		"pairs cannot be combined":               "pairs all",
		"all_reduce is given twice":              "all all_reduce",
		`-b: "1X" is not a size`:                 "all_reduce -b 1X",
		"sizes from 8192 to 4096 bytes":          "all_reduce -b 8K -e 4K",
		`unknown element type "quad"`:            "all_reduce -d quad",
		`unknown reduction "xor"`:                "all_reduce -o xor",
		"root 9: want a rank from 0 to 3":        "broadcast -b 1K -r 9",
		`-r "x": want a rank or all`:             "broadcast -r x",
		"registration 7":                         "all_reduce -b 1K -R 7",
		"-g 99: this machine has 4 devices":      "all_reduce -b 1K -g 99",
		`--format "xml"`:                         "all_reduce --format xml",
		"no such file":                           "all_reduce --baseline missing.json",
		"not a regular file but a device":        "all_reduce --baseline /dev/null",
		"--output and --html are both x":         "all_reduce --output x --html ./x",
		"-g -1: want 1 or more, or 0":            "all_reduce -g -1",
		"hypercube on 3 ranks":                   "hypercube -b 1K -g 3",
		"want 1 iteration or more":               "all_reduce -b 1K -n 0",
		"unknown shorthand flag: 'z' in -z":      "all_reduce -z",
		"--tolerance 0: want a fraction above 0": "all_reduce --tolerance 0",
		"--link NaN: want a bandw":               "all_reduce --link nan",
		"--link +Inf: want a bandw":              "all_reduce --link inf",
		"more than 10000 sizes":                  "all_reduce -b 1 -e 1T -i 1",
		"--maxbytes does not apply to pairs":     "pairs -b 1K -e 1M",
		"want 8 bytes and 1 iteration":           "pairs -b 4",
	} {
		out, errs, code := chorusPerf(t, []string{"CHORUS_VIRTUAL_DEVICES=4"}, strings.Fields(args)...)
		require.Equal(t, launch.ExitUsage, code, "%s: %s", args, errs)
		require.Contains(t, errs, want, args)
		require.NotContains(t, out, "Out of bounds", args)
	}
}

// Ranks that were started with different flags say so instead of waiting for each
// other.
func TestPerfOfRanksThatDisagree(t *testing.T) {
	for _, flags := range []string{"-b $((RANK+1))K", "-b 1K -e 64K -f $((2+2*RANK))", "-b 1K -d float -o all -c $RANK"} {
		cmd := exec.Command(self(t), "run", "--nproc-per-node", "2", "--", "sh", "-c", self(t)+" perf all_reduce -n 2 "+flags, "sh")
		cmd.Env = append(os.Environ(), commandVar+"=1", "CHORUS_BACKEND=virtual")
		out, err := cmd.CombinedOutput()
		require.Error(t, err)
		for rank := range 2 {
			require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] chorus: .*rank 0 has the flags .* and rank 1 the flags .*: give the same on all ranks`, rank), string(out), flags)
		}
	}
}
