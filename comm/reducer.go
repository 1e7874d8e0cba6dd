package comm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Reducer reduces the gradients of a model over all ranks while the backward
// pass still computes the others: gradients are grouped into buckets, and a
// bucket is reduced on the group's stream as soon as its last gradient is ready
// (torch's DistributedDataParallel).
//
// Gradients that memory.MakeFlat made are reduced where they are
// (gradient_as_bucket_view); others are copied into a flat buffer and back. A
// program that adds up the gradients of several backward passes calls Ready and
// Finish in the last one only (no_sync).
//
// A step can be captured in a graph, once a step has run without: each launch is a
// step with the gradients that were used in the capture.
//
// Ready may be called by several goroutines; everything else by one.
type Reducer[T memory.Element] struct {
	owner  handle.Owner
	g      *Group
	cfg    ReducerConfig
	grads  [][]memory.Slice[T] // by local rank
	queue  *queue
	parts  [][]localBucket[T] // by bucket and local rank
	census *census[T]         // nil where all gradients are used
}

// localBucket is a bucket on one local rank.
type localBucket[T memory.Element] struct {
	whole memory.Slice[T] // the memory over its gradients, or none where they lie apart
	wire  bucketWire[T]
}

// NewReducer makes a reducer for the gradients of each local rank: one list for
// each, with the same lengths in the same order on all ranks of the group, and no
// memory in common: shared weights have one gradient.
// Collective: all ranks make it with the same configuration, and wait for each other where
// they are of several processes, so that all are told where they differ, and none adds up
// gradients that do not belong together.
func NewReducer[T memory.Element](g *Group, cfg *ReducerConfig, grads ...[]memory.Slice[T]) (*Reducer[T], error) {
	const op = "new reducer"
	if err := g.checkWait(op); err != nil {
		return nil, err
	}
	c, err := filled[T](cfg)
	if err == nil {
		err = checkGrads(g, grads)
	}
	var given terms
	if err == nil {
		given = inBuckets[T]("gradient", lengths(grads[0]), c.FirstBucketBytes, c.BucketBytes, *c.Op)
		given.Given += fmt.Sprintf(", unused ones %v, a static graph %v, on the wire %s", c.FindUnused, c.StaticGraph, c.Compress)
	}
	if err := g.agree(context.Background(), op, given, err); err != nil {
		return nil, err
	}
	r := &Reducer[T]{g: g, cfg: c}
	for _, list := range grads {
		r.grads = append(r.grads, slices.Clone(list))
	}
	r.queue = newQueue(g, r, len(grads[0]))
	handle.Init(r, &r.owner, handle.About{Kind: "reducer", On: g.Device(0)})
	if c.FindUnused || c.StaticGraph {
		r.census, err = newCensus[T](g, len(grads[0]))
	}
	if err == nil {
		err = r.arrange(backwards(len(grads[0])))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("comm: new reducer: %w", err), r.Close())
	}
	return r, nil
}

// arrange makes buckets of the gradients in an order, in the place of those that
// there are.
func (r *Reducer[T]) arrange(order []int) error {
	buckets := r.split(order)
	parts := make([][]localBucket[T], len(buckets))
	for k := range buckets {
		for i := range r.g.members {
			var l localBucket[T]
			var err error
			l.whole, _ = adjacent(&buckets[k], r.grads[i])
			l.wire, err = newBucketWire(&r.g.members[i], &r.cfg, l.whole, buckets[k].len, r.g.size)
			if err != nil {
				return errors.Join(err, closeParts(parts))
			}
			parts[k] = append(parts[k], l)
		}
	}
	if err := r.queue.fill(buckets); err != nil {
		return errors.Join(err, closeParts(parts))
	}
	old := r.parts
	r.parts = parts
	return closeParts(old)
}

func (r *Reducer[T]) split(order []int) []bucket {
	return split[T](lengths(r.grads[0]), order, r.cfg.FirstBucketBytes, r.cfg.BucketBytes)
}

func closeParts[T memory.Element](parts [][]localBucket[T]) error {
	var errs []error
	for _, ls := range parts {
		for i := range ls {
			errs = append(errs, ls[i].wire.close())
		}
	}
	return errors.Join(errs...)
}

func checkGrads[T memory.Element](g *Group, grads [][]memory.Slice[T]) error {
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
				return unfit(fmt.Errorf("%w (gradient %d of local rank %d)", err, j, i))
			}
		}
		if a, b, shared := sharing(list); shared {
			return refuse("new reducer", "gradients %d and %d of local rank %d share some memory: want each to be reduced once", a, b, i)
		}
	}
	return nil
}

// sharing returns two slices that share some memory, if there are any.
func sharing[T memory.Element](xs []memory.Slice[T]) (a, b int, found bool) {
	var order []int
	for i, x := range xs {
		if x.Len() > 0 {
			order = append(order, i)
		}
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(xs[i].Raw(), xs[j].Raw()) })
	for k := 1; k < len(order); k++ {
		a, b = order[k-1], order[k]
		if uint64(xs[a].Raw())+uint64(xs[a].Bytes()) > uint64(xs[b].Raw()) {
			return min(a, b), max(a, b), true
		}
	}
	return 0, 0, false
}

