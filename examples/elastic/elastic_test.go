package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The test binary is the program when this is set.
const asWorker = "ELASTIC_TEST_WORKER"

func TestMain(m *testing.M) {
	if host := os.Getenv(asLauncher); host != "" {
		os.Exit(launcher(host))
	}
	if file := os.Getenv(untilVar); file != "" {
		os.Exit(workUntil(file))
	}
	if slow := os.Getenv(beatVar); slow != "" {
		os.Exit(beat(slow))
	}
	if os.Getenv(asWorker) != "" {
		main()
		return
	}
	testgpu.Main(m)
}

var (
	goesOn = regexp.MustCompile(`epoch (\d+): rank (\d+) of (\d+), pid (\d+), goes on at step (\d+)`)
	stepOf = regexp.MustCompile(`step (\d+) of \d+: loss`)
	sumOf  = regexp.MustCompile(`rank (\d+) has parameters ([0-9a-f]{8})`)
)

// A killer reads the output of a job and kills workers. After each epoch of the job has
// begun, it kills one worker, or more, at the next report of a loss.
type killer struct {
	t     *testing.T
	rand  *rand.Rand
	kills []int // how many workers to kill at a time

	mu     sync.Mutex
	text   bytes.Buffer
	line   string
	epoch  int
	pids   map[int]int // of the epoch, by rank
	size   int
	killed []int
}

func (k *killer) Write(b []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.text.Write(b)
	k.line += string(b)
	for {
		line, rest, ok := strings.Cut(k.line, "\n")
		if !ok {
			return len(b), nil
		}
		k.line = rest
		k.read(line)
	}
}

func (k *killer) read(line string) {
	if m := goesOn.FindStringSubmatch(line); m != nil {
		n := numbers(m[1:])
		if n[0] != k.epoch {
			k.epoch, k.size, k.pids = n[0], n[2], map[int]int{}
		}
		k.pids[n[1]] = n[3]
		return
	}
	if !stepOf.MatchString(line) || len(k.pids) < k.size || k.size < 2 || len(k.kills) == 0 {
		return // also if the others have not been started again yet
	}
	ranks := k.rand.Perm(k.size)[:min(k.kills[0], k.size-1)]
	k.kills, k.size = k.kills[1:], k.size+1 // the next loss is of another epoch
	for _, r := range ranks {
		k.killed = append(k.killed, k.pids[r])
		if err := syscall.Kill(k.pids[r], syscall.SIGKILL); err != nil {
			k.t.Errorf("kill rank %d, pid %d: %v", r, k.pids[r], err)
		}
	}
}

func numbers(texts []string) []int {
	var out []int
	for _, s := range texts {
		n, _ := strconv.Atoi(s)
		out = append(out, n)
	}
	return out
}

// Workers are killed during the training. At the end all ranks have the same parameters, each
// row of the data was used once in each pass, the losses are those of a run without
// failures, and no other process has ended.
func TestTrainingSurvives(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	k := &killer{t: t, rand: rand.New(rand.NewPCG(seed, 1)), kills: []int{1, 2, 1}}
	file := filepath.Join(t.TempDir(), "result.json")
	self, err := os.Executable()
	require.NoError(t, err)
	code := launch.Run(testgpu.Context(t), &launch.Config{
		Program: []string{self, "-json", file, "-pause", "10ms"},
		Procs:   4,
		Devices: launch.Devices{Count: 4, Backend: "virtual", Env: []string{asWorker + "=1", "CHORUS_BACKEND=virtual"}},
		Cluster: job.Config{Job: "survives", MaxRestarts: 3, Timing: cluster.Timing{Backoff: 10 * time.Millisecond, LostAfter: 20 * time.Second}}, // no process is silent
		Stdout:  k,
		Stderr:  k,
	})
	text := k.text.String()
	require.Zero(t, code, text)
	require.Empty(t, k.kills, text)
	require.GreaterOrEqual(t, len(k.killed), 3, text)
	checkSums(t, text, k)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	var res result
	require.NoError(t, json.Unmarshal(b, &res))
	require.Equal(t, slices.Repeat([]int32{training.Epochs}, training.BatchRows*training.Steps), res.Used)
	want, err := training.Reference()
	require.NoError(t, err)
	require.Len(t, res.Losses, len(want))
	for i, w := range want {
		require.InEpsilon(t, w, res.Losses[i], 0.02, "loss of step %d", i)
	}
	require.GreaterOrEqual(t, res.TestAccuracy, 0.88)
}

// checkSums compares the parameters of all ranks, and the processes at the end with those
// that were started and not killed.
func checkSums(t *testing.T, text string, k *killer) {
	t.Helper()
	sums := map[string]int{}
	for _, m := range sumOf.FindAllStringSubmatch(text, -1) {
		sums[m[2]]++
	}
	require.Len(t, sums, 1, text)
	final := map[int]bool{}
	for _, pid := range k.pids {
		final[pid] = true
	}
	for s, n := range sums {
		require.Len(t, final, n, "ranks with parameters %s: %s", s, text)
	}
	for _, m := range goesOn.FindAllStringSubmatch(text, -1) {
		pid := numbers(m[1:])[3]
		require.True(t, final[pid] || slices.Contains(k.killed, pid), "pid %d has ended: %s", pid, text)
	}
	require.Contains(t, text, "chorus: job survives: epoch 2: ")
	require.Equal(t, k.epoch, 1+strings.Count(text, "chorus: job survives: epoch "), fmt.Sprint(k.killed))
}
