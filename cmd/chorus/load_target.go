package main

import (
	"context"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/stream"
)

// A loadTarget is the destination of a load: a group, or a single device, so that
// one GPU does not need NCCL.
type loadTarget struct {
	group  *comm.Group
	stream *stream.Stream
	ranks  int
}

func (m *member) loadTarget(ctx context.Context) (*loadTarget, error) {
	if m.Size() == 1 && len(m.devs) == 1 {
		s, err := stream.New(m.devs[0], nil)
		return &loadTarget{stream: s, ranks: 1}, err
	}
	g, err := m.group(ctx, nil)
	if err != nil {
		return nil, err
	}
	return &loadTarget{group: g, ranks: g.Size()}, nil
}

func (t *loadTarget) close() {
	if t.group != nil {
		t.group.Close() // load or leave has returned the error
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

func (t *loadTarget) load(ctx context.Context, c *checkpoint.Checkpoint, cfg *checkpoint.LoadConfig) ([]*checkpoint.Weights, error) {
	if t.group != nil {
		return c.Load(ctx, t.group, cfg)
	}
	w, err := c.LoadOn(ctx, t.stream, cfg)
	return []*checkpoint.Weights{w}, err
}
