package comm

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// ReducerConfig are the options of NewReducer; nil means their defaults.
type ReducerConfig struct {
	// BucketBytes is how many bytes of gradients are reduced together at most;
	// a larger gradient has a bucket of its own. Default 25 MiB, as in torch's
	// DistributedDataParallel. It must be the same on all ranks.
	BucketBytes int
	// FirstBucketBytes is BucketBytes for the bucket that is ready first.
	// Default 1 MiB.
	FirstBucketBytes int
	// Op is the reduction. Default Avg, the mean over the ranks; use Sum when
	// each rank has weighted its gradients already, as ranks with unequal parts
	// of a batch must.
	Op *Op
}

// A Reducer reduces the gradients of a model over all ranks while the backward
// pass still computes the others: gradients are grouped into buckets, and a
// bucket is reduced on the group's stream as soon as its last gradient is ready
// (torch's DistributedDataParallel).
//
// Gradients that memory.MakeFlat made are reduced where they are; others are
// copied into a flat buffer and back.
//
// Ready may be called by several goroutines; everything else by one.
type Reducer[T memory.Element] struct {
	owner handle.Owner
	g     *Group
	op    Op
	grads [][]memory.Slice[T] // by local rank
	of    []int               // the bucket of each gradient

	mu      sync.Mutex
	buckets []bucket[T]
	next    int      // the bucket to reduce next: the order is the same on all ranks
	seen    [][]bool // by local rank: which gradients are ready in this step
}

// NewReducer makes a reducer for the gradients of each local rank: one list for
// each, with the same lengths in the same order on all ranks of the group.
// Collective in the sense that all ranks use reducers with the same
// configuration.
func NewReducer[T memory.Element](g *Group, cfg *ReducerConfig, grads ...[]memory.Slice[T]) (*Reducer[T], error) {
	c, err := cfg.filled()
	if err != nil {
		return nil, err
	}
	if err := checkGrads(g, grads); err != nil {
		return nil, err
	}
	r := &Reducer[T]{g: g, op: *c.Op, of: make([]int, len(grads[0]))}
	r.buckets = split[T](lengths(grads[0]), c.FirstBucketBytes, c.BucketBytes)
	for k := range r.buckets {
		for i := r.buckets[k].first; i < r.buckets[k].last; i++ {
			r.of[i] = k
		}
	}
	handle.Init(r, &r.owner, "reducer")
	for i := range g.members {
		r.grads = append(r.grads, slices.Clone(grads[i]))
		r.seen = append(r.seen, make([]bool, len(grads[i])))
		for k := range r.buckets {
			if err := r.buckets[k].open(&g.members[i], grads[i]); err != nil {
				return nil, errors.Join(fmt.Errorf("comm: new reducer: %w", err), r.Close())
			}
		}
	}
	return r, nil
}

func (c *ReducerConfig) filled() (ReducerConfig, error) {
	f := ReducerConfig{}
	if c != nil {
		f = *c
	}
	if f.BucketBytes < 0 || f.FirstBucketBytes < 0 {
		return f, fmt.Errorf("comm: new reducer: buckets of %d and %d bytes: want a positive size", f.FirstBucketBytes, f.BucketBytes)
	}
	if f.BucketBytes == 0 {
		f.BucketBytes = 25 << 20
	}
	if f.FirstBucketBytes == 0 {
		f.FirstBucketBytes = min(1<<20, f.BucketBytes)
	}
	if f.Op == nil {
		f.Op = new(Avg)
	}
	return f, nil
}

func checkGrads[T memory.Element](g *Group, grads [][]memory.Slice[T]) error {
	if err := g.check("new reducer"); err != nil {
		return err
	}
	if len(grads) != len(g.members) || len(grads[0]) == 0 {
		return fmt.Errorf("comm: new reducer: %d lists of gradients for %d local ranks: want one list with at least one gradient for each: %w",
			len(grads), len(g.members), ErrMismatch)
	}
	for i, list := range grads {
		if !slices.Equal(lengths(list), lengths(grads[0])) {
			return fmt.Errorf("comm: new reducer: the gradients of local ranks 0 and %d have different lengths: %w", i, ErrMismatch)
		}
		for j, x := range list {
			if err := x.Check("comm: new reducer", g.Device(i)); err != nil {
				return fmt.Errorf("%w (gradient %d of local rank %d): %w", err, j, i, ErrMismatch)
			}
		}
	}
	return nil
}

// Buckets returns how many buckets there are.
func (r *Reducer[T]) Buckets() int { return len(r.buckets) }

// Ready tells that gradient i is complete when s is past what is enqueued on it
// by now. When it is the last one of its bucket, the reduction of the bucket is
// enqueued on the group's stream, which waits for s; the host and s wait for
// nothing. The device of s says which local rank it is.
func (r *Reducer[T]) Ready(s *stream.Stream, i int) error {
	const op = "comm: gradient ready"
	local, err := r.local(op, s)
	if err != nil {
		return err
	}
	if i < 0 || i >= len(r.of) {
		return fmt.Errorf("%s: gradient %d of %d does not exist", op, i, len(r.of))
	}
	if err := r.g.check("gradient ready"); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.seen[local][i] {
		return fmt.Errorf("%s: gradient %d was ready already in this step: call Finish between steps", op, i)
	}
	if err := r.collect(local, s, i); err != nil {
		return err
	}
	r.seen[local][i] = true
	return r.launch()
}

