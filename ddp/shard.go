package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// ShardConfig are the options of NewSharder; nil means their defaults. They must
// be the same on all ranks.
type ShardConfig struct {
	// BucketBytes and FirstBucketBytes are as in ReducerConfig.
	BucketBytes      int
	FirstBucketBytes int
	// Op is the reduction of gradients. Default Avg.
	Op *comm.Op
}

// A Sharder keeps the parameters and gradients of a model. Each rank updates one shard, and
// needs the optimiser's state for that shard only (torch's ZeroRedundancyOptimizer and
// FullyShardedDataParallel with SHARD_GRAD_OP). Shards are equally long on all ranks. A step
// is
//
//	err = sh.WaitOn(s, i)          // forward, before parameter i is used
//	err = sh.Ready(s, i)           // backward, when gradient i is enqueued: buckets are reduce-scattered meanwhile
//	err = sh.Finish(s)             // s sees this rank's shard of the reduced gradients
//	for _, p := range sh.Parts(0) { // the optimiser, on s, with a state of sh.Len elements
//		err = update(s, p.Param, p.Grad, state.Slice(p.At, p.At+p.Param.Len()))
//	}
//	err = sh.AllGather(s)          // the parameters of all shards go to all ranks
//
// Parameters lie in one flat memory and gradients in another. Both are padded so that the
// ranks divide them equally, and are sent without copies. The program owns the optimiser's
// state, which may be of another type, such as float32 copies of bfloat16 parameters;
// tensor.Copy converts.
//
// Ready may be called by several goroutines; everything else by one.
type Sharder[T memory.Element] struct {
	owner  handle.Owner
	g      *comm.Group
	op     comm.Op
	queue  *queue
	spans  []span[T] // by bucket
	len    int       // of a shard
	locals []localShard[T]
}

// A span is the place of a bucket in the flat memory, in elements: a part of the same length
// for each rank.
type span[T memory.Element] struct {
	at, part      int
	params, grads piece[T]
}

// A piece is the memory of a span on the local ranks, and the parts of their shards.
type piece[T memory.Element] struct{ whole, mine comm.Shards[T] }

// localShard is the memory of a local rank.
type localShard[T memory.Element] struct {
	params, grads         []memory.Slice[T]
	flatParams, flatGrads memory.Slice[T]
	gathered              []*mark // by bucket: the parameters have arrived
}

// A Part is the part of a bucket that belongs to a rank's shard.
type Part[T memory.Element] struct {
	Param memory.Slice[T] // to be updated
	Grad  memory.Slice[T] // reduced over all ranks, after Finish
	At    int             // its first element in the shard
}

// NewSharder allocates parameters and gradients of the given lengths on each
// local rank, on the group's streams, and fills them with zeros. Other streams
// wait for that with WaitOn. The lengths must be the same on all ranks. If the
// group has several processes, they wait for each other and compare their
// arguments, and all processes return an error if the arguments differ. Write
// the initial parameters to Params; comm.BroadcastFrom of Flat gives all ranks
// the parameters of one rank. Collective.
func NewSharder[T memory.Element](g *comm.Group, lens []int, cfg *ShardConfig) (*Sharder[T], error) {
	const op = "new sharder"
	if err := checkGroup(g, op); err != nil {
		return nil, err
	}
	c := ShardConfig{Op: new(comm.Avg)}
	if cfg != nil {
		c = *cfg
		c.Op = cmp.Or(c.Op, new(comm.Avg))
	}
	var err error
	if c.BucketBytes, c.FirstBucketBytes, err = bucketSizes(c.BucketBytes, c.FirstBucketBytes); err != nil {
		err = fmt.Errorf("ddp: %s: %w", op, err)
	} else {
		err = checkLengths[T](op, lens, g.Size())
	}
	types := slices.Repeat([]memory.DType{memory.DTypeOf[T]()}, len(lens))
	if err := agree(context.Background(), g, op, describe("parameter", lens, types, c.FirstBucketBytes, c.BucketBytes, *c.Op), err); err != nil {
		return nil, err
	}
	sh := &Sharder[T]{g: g, op: *c.Op}
	sh.queue = newQueue(g, sh, "gradient", len(lens))
	handle.Init(sh, &sh.owner, handle.About{Kind: "sharder", On: g.Device(0)})
	if err := sh.open(split(lens, types, backwards(len(lens)), c.FirstBucketBytes, c.BucketBytes), lens); err != nil {
		return nil, errors.Join(fmt.Errorf("ddp: %s: %w", op, err), sh.Close())
	}
	return sh, nil
}

// checkLengths returns an error for lengths that no memory can have.
func checkLengths[T memory.Element](op string, lens []int, ranks int) error {
	if len(lens) == 0 || slices.Min(lens) < 0 {
		return refuse(op, "parameters of %v elements: want one or more, and none negative", lens)
	}
	room := math.MaxInt / 2 / memory.DTypeOf[T]().Size()
	for _, n := range lens {
		if n > room {
			return refuse(op, "parameters of %v elements: no memory has as many", lens)
		}
		room -= n + wireAlign*ranks // the most padding
	}
	return nil
}

// open lays the buckets out, the buckets of the first parameters first.
func (sh *Sharder[T]) open(buckets []bucket, lens []int) error {
	align := wireAlign / memory.DTypeOf[T]().Size()
	sh.spans = make([]span[T], len(buckets))
	for k := len(buckets) - 1; k >= 0; k-- {
		part := roundUp(buckets[k].len, align*sh.g.Size()) / sh.g.Size()
		sh.spans[k] = span[T]{at: sh.len * sh.g.Size(), part: part}
		sh.len += part
	}
	sh.locals = make([]localShard[T], sh.g.Locals())
	for i := range sh.locals {
		if err := sh.locals[i].open(sh.g.Stream(i), buckets, sh.spans, lens, sh.len*sh.g.Size()); err != nil {
			return err
		}
		for k := range sh.spans {
			sh.spans[k].add(&sh.locals[i], sh.g.Size(), sh.queue.rank(i))
		}
	}
	return sh.queue.fill(buckets)
}

