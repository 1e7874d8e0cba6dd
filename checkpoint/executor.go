package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// An executor executes a schedule between files and the slabs of the local ranks.
type executor struct {
	*peers
	op, path string
	files    []*gds.File
	headers  []*safetensors.Header // of the files
	slabs    []tensor.Tensor       // by local rank: bytes
	plan     *schedule
	moved    func(bytes int)

	locals       []*worker  // by local rank, as in peers
	remoteFailed bool       // a rank of another process failed
	mu           sync.Mutex // of what failed
}

// A worker is a local rank with its memory. The rounds use its two staging buffers in turn.
type worker struct {
	*local
	slab     tensor.Tensor // bytes
	staging  [2]tensor.Tensor
	free     [2]*stream.Event    // recorded on the rank's stream when a buffer's round is over
	failures memory.Slice[uint8] // two: 1 if a rank failed before the end of the round that uses the buffer
	err      error               // the first
}

// open allocates the memory and events of the rounds.
func (m *executor) open() error {
	sizes := make([]int, len(m.peers.locals))
	for _, r := range m.plan.rounds {
		for i, l := range m.peers.locals {
			sizes[i] = max(sizes[i], r.ranks[l.rank].staged)
		}
	}
	for i, l := range m.peers.locals {
		d := &worker{local: l, slab: m.slabs[i]}
		m.locals = append(m.locals, d)
		if err := d.open(sizes[i], m.remote()); err != nil {
			return err
		}
		// The stream of the files waits for the allocation.
		if err := l.files.WaitStream(l.stream); err != nil {
			return err
		}
	}
	return nil
}

func (d *worker) open(staged int, remote bool) (err error) {
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
	if remote {
		d.failures, err = memory.MakeFrom(d.stream, []uint8{0, 0})
	}
	return err
}

// close waits for all enqueued operations, so that the caller may close the slabs, and
// frees the memory and events of open.
func (m *executor) close() error {
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
		if d.failures.Buffer() != nil {
			errs = append(errs, d.failures.Close())
		}
	}
	return errors.Join(errs...)
}

func (m *executor) failed() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.locals, func(d *worker) bool { return d.err != nil })
}

// setError keeps the first error of a local rank.
func (m *executor) setError(d *worker, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d.err = cmp.Or(d.err, err)
}

// setErrorOfAll notes what happened to all local ranks at once.
func (m *executor) setErrorOfAll(err error) {
	if err != nil && !m.failed() {
		m.setError(m.locals[0], err)
	}
}

// errs returns what failed, by local rank.
func (m *executor) errs() []error {
	errs := make([]error, len(m.peers.locals))
	for i, d := range m.locals {
		errs[i] = d.err
	}
	return errs
}

// load brings everything from the files to the slabs. While the ranks exchange a round,
// they read the next one. If a rank fails, all others learn it with the same round, so that
// no rank waits for bytes that are never sent.
func (m *executor) load(ctx context.Context) {
	if m.remote() && len(m.plan.rounds) == 0 { // a round without bytes, that says only whether a rank failed
		m.plan.rounds = []*round{{ranks: make([]work, m.ranks)}}
	}
	c := m.start(ctx, files.File.Read)
	defer c.end()
	c.open(1)
	c.open(2)
	c.await(0)
	for i, r := range m.plan.rounds {
		c.await(i + 1)
		m.exchange(r, i%2)
		// A rank that failed in an earlier round says so in the last one, too.
		if m.stopped(c.ctx, i%2) {
			return
		}
		c.open(i + 3) // which has the same buffer
	}
}

// store is load backwards: the ranks gather the bytes of a round while they
// write the round before.
func (m *executor) store(ctx context.Context) {
	c := m.start(ctx, files.File.Write)
	defer c.end()
	for i, r := range m.plan.rounds {
		if i >= 2 {
			c.await(i - 1) // which has the same buffer
		}
		m.gather(r, i%2)
		if m.stopped(c.ctx, i%2) {
			return
		}
		c.open(i + 1)
	}
	c.ranks.Wait()
}

// gather enqueues the sends and copies before the writes of a round, on the ranks' streams.
func (m *executor) gather(r *round, buf int) {
	if m.failed() && !m.remote() {
		return
	}
	m.setErrorOfAll(m.send(r, buf, true))
	m.copyAll(r, cutsOf, buf, true)
	m.finish(buf)
}

// exchange enqueues the copies and sends after the reads of a round, on the ranks' streams.
// After a failure the ranks of other processes still get the bytes that they wait for, even
// if the bytes are wrong.
func (m *executor) exchange(r *round, buf int) {
	m.copyAll(r, cutsOf, buf, false)
	if m.failed() && !m.remote() {
		return
	}
	m.setErrorOfAll(m.send(r, buf, false))
	m.copyAll(r, partsOf, buf, false)
	m.finish(buf)
}

// finish marks the end of a round's work on the ranks' streams.
func (m *executor) finish(buf int) {
	m.setErrorOfAll(m.shareFailure(buf))
	for _, d := range m.locals {
		m.setErrorOfAll(d.free[buf].Record(d.stream))
	}
}

