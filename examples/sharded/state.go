package main

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/examples/digits"
	"github.com/gochorus/chorus/examples/internal/resume"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

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
			run := checkpoint.Part{Name: fmt.Sprintf("momentum.%d", p.Param), Shape: []int{digits.ParamLens[p.Param]}, Start: p.Start, Flat: true}
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
	x := &resume.Training{Folder: c.cfg.ckpt, Steps: digits.Epochs * digits.Steps, Print: log.Printf, Restore: func(saved *checkpoint.Saved) error {
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
	if c.saver == nil || steps != digits.Epochs*digits.Steps && (c.cfg.every == 0 || steps%c.cfg.every != 0) {
		return nil
	}
	for _, s := range c.streams {
		for i := range digits.ParamLens {
			if err := c.sh.WaitOn(s, i); err != nil {
				return err
			}
		}
	}
	return c.saver.Save(ctx, int64(steps), c.streams)
}
