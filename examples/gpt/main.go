// Gpt trains a small GPT that learns to add two numbers, or GPT-2 with 124 million parameters. It shows
// a complete training run. Several ranks reduce gradients during the backward pass, or shard parameters,
// gradients and the optimiser's state, with gradient accumulation and gradient clipping.
// Activations may be bfloat16, with float32 parameters. AdamW has a warmup of the learning rate, and
// one CUDA graph has a whole step. PyTorch's run of the same model has the same losses. The program
// uses all devices in one process, or one device in each process of a job.
//
//	bin/gpt -steps 1500
//	bin/gpt -model gpt2 -bf16 -data tokens.bin -steps 200
//	chorus run --nproc-per-node 4 -- bin/gpt -model gpt2 -bf16 -micro 8 -fsdp
//	chorus run --nproc-per-node 4 -- bin/gpt -bf16 -accum 2
//	bin/gpt -steps 1500 -ckpt run -every 100 -resume
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/timeline"
)

// A config holds the flags.
type config struct {
	steps, accum int
	graph, bf16  bool
	json         string

	model, data  string
	batch, micro int // sequences; 0 means the model's, or those of accum
	fsdp         bool
	timeline     string // folder

	ckpt   string // folder of checkpoints
	every  int    // steps
	resume bool
}

func main() {
	var cfg config
	flag.IntVar(&cfg.steps, "steps", 60, "`number` of steps")
	flag.BoolVar(&cfg.graph, "graph", true, "captures a step into a CUDA graph")
	flag.BoolVar(&cfg.bf16, "bf16", false, "computes matrix products in bfloat16, as torch.autocast does")
	flag.IntVar(&cfg.accum, "accum", 1, "`number` of micro-batches that a rank's part of a batch is split into")
	flag.StringVar(&cfg.model, "model", "sums", "`name` of the model: sums, which learns to add two numbers, or gpt2, with 124 million parameters")
	flag.StringVar(&cfg.data, "data", "", "`file` of tokens, as little-endian numbers of 16 bits without a header; without it, sums has lines of sums, and gpt2 a Markov chain that is the same in each run")
	flag.IntVar(&cfg.batch, "batch", 0, "`number` of sequences of a step, over all ranks; 0 means the model's, which is 32")
	flag.IntVar(&cfg.micro, "micro", 0, "largest `number` of sequences of a micro-batch, instead of -accum; 0 means that -accum says it")
	flag.BoolVar(&cfg.fsdp, "fsdp", false, "shards parameters, gradients and the optimiser's state over the ranks, as torch's fully_shard does")
	flag.StringVar(&cfg.timeline, "timeline", "", "`folder` for a timeline of the run, as CHORUS_TIMELINE records it")
	flag.StringVar(&cfg.json, "json", "", "`file` for the results in JSON")
	flag.StringVar(&cfg.ckpt, "ckpt", "", "`folder` for checkpoints; the last step is saved")
	flag.IntVar(&cfg.every, "every", 0, "`number` of steps from one checkpoint to the next; 0 means that only the last step is saved")
	flag.BoolVar(&cfg.resume, "resume", false, "continues after the newest complete checkpoint in -ckpt, or starts if there is no checkpoint")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &cfg); err != nil {
		fmt.Fprintln(os.Stderr, "gpt:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, cfg *config) (err error) {
	begun := time.Now()
	if cfg.timeline != "" {
		recording, fault := timeline.Start(cfg.timeline)
		if fault != nil {
			return fault
		}
		defer func() { err = errors.Join(err, recording.Close()) }()
	}
	g, err := comm.Init(ctx, &comm.InitConfig{AllDevices: true, Fallback: func(note string) { fmt.Fprintln(os.Stderr, "gpt:", note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	rank := g.Rank()
	res, err := trainGroup(ctx, g, cfg)
	if err != nil {
		return err
	}
	if err := g.Shutdown(ctx); err != nil { // leaves the job together with the other processes
		return err
	}
	res.Seconds = time.Since(begun).Seconds()
	if rank != 0 {
		return nil
	}
	fmt.Println(res)
	return res.write(cfg.json)
}

// trainGroup trains in the type of the flags.
func trainGroup(ctx context.Context, g *comm.Group, cfg *config) (*result, error) {
	if cfg.bf16 {
		return train[memory.BFloat16Bits](ctx, g, cfg)
	}
	return train[float32](ctx, g, cfg)
}

// A result holds the results of a run.
type result struct {
	First       int       `json:"first"`      // the step that the losses begin with
	Losses      []float32 `json:"losses"`     // of each step, over all ranks
	GradNorms   []float32 `json:"grad_norms"` // of each step, before clipping
	Ranks       int       `json:"ranks"`
	Backend     string    `json:"backend"`
	Seconds     float64   `json:"seconds"`      // from the start of the program
	StepSeconds float64   `json:"step_seconds"` // mean of all steps after the first

	MedianSeconds   float64 `json:"median_seconds"`    // of a step: the median of the averages between two reports
	TokensPerSecond float64 `json:"tokens_per_second"` // of all ranks, in the median step
	PeakBytes       int64   `json:"peak_bytes"`        // of a local device's memory, after the first step
}

// String returns a summary in one line. A run that was complete already has no losses.
func (r *result) String() string {
	n := len(r.Losses)
	if n == 0 {
		return fmt.Sprintf("ranks %d, backend %s, steps 0, %.1f s", r.Ranks, r.Backend, r.Seconds)
	}
	return fmt.Sprintf("ranks %d, backend %s, steps %d, loss %.4f -> %.4f, %.3g ms a step, %.0f tokens/s, %.3g GB, %.1f s", r.Ranks, r.Backend, n,
		r.Losses[0], r.Losses[n-1], 1000*r.MedianSeconds, r.TokensPerSecond, float64(r.PeakBytes)/1e9, r.Seconds)
}

// write writes the result to a file in JSON, or nothing if file is empty.
func (r *result) write(file string) error {
	if file == "" {
		return nil
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}