// copyAll takes boxes out of the staging buffers of all local ranks, or puts them back.
func (m *executor) copyAll(r *round, list func(*work) []copying, buf int, back bool) {
	for _, d := range m.locals {
		if !m.failed() {
			m.setErrorOfAll(d.copyAll(list(&r.ranks[d.rank]), buf, back))
		}
	}
}

func cutsOf(w *work) []copying  { return w.copies }
func partsOf(w *work) []copying { return w.parts }

func (d *worker) copyAll(list []copying, buf int, back bool) error {
	to, from := make([]tensor.Tensor, len(list)), make([]tensor.Tensor, len(list))
	for i := range list {
		var err error
		if from[i], to[i], err = d.sourceAndDestination(&list[i], buf); err != nil {
			return fmt.Errorf("tensor %q: %w", list[i].of.info.Name, err)
		}
	}
	if back {
		to, from = from, to
	}
	return tensor.CopyAll(d.stream, to, from)
}

// sourceAndDestination returns the source and the destination of a copy.
func (d *worker) sourceAndDestination(c *copying, buf int) (from, to tensor.Tensor, err error) {
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
func (d *worker) memory(staged bool, buf int) tensor.Tensor {
	if staged {
		return d.staging[buf]
	}
	return d.slab
}

// cutOut returns bytes of mem as a tensor.
func cutOut(mem tensor.Tensor, at int, t memory.DType, shape ...int) (tensor.Tensor, error) {
	x, err := mem.Narrow(0, at, t.Size()*product(shape))
	if err != nil {
		return x, err
	}
	if x, err = x.ViewDType(t); err != nil {
		return x, err
	}
	return x.View(shape...)
}

// send enqueues a round's sends and receives as one operation. Backwards, only bytes
// for staging buffers are sent, because bytes in slabs are on all ranks already.
func (m *executor) send(r *round, buf int, back bool) error {
	if !slices.ContainsFunc(r.sends, func(s send) bool { return s.packed || !back }) {
		return nil
	}
	return nccl.Group(func(b *nccl.Batch) error {
		for i := range r.sends {
			s := &r.sends[i]
			if back && !s.packed {
				continue
			}
			for _, d := range m.locals {
				if err := m.addTransfer(b, d, s, buf, back); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// addTransfer adds the send or the receive of a local rank to a batch.
func (m *executor) addTransfer(b *nccl.Batch, d *worker, s *send, buf int, back bool) error {
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
		return nccl.Send(b.On(d.comm), d.stream, x, peer)
	}
	return nccl.Recv(b.On(d.comm), d.stream, x, peer)
}

// shareFailure lets the ranks of other processes know, after a round, whether one failed.
func (m *executor) shareFailure(buf int) error {
	if !m.remote() {
		return nil
	}
	failures := make(comm.Shards[uint8], len(m.locals))
	for i, d := range m.locals {
		failures[i] = d.failures.Slice(buf, buf+1)
		if m.failed() {
			if err := failures[i].CopyFrom(d.stream, []uint8{1}); err != nil {
				return err
			}
		}
	}
	return comm.AllReduce(m.group, comm.Max, failures...)
}

// stopped waits until the round that used a buffer last is over, and reports whether
// a rank of any process had failed by then.
func (m *executor) stopped(ctx context.Context, buf int) bool {
	if !m.remote() {
		for _, d := range m.locals {
			if !m.failed() {
				m.setErrorOfAll(d.free[buf].Sync(ctx))
			}
		}
		if m.group != nil { // whose streams pass what an abort ends
			m.setErrorOfAll(m.group.Err())
		}
		return m.failed()
	}
	// That another rank's end ends this too is the group's matter, so ctx is not asked:
	// a rank that stops alone would leave the others waiting.
	failed := []uint8{0}
	for _, d := range m.locals {
		err := d.files.Wait(d.free[buf])
		if err == nil {
			err = d.failures.Slice(buf, buf+1).CopyTo(d.files, failed)
		}
		m.setErrorOfAll(err)
	}
	m.setErrorOfAll(m.group.Err())
	m.remoteFailed = m.remoteFailed || failed[0] != 0
	return m.remoteFailed || m.group.Err() != nil
}

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
		r.run(func(allStarted func()) {
			defer s.left.Done()
			c.setError(d, c.move(files.Of(c.m.files[l.file]), c.ctx, d.files, l.pieces, files.Hooks{Moved: c.m.moved, AllStarted: allStarted, Devices: c.m.devices()}))
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

// pieces returns the pieces of reads, with tensors that share bytes of a file
// in different runs.
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

// A sequencer runs moves that follow each other: the next one begins when the one before
// has nothing left to begin, and while that comes to its end. Two at most are under way.
type sequencer struct {
	ended chan struct{} // closed by the last one
}

// run returns when the move has nothing left to begin, and those before it have ended.
func (r *sequencer) run(move func(allStarted func())) {
	begun, ended, before := make(chan struct{}), make(chan struct{}), r.ended
	allStarted := sync.OnceFunc(func() { close(begun) })
	go func() {
		defer close(ended)
		defer allStarted()
		move(allStarted)
	}()
	<-begun
	if before != nil {
		<-before
	}
	r.ended = ended
}

// wait returns when all have ended.
func (r *sequencer) wait() {
	if r.ended != nil {
		<-r.ended
	}
}
