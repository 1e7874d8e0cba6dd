package comm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// ShardConfig are the options of NewSharder; nil means their defaults. They must
// be the same on all ranks.
type ShardConfig struct {
	// BucketBytes and FirstBucketBytes are those of ReducerConfig.
	BucketBytes      int
	FirstBucketBytes int
	// Op is the reduction of gradients. Default Avg.
	Op *Op
}

// A Sharder keeps the parameters and gradients of a model so that each rank
// updates a shard of them, of equal length on all ranks, and needs the optimiser's
// state for that one only (torch's ZeroRedundancyOptimizer and
// FullyShardedDataParallel with SHARD_GRAD_OP). A step is
//
//	err = sh.WaitOn(s, i)          // forward, before parameter i is used
//	err = sh.Ready(s, i)           // backward, when gradient i is enqueued: buckets are reduce-scattered meanwhile
//	err = sh.Finish(s)             // s sees this rank's shard of the reduced gradients
//	for _, p := range sh.Parts(0) { // the optimiser, on s, with a state of sh.Len elements
//		err = update(s, p.Param, p.Grad, state.Slice(p.At, p.At+p.Param.Len()))
//	}
//	err = sh.AllGather(s)          // the parameters of all shards go to all ranks
//
// Parameters and gradients lie in one flat memory each, padded where their number
// does not divide by the ranks, so that nothing is ever copied to be sent. The
// state is the program's: it may be of another type, such as float32 copies of
// bfloat16 parameters, between which tensor.Copy converts.
//
// Ready may be called by several goroutines; everything else by one.
type Sharder[T memory.Element] struct {
	owner  handle.Owner
	g      *Group
	op     Op
	queue  *queue
	spans  []span // by bucket
	len    int    // of a shard
	locals []localShard[T]
}

// A span is where a bucket lies in the flat memory, in elements: a part of the
// same length for each rank.
type span struct{ at, part int }

// localShard is what a local rank has.
type localShard[T memory.Element] struct {
	params, grads         []memory.Slice[T]
	flatParams, flatGrads memory.Slice[T]
	gathered              []*mark // by bucket: the parameters are there
}

// A Part is what a rank's shard has of one bucket.
type Part[T memory.Element] struct {
	Param memory.Slice[T] // to be updated
	Grad  memory.Slice[T] // reduced over all ranks, after Finish
	At    int             // the element of the shard at which it begins
}

// NewSharder allocates parameters and gradients of the given lengths on each local
// rank, in the order of the group's streams, and fills them with zeros: let other
// streams wait for it with WaitOn. The lengths are the same on all ranks, which wait for each
// other where they are of several processes, and are all told where they differ. What the
// parameters are to begin with is written to Params; ranks that may differ in it
// take what rank 0 has by BroadcastFrom of Flat.
func NewSharder[T memory.Element](g *Group, cfg *ShardConfig, lens ...int) (*Sharder[T], error) {
	const op = "new sharder"
	if err := g.checkWait(op); err != nil {
		return nil, err
	}
	c := ShardConfig{Op: new(Avg)}
	if cfg != nil {
		c = *cfg
		c.Op = cmp.Or(c.Op, new(Avg))
	}
	var err error
	if c.BucketBytes, c.FirstBucketBytes, err = bucketSizes(c.BucketBytes, c.FirstBucketBytes); err != nil {
		err = fmt.Errorf("comm: %s: %w", op, err)
	} else {
		err = checkLengths[T](op, lens, g.size)
	}
	if err := g.agree(context.Background(), op, inBuckets[T]("parameter", lens, c.FirstBucketBytes, c.BucketBytes, *c.Op), err); err != nil {
		return nil, err
	}
	sh := &Sharder[T]{g: g, op: *c.Op}
	sh.queue = newQueue(g, sh, len(lens))
	handle.Init(sh, &sh.owner, handle.About{Kind: "sharder", On: g.Device(0)})
	if err := sh.open(split[T](lens, backwards(len(lens)), c.FirstBucketBytes, c.BucketBytes), lens); err != nil {
		return nil, errors.Join(fmt.Errorf("comm: %s: %w", op, err), sh.Close())
	}
	return sh, nil
}

