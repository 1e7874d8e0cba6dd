package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Reducer reduces the gradients of a model over all ranks while the backward pass still
// computes other gradients (torch's DistributedDataParallel). It groups gradients into buckets,
// and reduces a bucket on the group's stream as soon as its last gradient is ready.
//
// Gradients of memory.MakeFlat are reduced in place (gradient_as_bucket_view); others are
// copied into a flat buffer and back. A program that adds up the gradients of several
// backward passes calls Ready and Finish in the last one only (no_sync).
//
// A graph can capture a step after one step has run without a graph. Each launch is then a
// step with the gradients of the capture.
//
// Ready may be called by several goroutines; everything else by one.
type Reducer[T memory.Element] struct {
	owner handle.Owner
	g     *comm.Group
	cfg   ReducerConfig
	grads [][]memory.Slice[T] // by local rank
	queue *queue
	parts []wired[T]  // by bucket
	used  *usedMap[T] // nil if all gradients are used
}

// wired is the memory of a bucket on the local ranks.
type wired[T memory.Element] struct {
	wholes []memory.Slice[T] // the memory over its gradients, or none if they lie apart
	wire   wire[T]
}

// NewReducer makes a reducer for the gradients of each local rank. grads has one list for
// each local rank, with the same lengths in the same order on all ranks of the group. Two
// gradients must not share memory: shared weights have one gradient. All ranks give the same
// configuration. If the group has several processes, they wait for each other and compare
// their arguments, and all of them return an error if the arguments differ. Collective.
func NewReducer[T memory.Element](g *comm.Group, grads [][]memory.Slice[T], cfg *ReducerConfig) (*Reducer[T], error) {
	const op = "new reducer"
	if err := checkGroup(g, op); err != nil {
		return nil, err
	}
	c, err := filled[T](cfg)
	if err == nil {
		err = checkGrads(g, grads)
	}
	var given arguments
	if err == nil {
		given = inBuckets[T]("gradient", lengths(grads[0]), c.FirstBucketBytes, c.BucketBytes, *c.Op)
		given.Given += fmt.Sprintf(", unused ones %v, a static graph %v, on the wire %s", c.FindUnused, c.StaticGraph, c.Compress)
	}
	if err := agree(context.Background(), g, op, given, err); err != nil {
		return nil, err
	}
	r := &Reducer[T]{g: g, cfg: c}
	for _, list := range grads {
		r.grads = append(r.grads, slices.Clone(list))
	}
	r.queue = newQueue(g, r, len(grads[0]))
	handle.Init(r, &r.owner, handle.About{Kind: "reducer", On: g.Device(0)})
	if c.FindUnused || c.StaticGraph {
		r.used, err = newUsedMap[T](g, len(grads[0]))
	}
	if err == nil {
		err = r.arrange(backwards(len(grads[0])))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("ddp: new reducer: %w", err), r.Close())
	}
	return r, nil
}

