package comm_test

import (
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/testgpu"
)

// TestNoTuningToSave refuses to save nothing, or to an empty path.
func TestNoTuningToSave(t *testing.T) {
	require.ErrorContains(t, (*comm.Tuning)(nil).Save(t.Context(), "file"), "no tuning or no path given")
	require.ErrorContains(t, (&comm.Tuning{}).Save(t.Context(), ""), "no tuning or no path given")
	require.ErrorContains(t, route.CanSave(t.Context(), ""), "no path given")
}

// TestTuningsThatAreRefused gives groups files that are wrong or out of date.
func TestTuningsThatAreRefused(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	at := siteOf(t, devs)
	folder := t.TempDir()
	good := filepath.Join(folder, "good.json")
	tuning := anyTuning(at, rand.New(rand.NewPCG(1, 1)))
	require.NoError(t, tuning.Save(t.Context(), good))
	data, err := os.ReadFile(good)
	require.NoError(t, err)
	kind := tuning.Choices[0].Operation
	tuning.Choices[0].Operation = "bogus" // after it was read
	require.ErrorContains(t, tuning.Save(t.Context(), good), `there is no operation "bogus"`)
	tuning.Choices[0].Operation = kind
	swap := func(old, new string) string {
		text := strings.Replace(string(data), old, new, 1)
		require.NotEqual(t, string(data), text, old)
		return text
	}
	files := map[string][2]string{
		"nothing in it":       {"", "EOF"},
		"cut":                 {string(data[:len(data)/2]), "unexpected EOF"},
		"two":                 {string(data) + "{}", "there is more behind its end"},
		"a bracket behind":    {string(data) + "}", "there is more behind its end"},
		"no strategy":         {swap(`"strategy": "own",`, ""), `there is no strategy ""`},
		"of another form":     {swap(`"form": 2`, `"form": 1`), "it is of form 1, and this Chorus knows form 2"},
		"of a later form":     {`{"form": 3, "leaves": []}`, "it is of form 3, and this Chorus knows form 2: remove it and measure again with chorus tune"},
		"null":                {`{"form": 2, "tunings": [null]}`, "null"},
		"unknown field":       {swap(`"gpu"`, `"gpus"`), "gpus"},
		"unknown operation":   {swap(`"all-gather"`, `"all-gather-v"`), `there is no operation "all-gather-v"`},
		"unknown type":        {swap(`"float32"`, `"float33"`), `"float33"`},
		"unknown reduction":   {swap(`"redop": "sum"`, `"redop": "diff"`), `"diff"`},
		"unknown strategy":    {swap(`"strategy": "own"`, `"strategy": "magic"`), "magic"},
		"itself":              {swap(`"strategy": "own"`, `"strategy": "tuned"`), "tuned"},
		"no bytes":            {swap(`"bytes": 4`, `"bytes": 0`), "of 0 bytes"},
		"not fastest first":   {swap(`"us": 1`, `"us": 7`), "want the fastest first"},
		"less than no time":   {swap(`"us": 0`, `"us": -1`), "-1"},
		"other NCCL":          {swap(`"nccl": "2.28.3"`, `"nccl": "2.27.3"`), "out of date: it was measured with NCCL 2.27.3, here 2.28.3: measure again with chorus tune"},
		"other driver":        {swap(at.Driver, "CUDA 11.0"), "with driver CUDA 11.0, here " + at.Driver},
		"other hosts, untold": {swap(`"hosts": 1,`, ""), "out of date: it was measured with number of hosts 0, here 1: measure again with chorus tune"},
		"other own kernels":   {swap(at.Kernels, "abc"), "with Chorus kernels abc, here " + at.Kernels},
		"two of a place":      {`{"form": 2, "tunings": [{"for": {"gpu": "x", "ranks": 3}, "choices": []}, {"for": {"gpu": "x", "ranks": 3}, "choices": []}]}`, "it has two tunings for 3 ranks of x"},
		"with nothing timed":  {`{"form": 2, "tunings": [{"for": {}, "choices": [{"operation": "broadcast", "bytes": 1, "times": []}]}]}`, "broadcast of 1 bytes has no times"},
		"eager of others":     {swap(`"strategy": "own",`, `"strategy": "own", "eager_us": 3,`), "has eager_us 3 of own: want a time, of copy-engines only"},
		"less than no eager":  {`{"form": 2, "tunings": [{"for": {}, "choices": [{"operation": "all-gather", "bytes": 1, "times": [{"strategy": "copy-engines", "us": 0, "eager_us": -1}]}]}]}`, "has eager_us -1 of copy-engines"},
	}
	t.Setenv(env.CommStrategy.Name, "tuned")
	joining := testgpu.Sample(t, 4)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(folder, "bad.json")
		require.NoError(t, os.WriteFile(path, []byte(files[name][0]), 0o644))
		t.Setenv(env.TuningFile.Name, path)
		_, err := comm.Local(testgpu.Context(t), devs, nil)
		require.ErrorContains(t, err, path, name)
		require.ErrorContains(t, err, files[name][1], name)
		if strings.HasPrefix(name, "other") {
			continue // for another place, that of one rank a process, it is not
		}
		require.Error(t, tuning.Save(t.Context(), path), "it would be lost")
		if !joining() {
			continue
		}
		gs, errs := join(t, t.Context(), devs)
		for i := range gs {
			require.True(t, gs[i] == nil, name)
			require.ErrorContains(t, errs[i], files[name][1], name)
		}
	}
	pipe := filepath.Join(folder, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	huge := filepath.Join(folder, "huge")
	require.NoError(t, os.WriteFile(huge, nil, 0o600))
	require.NoError(t, os.Truncate(huge, 1<<30))
	for path, text := range map[string]string{folder: "not a regular file but a directory", pipe: "not a regular file but a named pipe", "/dev/zero": "not a regular file but a device", huge: "has 1073741824 bytes"} {
		t.Setenv(env.TuningFile.Name, path)
		_, err = comm.Local(testgpu.Context(t), devs, nil)
		require.ErrorContains(t, err, text)
	}
	// What another user can have written is not a tuning, and is not written to.
	mutual := filepath.Join(t.TempDir(), "mutual")
	require.NoError(t, os.Mkdir(mutual, 0o700))
	planted := filepath.Join(mutual, "tuning.json")
	require.NoError(t, tuning.Save(t.Context(), planted))
	t.Setenv(env.TuningFile.Name, planted)
	for path, mode := range map[string]os.FileMode{planted: 0o666, mutual: 0o777} {
		was, err := os.Stat(path)
		require.NoError(t, err)
		require.NoError(t, os.Chmod(path, mode))
		_, err = comm.Local(testgpu.Context(t), devs, nil)
		require.ErrorContains(t, err, "lets other users write to it")
		require.ErrorContains(t, tuning.Save(t.Context(), planted), "lets other users write to it")
		require.ErrorContains(t, route.CanSave(t.Context(), planted), "lets other users write to it")
		require.NoError(t, os.Chmod(path, was.Mode()))
	}
	for _, c := range []struct {
		tuning comm.Tuning
		text   string
	}{
		{comm.Tuning{Choices: tuning.Choices}, "the given tuning is not valid: it was measured with GPU , here"},
		{comm.Tuning{For: at, Choices: []comm.Choice{{Operation: "sum"}}}, `there is no operation "sum"`},
	} {
		_, err = comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: comm.Tuned, Tuning: &c.tuning})
		require.ErrorContains(t, err, c.text)
	}
	// What no group could read is not written.
	require.ErrorContains(t, (&comm.Tuning{Choices: []comm.Choice{{Operation: "sum"}}}).Save(t.Context(), good), `there is no operation "sum"`)
	// One for another place is no hindrance, and is kept.
	t.Setenv(env.TuningFile.Name, good)
	other := *tuning
	other.For.GPU = "another"
	require.NoError(t, other.Save(t.Context(), good))
	g := groupBy(t, devs, comm.Config{})
	require.Equal(t, comm.Tuned, g.Strategy())
	for _, elsewhere := range []func(*comm.Site){
		func(at *comm.Site) { at.Locals = 1 }, func(at *comm.Site) { at.Backend = "cuda" }, func(at *comm.Site) { at.Ranks = 3 }, func(at *comm.Site) { at.Hosts = 2 },
	} {
		place := at
		elsewhere(&place)
		none, err := comm.LoadTuning(good, place)
		require.NoError(t, err, "%+v", place)
		require.Nil(t, none, "%+v", place)
	}
	kept, err := comm.LoadTuning(good, other.For)
	require.NoError(t, err)
	require.Len(t, kept.Choices, len(tuning.Choices))
	// A file that does not tell of hosts gets one that does.
	untold := filepath.Join(folder, "untold.json")
	require.NoError(t, os.WriteFile(untold, []byte(swap(`"hosts": 1,`, "")), 0o644))
	_, err = comm.LoadTuning(untold, at)
	require.ErrorContains(t, err, "out of date")
	require.NoError(t, tuning.Save(t.Context(), untold))
	kept, err = comm.LoadTuning(untold, at)
	require.NoError(t, err)
	require.Equal(t, at, kept.For)
}

