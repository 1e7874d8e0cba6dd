package gds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A carrier carries out a schedule between files and the slabs of the local ranks.
type carrier struct {
	*world
	op, path string
	files    []*File
	headers  []*safetensors.Header // of the files
	slabs    []tensor.Tensor       // by local rank: bytes
	plan     *schedule
	moved    func(bytes int)

	locals    []*desk    // as those of the world
	elsewhere bool       // a rank of another process failed
	mu        sync.Mutex // of what failed
}

// A desk is what a local rank works with: the rounds use its two buffers in turn.
type desk struct {
	*local
	slab    tensor.Tensor // bytes
	staging [2]tensor.Tensor
	free    [2]*stream.Event    // recorded on the rank's stream when a buffer's round is over
	words   memory.Slice[uint8] // two: whether a rank failed, after each round
	err     error               // the first
}

// open allocates what the rounds need.
func (m *carrier) open() error {
	sizes := make([]int, len(m.world.locals))
	for _, r := range m.plan.rounds {
		for i, l := range m.world.locals {
			sizes[i] = max(sizes[i], r.ranks[l.rank].staged)
		}
	}
	for i, l := range m.world.locals {
		d := &desk{local: l, slab: m.slabs[i]}
		m.locals = append(m.locals, d)
		if err := d.open(sizes[i], m.spread()); err != nil {
			return err
		}
		// What allocated the memory comes before what the files' stream does.
		if err := l.files.WaitStream(l.stream); err != nil {
			return err
		}
	}
	return nil
}

func (d *desk) open(staged int, words bool) (err error) {
	for i := range d.free {
		if d.free[i], err = stream.NewEvent(d.device(), nil); err != nil {
			return err
		}
		if staged == 0 {
			continue
		}
		if d.staging[i], err = tensor.Make(d.stream, memory.Uint8, staged); err != nil {
			return err
		}
	}
	if words {
		d.words, err = memory.MakeFrom(d.stream, []uint8{0, 0})
	}
	return err
}

// close waits for what is enqueued, so that nothing of it is under way when the
// caller closes the slabs, and gives back what open allocated.
func (m *carrier) close() error {
	var errs []error
	for _, d := range m.locals {
		ctx := context.Background()
		if m.group == nil {
			errs = append(errs, d.stream.Sync(ctx))
		}
		errs = append(errs, d.files.Sync(ctx))
		for i := range d.free {
			errs = append(errs, d.free[i].Close(), d.staging[i].Close())
		}
		if d.words.Buffer() != nil {
			errs = append(errs, d.words.Close())
		}
	}
	return errors.Join(errs...)
}

func (m *carrier) failed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.locals, func(d *desk) bool { return d.err != nil })
}

// note keeps the first error of a local rank.
func (m *carrier) note(d *desk, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d.err = cmp.Or(d.err, err)
}

// fail notes what happened to all local ranks at once.
func (m *carrier) fail(err error) {
	if err != nil && !m.failed() {
		m.note(m.locals[0], err)
	}
}

// errs returns what failed, by local rank.
func (m *carrier) errs() []error {
	errs := make([]error, len(m.world.locals))
	for i, d := range m.locals {
		errs[i] = d.err
	}
	return errs
}

// load brings everything from the files to the slabs. While a round is exchanged, the
// next one is read. Where a rank fails the others learn it with a round, all with the
// same one, so that none waits for what nobody sends.
func (m *carrier) load(ctx context.Context) {
	if m.spread() && len(m.plan.rounds) == 0 { // one in which only that is learnt
		m.plan.rounds = []*round{{ranks: make([]work, m.ranks)}}
	}
	c := m.depart(ctx, (*File).readPieces)
	defer c.end()
	c.open(1)
	c.open(2)
	c.landed(0)
	for i, r := range m.plan.rounds {
		c.landed(i + 1)
		m.exchange(r, i%2)
		// Who had failed in an earlier round says so in the last one, too.
		if m.stopped(c.ctx, i%2) {
			return
		}
		c.open(i + 3) // which has the same buffer
	}
}

// store is load backwards. What the ranks gather for a round is under way while the
// round before is written.
func (m *carrier) store(ctx context.Context) {
	c := m.depart(ctx, (*File).writePieces)
	defer c.end()
	for i, r := range m.plan.rounds {
		if i >= 2 {
			c.landed(i - 1) // which has the same buffer
		}
		m.gather(r, i%2)
		if m.stopped(c.ctx, i%2) {
			return
		}
		c.open(i + 1)
	}
	c.ranks.Wait()
}

// gather enqueues what comes before the writes of a round on the ranks' streams.
func (m *carrier) gather(r *round, buf int) {
	if m.failed() && !m.spread() {
		return
	}
	m.fail(m.send(r, buf, true))
	m.copyAll(r, cutsOf, buf, true)
	m.finish(buf)
}

// exchange enqueues what comes after the reads of a round on the ranks' streams. After
// a failure the ranks of other processes still get what they wait for, whatever it is.
func (m *carrier) exchange(r *round, buf int) {
	m.copyAll(r, cutsOf, buf, false)
	if m.failed() && !m.spread() {
		return
	}
	m.fail(m.send(r, buf, false))
	m.copyAll(r, partsOf, buf, false)
	m.finish(buf)
}