// arrange replaces the buckets by buckets of the gradients in an order.
func (r *Reducer[T]) arrange(order []int) error {
	buckets := r.split(order)
	parts := make([]wired[T], 0, len(buckets))
	for k := range buckets {
		w := wired[T]{wholes: make([]memory.Slice[T], len(r.grads))}
		for i := range r.grads {
			w.wholes[i], _ = adjacent(&buckets[k], r.grads[i])
		}
		var err error
		if w.wire, err = newWire(r.g, &r.cfg, w.wholes, buckets[k].len); err != nil {
			return errors.Join(err, closeParts(parts))
		}
		parts = append(parts, w)
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

func closeParts[T memory.Element](parts []wired[T]) error {
	var errs []error
	for _, w := range parts {
		errs = append(errs, w.wire.close())
	}
	return errors.Join(errs...)
}

func checkGrads[T memory.Element](g *comm.Group, grads [][]memory.Slice[T]) error {
	if len(grads) != g.Locals() || len(grads[0]) == 0 {
		return fmt.Errorf("ddp: new reducer: %d lists of gradients for %d local ranks: want one list with at least one gradient for each: %w",
			len(grads), g.Locals(), comm.ErrMismatch)
	}
	for i, list := range grads {
		if !slices.Equal(lengths(list), lengths(grads[0])) {
			return fmt.Errorf("ddp: new reducer: the gradients of local ranks 0 and %d have different lengths: %w", i, comm.ErrMismatch)
		}
		for j, x := range list {
			if err := mem.Check("ddp: new reducer", x.Buffer(), x.Len(), g.Device(i)); err != nil {
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
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(xs[i].Ptr(), xs[j].Ptr()) })
	for k := 1; k < len(order); k++ {
		a, b = order[k-1], order[k]
		if xs[a].Ptr()+uint64(xs[a].Bytes()) > xs[b].Ptr() {
			return min(a, b), max(a, b), true
		}
	}
	return 0, 0, false
}

// Buckets returns how many buckets there are.
func (r *Reducer[T]) Buckets() int { return len(r.parts) }

// Ready says that the work that is now on s completes gradient i of the local rank on the
// device of s. If i is the last gradient of its bucket, Ready enqueues the reduction of the
// bucket on the group's stream, which waits for s. The host and s do not wait. With
// StaticGraph, from the second step on, Ready returns an error if the first step did not use
// gradient i.
func (r *Reducer[T]) Ready(s *stream.Stream, i int) error {
	const op = "ddp: gradient ready"
	if r.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	return r.queue.ready(op, s, i)
}

// collect copies gradient i into its bucket, unless it lies there already or load copies it
// with its neighbours.
func (r *Reducer[T]) collect(local int, s *stream.Stream, i int) error {
	at := r.queue.of[i]
	w := &r.parts[at.bucket]
	if w.wholes[local].Buffer() != nil {
		return nil
	}
	// The result of the step before must have left the wire.
	if err := r.queue.arrived[at.bucket][local].reduced.wait(s); err != nil {
		return err
	}
	if err := w.wire.record(s, local); err != nil {
		return err
	}
	return w.wire.put(s, local, r.queue.buckets[at.bucket].at[at.nth], r.grads[local][i])
}

// reduce enqueues the reduction of bucket k.
func (r *Reducer[T]) reduce(k int) error {
	for i := range r.grads {
		if err := r.load(k, i); err != nil {
			return err
		}
	}
	if err := r.parts[k].wire.reduce(r.g, *r.cfg.Op); err != nil {
		return err
	}
	for i := range r.grads {
		if err := r.unload(k, i); err != nil {
			return err
		}
	}
	if r.used != nil && r.used.known {
		return r.restore()
	}
	return nil
}

// load brings gradients that lie together into the wire, and zeros for unused gradients.
func (r *Reducer[T]) load(k, local int) error {
	w, s := &r.parts[k], r.g.Stream(local)
	if w.wholes[local].Buffer() == nil {
		for _, i := range r.queue.buckets[k].grads {
			if err := r.grads[local][i].RecordStream(s); err != nil {
				return err
			}
		}
	} else {
		if err := w.wholes[local].RecordStream(s); err != nil {
			return err
		}
		if err := r.runs(k, local, r.queue.seen[local], func(at int, x memory.Slice[T]) error { return w.wire.put(s, local, at, x) }); err != nil {
			return err
		}
	}
	return r.zeroUnused(k, local)
}

// unload brings the result of a bucket back into the gradients that this rank uses.
func (r *Reducer[T]) unload(k, local int) error {
	w, s := &r.parts[k], r.g.Stream(local)
	used := r.queue.seen[local]
	if r.used == nil {
		used = nil
	}
	return r.runs(k, local, used, func(at int, x memory.Slice[T]) error { return w.wire.get(s, local, at, x) })
}

// runs calls fn for the used gradients of a bucket, nil is all: for as many at once as lie
// together, in the memory and in the wire.
func (r *Reducer[T]) runs(k, local int, used []bool, fn func(at int, x memory.Slice[T]) error) error {
	b, whole := &r.queue.buckets[k], r.parts[k].wholes[local]
	for j := 0; j < len(b.grads); j++ {
		if used != nil && !used[b.grads[j]] {
			continue
		}
		at, x := b.at[j], r.grads[local][b.grads[j]]
		if whole.Buffer() != nil {
			for j+1 < len(b.grads) && (used == nil || used[b.grads[j+1]]) {
				j++
			}
			x = whole.Slice(at, b.at[j]+r.grads[local][b.grads[j]].Len())
		}
		if err := fn(at, x); err != nil {
			return err
		}
	}
	return nil
}

// Finish ends the step. Work that is enqueued on the streams after Finish sees all gradients
// reduced; give one stream for each local rank. The host does not wait. Finish returns an
// error that names the gradients that are not ready on the local ranks and should be, see
// ReducerConfig. Even then the step ends, so that the ranks stay together: the missing
// gradients count as zeros and get the result, and the next Ready begins another step.
func (r *Reducer[T]) Finish(streams ...*stream.Stream) error {
	const op = "ddp: finish gradients"
	if r.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	by, err := r.queue.sorted(op, streams)
	if err != nil {
		return err
	}
	return r.queue.end(op, by, r.used != nil && !r.used.known, func() error {
		if r.used == nil || r.used.known {
			return nil
		}
		return r.reduceUsed()
	})
}

// Close frees the buckets, in the order of the group's streams.
func (r *Reducer[T]) Close() error {
	if r == nil || !r.owner.Close() {
		return nil
	}
	return errors.Join(closeParts(r.parts), r.queue.close(), r.used.close())
}