// TestCachedTuningOutOfDate has a tuning of another NCCL in the user's cache, where groups measure again, and in a file that was
// named, which is refused.
func TestCachedTuningOutOfDate(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	at := siteOf(t, devs)
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	path, err := comm.TuningFile()
	require.NoError(t, err)
	old := anyTuning(at, rand.New(rand.NewPCG(1, 1)))
	old.For.NCCL = "2.27.3"
	require.NoError(t, old.Save(t.Context(), path))
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned})
	require.Equal(t, comm.Tuned, g.Strategy())
	kept, err := comm.LoadTuning(path, at)
	require.NoError(t, err)
	require.NotEqual(t, old.Choices, kept.Choices)
	// A deterministic group has a Tuning beside it.
	other := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Deterministic: &comm.Order{}})
	require.Equal(t, comm.Tuned, other.Strategy())
	again, err := comm.LoadTuning(path, at)
	require.NoError(t, err)
	require.Equal(t, kept, again)
	require.NoError(t, old.Save(t.Context(), path))
	require.ErrorContains(t, comm.SetTuning(t.Context(), g, nil), "is out of date: it was measured with NCCL 2.27.3")

	t.Setenv(env.TuningFile.Name, path)
	_, err = comm.Local(t.Context(), devs, &comm.Config{Strategy: comm.Tuned})
	require.ErrorContains(t, err, "is out of date: it was measured with NCCL 2.27.3, here 2.28.3: measure again with chorus tune")
}

// TestTuningOfAnotherUser gives the file of a tuning to another user, who could then choose the
// strategies of this one.
func TestTuningOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	path := filepath.Join(t.TempDir(), "tuning.json")
	tuning := anyTuning(siteOf(t, devs), rand.New(rand.NewPCG(1, 1)))
	require.NoError(t, tuning.Save(t.Context(), path))
	t.Setenv(env.CommStrategy.Name, "tuned")
	t.Setenv(env.TuningFile.Name, path)
	g := groupBy(t, devs, comm.Config{})
	require.Equal(t, comm.Tuned, g.Strategy())
	require.NoError(t, os.Chown(path, 65534, 65534))
	_, err := comm.Local(testgpu.Context(t), devs, nil)
	require.ErrorContains(t, err, path)
	require.ErrorContains(t, err, "belongs to the user with id 65534")
}
