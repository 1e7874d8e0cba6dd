package fabric_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
)

// workerVar tells a worker its backend, what it does, its rank, the number of ranks,
// a seed and the folder in which the ranks exchange what they say.
const workerVar = "CHORUS_TEST_FABRIC"

// A folder is where ranks of several processes exchange what they say.
type folder struct {
	path  string
	ranks int
}

func (f folder) seat(rank int) collective.Exchange {
	next := 0
	return func(ctx context.Context, mine []byte) ([][]byte, error) {
		next++
		name := func(rank int) string { return filepath.Join(f.path, fmt.Sprint(next, ".", rank)) }
		if err := os.WriteFile(name(rank)+".new", mine, 0o600); err != nil {
			return nil, err
		}
		if err := os.Rename(name(rank)+".new", name(rank)); err != nil {
			return nil, err
		}
		said := make([][]byte, f.ranks)
		for r := range said {
			for {
				text, err := os.ReadFile(name(r))
				if said[r] = text; err == nil {
					break
				}
				if ctx.Err() != nil {
					return nil, context.Cause(ctx)
				}
				time.Sleep(time.Millisecond)
			}
		}
		return said, nil
	}
}

// TestWorker is one rank of the tests below, in a process of its own.
func TestWorker(t *testing.T) {
	fields := strings.Fields(os.Getenv(workerVar))
	if len(fields) != 6 {
		t.Skip("a worker of other tests")
	}
	number := func(i int) int {
		n, err := strconv.Atoi(fields[i])
		require.NoError(t, err)
		return n
	}
	rank, ranks, seed := number(2), number(3), uint64(number(4))
	var devs []*device.Device
	if fields[0] == "cuda" {
		devs = testgpu.Ranks(t, ranks)
	} else {
		devs = testgpu.VirtualRanks(t, ranks)
	}
	s, seat := newStream(t, devs[rank]), falsifyHandle(t, fields[1], rank, folder{fields[5], ranks}.seat(rank))
	cfg := &fabric.Config{Bytes: 1}
	if fields[1] == "pushed" || fields[1] == "late" || fields[1] == "gone" {
		cfg = &pushes
	}
	if fields[1] == "cancelled" || fields[1] == "cancelled-pushes" {
		if fields[1] == "cancelled-pushes" {
			cfg = &pushes
		}
		attempts(t, s, rank, ranks, 20, seed, cfg, func(k int) collective.Exchange {
			path := filepath.Join(fields[5], fmt.Sprint(k))
			require.NoError(t, os.MkdirAll(path, 0o700))
			return folder{path, ranks}.seat(rank)
		})
		return
	}
	r, err := fabric.Open(testgpu.Context(t), s, rank, ranks, seat, cfg)
	if fields[1] == "secretive" {
		require.ErrorContains(t, err, "not of a kind that processes share")
		return
	}
	if fields[1] == "spoilt" {
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorContains(t, err, "corrupted data from rank 0")
		require.Zero(t, fabric.Scratches())
		return
	}
	if text, wrong := announcedError[fields[1]]; wrong {
		require.ErrorContains(t, err, "the memory of rank 1: ")
		require.ErrorContains(t, err, text)
		require.Zero(t, fabric.Scratches())
		return
	}
	require.NoError(t, err)
	m := member{r, s}
	x := makeOf[float32](t, s, 1000)
	meet := func() {
		_, err := seat(testgpu.Context(t), nil)
		require.NoError(t, err)
	}
	switch fields[1] {
	case "random", "pushed":
		p := newPlan(seed, m, 20)
		p.run(t, m)
		meet()
	case "uncompiled":
		sums(t, m)
		meet()
	case "die":
		require.NoError(t, fabric.AllReduce(r, s, x, x, collective.Sum, nil))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		meet()
		if rank == 0 {
			os.Exit(0)
		}
		require.NoError(t, fabric.AllReduce(r, s, x, x, collective.Sum, nil))
		done, err := s.Query()
		require.NoError(t, err)
		require.False(t, done, "rank 0 is gone")
		r.Abort()
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.ErrorContains(t, r.Err(), "given up")
	}
	if rank == 0 && (fields[1] == "late" || fields[1] == "gone") {
		require.NoError(t, r.Close())
		require.Equal(t, 1, fabric.Scratches(), "others may still write to it")
		meet()
		require.Eventually(t, func() bool { return fabric.Scratches() == 0 }, time.Minute, time.Millisecond)
		return
	}
	if fields[1] == "late" {
		meet()
	}
	if fields[1] == "gone" {
		meet()
		os.Exit(0)
	}
	require.NoError(t, r.Close())
	if cfg.Pushes {
		require.Eventually(t, func() bool { return fabric.Scratches() == 0 }, time.Minute, time.Millisecond)
	}
	require.Zero(t, fabric.Scratches())
}