// finish marks the end of a round's work on the ranks' streams.
func (m *carrier) finish(buf int) {
	m.fail(m.tell(buf))
	for _, d := range m.locals {
		m.fail(d.free[buf].Record(d.stream))
	}
}

// copyAll takes boxes out of the staging buffers of all local ranks, or puts them back.
func (m *carrier) copyAll(r *round, list func(*work) []copying, buf int, back bool) {
	for _, d := range m.locals {
		if !m.failed() {
			m.fail(d.copyAll(list(&r.ranks[d.rank]), buf, back))
		}
	}
}

func cutsOf(w *work) []copying  { return w.copies }
func partsOf(w *work) []copying { return w.parts }

func (d *desk) copyAll(list []copying, buf int, back bool) error {
	to, from := make([]tensor.Tensor, len(list)), make([]tensor.Tensor, len(list))
	for i := range list {
		var err error
		if from[i], to[i], err = d.ends(&list[i], buf); err != nil {
			return fmt.Errorf("tensor %q: %w", list[i].of.info.Name, err)
		}
	}
	if back {
		to, from = from, to
	}
	return tensor.CopyAll(d.stream, to, from)
}

// ends returns the box that is taken, and where it goes.
func (d *desk) ends(c *copying, buf int) (from, to tensor.Tensor, err error) {
	rows, err := cutOut(d.staging[buf], c.staged, c.of.info.DType, c.rows, c.width)
	if err == nil {
		from, err = rows.Narrow(1, c.from.Start, c.from.Len)
	}
	if err == nil {
		to, err = cutOut(d.memory(c.packed, buf), c.at, c.of.to, c.rows, c.from.Len)
	}
	return from, to, err
}

// memory returns the slab, or a staging buffer.
func (d *desk) memory(staged bool, buf int) tensor.Tensor {
	if staged {
		return d.staging[buf]
	}
	return d.slab
}

// cutOut returns bytes of mem as a tensor.
func cutOut(mem tensor.Tensor, at int, t memory.DType, shape ...int) (tensor.Tensor, error) {
	n := t.Size()
	for _, d := range shape {
		n *= d
	}
	x, err := mem.Narrow(0, at, n)
	if err != nil {
		return x, err
	}
	if x, err = x.ViewDType(t); err != nil {
		return x, err
	}
	return x.View(shape...)
}

// send enqueues a round's sends and receives as one operation. Backwards, only what
// comes into staging buffers is sent: what lies in slabs is everywhere already.
func (m *carrier) send(r *round, buf int, back bool) error {
	if !slices.ContainsFunc(r.sends, func(s send) bool { return s.packed || !back }) {
		return nil
	}
	return nccl.Group(m.locals[0].comm, func() error {
		for i := range r.sends {
			s := &r.sends[i]
			if back && !s.packed {
				continue
			}
			for _, d := range m.locals {
				if err := m.half(d, s, buf, back); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// half enqueues what a local rank does for a send.
func (m *carrier) half(d *desk, s *send, buf int, back bool) error {
	at, peer, sends, staged := s.toAt, s.from, back, s.batch
	switch {
	case d.rank == s.from:
		at, peer, sends, staged = s.fromAt, s.to, !back, s.packed
	case d.rank != s.to:
		return nil
	}
	x, err := view(d.memory(staged, buf), at, s.bytes)
	if err != nil {
		return err
	}
	if sends {
		return nccl.Send(d.comm, d.stream, x, peer)
	}
	return nccl.Recv(d.comm, d.stream, x, peer)
}

// tell lets the ranks of other processes know, after a round, whether one failed.
func (m *carrier) tell(buf int) error {
	if !m.spread() {
		return nil
	}
	words := make([]memory.Slice[uint8], len(m.locals))
	for i, d := range m.locals {
		words[i] = d.words.Slice(buf, buf+1)
		if m.failed() {
			if err := words[i].CopyFrom(d.stream, []uint8{1}); err != nil {
				return err
			}
		}
	}
	return comm.AllReduce(m.group, comm.Max, words...)
}

// stopped waits until the round that used a buffer last is over, and reports whether
// a rank of any process had failed by then.
func (m *carrier) stopped(ctx context.Context, buf int) bool {
	if !m.spread() {
		for _, d := range m.locals {
			if !m.failed() {
				m.fail(d.free[buf].Sync(ctx))
			}
		}
		if m.group != nil { // whose streams pass what an abort ends
			m.fail(m.group.Err())
		}
		return m.failed()
	}
	// That another rank's end ends this too is the group's matter, so ctx is not asked:
	// a rank that stops alone would leave the others waiting.
	word := []uint8{0}
	for _, d := range m.locals {
		err := d.files.Wait(d.free[buf])
		if err == nil {
			err = d.words.Slice(buf, buf+1).CopyTo(d.files, word)
		}
		m.fail(err)
	}
	m.fail(m.group.Err())
	m.elsewhere = m.elsewhere || word[0] != 0
	return m.elsewhere || m.group.Err() != nil
}
