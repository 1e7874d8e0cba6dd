// Sharded trains the classifier of the ddp example with optimizer state that is
// sharded over the ranks. A ddp.Sharder reduces the gradients to the rank that
// owns them. That rank updates its parameters, and an all-gather distributes
// them. The program uses all devices in one process, or one device in each
// process of a job.
//
//	bin/sharded
//	chorus run --nproc-per-node 4 -- bin/sharded -ckpt run -every 6
//	bin/sharded -ckpt run -resume
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os/signal"
	"syscall"
	"time"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A config holds the flags.
type config struct {
	json, ckpt string
	every      int
	resume     bool
}

func main() {
	log.SetFlags(0)
	log.SetPrefix("sharded: ")
	var cfg config
	flag.StringVar(&cfg.json, "json", "", "`file` for the results in JSON")
	flag.StringVar(&cfg.ckpt, "ckpt", "", "`folder` for checkpoints; the last step is saved")
	flag.IntVar(&cfg.every, "every", 0, "`number` of steps from one checkpoint to the next; 0 means that only the last step is saved")
	flag.BoolVar(&cfg.resume, "resume", false, "continues after the newest complete checkpoint in -ckpt, or starts if there is no checkpoint")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &cfg); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, cfg *config) error {
	begun := time.Now()
	g, err := comm.Init(ctx, &comm.InitConfig{AllDevices: true, Fallback: func(note string) { log.Print(note) }})
	if err != nil {
		return err
	}
	defer g.Close()
	res, err := train(ctx, g, cfg)
	if err != nil {
		return err
	}
	// Shut down together, so that no rank reports another one as lost.
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	res.Seconds = time.Since(begun).Seconds()
	if g.Rank() != 0 {
		return nil
	}
	fmt.Println(res)
	fmt.Printf("each rank has %d of %d bytes of momenta\n", res.StateBytes, res.ModelBytes)
	return res.Write(cfg.json)
}

// checkpoints saves and resumes a training.
type checkpoints struct {
	cfg      *config
	sh       *ddp.Sharder[float32]
	replicas []replica
	streams  []*stream.Stream // of the models
	saver    *checkpoint.Saver
}

