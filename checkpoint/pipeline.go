package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/stream"
)

// A pipeline takes the local ranks through the phases, each at its own pace, up to the
// last open phase. While the last bytes of a round arrive, the first bytes of the next one
// are under way.
type pipeline struct {
	m      *executor
	move   moving
	phases []*phase // the direct transfers, and then the rounds
	ctx    context.Context
	stop   context.CancelCauseFunc
	ranks  sync.WaitGroup // that are not done
}

// moving is files.File.Read or Write.
type moving func(f files.File, ctx context.Context, s *stream.Stream, pieces []files.Piece, h files.Hooks) error

// A phase has the transfers of the local ranks between files and memory that need no other
// rank.
type phase struct {
	reads func(rank int) reads
	buf   int
	open  chan struct{}  // closed when it may begin
	left  sync.WaitGroup // ranks that have more to begin, and files that are under way
}

// errOther ends a rank after another one has failed. It is not reported.
var errOther = errors.New("another rank has failed")

// start lets the local ranks begin the direct transfers.
func (m *executor) start(ctx context.Context, move moving) *pipeline {
	c := &pipeline{m: m, move: move}
	c.ctx, c.stop = context.WithCancelCause(ctx)
	c.add(0, func(rank int) reads { return m.plan.direct[rank] })
	for i, r := range m.plan.rounds {
		c.add(i%2, func(rank int) reads { return r.ranks[rank].reads })
	}
	for _, d := range m.locals {
		c.ranks.Go(func() { c.run(d) })
	}
	c.open(0)
	return c
}

func (c *pipeline) add(buf int, list func(rank int) reads) {
	s := &phase{reads: list, buf: buf, open: make(chan struct{})}
	s.left.Add(len(c.m.locals))
	c.phases = append(c.phases, s)
}

// open lets a phase begin, if there is one.
func (c *pipeline) open(i int) {
	if i < len(c.phases) {
		close(c.phases[i].open)
	}
}

// await waits until the transfers of a phase have ended.
func (c *pipeline) await(i int) { c.phases[i].left.Wait() }

// end stops the local ranks that are not done, and waits for all.
func (c *pipeline) end() {
	c.stop(errOther)
	c.ranks.Wait()
}

// run takes a rank through the phases.
func (c *pipeline) run(d *worker) {
	var r sequencer
	defer r.wait()
	for _, s := range c.phases {
		c.setError(d, c.begin(d, s, &r))
		s.left.Done()
	}
}

// begin begins the transfers of a rank in a phase, file by file.
func (c *pipeline) begin(d *worker, s *phase, r *sequencer) error {
	select {
	case <-s.open:
	case <-c.ctx.Done():
		return fmt.Errorf("checkpoint: %s %s: %w", c.m.op, c.m.path, context.Cause(c.ctx))
	}
	lists, err := d.pieces(s.reads(d.rank), s.buf, len(c.m.files))
	if err != nil {
		return err
	}
	for _, l := range lists {
		s.left.Add(1)
		r.run(func(spare func()) {
			defer s.left.Done()
			c.setError(d, c.move(files.Of(c.m.files[l.file]), c.ctx, d.files, l.pieces, files.Hooks{Moved: c.m.moved, Spare: spare, Devices: c.m.devices()}))
		})
	}
	return nil
}

// setError keeps the error of a rank, and stops all ranks.
func (c *pipeline) setError(d *worker, err error) {
	if err != nil && !errors.Is(err, errOther) {
		c.m.setError(d, err)
		c.stop(errOther)
	}
}

// A run is pieces of a file in the file's order, which do not overlap.
type run struct {
	file   int
	pieces []files.Piece
}

// pieces returns the pieces of reads. Tensors that share bytes of a file are in different runs.
func (d *worker) pieces(list reads, buf, count int) ([]run, error) {
	pieces := make([][]files.Piece, count)
	for _, r := range list {
		x, err := view(d.memory(r.staged, buf), r.at, r.size)
		if err != nil {
			return nil, err
		}
		pieces[r.file] = append(pieces[r.file], files.Piece{Off: r.off, Mem: x})
	}
	var runs []run
	for file, list := range pieces {
		slices.SortStableFunc(list, func(a, b files.Piece) int { return cmp.Compare(a.Off, b.Off) })
		for len(list) > 0 {
			var first, rest []files.Piece
			first, rest = apart(list)
			runs, list = append(runs, run{file, first}), rest
		}
	}
	return runs, nil
}

// apart takes pieces out of a sorted list that do not overlap.
func apart(list []files.Piece) (first, rest []files.Piece) {
	end := int64(0)
	for i, p := range list {
		switch {
		case p.Off < end && rest == nil:
			first, rest = slices.Clone(list[:i]), append(rest, p)
		case p.Off < end:
			rest = append(rest, p)
		case rest != nil:
			first = append(first, p)
		}
		if p.Off >= end {
			end = p.End()
		}
	}
	if rest == nil {
		return list, nil
	}
	return first, rest
}
