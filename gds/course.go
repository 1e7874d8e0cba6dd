package gds

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/stream"
)

// A course is the way of the local ranks through the rounds, each at its own pace, as
// far as it is open to them. While the last bytes of a round arrive, the first ones of
// the next are under way.
type course struct {
	m      *carrier
	move   moving
	stages []*stage // what goes straight, and then the rounds
	ctx    context.Context
	stop   context.CancelCauseFunc
	ranks  sync.WaitGroup // that have not come to the end
}

// moving is readPieces or writePieces.
type moving func(f *File, ctx context.Context, s *stream.Stream, pieces []piece, h hooks) error

// A stage is what the local ranks move between files and memory before they have to
// wait for each other.
type stage struct {
	reads func(rank int) reads
	buf   int
	open  chan struct{}  // closed when it may begin
	left  sync.WaitGroup // ranks that have more to begin, and files that are under way
}

// errOther is why a rank ends when another one has failed. It is no error of its own.
var errOther = errors.New("another rank has failed")

// depart lets the local ranks begin with what goes straight.
func (m *carrier) depart(ctx context.Context, move moving) *course {
	c := &course{m: m, move: move}
	c.ctx, c.stop = context.WithCancelCause(ctx)
	c.add(0, func(rank int) reads { return m.plan.direct[rank] })
	for i, r := range m.plan.rounds {
		c.add(i%2, func(rank int) reads { return r.ranks[rank].reads })
	}
	for _, d := range m.locals {
		c.ranks.Go(func() { c.follow(d) })
	}
	c.open(0)
	return c
}

func (c *course) add(buf int, list func(rank int) reads) {
	s := &stage{reads: list, buf: buf, open: make(chan struct{})}
	s.left.Add(len(c.m.locals))
	c.stages = append(c.stages, s)
}

// open lets a stage begin, if there is one.
func (c *course) open(i int) {
	if i < len(c.stages) {
		close(c.stages[i].open)
	}
}

// landed waits until all that the local ranks move in a stage is there, or they have
// given up.
func (c *course) landed(i int) { c.stages[i].left.Wait() }

// end stops who has not come to the end, and waits for all.
func (c *course) end() {
	c.stop(errOther)
	c.ranks.Wait()
}

// follow takes a rank through the stages.
func (c *course) follow(d *desk) {
	var r relay
	defer r.wait()
	for _, s := range c.stages {
		c.note(d, c.pass(d, s, &r))
		s.left.Done()
	}
}

// pass begins what a rank moves in a stage, file by file.
func (c *course) pass(d *desk, s *stage, r *relay) error {
	select {
	case <-s.open:
	case <-c.ctx.Done():
		return fmt.Errorf("gds: %s %s: %w", c.m.op, c.m.path, context.Cause(c.ctx))
	}
	files, err := d.pieces(s.reads(d.rank), s.buf, len(c.m.files))
	if err != nil {
		return err
	}
	for i, list := range files {
		if len(list) == 0 {
			continue
		}
		s.left.Add(1)
		r.run(func(spare func()) {
			defer s.left.Done()
			c.note(d, c.move(c.m.files[i], c.ctx, d.files, list, hooks{c.m.moved, spare, c.m.devices()}))
		})
	}
	return nil
}

// note keeps what happened to a rank, and ends the way of all.
func (c *course) note(d *desk, err error) {
	if err != nil && !errors.Is(err, errOther) {
		c.m.note(d, err)
		c.stop(errOther)
	}
}

// pieces returns what reads mean, by file and in its order.
func (d *desk) pieces(list reads, buf, files int) ([][]piece, error) {
	pieces := make([][]piece, files)
	for _, r := range list {
		x, err := view(d.memory(r.staged, buf), r.at, r.size)
		if err != nil {
			return nil, err
		}
		pieces[r.file] = append(pieces[r.file], piece{off: r.off, mem: x})
	}
	for _, list := range pieces {
		slices.SortFunc(list, func(a, b piece) int { return int(min(max(a.off-b.off, -1), 1)) })
	}
	return pieces, nil
}
