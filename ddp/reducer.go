package ddp

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
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
type Reducer struct {
	owner    handle.Owner
	g        *comm.Group
	cfg      ReducerConfig
	grads    [][]gradient // by local rank
	queue    *queue
	parts    []contents // by bucket
	buckets  []Bucket   // as the hook sees them; none without a hook
	used     *usedMap   // nil if all gradients are used
	uneven   *uneven    // nil if all ranks have the same number of steps
	verifier *verifier  // nil without ReducerConfig.Verify
	replaced []replaced // until Close, for graphs that have captured them
	order    []int      // of the gradients in the buckets
}

// NewReducer returns a reducer for the gradients of each local rank. grads has
// one list for each local rank, with the same lengths and types in the same
// order on all ranks of the group. A list of tensor.Tensor may have several
// types, but each bucket has one. Two gradients must not share memory, so
// shared weights have one gradient. All ranks must give the same configuration.
// If the group has several processes, they wait for each other and compare
// their arguments, and all of them return an error if the arguments differ.
// Collective.
func NewReducer[G Gradient](g *comm.Group, grads [][]G, cfg *ReducerConfig) (*Reducer, error) {
	const op = "new reducer"
	if err := checkGroup(g, op); err != nil {
		return nil, err
	}
	all, err := gradientsOf(op, g, grads)
	var c ReducerConfig
	var given arguments
	if err == nil {
		c, err = filled(cfg, dtypes(all[0]))
	}
	if err == nil {
		err = c.checkAutotune(op, g)
	}
	c.Autotune = c.Autotune.filled(c.BucketBytes, 0)
	if err == nil {
		given = describe("gradient", lengths(all[0]), dtypes(all[0]), c.FirstBucketBytes, c.BucketBytes, *c.Op)
		given.Given += fmt.Sprintf(", unused ones %v, a static graph %v, uneven %v %v %v, verified %v, on the wire %s%s%s",
			c.FindUnused, c.StaticGraph, c.Uneven, c.DivideByActive, c.StopTogether, c.Verify, c.Compress, c.describeHook(), c.Autotune.describe(false))
		given.Groups = c.Autotune.identities()
		if c.Hook != nil {
			given.Shapes = shapes(all[0])
		}
	}
	if err := agree(context.Background(), g, op, given, err); err != nil {
		return nil, err
	}
	r := &Reducer{g: g, cfg: c, grads: all}
	r.queue = newQueue(g, r, "gradient", len(all[0]))
	handle.Init(r, &r.owner, handle.About{Kind: "reducer", On: g.Device(0)})
	if err := r.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("ddp: new reducer: %w", err), r.Close())
	}
	return r, nil
}

// open allocates the reducer's memory.
func (r *Reducer) open() (err error) {
	n := len(r.grads[0])
	if r.cfg.FindUnused || r.cfg.StaticGraph {
		if r.used, err = newUsedMap(r.g, n); err != nil {
			return err
		}
	}
	if r.cfg.Uneven {
		if r.uneven, err = newUneven(r.g); err != nil {
			return err
		}
	}
	if a := r.cfg.Autotune; a != nil {
		r.queue.trial = newTrial(a, r.g, r.settings(), r.change)
	}
	r.queue.any, r.queue.partly, r.queue.always = r.used != nil, r.cfg.Uneven, r.cfg.Verify
	return r.arrange(backwards(n))
}

// arrange replaces the buckets by buckets of the gradients in an order.
func (r *Reducer) arrange(order []int) error {
	buckets := r.split(order, r.cfg.BucketBytes)
	parts := make([]contents, 0, len(buckets))
	for k := range buckets {
		x, err := contentsOf(r.g, &r.cfg, &buckets[k], r.grads)
		if err != nil {
			return errors.Join(err, closeParts(parts))
		}
		parts = append(parts, x)
	}
	var hooked []Bucket
	if r.cfg.Hook != nil {
		var err error
		if hooked, err = r.newBuckets(buckets, parts); err != nil {
			return errors.Join(err, closeParts(parts))
		}
	}
	verifier, err := r.newVerifier(buckets, parts)
	if err == nil {
		err = r.queue.fill(buckets)
	}
	if err != nil {
		return errors.Join(err, verifier.close(), closeParts(parts))
	}
	old := replaced{r.buckets, r.verifier, r.parts}
	r.parts, r.buckets, r.verifier, r.order = parts, hooked, verifier, order
	if r.queue.graphs.Any() { // its launches use them
		r.replaced = append(r.replaced, old)
		return nil
	}
	return old.close()
}

// replaced are buckets that Rebuild has replaced.
type replaced struct {
	buckets  []Bucket
	verifier *verifier
	parts    []contents
}

func (x *replaced) close() error {
	return errors.Join(closeBuckets(x.buckets), x.verifier.close(), closeParts(x.parts))
}

func (r *Reducer) split(order []int, bytes int) []bucket {
	return split(lengths(r.grads[0]), dtypes(r.grads[0]), order, r.cfg.FirstBucketBytes, bytes)
}

