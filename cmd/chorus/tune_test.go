package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cmd/chorus/internal/results"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
)

// few are the flags of a short tuning.
var few = []string{"tune", "-g", "3", "-e", "64", "-o", "sum", "-d", "float"}

func TestTune(t *testing.T) {
	file := filepath.Join(t.TempDir(), "new", "tuning.json")
	set := []string{env.TuningFile.Name + "=" + file}
	out, errs, code := chorusCommand(t, set, append(few, "--dry-run")...)
	require.Zero(t, code, errs)
	require.Contains(t, out, "# chorus tune: 3 ranks, 3 in each process, hosts: 1, Chorus Virtual Device")
	require.Regexp(t, `(?m)^# all-reduce float32 sum, us\n +# +bytes +nccl +one-shot +two-shot-packets +two-shot +two-shot-lines +windows *\n +12 +\? +\? +\? +\? +\? +\?`, out)
	require.Contains(t, out, "# nothing was measured; the result would be written to "+file)
	require.NoFileExists(t, file)

	out, errs, code = chorusCommand(t, set, few...)
	require.Zero(t, code, errs)
	require.Contains(t, out, "# written to "+file)
	require.Regexp(t, `(?m)^# all-gather, us\n +# +bytes +nccl +own +windows *\n +15 .*- \n +16 .*\*`, out)
	for _, line := range strings.Split(out, "\n") {
		if line != "" && !strings.Contains(line, "#") {
			require.Equal(t, 1, strings.Count(line, "*"), line)
		}
	}
	was, err := os.ReadFile(file)
	require.NoError(t, err)

	// What is printed as JSON is what is written.
	other := filepath.Join(t.TempDir(), "other.json")
	out, errs, code = chorusCommand(t, set, append(few, "--format", "json", "--output", other)...)
	require.Zero(t, code, errs)
	var printed comm.Tuning
	require.NoError(t, json.Unmarshal([]byte(out), &printed))
	written, err := comm.LoadTuning(other, printed.For)
	require.NoError(t, err)
	require.Len(t, printed.Choices, 5*6, "five operations, of three sizes and those below")
	for i := range written.Choices {
		require.Equal(t, printed.Choices[i].Times, written.Choices[i].Times)
	}
	is, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, was, is)
}

func TestTuneRefuses(t *testing.T) {
	t.Setenv(env.TuningFile.Name, filepath.Join(t.TempDir(), "tuning.json"))
	for text, args := range map[string][]string{
		`-e: "8": want 16 or more`:          {"-e", "8"},
		`-e: `:                              {"-e", "x"},
		`-d "florin": unknown element type`: {"-d", "float,florin"},
		`-o "diff": want some of`:           {"-o", "sum,diff"},
		`-g -1: want 1 or more`:             {"-g", "-1"},
		`-g 9: this machine has`:            {"-g", "9"},
		`--format "xml": want text or json`: {"--format", "xml"},
		`unknown argument "all_reduce"`:     {"all_reduce"},
		`unknown flag: --dryrun`:            {"--dryrun"},
		`see chorus tune --help`:            {"-o", ""},
		`-e: "16Q"`:                         {"-e", "16Q"},
	} {
		_, errs, code := chorusCommand(t, nil, append([]string{"tune"}, args...)...)
		require.Equal(t, launch.ExitUsage, code, "%v: %s", args, errs)
		require.Contains(t, errs, text)
	}
	_, errs, code := chorusCommand(t, nil, "tune", "-g", "1")
	require.Equal(t, launch.ExitFailed, code)
	require.Contains(t, errs, "there is only one strategy here: collectives need two GPUs")
	blocked := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(blocked, nil, 0o600))
	_, errs, code = chorusCommand(t, nil, append(few, "--output", filepath.Join(blocked, "x"))...)
	require.Equal(t, launch.ExitFailed, code)
	require.Contains(t, errs, "not a directory")

	// A dry run refuses the file that a real one would, and lets it be.
	require.NoError(t, os.WriteFile(blocked, []byte("{"), 0o600))
	for _, dry := range [][]string{nil, {"--dry-run"}} {
		_, errs, code = chorusCommand(t, nil, slices.Concat(few, []string{"--output", blocked}, dry)...)
		require.Equal(t, launch.ExitFailed, code)
		require.Contains(t, errs, blocked+" is not a tuning")
	}
}