// Buckets returns how many buckets there are.
func (r *Reducer[T]) Buckets() int { return len(r.parts) }

// Ready tells that gradient i is complete when s is past what is enqueued on it
// by now. When it is the last one of its bucket, the reduction of the bucket is
// enqueued on the group's stream, which waits for s; the host and s wait for
// nothing. The device of s says which local rank it is. With StaticGraph it is
// an error, from the second step on, that i was not used in the first one.
func (r *Reducer[T]) Ready(s *stream.Stream, i int) error {
	const op = "comm: gradient ready"
	if r.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	return r.queue.ready(op, s, i)
}

// collect copies gradient i into its bucket, if it does not lie there and is not
// taken with its neighbours later.
func (r *Reducer[T]) collect(local int, s *stream.Stream, i int) error {
	at := r.queue.of[i]
	l := &r.parts[at.bucket][local]
	if l.whole.Buffer() != nil {
		return nil
	}
	// The result of the step before must have left the wire.
	if err := r.queue.arrived[at.bucket][local].reduced.wait(s); err != nil {
		return err
	}
	if err := l.wire.record(s); err != nil {
		return err
	}
	return l.wire.put(s, r.queue.buckets[at.bucket].at[at.nth], r.grads[local][i])
}

// reduce enqueues the reduction of bucket k.
func (r *Reducer[T]) reduce(k int) error {
	for i := range r.parts[k] {
		if err := r.load(k, i); err != nil {
			return err
		}
	}
	if err := r.g.each(func(i int, m *member) error { return r.parts[k][i].wire.reduce(m, *r.cfg.Op) }); err != nil {
		return err
	}
	for i := range r.parts[k] {
		if err := r.unload(k, i); err != nil {
			return err
		}
	}
	if r.census != nil && r.census.known {
		return r.restore()
	}
	return nil
}

// load brings what is not in the wire yet there: gradients that lie together,
// and zeros for those that are not used.
func (r *Reducer[T]) load(k, local int) error {
	l, s := &r.parts[k][local], r.g.members[local].stream
	if err := l.wire.record(s); err != nil {
		return err
	}
	if l.whole.Buffer() == nil {
		for _, i := range r.queue.buckets[k].grads {
			if err := r.grads[local][i].RecordStream(s); err != nil {
				return err
			}
		}
	} else {
		if err := l.whole.RecordStream(s); err != nil {
			return err
		}
		if err := r.runs(k, local, r.queue.seen[local], func(at int, x memory.Slice[T]) error { return l.wire.put(s, at, x) }); err != nil {
			return err
		}
	}
	return r.blank(k, local)
}

// unload brings the result of a bucket back into the gradients that this rank
// uses; all, where every gradient is to be used.
func (r *Reducer[T]) unload(k, local int) error {
	l, s := &r.parts[k][local], r.g.members[local].stream
	used := r.queue.seen[local]
	if r.census == nil {
		used = nil
	}
	return r.runs(k, local, used, func(at int, x memory.Slice[T]) error { return l.wire.get(s, at, x) })
}

// runs calls fn for the used gradients of a bucket, nil is all: for as many at once as lie
// together, in the memory and in the wire.
func (r *Reducer[T]) runs(k, local int, used []bool, fn func(at int, x memory.Slice[T]) error) error {
	b, l := &r.queue.buckets[k], &r.parts[k][local]
	for j := 0; j < len(b.grads); j++ {
		if used != nil && !used[b.grads[j]] {
			continue
		}
		at, x := b.at[j], r.grads[local][b.grads[j]]
		if l.whole.Buffer() != nil {
			for j+1 < len(b.grads) && (used == nil || used[b.grads[j+1]]) {
				j++
			}
			x = l.whole.Slice(at, b.at[j]+r.grads[local][b.grads[j]].Len())
		}
		if err := fn(at, x); err != nil {
			return err
		}
	}
	return nil
}

// Finish ends the step: work that is enqueued on the streams from now on, one
// stream for each local rank, sees all gradients reduced. The host does not
// wait. It is an error when gradients were not made ready that should have been,
// see ReducerConfig: the error names them, for all local ranks. The step ends nevertheless,
// so that the ranks stay together: those gradients count as zeros and get the result, and the
// next Ready begins another step.
func (r *Reducer[T]) Finish(streams ...*stream.Stream) error {
	const op = "comm: finish gradients"
	if r.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	by, err := r.queue.sorted(op, streams)
	if err != nil {
		return err
	}
	return r.queue.end(op, by, r.census != nil && !r.census.known, func() error {
		if r.census == nil || r.census.known {
			return nil
		}
		return r.agree()
	})
}

// Close frees the buckets, in the order of the group's streams.
func (r *Reducer[T]) Close() error {
	if r == nil || !r.owner.Close() {
		return nil
	}
	return errors.Join(closeParts(r.parts), r.queue.close(), r.census.close())
}