// collect puts gradient i into its bucket.
func (r *Reducer[T]) collect(local int, s *stream.Stream, i int) error {
	b := &r.buckets[r.of[i]]
	l := &b.locals[local]
	if !l.inPlace {
		// The result of the step before must have left the flat buffer.
		if err := s.Wait(l.reduced); err != nil {
			return err
		}
		if err := l.flat.RecordStream(s); err != nil {
			return err
		}
		at := b.at[i-b.first]
		x := r.grads[local][i]
		if err := memory.Copy(s, l.flat.Slice(at, at+x.Len()), x); err != nil {
			return err
		}
	}
	if l.stream != nil && l.stream != s {
		// The bucket waits for one event of the last stream: earlier streams must
		// be before it.
		if err := s.WaitStream(l.stream); err != nil {
			return err
		}
	}
	l.stream = s
	if l.pending--; l.pending > 0 {
		return nil
	}
	return l.ready.Record(s)
}

// launch enqueues the reduction of all buckets whose turn it is.
func (r *Reducer[T]) launch() error {
	for ; r.next < len(r.buckets); r.next++ {
		b := &r.buckets[r.next]
		for i := range b.locals {
			if b.locals[i].pending > 0 {
				return nil
			}
		}
		if err := r.reduce(b); err != nil {
			return err
		}
	}
	return nil
}

func (r *Reducer[T]) reduce(b *bucket[T]) error {
	if err := r.g.check("reduce a bucket of gradients"); err != nil {
		return err
	}
	for i := range b.locals {
		l, m := &b.locals[i], &r.g.members[i]
		if err := m.stream.Wait(l.ready); err != nil {
			return err
		}
		if err := l.flat.RecordStream(m.stream); err != nil {
			return err
		}
	}
	err := r.g.each(func(i int, m *member) error {
		return nccl.AllReduce(m.comm, m.stream, b.locals[i].flat, b.locals[i].flat, r.op)
	})
	if err != nil {
		return err
	}
	for i := range b.locals {
		if err := r.spread(b, i); err != nil {
			return err
		}
	}
	return nil
}

// spread brings the result of a bucket back into the gradients.
func (r *Reducer[T]) spread(b *bucket[T], local int) error {
	l, s := &b.locals[local], r.g.members[local].stream
	if !l.inPlace {
		for i := b.first; i < b.last; i++ {
			x, at := r.grads[local][i], b.at[i-b.first]
			if err := x.RecordStream(s); err != nil {
				return err
			}
			if err := memory.Copy(s, x, l.flat.Slice(at, at+x.Len())); err != nil {
				return err
			}
		}
	}
	return l.reduced.Record(s)
}

// Finish ends the step: work that is enqueued on the streams from now on, one
// stream for each local rank, sees all gradients reduced. The host does not
// wait. It is an error when a gradient was not made ready; the error names it.
func (r *Reducer[T]) Finish(streams ...*stream.Stream) error {
	const op = "comm: finish gradients"
	if len(streams) != len(r.g.members) {
		return fmt.Errorf("%s: %d streams for %d local ranks: %w", op, len(streams), len(r.g.members), ErrMismatch)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.complete(op); err != nil {
		return err
	}
	last := &r.buckets[len(r.buckets)-1] // the group's stream reduces in order
	waiting := make([]bool, len(streams))
	for _, s := range streams {
		local, err := r.local(op, s)
		if err != nil {
			return err
		}
		if waiting[local] {
			return fmt.Errorf("%s: two streams of %s: want one for each local rank: %w", op, s.Device(), ErrMismatch)
		}
		waiting[local] = true
		if err := s.Wait(last.locals[local].reduced); err != nil {
			return err
		}
	}
	r.rewind()
	return nil
}

// complete checks that every gradient was ready in this step.
func (r *Reducer[T]) complete(op string) error {
	for local, seen := range r.seen {
		if i := slices.Index(seen, false); i >= 0 {
			return fmt.Errorf("%s on rank %d: gradient %d of %d is not ready: every gradient must be, in every step",
				op, r.g.members[local].comm.Rank(), i, len(seen))
		}
	}
	return nil
}

// rewind prepares for the next step.
func (r *Reducer[T]) rewind() {
	r.next = 0
	for k := range r.buckets {
		b := &r.buckets[k]
		for i := range b.locals {
			b.locals[i].pending, b.locals[i].stream = b.last-b.first, nil
		}
	}
	for _, seen := range r.seen {
		clear(seen)
	}
}

// Close frees the buckets, in the order of the group's streams.
func (r *Reducer[T]) Close() error {
	if r == nil || !r.owner.Close() {
		return nil
	}
	var errs []error
	for k := range r.buckets {
		for i := range r.buckets[k].locals {
			errs = append(errs, r.buckets[k].locals[i].close())
		}
	}
	return errors.Join(errs...)
}

// local returns the local rank whose device s is on.
func (r *Reducer[T]) local(op string, s *stream.Stream) (int, error) {
	if r.owner.Closed() {
		return 0, fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	if err := s.Check(op, nil); err != nil {
		return 0, err
	}
	for i := range r.g.members {
		if r.g.members[i].comm.Device() == s.Device() {
			return i, nil
		}
	}
	return 0, fmt.Errorf("%s: %s is on no device of the group: %w", op, s, ErrMismatch)
}
