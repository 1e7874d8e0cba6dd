package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The test binary is the program when this is set.
const asWorker = "GPT_TEST_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(asWorker) != "" {
		main()
		return
	}
	if os.Getenv(env.VirtualKernels.Name) == "" { // the tests of package kernels run the CUDA source
		os.Setenv(env.VirtualKernels.Name, "go")
	}
	testgpu.AllowStalls()
	testgpu.Main(m)
}

//go:embed testdata/reference.json
var referenceJSON []byte

// A reference is what PyTorch recorded on one H200.
type reference struct {
	Names      []string
	Shapes     map[string][]int
	First      map[string][]float32 `json:"init_first4"`
	Losses     []float64
	LossesBF16 []float64 `json:"losses_bf16"`
	GradNorms  []float64 `json:"grad_norms"`
}

func load(t *testing.T) (r reference) {
	t.Helper()
	require.NoError(t, json.Unmarshal(referenceJSON, &r))
	require.Len(t, r.Losses, 60)
	return r
}

// The initial parameters are those that PyTorch draws from the same seed.
func TestInitialParameters(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		p, _, err := newReplicated[memory.BFloat16Bits](s, presets["sums"])
		require.NoError(t, err)
		defer func() { require.NoError(t, p.close()) }()
		require.NoError(t, p.refresh(s))
		want := load(t)
		require.Len(t, p.shapes, len(want.Names))
		for i, x := range p.shapes {
			require.Equal(t, want.Names[i], x.name)
			n := 1
			for _, d := range want.Shapes[x.name] {
				n *= d
			}
			require.Equal(t, n, x.len(), x.name)
			var got [4]float32
			require.NoError(t, p.values[i].Slice(0, 4).CopyTo(s, got[:]))
			require.InDeltaSlice(t, want.First[x.name], got[:], 1e-7, x.name)
			var brief [4]memory.BFloat16Bits
			require.NoError(t, p.copies[i].Slice(0, 4).CopyTo(s, brief[:]))
			for k := range got {
				require.Equal(t, memory.BFloat16Of(got[k]), brief[k], x.name)
			}
		}
	})
}

// The sequences are those of gpt_reference.py.
func TestSequences(t *testing.T) {
	for _, x := range []struct {
		step, i int
		text    string
	}{
		{0, 0, "35+65=100.10+53=063.78+18=096.92+87=179."},
		{7, 31, "42+15=057.59+25=084.53+54=107.94+48=142."},
	} {
		var tokens [40]int32
		sums(nil)(tokens[:], 32*x.step+x.i)
		text := ""
		for _, c := range tokens {
			text += vocabulary[c : c+1]
		}
		require.Equal(t, x.text, text)
	}
}

// A variant is a number of ranks, and flags.
type variant struct {
	ranks       int
	graph, bf16 bool
	accum       int
}

// someVariants have each number of ranks and each value of a flag; the parts of a batch of three
// ranks, and of three micro-batches, differ in size.
var someVariants = []variant{
	{ranks: 1, graph: true, accum: 1},
	{ranks: 2, accum: 1},
	{ranks: 3, graph: true, accum: 3},
	{ranks: 4, graph: true, accum: 1},
	{ranks: 1, graph: true, bf16: true, accum: 3},
	{ranks: 3, bf16: true, accum: 1},
}

func allVariants() (all []variant) {
	for ranks := 1; ranks <= 4; ranks++ {
		for _, accum := range []int{1, 3, 8} {
			for flags := range 4 {
				all = append(all, variant{ranks, flags&1 == 0, flags&2 != 0, accum})
			}
		}
	}
	return all
}

// Losses and norms are those of PyTorch. Virtual devices do all variants, and 60 steps of each,
// with -thorough.
func TestLosses(t *testing.T) {
	virtual := someVariants
	if testgpu.Rounds(0, 1) == 1 {
		virtual = allVariants()
	}
	for _, v := range virtual {
		t.Run(fmt.Sprintf("virtual/%+v", v), func(t *testing.T) {
			steps := 5
			if testhost.On { // the third step depends on everything that a step does
				steps = 3
			}
			v.check(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: v.ranks}), testgpu.Rounds(steps, 60))
		})
	}
	for _, v := range allVariants() {
		t.Run(fmt.Sprintf("cuda/%+v", v), func(t *testing.T) { v.check(t, testgpu.CUDA(t, v.ranks), 60) })
	}
}

