package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// Sharded parameters give the losses and norms of whole ones, on any number of ranks, in a graph
// or not, and with micro-batches.
func TestSharded(t *testing.T) {
	for _, x := range []struct {
		model string
		bf16  bool
		ranks []int
	}{{"tiny", false, []int{1, 2, 3, 4}}, {"tiny", true, []int{2, 3}}, {"sums", false, []int{3}}} {
		t.Run(fmt.Sprintf("%s/bf16=%v", x.model, x.bf16), func(t *testing.T) {
			testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
				cfg := config{steps: 3, accum: 1, bf16: x.bf16, model: x.model}
				want := trainOn(t, devs[:1], cfg)
				cfg.fsdp = true
				for _, ranks := range x.ranks {
					cfg.graph, cfg.micro = ranks%2 == 0, ranks%3
					same(t, want, trainOn(t, devs[:ranks], cfg), x.bf16)
				}
			})
		})
	}
}

// same compares the losses and norms of steps.
func same(t *testing.T, want, got *result, bf16 bool) {
	t.Helper()
	bound := 1e-5
	if bf16 {
		bound = 5e-3
	}
	worst := 0.
	for i, loss := range got.Losses {
		at := got.First - want.First + i
		require.InEpsilon(t, want.Losses[at], loss, bound/10, "loss of step %d on %d ranks", at, got.Ranks)
		require.InEpsilon(t, want.GradNorms[at], got.GradNorms[i], 10*bound, "norm of step %d on %d ranks", at, got.Ranks)
		worst = max(worst, abs(float64(want.Losses[at]-loss)/float64(loss)))
	}
	t.Logf("%d ranks: largest relative difference of losses %.1e", got.Ranks, worst)
}

func abs(x float64) float64 { return max(x, -x) }

// A training with sharded parameters continues on another number of ranks, and with whole ones.
func TestShardedResume(t *testing.T) {
	testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
		cfg := config{steps: 4, accum: 1, model: "tiny"}
		want := trainOn(t, devs[:1], cfg)
		cfg.ckpt, cfg.resume = filepath.Join(t.TempDir(), "run"), true
		for i, x := range []struct {
			ranks int
			fsdp  bool
		}{{4, true}, {2, true}, {1, false}, {3, true}} {
			cfg.steps, cfg.fsdp = i+1, x.fsdp
			got := trainOn(t, devs[:x.ranks], cfg)
			require.Equal(t, i, got.First)
			require.Len(t, got.Losses, 1)
			same(t, want, got, false)
		}
	})
}

// A file of tokens is read in turn, and errors name the place.
func TestData(t *testing.T) {
	of := *presets["tiny"]
	dir := t.TempDir()
	write := func(name string, tokens ...int) string {
		var b []byte
		for _, x := range tokens {
			b = binary.LittleEndian.AppendUint16(b, uint16(x))
		}
		file := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(file, b, 0o600))
		return file
	}
	var tokens []int
	for i := range 3*of.Context + 5 {
		tokens = append(tokens, i%of.Vocab)
	}
	text, err := of.readText(write("good", tokens...))
	require.NoError(t, err)
	usable := len(tokens) - of.Context
	for i := range 7 {
		got := make([]int32, of.Line())
		text(got, i)
		for k, x := range got {
			require.EqualValues(t, tokens[i*of.Context%usable+k], x, "sequence %d", i)
		}
	}
	tokens[70] = of.Vocab
	_, err = of.readText(write("token", tokens...))
	require.EqualError(t, err, "data "+filepath.Join(dir, "token")+": token 300 at byte 140: want less than 300, the size of the vocabulary")
	_, err = of.readText(write("short", tokens[:of.Context]...))
	require.ErrorContains(t, err, "128 bytes: want tokens of 2 bytes, at least 65")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "odd"), make([]byte, 501), 0o600))
	_, err = of.readText(filepath.Join(dir, "odd"))
	require.ErrorContains(t, err, "501 bytes")

	// Through the program: with a file the losses are others, and throughput is reported.
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	cfg := config{steps: 2, accum: 1, model: "tiny", batch: 2, micro: 1}
	without := trainOn(t, devs, cfg)
	cfg.data = filepath.Join(dir, "good")
	with := trainOn(t, devs, cfg)
	require.NotEqual(t, without.Losses, with.Losses)
	require.InEpsilon(t, 2*64/with.MedianSeconds, with.TokensPerSecond, 1e-9)
	require.Positive(t, with.PeakBytes)
}

func TestUnknownModel(t *testing.T) {
	_, err := presetOf("gpt3")
	require.EqualError(t, err, `model "gpt3": want one of gpt2, sums, tiny`)
}

// The parameters of gpt2 are those of GPT-2 without biases: 124 million.
func TestGPT2(t *testing.T) {
	of, n, decayed := presets["gpt2"], 0, 0
	for _, x := range of.shapes() {
		n += x.len()
		if x.in > 0 {
			decayed += x.len()
		}
	}
	require.Equal(t, 50304*768+1024*768+12*(12*768*768+4*768)+2*768, n)
	require.Equal(t, n-25*2*768, decayed)
	seen := map[int]bool{}
	for _, members := range of.units() {
		for _, i := range members {
			require.False(t, seen[i])
			seen[i] = true
		}
	}
	require.Len(t, seen, len(of.shapes()))
}
