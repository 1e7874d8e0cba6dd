package perf

import (
	"context"
	"errors"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// A replay is a graph with all iterations of a plan, of one rank or of all local ranks.
type replay struct {
	rank *rank
	exec *graph.Exec
	all  bool
}

// capture captures the calls of the rank, or of all local ranks if p.together is set.
func (r *rank) capture(ctx context.Context, p *Plan, calls []func() error) (*replay, error) {
	iterate := func(issue func(k int) error) func() error {
		return func() error {
			for i := range p.Iterations {
				if err := issue(i % len(calls)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	x := &replay{rank: r, all: p.together}
	if !x.all {
		var err error
		x.exec, err = graph.Capture([]*stream.Stream{r.s}, iterate(func(k int) error { return calls[k]() }), nil)
		return x, err
	}
	err := r.onFirst(ctx, func() (err error) {
		x.exec, err = graph.Capture(r.group.Streams(), iterate(r.issueAll), nil)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, x.close())
	}
	return x, nil
}

// launch launches the graph on the stream of the rank, or on the streams of all local ranks.
func (x *replay) launch(ctx context.Context) error {
	s := x.rank.s
	if !x.all {
		return x.exec.Launch(s)
	}
	return x.rank.onFirst(ctx, func() error {
		all := x.rank.group.Streams()
		if err := gpu.Join(s, all); err != nil {
			return err
		}
		if err := x.exec.Launch(s); err != nil {
			return err
		}
		return gpu.Fork(s, all)
	})
}

func (x *replay) close() error { return x.exec.Close() } // only the first rank has the graph of all local ranks
