package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
)

// All survivors report the error, and the ranks work together again, also if calls wait for room.
func TestRecovery(t *testing.T) {
	for name, c := range map[string]struct {
		flags []string
		vars  []string
	}{
		"20 operations": {[]string{"-queued", "20"}, nil},
		"200 operations of processes that share GPUs": {[]string{"-queued", "200"}, []string{"CHORUS_SHARE_GPUS=yes"}},
		"operations that run":                         {[]string{"-queued", "1000", "-running"}, nil},
	} {
		t.Run(name, func(t *testing.T) { recovers(t, c.flags, c.vars) })
	}
}

// Without a restart the survivors wait for the lost rank for ever. The end of the context stops them.
func TestContextEnds(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(testgpu.Context(t))
	out := writer{when: ": 2 processes on 1 host", do: cancel}
	code := launch.Run(ctx, &launch.Config{
		Program: []string{self, "recovery", "-queued", "1", "-elements", "1000", "-mark", t.TempDir() + "/mark"},
		Procs:   3,
		Devices: launch.Devices{Count: 3, Backend: "virtual", Env: []string{asRank + "=1", "CHORUS_BACKEND=virtual"}},
		Grace:   10 * time.Second,
		Cluster: job.Config{Job: "ends"},
		Stdout:  io.Discard,
		Stderr:  out,
	})
	require.Equal(t, 143, code)
}

// A writer calls a function when the launcher writes a line with a text.
type writer struct {
	when string
	do   func()
}

func (w writer) Write(b []byte) (int, error) {
	if strings.Contains(string(b), w.when) {
		w.do()
	}
	return len(b), nil
}

func recovers(t *testing.T, flags, vars []string) {
	self, err := os.Executable()
	require.NoError(t, err)
	var out bytes.Buffer
	code := launch.Run(testgpu.Context(t), &launch.Config{
		Program: append([]string{self, "recovery", "-elements", "1000", "-mark", t.TempDir() + "/mark"}, flags...),
		Procs:   3,
		Devices: launch.Devices{Count: 3, Backend: "virtual", Env: append(vars, asRank+"=1", "CHORUS_BACKEND=virtual")},
		Cluster: job.Config{Job: "recovers", MaxRestarts: 1},
		Stdout:  &out,
		Stderr:  &out,
	})
	text := out.String()
	require.Zero(t, code, text)
	for _, want := range []string{"rank 0, error: ", "rank 1, error: ", "rank 0, group closed: ", "of 3 ranks, first all-reduce: "} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, "rank 2, error")
}