func closeParts(parts []contents) error {
	var errs []error
	for _, x := range parts {
		errs = append(errs, x.close())
	}
	return errors.Join(errs...)
}

// Ready says that the work that is now on s completes gradient i of the local rank on the
// device of s. If i is the last gradient of its bucket, Ready enqueues the reduction of the
// bucket on the group's stream, which waits for s. The host and s do not wait. With
// StaticGraph, from the second step on, Ready returns an error if the first step did not use
// gradient i.
func (r *Reducer) Ready(s *stream.Stream, i int) error {
	const op = "ddp: gradient ready"
	if r == nil || r.owner.Closed() {
		return fmt.Errorf("%s: the reducer: %w", op, device.ErrClosed)
	}
	return r.queue.ready(op, s, i)
}

// collect copies gradient i into its bucket, unless it lies there already or load copies it
// with its neighbours.
func (r *Reducer) collect(local int, s *stream.Stream, i int) error {
	at := r.queue.of[i]
	part := r.parts[at.bucket]
	if !part.apart(local) {
		return nil
	}
	// The result of the step before must have left the wire.
	if err := r.queue.arrived[at.bucket][local].reduced.wait(s); err != nil {
		return err
	}
	return part.put(s, local, at.nth)
}

// reduce enqueues the reduction of bucket k.
func (r *Reducer) reduce(k int) error {
	if err := r.uneven.begin(r); err != nil {
		return err
	}
	part := r.parts[k]
	for i := range r.grads {
		if err := part.load(r.g.Stream(i), i, r.queue.seen[i]); err != nil {
			return err
		}
		if err := r.zeroUnused(k, i); err != nil {
			return err
		}
	}
	if err := r.exchange(k); err != nil {
		return err
	}
	for i := range r.grads {
		used := r.queue.seen[i] // the rank keeps the value of the others
		if r.used == nil {
			used = nil
		}
		if err := part.unload(r.g.Stream(i), i, used); err != nil {
			return err
		}
	}
	if r.used != nil && r.used.known {
		return r.restore()
	}
	return nil
}

// exchange reduces the wire of bucket k over the ranks.
func (r *Reducer) exchange(k int) error {
	if err := r.verifier.look(r.g, k); err != nil {
		return err
	}
	if r.cfg.DivideByActive {
		if err := r.parts[k].scale(r.g, r.uneven.factors); err != nil {
			return err
		}
	}
	if r.cfg.Hook != nil {
		return r.reduceByHook(k)
	}
	return r.parts[k].reduce(r.g, *r.cfg.Op)
}

// Finish ends the step. Work that is enqueued on the streams after Finish sees all gradients
// reduced; give one stream for each local rank. The host does not wait. Finish returns an
// error that names the gradients that are not ready on the local ranks and should be, see
// ReducerConfig. Even then the step ends, so that the ranks stay together: the missing
// gradients count as zeros and get the result, and the next Ready begins another step. With Autotune,
// one Finish waits for the steps before.
func (r *Reducer) Finish(streams ...*stream.Stream) error {
	const op = "ddp: finish gradients"
	if r == nil || r.owner.Closed() {
		return fmt.Errorf("%s: the reducer: %w", op, device.ErrClosed)
	}
	by, err := r.queue.sorted(op, streams)
	if err != nil {
		return err
	}
	err = r.queue.end(op, by, r.agreeUsed)
	if stop := r.uneven.end(context.Background(), r); stop != nil {
		err = errors.Join(err, fmt.Errorf("%s: %w", op, stop))
	}
	err = r.verified("finish gradients", err)
	r.queue.mu.Lock()
	defer r.queue.mu.Unlock()
	return errors.Join(err, r.queue.trial.advance(context.Background(), by))
}

// agreeUsed lets the ranks tell each other which gradients they use, if they do not know.
func (r *Reducer) agreeUsed() error {
	if r.used == nil || r.used.known {
		return nil
	}
	return r.reduceUsed()
}

// Close frees the buckets once pending work on the group's streams has finished. Within a step, some buckets may be reduced and
// others not. Work that is enqueued on the group's streams after Close follows the reductions, also if Autotune
// has used another group. While a graph that has captured a step is open, Close fails and the Reducer stays open. It is idempotent and safe on nil.
func (r *Reducer) Close() error {
	if r == nil || r.owner.Closed() {
		return nil
	}
	if err := r.queue.graphs.Refuse("ddp: close the reducer on " + r.g.Device(0).String()); err != nil {
		return err
	}
	if !r.owner.Close() {
		return nil
	}
	errs := []error{r.queue.trial.followClosing(r.g), closeBuckets(r.buckets), closeParts(r.parts), r.queue.close(), r.used.close(), r.uneven.close(), r.verifier.close()}
	for i := range r.replaced {
		errs = append(errs, r.replaced[i].close())
	}
	return errors.Join(errs...)
}