// sums has all ranks reduce something by each algorithm.
func sums(t *testing.T, m member) {
	src, dst := makeOf[float32](t, m.s, 4000), makeOf[float32](t, m.s, 4000)
	in, want := make([]float32, 4000), make([]float32, 4000)
	for i := range in {
		for r := range m.Ranks() {
			want[i] += float32(i * (r + 1))
		}
		in[i] = float32(i * (m.Rank.Rank() + 1))
	}
	require.NoError(t, src.CopyFrom(m.s, in))
	for _, a := range fabric.Algorithms {
		require.NoError(t, fabric.AllReduce(m.Rank, m.s, dst, src, collective.Sum, &fabric.AllReduceConfig{Algorithm: a}))
		require.Equal(t, want, fetch(t, m, dst), a)
		require.NoError(t, dst.Zero(m.s))
	}
}

// Ranks of several processes do what those of one do; and where one dies, the others
// can be aborted. If one cannot share its memory, or what it stores in that of others
// does not arrive, all of them know. Ranks without NVRTC have kernels for any number of
// ranks, and the others those for theirs, which go together. Ranks whose context ends while they open leave nothing behind.
func TestProcesses(t *testing.T) {
	for _, task := range []string{"random", "pushed", "late", "gone", "die", "secretive", "spoilt", "uncompiled", "cancelled", "cancelled-pushes"} {
		pushed := slices.Contains([]string{"pushed", "late", "gone", "cancelled-pushes"}, task)
		for _, n := range []int{2, 3} {
			if pushed && n > 2 && env.ShareGPUs.Value() == "yes" {
				continue // more than two ranks on a GPU
			}
			if task == "spoilt" && env.ShareGPUs.Value() == "yes" {
				continue // no data crosses a link
			}
			t.Run(fmt.Sprint(task, "/virtual/", n), func(t *testing.T) { processes(t, "virtual", task, n) })
		}
		for _, n := range []int{2, 4, 8} {
			if task == "spoilt" {
				continue // GPUs do not inject faults
			}
			if pushed && n > 2 && env.ShareGPUs.Value() == "yes" {
				continue
			}
			t.Run(fmt.Sprint(task, "/cuda/", n), func(t *testing.T) {
				testgpu.Ranks(t, n)
				processes(t, "cuda", task, n)
			})
		}
	}
}

func processes(t *testing.T, backend, task string, n int) {
	dir, seed := t.TempDir(), rand.Uint32()
	t.Log("seed ", seed)
	type end struct {
		rank int
		text []byte
		err  error
	}
	ends := make(chan end, n)
	for rank := range n {
		cmd := exec.CommandContext(testgpu.Context(t), os.Args[0], "-test.run=^TestWorker$", "-test.timeout=90s")
		cmd.Env = os.Environ()
		if task == "spoilt" && rank == 0 {
			cmd.Env = append(cmd.Env, env.VirtualFaults.Name+"=zero@cuMemcpyDtoDAsync#1")
		}
		if task == "secretive" && rank == 0 {
			cmd.Env = append(cmd.Env, env.AllocConf.Name+"=backend:cudaMallocAsync")
		}
		if task == "uncompiled" && rank%2 == 0 {
			cmd.Env = append(cmd.Env, env.LibNVRTC.Name+"=/dev/null")
		}
		cmd.Env = append(cmd.Env, fmt.Sprint(workerVar, "=", backend, " ", task, " ", rank, " ", n, " ", seed, " ", dir))
		go func() {
			text, err := cmd.CombinedOutput()
			ends <- end{rank, text, err}
		}()
	}
	for range n {
		e := <-ends
		require.NoError(t, e.err, "rank %d: %s", e.rank, e.text)
		require.NotContains(t, string(e.text), "SKIP")
	}
}
