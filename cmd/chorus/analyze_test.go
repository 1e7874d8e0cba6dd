package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/poll"
)

// hangVar makes the test binary a worker whose rank 1 makes the job hang: "skip" omits a
// collective, "orders" uses two groups in another order than the other ranks.
const hangVar = "CHORUS_TEST_HANG"

// meetVar is the folder of awaitAll.
const meetVar = "CHORUS_TEST_MEET"

// hang is the worker. It returns the exit code.
func hang(how string) int {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := hangIn(ctx, how); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		return 1
	}
	return 0
}

func hangIn(ctx context.Context, how string) error {
	g, err := comm.Init(ctx, nil)
	if err != nil {
		return err
	}
	defer g.Close()
	sub, err := g.Sub(ctx, 2, 1)
	if err != nil {
		return err
	}
	xs, err := comm.Make[float32](g, 1000)
	if err != nil {
		return err
	}
	defer xs.Close()
	reduce := func(g *comm.Group) error {
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			return err
		}
		return g.Wait(ctx)
	}
	for range 2 {
		if err := reduce(g); err != nil {
			return err
		}
	}
	switch {
	case how == "skip" && g.Rank() == 1:
		err = poll.Until(ctx, func() (bool, error) { return false, g.Err() })
	case how == "orders" && g.Rank() == 1:
		err = reduce(sub)
	default:
		err = reduce(g)
	}
	return errors.Join(err, awaitAll(ctx, g.Rank(), g.Size()))
}

// awaitAll waits until all ranks have called it, so that the launcher ends no worker before the
// worker has written its files.
func awaitAll(ctx context.Context, rank, size int) error {
	name := func(rank int) string { return filepath.Join(os.Getenv(meetVar), fmt.Sprint(rank)) }
	if err := os.WriteFile(name(rank), nil, 0o600); err != nil {
		return err
	}
	return poll.Until(ctx, func() (bool, error) {
		for other := range size {
			if _, err := os.Stat(name(other)); err != nil {
				return false, nil
			}
		}
		return true, nil
	})
}

// TestAnalyze makes jobs of real processes hang, and analyzes the files that they leave.
func TestAnalyze(t *testing.T) {
	for how, want := range map[string]struct {
		kind     string
		culprits []int
		text     string
	}{
		"skip":   {analyze.KindBehind, []int{1}, `^Rank 1 .* has not issued collective \d+ \(all_reduce\(1000 x Float, sum\)\) of .* Its last operation is collective \d+ \(all_reduce\(1000 x Float, sum\)\) of .*, completed`},
		"orders": {analyze.KindOrder, []int{1, 2}, `waits for rank 1 .* in collective \d+ \(all_reduce`},
	} {
		t.Run(how, func(t *testing.T) {
			dir := t.TempDir()
			out, errs, code := chorusCommand(t, []string{hangVar + "=" + how, meetVar + "=" + t.TempDir(), "CHORUS_NCCL_TIMEOUT=3s", "CHORUS_NCCL_TRACE_FILE=" + filepath.Join(dir, "trace-")},
				"run", "--nproc-per-node", "3", "--", self(t))
			require.NotZero(t, code, out+errs)
			out, errs2, code := chorusCommand(t, nil, "analyze", "--json", dir)
			require.Equal(t, 1, code, out+errs2+errs)
			var r analyze.Report
			require.NoError(t, json.Unmarshal([]byte(out), &r))
			require.Equal(t, want.kind, r.Kind, out+errs)
			require.Regexp(t, want.text, r.Verdict)
			var culprits []int
			for _, c := range r.Culprits {
				culprits = append(culprits, *c.World)
			}
			require.ElementsMatch(t, want.culprits, culprits, r.Verdict)
		})
	}
}

func TestAnalyzeCommand(t *testing.T) {
	const torch = "../../internal/analyze/testdata/torch"
	out, errs, code := chorusCommand(t, nil, "analyze", torch)
	require.Equal(t, 1, code, errs)
	require.Regexp(t, `^Rank 1 has not issued collective 3`, out)
	require.Contains(t, out, "default_pg, 2 ranks\nRANK ")
	_, errs, code = chorusCommand(t, nil, "analyze")
	require.Equal(t, 64, code)
	require.Contains(t, errs, "no file or folder given; see chorus analyze --help")
	_, _, code = chorusCommand(t, nil, "analyze", "--colour", torch)
	require.Equal(t, 64, code)
	_, errs, code = chorusCommand(t, nil, "analyze", filepath.Join(t.TempDir(), "no"))
	require.Equal(t, 1, code)
	require.Contains(t, errs, "no such file")
}