// TestPerfStrategies measures all strategies side by side, with what a tuning chooses.
func TestPerfStrategies(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	set := []string{env.TuningFile.Name + "=" + file}
	args := []string{"all_reduce", "all_gather", "gather", "-g", "3", "-b", "48", "-e", "192", "-f", "2", "-n", "1", "--strategies"}
	chosen := func() (list []string) {
		out, errs, code := chorusPerf(t, set, append(args, "--format", "json")...)
		require.Zero(t, code, errs)
		r, err := results.Read(strings.NewReader(out))
		require.NoError(t, err)
		require.Equal(t, "tuned", r.Strategy)
		have := map[string][]string{}
		for _, row := range r.Rows {
			key := row.Operation
			have[key] = append(have[key], row.Strategy)
			require.Zero(t, *row.OutOfPlace.Wrong)
			if row.Chosen {
				list = append(list, row.Operation+" "+row.Strategy)
			}
		}
		repeat := func(names ...string) []string { return slices.Repeat(names, 3) }
		require.Equal(t, repeat("nccl", "own", "one-shot", "two-shot-packets", "two-shot", "two-shot-lines", "pipelined", "windows"), have["all_reduce"])
		require.Equal(t, repeat("nccl", "own", "pipelined", "windows", "copy-engines"), have["all_gather"])
		require.Equal(t, repeat("nccl"), have["gather"])
		return list
	}
	none := slices.Concat(slices.Repeat([]string{"all_reduce nccl"}, 3), slices.Repeat([]string{"all_gather nccl"}, 3), slices.Repeat([]string{"gather nccl"}, 3))
	require.Equal(t, none, chosen(), "without a tuning")

	out, errs, code := chorusCommand(t, set, append(few, "--format", "json")...)
	require.Zero(t, code, errs)
	var tuning comm.Tuning
	require.NoError(t, json.Unmarshal([]byte(out), &tuning))
	for i := range tuning.Choices {
		c := &tuning.Choices[i]
		c.Times = []comm.Timing{{Strategy: comm.Strategy("two-shot")}, {Strategy: comm.OwnKernels, Micros: 1}}
	}
	require.NoError(t, tuning.Save(t.Context(), file))
	copy(none, slices.Concat(slices.Repeat([]string{"all_reduce two-shot"}, 3), slices.Repeat([]string{"all_gather own"}, 3)))
	require.Equal(t, none, chosen())

	out, errs, code = chorusPerf(t, set, args...)
	require.Zero(t, code, errs)
	require.Regexp(t, `(?m)^ +48 +[\d.]+[ <] +[\d.]+[ <] +[\d.]+[ <] +[\d.]+[ <] +[\d.]+\* +[\d.]+[ <] +[\d.]+[ <] +[\d.]+[ <] *$`, out)
	require.Contains(t, out, "# * chosen, < faster than the chosen one")

	tuning.For.NCCL = "2.27.5"
	require.NoError(t, tuning.Save(t.Context(), file))
	_, errs, code = chorusPerf(t, set, args...)
	require.Equal(t, launch.ExitFailed, code)
	require.Contains(t, errs, "the tuning in "+file+" is out of date: it was measured with NCCL 2.27.5, here 2.28.3: measure again with chorus tune")
	_, errs, code = chorusPerf(t, set, append(args, "-R", "2")...)
	require.Equal(t, launch.ExitUsage, code)
	require.Contains(t, errs, "--strategies with -R")
	_, errs, code = chorusPerf(t, set, "pairs", "--strategies")
	require.Equal(t, launch.ExitUsage, code)
	require.Contains(t, errs, "--strategies does not apply to pairs")
	out, errs, code = chorusPerf(t, set, "all_reduce", "-g", "1", "--strategies")
	require.Equal(t, launch.ExitFailed, code, out)
	require.Contains(t, errs, "a collective needs two ranks")
}