// add notes the memory of the next local rank.
func (sp *span[T]) add(l *localShard[T], ranks, rank int) {
	sp.params.add(l.flatParams.Slice(sp.at, sp.at+sp.part*ranks), rank, sp.part)
	sp.grads.add(l.flatGrads.Slice(sp.at, sp.at+sp.part*ranks), rank, sp.part)
}

func (p *piece[T]) add(whole memory.Slice[T], rank, part int) {
	p.whole = append(p.whole, whole)
	p.mine = append(p.mine, whole.Slice(rank*part, (rank+1)*part))
}

func (l *localShard[T]) open(s *stream.Stream, buckets []bucket, spans []span[T], lens []int, total int) (err error) {
	if l.flatParams, err = zeroed[T](s, total); err != nil {
		return err
	}
	if l.flatGrads, err = zeroed[T](s, total); err != nil {
		return err
	}
	l.params, l.grads = make([]memory.Slice[T], len(lens)), make([]memory.Slice[T], len(lens))
	for k, b := range buckets {
		for j, i := range b.grads {
			at := spans[k].at + b.at[j]
			l.params[i], l.grads[i] = l.flatParams.Slice(at, at+lens[i]), l.flatGrads.Slice(at, at+lens[i])
		}
		e, err := newMark(s)
		if err != nil {
			return err
		}
		l.gathered = append(l.gathered, e)
	}
	return nil
}

// Len returns the elements of a shard, with its padding, the same number on all
// ranks.
func (sh *Sharder[T]) Len() int { return sh.len }

// Params returns the parameters of a local rank.
func (sh *Sharder[T]) Params(local int) []memory.Slice[T] {
	return slices.Clone(sh.locals[local].params)
}

// Grads returns the gradients of a local rank. They belong to the group from
// Ready to Finish, and only the shard of the rank is valid after Finish.
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
	for k := len(sh.spans) - 1; k >= 0; k-- {
		sp := &sh.spans[k]
		parts = append(parts, Part[T]{sp.params.mine[local], sp.grads.mine[local], sp.at / sh.g.Size()})
	}
	return parts
}

// Ready says that the work that is now on s completes gradient i of the local rank on the
// device of s. If i is the last gradient of its bucket, Ready enqueues the reduce-scatter of
// the bucket on the group's stream, which waits for s. The host and s do not wait.
func (sh *Sharder[T]) Ready(s *stream.Stream, i int) error {
	const op = "ddp: gradient ready"
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
			if err := sh.locals[i].grads[grad].Zero(sh.g.Stream(i)); err != nil {
				return err
			}
		}
	}
	return comm.ReduceScatter(sh.g, sh.op, sh.spans[k].grads.mine, sh.spans[k].grads.whole)
}

// Finish ends the backward pass. Work that is enqueued on the streams after Finish sees its
// shard of the gradients reduced; give one stream for each local rank. The host does not
// wait. Finish returns an error that names the gradients that are not ready on the local
// ranks. Even then the step ends: the missing gradients count as zeros, and the next Ready
// begins another step.
func (sh *Sharder[T]) Finish(streams ...*stream.Stream) error {
	const op = "ddp: finish gradients"
	by, err := sh.sorted(op, streams)
	if err != nil {
		return err
	}
	for i, s := range by {
		if err := errors.Join(sh.locals[i].flatGrads.RecordStream(s), sh.locals[i].flatParams.RecordStream(s)); err != nil {
			return err
		}
	}
	return sh.queue.end(op, by, func() error { return nil })
}

// AllGather enqueues, on the group's streams, the copy of each rank's shard of the
// parameters to all ranks. It comes after the work that is now on the given streams: the
// optimiser's, one for each local rank. Parameters arrive in their order, so that the next
// forward pass can begin when the first have arrived; see WaitOn. Collective.
func (sh *Sharder[T]) AllGather(streams ...*stream.Stream) error {
	const op = "ddp: all-gather parameters"
	by, err := sh.sorted(op, streams)
	if err != nil {
		return err
	}
	if err := route.GroupOf(sh.g).Check("all-gather parameters"); err != nil {
		return fmt.Errorf("ddp: %w", err)
	}
	for i, s := range by {
		if err := sh.g.Stream(i).WaitStream(s); err != nil {
			return err
		}
	}
	for k := len(sh.spans) - 1; k >= 0; k-- {
		if err := comm.AllGather(sh.g, sh.spans[k].params.whole, sh.spans[k].params.mine); err != nil {
			return err
		}
		for i := range sh.locals {
			if err := sh.locals[i].gathered[k].set(sh.g.Stream(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// WaitOn orders work that is enqueued on s from now on after parameter i of the
// last AllGather. The host does not wait. The device of s names the local rank.
// In the capture of a graph, s waits for an AllGather of the same capture only.
func (sh *Sharder[T]) WaitOn(s *stream.Stream, i int) error {
	const op = "ddp: wait for a parameter"
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

// Close frees parameters and gradients once pending work on the streams that use them has finished. While a graph that has captured
// calls of the Sharder is open, Close fails and the Sharder stays open. It is idempotent and safe on nil.
func (sh *Sharder[T]) Close() error {
	if sh == nil || sh.owner.Closed() {
		return nil
	}
	if err := sh.queue.graphs.Refuse("ddp: close the sharder on " + sh.g.Device(0).String()); err != nil {
		return err
	}
	if !sh.owner.Close() {
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