func (v variant) check(t *testing.T, devs []*device.Device, steps int) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	g, err := comm.Local(ctx, devs, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Close()) }()
	cfg := &config{steps: steps, accum: v.accum, graph: v.graph, bf16: v.bf16}
	res, err := trainGroup(ctx, g, cfg)
	require.NoError(t, err)
	check(t, res, cfg)
	require.Equal(t, v.ranks, res.Ranks)
	require.Equal(t, devs[0].System().Backend(), res.Backend)
}

// check compares with PyTorch. Rounding errors grow from step to step, so the first steps
// must agree better.
func check(t *testing.T, got *result, cfg *config) {
	t.Helper()
	want := load(t)
	require.Len(t, got.Losses, cfg.steps)
	require.Len(t, got.GradNorms, cfg.steps)
	losses, early, late := want.Losses, 1e-5, 1e-3
	if cfg.bf16 {
		losses, early, late = want.LossesBF16, 5e-4, 1e-2
	}
	worst, norms := compare(t, "loss", got.Losses, losses, early, late), 0.
	if !cfg.bf16 { // norms were recorded in float32
		norms = compare(t, "gradient norm", got.GradNorms, want.GradNorms, early, late)
	}
	t.Logf("largest relative differences: losses %.1e, norms %.1e; %.3g ms a step", worst, norms, 1000*got.StepSeconds)
}

func compare(t *testing.T, what string, got []float32, want []float64, early, late float64) (worst float64) {
	t.Helper()
	for s, x := range got {
		bound := early
		if s >= 10 {
			bound = late
		}
		e := math.Abs(float64(x)-want[s]) / want[s]
		require.Less(t, e, bound, "%s of step %d: %v: want %v", what, s, x, want[s])
		worst = max(worst, e)
	}
	return worst
}

// The same with a process for each rank, and the file of the results. On CUDA four ranks
// share the GPUs.
func TestProcesses(t *testing.T) {
	for _, x := range []struct {
		backend string
		flags   []string
	}{{"virtual", nil}, {"virtual", []string{"-fsdp", "-timeline=" + t.TempDir()}}, {"cuda", nil}} {
		backend := x.backend
		t.Run(fmt.Sprint(backend, len(x.flags)), func(t *testing.T) {
			ranks, cfg := 3, &config{steps: 4}
			vars := []string{asWorker + "=1", "CHORUS_BACKEND=" + backend}
			if backend == "cuda" {
				testgpu.CUDA(t, 1)
				ranks, cfg.steps = 4, 60
				vars = append(vars, "CHORUS_SHARE_GPUS=yes")
			}
			file := filepath.Join(t.TempDir(), "result.json")
			self, err := os.Executable()
			require.NoError(t, err)
			var out bytes.Buffer
			code := launch.Run(testgpu.Context(t), &launch.Config{
				Program: append([]string{self, "-steps", fmt.Sprint(cfg.steps), "-accum", "2", "-json", file}, x.flags...),
				Procs:   ranks,
				Devices: launch.Devices{Count: ranks, Backend: backend, Env: vars},
				Stdout:  &out,
				Stderr:  &out,
			})
			require.Zero(t, code, out.String())
			if backend == "virtual" {
				require.Contains(t, out.String(), "[rank 0] step 4 of 4: loss 2.3145, gradient norm 1.2658")
			}
			require.Contains(t, out.String(), fmt.Sprintf("[rank 0] ranks %d, backend %s", ranks, backend))
			b, err := os.ReadFile(file)
			require.NoError(t, err)
			got := new(result)
			require.NoError(t, json.Unmarshal(b, got))
			check(t, got, cfg)
			require.Equal(t, ranks, got.Ranks)
			require.Equal(t, backend, got.Backend)
			require.Positive(t, got.Seconds)
			for _, flag := range x.flags {
				if folder, ok := strings.CutPrefix(flag, "-timeline="); ok {
					files, err := os.ReadDir(folder)
					require.NoError(t, err)
					require.Len(t, files, ranks, "timelines")
				}
			}
		})
	}
}

// A batch that cannot be divided is an error.
func TestTooManyMicroBatches(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Close()) }()
	_, err = trainGroup(testgpu.Context(t), g, &config{steps: 1, accum: 11})
	require.ErrorContains(t, err, "3 ranks have 10 sequences each, or one more")
}
