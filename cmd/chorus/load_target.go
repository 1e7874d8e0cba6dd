package main

import (
	"context"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/stream"
)

// A loadTarget is where the checkpoint goes: a group, or one device alone, which needs
// no NCCL.
type loadTarget struct {
	group  *comm.Group
	stream *stream.Stream
	ranks  int
}

func (l *loading) target(ctx context.Context, sess *cluster.Session, devs []*device.Device) (*loadTarget, error) {
	if sess.Size() == 1 && len(devs) == 1 {
		s, err := stream.New(devs[0], nil)
		return &loadTarget{stream: s, ranks: 1}, err
	}
	g, err := joinRanks(ctx, sess, devs, nil)
	if err != nil {
		return nil, err
	}
	return &loadTarget{group: g, ranks: g.Size()}, nil
}

func (t *loadTarget) close() {
	if t.group != nil {
		t.group.Close() // it has said before what went wrong
		return
	}
	t.stream.Close()
}

func (t *loadTarget) leave(ctx context.Context) error {
	if t.group != nil {
		return t.group.Shutdown(ctx)
	}
	return nil
}

func (t *loadTarget) load(ctx context.Context, c *gds.Checkpoint, cfg *gds.LoadConfig) ([]*gds.Weights, error) {
	if t.group != nil {
		return c.Load(ctx, t.group, cfg)
	}
	w, err := c.LoadOn(ctx, t.stream, cfg)
	return []*gds.Weights{w}, err
}
