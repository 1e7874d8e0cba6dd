package main

import (
	"context"
	"errors"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/examples/digits"
	"github.com/gochorus/chorus/memory"
)

// A replica is the state of one local rank.
type replica struct {
	model   *digits.Model
	parts   []ddp.Part[float32]   // this rank's shard
	momenta memory.Slice[float32] // of the shard only
}

func train(ctx context.Context, g *comm.Group, cfg *config) (res *digits.Result, err error) {
	// Gradients are weighted by the rows of each rank, so they are summed. The small first
	// bucket overlaps the reduction of the last layer with the backward pass of the first one.
	sh, err := ddp.NewSharder[float32](g, digits.ParamLens, &ddp.ShardConfig{FirstBucketBytes: 6 << 10, Op: new(comm.Sum)})
	if err != nil {
		return nil, err
	}
	defer sh.Close()
	t := digits.Trainer{Group: g, Need: sh.WaitOn, Ready: sh.Ready}
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
	if r.model, err = digits.NewModel(g.Device(local)); err != nil {
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