// checkLengths refuses lengths of which no memory can be made.
func checkLengths[T memory.Element](op string, lens []int, ranks int) error {
	if len(lens) == 0 || slices.Min(lens) < 0 {
		return refuse(op, "parameters of %v elements: want one or more, and none negative", lens)
	}
	room := math.MaxInt / 2 / memory.DTypeOf[T]().Size()
	for _, n := range lens {
		if n > room {
			return refuse(op, "parameters of %v elements: no memory has as many", lens)
		}
		room -= n + wireAlign*ranks // by which they are padded at most
	}
	return nil
}

// open lays the buckets out, those of the first parameters first.
func (sh *Sharder[T]) open(buckets []bucket, lens []int) error {
	align := wireAlign / memory.DTypeOf[T]().Size()
	sh.spans = make([]span, len(buckets))
	for k := len(buckets) - 1; k >= 0; k-- {
		part := roundUp(buckets[k].len, align*sh.g.size) / sh.g.size
		sh.spans[k] = span{sh.len * sh.g.size, part}
		sh.len += part
	}
	sh.locals = make([]localShard[T], len(sh.g.members))
	for i := range sh.locals {
		if err := sh.locals[i].open(&sh.g.members[i], buckets, sh.spans, lens, sh.len*sh.g.size); err != nil {
			return err
		}
	}
	return sh.queue.fill(buckets)
}

func (l *localShard[T]) open(m *member, buckets []bucket, spans []span, lens []int, total int) (err error) {
	if l.flatParams, err = zeroed[T](m, total); err != nil {
		return err
	}
	if l.flatGrads, err = zeroed[T](m, total); err != nil {
		return err
	}
	l.params, l.grads = make([]memory.Slice[T], len(lens)), make([]memory.Slice[T], len(lens))
	for k, b := range buckets {
		for j, i := range b.grads {
			at := spans[k].at + b.at[j]
			l.params[i], l.grads[i] = l.flatParams.Slice(at, at+lens[i]), l.flatGrads.Slice(at, at+lens[i])
		}
		e, err := newMark(m.stream)
		if err != nil {
			return err
		}
		l.gathered = append(l.gathered, e)
	}
	return nil
}

// Len returns the elements of a shard, with what it is padded by. It is the same
// on all ranks.
func (sh *Sharder[T]) Len() int { return sh.len }

// Params returns the parameters of a local rank.
func (sh *Sharder[T]) Params(local int) []memory.Slice[T] {
	return slices.Clone(sh.locals[local].params)
}

// Grads returns the gradients of a local rank. From Ready to Finish they are the
// group's; after Finish only this rank's shard of them has a meaning.
func (sh *Sharder[T]) Grads(local int) []memory.Slice[T] { return slices.Clone(sh.locals[local].grads) }

// Flat returns the memory of all parameters of a local rank, with gaps of zeros.
func (sh *Sharder[T]) Flat(local int) memory.Slice[T] {
	flat := sh.locals[local].flatParams
	return flat.Slice(0, flat.Len())
}

// Parts returns the shard of a local rank, by At: one part for each bucket. The
// gaps between parameters belong to it; they are zeros, and so are their
// gradients.
func (sh *Sharder[T]) Parts(local int) []Part[T] {
	var parts []Part[T]
	l := &sh.locals[local]
	for k := len(sh.spans) - 1; k >= 0; k-- {
		parts = append(parts, Part[T]{sh.mine(l.flatParams, k, local), sh.mine(l.flatGrads, k, local), sh.spans[k].at / sh.g.size})
	}
	return parts
}

// mine is the part of a bucket that belongs to the shard of a local rank.
func (sh *Sharder[T]) mine(flat memory.Slice[T], k, local int) memory.Slice[T] {
	at := sh.spans[k].at + sh.queue.rank(local)*sh.spans[k].part
	return flat.Slice(at, at+sh.spans[k].part)
}

func (sh *Sharder[T]) whole(flat memory.Slice[T], k int) memory.Slice[T] {
	at := sh.spans[k].at
	return flat.Slice(at, at+sh.spans[k].part*sh.g.size)
}

// Ready tells that gradient i is complete when s is past what is enqueued on it
// by now. When it is the last one of its bucket, the reduce-scatter of the bucket
// is enqueued on the group's stream, which waits for s; the host and s wait for
// nothing. The device of s says which local rank it is.
func (sh *Sharder[T]) Ready(s *stream.Stream, i int) error {
	const op = "comm: gradient ready"
	if err := sh.check(op); err != nil {
		return err
	}
	return sh.queue.ready(op, s, i)
}