// parts returns the state of the local ranks. All ranks have all parameters, and each rank has the
// momenta of its shard. The names and shapes do not depend on the number of ranks, so any number
// of ranks can load the state.
func (c *checkpoints) parts() ([][]checkpoint.Part, error) {
	all := make([][]checkpoint.Part, len(c.replicas))
	for i, r := range c.replicas {
		add := func(p checkpoint.Part, x memory.Slice[float32]) (err error) {
			p.Data, err = tensor.Of(x, x.Len())
			all[i] = append(all[i], p)
			return err
		}
		for j, x := range c.sh.Params(i) {
			if err := add(checkpoint.Part{Name: fmt.Sprintf("param.%d", j)}, x); err != nil {
				return nil, err
			}
		}
		for _, p := range c.sh.Pieces(i) {
			run := checkpoint.Part{Name: fmt.Sprintf("momentum.%d", p.Param), Shape: []int{training.ParamLens[p.Param]}, Start: p.Start, Flat: true}
			if err := add(run, r.momenta.Slice(p.At, p.At+p.Len)); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// open resumes a training and prepares checkpoints, if the flags say so. It returns the step to
// begin with.
func (c *checkpoints) open(ctx context.Context, g *comm.Group) (first int, err error) {
	if c.cfg.ckpt == "" {
		if c.cfg.resume || c.cfg.every != 0 {
			return 0, errors.New("-resume and -every need -ckpt")
		}
		return 0, nil
	}
	parts, err := c.parts()
	if err == nil && c.cfg.resume {
		first, err = c.resume(ctx, g, parts)
	}
	if err != nil {
		return 0, err
	}
	c.saver, err = checkpoint.NewSaver(ctx, g, c.cfg.ckpt, parts, &checkpoint.SaverConfig{KeepLast: 2})
	return first, err
}

// resume restores the newest checkpoint and returns its step. If the folder has no checkpoint, it
// returns 0.
func (c *checkpoints) resume(ctx context.Context, g *comm.Group, parts [][]checkpoint.Part) (int, error) {
	x := &training.Resume{Folder: c.cfg.ckpt, Steps: training.Epochs * training.Steps, Print: log.Printf, Restore: func(saved *checkpoint.Saved) error {
		for i, s := range c.streams { // the initial values are on these streams
			if err := g.Stream(i).WaitStream(s); err != nil {
				return err
			}
		}
		_, err := saved.Restore(ctx, g, parts, nil)
		return err
	}}
	return x.Run(ctx, g)
}

// save saves the state after a number of steps, if the flags say so. Training goes on meanwhile.
// The streams wait for the parameters first, because an all-gather is writing to them.
func (c *checkpoints) save(ctx context.Context, steps int) error {
	if c.saver == nil || steps != training.Epochs*training.Steps && (c.cfg.every == 0 || steps%c.cfg.every != 0) {
		return nil
	}
	for _, s := range c.streams {
		for i := range training.ParamLens {
			if err := c.sh.WaitOn(s, i); err != nil {
				return err
			}
		}
	}
	return c.saver.Save(ctx, int64(steps), c.streams)
}

// A replica is the state of one local rank.
type replica struct {
	model   *training.Model
	parts   []ddp.Part[float32]   // this rank's shard
	momenta memory.Slice[float32] // of the shard only
}

func train(ctx context.Context, g *comm.Group, cfg *config) (res *training.Result, err error) {
	// Gradients are weighted by the rows of each rank, so they are summed. The small first
	// bucket overlaps the reduction of the last layer with the backward pass of the first one.
	sh, err := ddp.NewSharder[float32](g, training.ParamLens, &ddp.ShardConfig{FirstBucketBytes: 6 << 10, Op: new(comm.Sum)})
	if err != nil {
		return nil, err
	}
	defer sh.Close()
	t := training.Trainer{Group: g, Need: sh.WaitOn, Ready: sh.Ready}
	var replicas []replica
	for i := range g.Locals() {
		r, err := newReplica(g, sh, i)
		defer r.close()
		if err != nil {
			return nil, err
		}
		replicas = append(replicas, r)
		t.Models = append(t.Models, r.model)
	}
	c := &checkpoints{cfg: cfg, sh: sh, replicas: replicas, streams: t.Streams()}
	if t.First, err = c.open(ctx, g); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.saver.Close()) }()
	t.Save = c.save
	if err := sh.AllGather(t.Streams()...); err != nil { // start with the parameters of all shards
		return nil, err
	}
	t.Update = func() error {
		if err := sh.Finish(t.Streams()...); err != nil {
			return err
		}
		for _, r := range replicas {
			if err := r.update(); err != nil {
				return err
			}
		}
		return sh.AllGather(t.Streams()...)
	}
	if res, err = t.Run(ctx); err != nil {
		return nil, err
	}
	res.StateBytes, res.ModelBytes = replicas[0].momenta.Bytes(), sh.Flat(0).Bytes()
	return res, nil
}

func newReplica(g *comm.Group, sh *ddp.Sharder[float32], local int) (r replica, err error) {
	if r.model, err = training.NewModel(g.Device(local)); err != nil {
		return r, err
	}
	if r.momenta, err = memory.Make[float32](r.model.Stream, sh.Len()); err != nil {
		return r, err
	}
	if err := r.momenta.Zero(r.model.Stream); err != nil {
		return r, err
	}
	r.parts, r.model.Params, r.model.Grads = sh.Parts(local), sh.Params(local), sh.Grads(local)
	for i := range r.model.Params {
		if err := sh.WaitOn(r.model.Stream, i); err != nil {
			return r, err
		}
	}
	return r, r.model.Init()
}

// update updates the parameters of the shard.
func (r *replica) update() error {
	for _, p := range r.parts {
		if err := r.model.SGD(p.Param, r.momenta.Slice(p.At, p.At+p.Param.Len()), p.Grad); err != nil {
			return err
		}
	}
	return nil
}

func (r *replica) close() {
	_ = r.momenta.Close()
	_ = r.model.Close()
}