func (sh *Sharder[T]) collect(local int, s *stream.Stream, _ int) error {
	return sh.locals[local].flatGrads.RecordStream(s)
}

func (sh *Sharder[T]) reduce(k int) error {
	for i := range sh.locals {
		for _, grad := range sh.queue.buckets[k].grads {
			if sh.queue.seen[i][grad] {
				continue
			}
			if err := sh.locals[i].grads[grad].Zero(sh.g.members[i].stream); err != nil {
				return err
			}
		}
	}
	return sh.g.each(func(i int, m *member) error {
		flat := sh.locals[i].flatGrads
		return nccl.ReduceScatter(m.comm, m.stream, sh.mine(flat, k, i), sh.whole(flat, k), sh.op)
	})
}

// Finish ends the backward pass: work that is enqueued on the streams from now on,
// one stream for each local rank, sees its shard of the gradients reduced. The
// host does not wait. It is an error when gradients were not made ready: the error
// names them, for all local ranks. The step ends nevertheless: those gradients count as
// zeros, and the next Ready begins another step.
func (sh *Sharder[T]) Finish(streams ...*stream.Stream) error {
	const op = "comm: finish gradients"
	by, err := sh.sorted(op, streams)
	if err != nil {
		return err
	}
	for i, s := range by {
		if err := errors.Join(sh.locals[i].flatGrads.RecordStream(s), sh.locals[i].flatParams.RecordStream(s)); err != nil {
			return err
		}
	}
	return sh.queue.end(op, by, false, func() error { return nil })
}

// AllGather enqueues, on the group's streams, the copy of each rank's shard of the
// parameters to all ranks, after the work on the streams so far, one for each local
// rank: those that the optimiser runs on. Parameters come in their order, so that
// the next forward pass begins when the first are there; see WaitOn. Collective.
func (sh *Sharder[T]) AllGather(streams ...*stream.Stream) error {
	const op = "comm: all-gather parameters"
	by, err := sh.sorted(op, streams)
	if err != nil {
		return err
	}
	if err := sh.g.check("all-gather parameters"); err != nil {
		return err
	}
	for i, s := range by {
		if err := sh.g.members[i].stream.WaitStream(s); err != nil {
			return err
		}
	}
	for k := len(sh.spans) - 1; k >= 0; k-- {
		err := sh.g.each(func(i int, m *member) error {
			flat := sh.locals[i].flatParams
			return nccl.AllGather(m.comm, m.stream, sh.whole(flat, k), sh.mine(flat, k, i))
		})
		if err != nil {
			return err
		}
		for i := range sh.locals {
			if err := sh.locals[i].gathered[k].set(sh.g.members[i].stream); err != nil {
				return err
			}
		}
	}
	return nil
}

// WaitOn lets work that is enqueued on s from now on wait for parameter i of the
// last AllGather; the host goes on. The device of s says which local rank it is. In
// the capture of a graph it waits for an AllGather of the same capture only.
func (sh *Sharder[T]) WaitOn(s *stream.Stream, i int) error {
	const op = "comm: wait for a parameter"
	if err := sh.check(op); err != nil {
		return err
	}
	local, err := sh.queue.local(op, s)
	if err != nil {
		return err
	}
	l := &sh.locals[local]
	if i < 0 || i >= len(l.params) {
		return fmt.Errorf("%s: parameter %d of %d does not exist", op, i, len(l.params))
	}
	if err := l.flatParams.RecordStream(s); err != nil {
		return err
	}
	return l.gathered[sh.queue.of[i].bucket].wait(s)
}

func (sh *Sharder[T]) sorted(op string, streams []*stream.Stream) ([]*stream.Stream, error) {
	if err := sh.check(op); err != nil {
		return nil, err
	}
	return sh.queue.sorted(op, streams)
}

func (sh *Sharder[T]) check(op string) error {
	if sh == nil || sh.owner.Closed() {
		return fmt.Errorf("%s: the sharder: %w", op, device.ErrClosed)
	}
	return nil
}

// Close frees parameters and gradients, in the order of the streams that use them.
func (sh *Sharder[T]) Close() error {
	if sh == nil || !sh.owner.Close() {
		return nil
	}
	errs := []error{sh.queue.close()}
	for _, l := range sh.locals {
		errs = append(errs, l.flatParams.Close(), l.flatGrads.Close())
		for _, e := range l.gathered {
			errs = append(errs, e.close())
		}
	}
	return errors.Join(errs...)
}
