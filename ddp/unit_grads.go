package ddp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Grads returns memory for the gradients of unit k on the local rank that is on the device of s,
// for the backward pass to write, with zeros when asked for the first time since Ready. Until Ready,
// later calls return the same memory, so that the gradients of several micro-batches add up in it,
// without a reduction (set_requires_gradient_sync(False)). They add up in P; in float32 add up shards
// instead: call Ready and Finish for each micro-batch.
//
// A rank has memory for the gradients of two units, and more if others are not ready. To reuse that of a unit
// that is as large, s waits for the reduction of the unit before the one that became ready last. Otherwise,
// as in the first pass, s also waits for the work that is on the group's stream. The host does not wait.
func (u *Units[M, P]) Grads(s *stream.Stream, k int) ([]memory.Slice[P], error) {
	const op = "ddp: gradients of a unit"
	i, x, err := u.at(op, s, k)
	if err != nil {
		return nil, err
	}
	if u.queue.seen[i][k] {
		return nil, fmt.Errorf("%s: unit %d on rank %d was ready already in this pass: call Finish before the next one", op, k, u.queue.rank(i))
	}
	x.wrote = true
	if x.grad.whole.Buffer() != nil {
		return x.grads, nil
	}
	if err = u.join(s); err == nil {
		x.grad, err = u.locals[i].gradMemory(u.g.Stream(i), s, u.units[k].part*u.g.Size())
	}
	if err != nil {
		return nil, fmt.Errorf("%s: unit %d on rank %d: %w", op, k, u.queue.rank(i), err)
	}
	x.grad.on, x.grads = s, cut(&u.units[k], x.grads, x.grad.whole)
	return x.grads, nil
}

// gradMemory returns memory whose first n elements are zeros on s. It reuses the memory of the unit
// before the one whose reduction was enqueued last, or of an earlier pass, if that is large enough. group is the group's stream, on which
// the memory is allocated, so that it is freed behind its reduction without an event.
func (l *localUnits[M, P]) gradMemory(group, s *stream.Stream, n int) (x gradMemory[P], err error) {
	capture, err := gpu.StreamOf(s).CaptureID()
	if err != nil {
		return x, err
	}
	if l.taken++; l.taken > l.keep {
		l.keep = l.taken
	}
	if len(l.retired) > 0 && l.retired[0].whole.Len() >= n && (len(l.retired) > 1 || l.retired[0].pass < l.passes) {
		x = l.retired[0]
		l.retired = append(l.retired[:0], l.retired[1:]...)
		if capture != 0 {
			x.capture = capture // the graph uses the memory as long as it is launched
		}
		return x, errors.Join(x.reduced.wait(s), x.whole.Slice(0, n).Zero(s))
	}
	if err := l.trim(max(1, len(l.retired)-1), math.MaxInt, s); err != nil {
		return x, err
	}
	x.made, x.capture = capture, capture
	if x.whole, err = memory.Make[P](group, n); err != nil {
		return x, err
	}
	if s != group {
		err = s.WaitStream(group)
	}
	return x, errors.Join(err, x.whole.Zero(s))
}

// trim frees retired gradients behind their reduction on the group's stream: the oldest until so many are left,
// and those of more than most elements. In the capture of s it frees only memory that was allocated in the same capture, and otherwise only memory that no graph uses.
func (l *localUnits[M, P]) trim(left, most int, s *stream.Stream) error {
	capture, err := gpu.StreamOf(s).CaptureID()
	if err != nil {
		return err
	}
	errs, kept, surplus := []error(nil), l.retired[:0], len(l.retired)-left
	for _, x := range l.retired {
		if (surplus > 0 || x.whole.Len() > most) && x.made == capture && x.capture == capture {
			errs = append(errs, x.whole.Close())
			surplus--
		} else {
			kept = append(kept, x)
		}
	}
	l.retired = kept
	return errors.Join(errs...)
}

// Ready says that the work that is now on s completes the gradients of unit k of the local rank
// on the device of s. When that is so on all local ranks, and for all later units, Ready enqueues
// the reduce-scatter on the group's streams, which wait for the streams that were given to Ready.
// With UnitsConfig.Replicas, an all-reduce on their streams follows. The result is the unit's shard of
// gradients, which is allocated then, or is added to it until Refresh. The host and s do not wait. Collective.
func (u *Units[M, P]) Ready(s *stream.Stream, k int) error {
	const op = "ddp: unit ready"
	i, x, err := u.at(op, s, k)
	if err != nil {
		return err
	}
	if x.grad.whole.Buffer() == nil && !u.queue.seen[i][k] {
		return fmt.Errorf("%s: unit %d on rank %d has no gradients: call Grads before, and write to its memory", op, k, u.queue.rank(i))
	}
	return u.queue.ready(op, s, k)
}

// collect does nothing: gradients are reduced where they are.
func (u *Units[M, P]) collect(int, *stream.Stream, int) error { return nil }

// reduce enqueues the reduction of a unit: bucket b has the unit of the same number from the end.
func (u *Units[M, P]) reduce(b int) error {
	k := u.queue.buckets[b].grads[0]
	n := u.units[k].part * u.g.Size()
	grads := make(comm.Shards[P], len(u.locals))
	for i := range u.locals {
		x, on := &u.locals[i].units[k], u.g.Stream(i)
		var err error
		switch {
		case x.grad.whole.Buffer() == nil: // not ready
			x.grad, err = u.locals[i].gradMemory(on, on, n)
		case !u.queue.seen[i][k]:
			err = x.grad.whole.Slice(0, n).Zero(on)
		}
		if err != nil {
			return err
		}
		grads[i] = x.grad.whole.Slice(0, n)
	}
	if err := u.reduceAs(k, grads); err != nil {
		return fmt.Errorf("reduce the gradients of unit %d: %w", k, err)
	}
	u.units[k].reduced = true
	for i := range u.locals {
		l := &u.locals[i]
		x := &l.units[k].grad
		x.reduced, x.pass = u.queue.arrived[b][i].reduced, l.passes
		l.taken--
		l.retired = append(l.retired, *x)
		*x = gradMemory[P]{}
	}
	return nil
}

// reduceUnit enqueues the reduction of the gradients of unit k to the shards, in type R.
func reduceUnit[R, M, P memory.Element](u *Units[M, P], k int, grads comm.Shards[P]) (err error) {
	x := &u.units[k]
	shards := make(comm.Shards[M], len(u.locals))
	for i := range shards {
		if shards[i], err = u.shardOf(i, k); err != nil {
			return err
		}
	}
	src, same := any(grads).(comm.Shards[R])
	if !same {
		if src, err = comm.Make[R](u.g, grads[0].Len()); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, src.Close()) }()
		for i := range src {
			if err := divide(u.g.Stream(i), src[i], grads[i], 1); err != nil {
				return err
			}
		}
	}
	dst, same := any(shards).(comm.Shards[R])
	own := !same || x.reduced
	if own {
		if dst, err = comm.Make[R](u.g, x.part); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, dst.Close()) }()
	}
	if err := comm.ReduceScatter(u.g, u.op, dst, src); err != nil {
		return err
	}
	for i := range dst {
		on := u.g.Stream(i)
		if u.replicas != nil {
			r := u.replicas[i]
			if err := r.Stream(0).WaitStream(on); err != nil {
				return err
			}
			if on = r.Stream(0); own {
				if err := dst[i].RecordStream(on); err != nil {
					return err
				}
			}
			if err := comm.AllReduce(r, u.op, dst[i]); err != nil {
				return err
			}
		}
		switch {
		case x.reduced:
			err = add(on, shards[i], dst[i])
		case own:
			err = divide(on, shards[i], dst[i], 1)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// shardOf returns the shard of the gradients of unit k on local rank i, whose contents are undefined
// unless the unit was reduced since Refresh.
func (u *Units[M, P]) shardOf(i, k int) (memory.Slice[M], error) {
	x, on := &u.locals[i].units[k], u.g.Stream(i)
	if x.shard.Buffer() == nil {
		err := x.allocate(on, u.units[k].part)
		return x.shard, err
	}
	if u.replicas != nil {
		return x.shard, nil
	}
	capture, err := gpu.StreamOf(on).CaptureID()
	if err == nil && capture != x.capture {
		err = errors.New("those of the pass before were reduced outside of this capture, or in that of a graph: call Refresh between a pass in a graph and another one")
	}
	return x.shard, err
}

// allocate allocates the shard of the gradients, of n elements, on the group's stream.
func (x *localUnit[M, P]) allocate(group *stream.Stream, n int) (err error) {
	if x.capture, err = gpu.StreamOf(group).CaptureID(); err == nil {
		x.shard, err = memory.Make[M](group, n)
	}
	return err
}

// forget frees the shard of the gradients of unit k on local rank i behind the work on the group's
// stream. Replicas use the shards on streams of their own, so theirs stay for the next pass.
func (u *Units[M, P]) forget(i, k int) error {
	x := &u.locals[i].units[k]
	if x.shard.Buffer() == nil || u.replicas != nil {
		return nil
	}
	capture, err := gpu.StreamOf(u.g.Stream(i)).CaptureID()
	if err == nil && capture != 0 && capture != x.capture {
		err = fmt.Errorf("unit %d on rank %d: its gradients were reduced outside of the capture: call Refresh before it begins", k, u.queue.rank(i))
	}
	if err == nil {
		err, x.shard = x.shard.Close(), memory.Slice[M]{}
	}
	return err
}

// adder lives as long as the process.
var adder = sync.OnceValues(func() (*kernel.Elementwise, error) {
	return kernel.NewElementwise("sum + x", &kernel.ElementwiseConfig{
		Inputs: []string{"sum", "x"},
		Floats: func(in, out []float64) { out[0] = in[0] + in[1] },
	})
})

// add adds x to sum, and rounds once.
func add[T, S memory.Element](s *stream.Stream, sum memory.Slice[T], x memory.Slice[S]) error {
	f, err := adder()
	if err != nil {
		return err
	}
	if err := f.Launch(s, kernel.Out(sum), kernel.In(sum), kernel.In(x)); err != nil {
		return fmt.Errorf("ddp: add gradients: %w", err)
	}
	return nil
}

// Finish ends the backward pass. Work that is enqueued on the streams after Finish sees the
// shards of the gradients reduced; give one stream for each local rank. The host does not
// wait. Finish returns an error that names the units that are not ready on the local ranks.
// Even then the pass ends: the missing gradients count as zeros, and the next Ready begins
// another pass. With Autotune, one Finish waits for the passes before.
func (u *Units[M, P]) Finish(streams ...*stream.Stream) error {
	const op = "ddp: finish units"
	by, err := u.sorted(op, streams)
	if err != nil {
		return err
	}
	for i, s := range by {
		if err := u.locals[i].params.RecordStream(s); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
		u.locals[i].finished = s
	}
	lack := u.queue.end(op, by, func() error { return nil })
	if err := u.g.Err(); err != nil {
		return errors.Join(lack, err)
	}
	lack = errors.Join(lack, u.endPass(op, by))
	return errors.Join(lack, u.queue.trial.advance(context.Background(), by))
}

// endPass lets the streams wait for the group's, and frees the gradients that the next pass does not reuse.
func (u *Units[M, P]) endPass(op string, by []*stream.Stream) error {
	for i, s := range by {
		l := &u.locals[i]
		l.last, l.passes = -1, l.passes+1
		err := errors.Join(l.trim(l.keep, u.most, s), s.WaitStream(u.g.Stream(i)))
		l.keep = max(2, l.taken)
		if u.replicas != nil {
			err = errors.Join(err, u.replicas[i].Err(), u.await(s, u.replicas[i].Stream(0)))
		}
		if err != nil {
			return fmt.Errorf("%s: rank %d: %w", op, u.queue.rank(i), err)
		}
	}
	return nil
}

// await lets s wait for the stream of the replicas, unless that has no part in the capture of s.
func (u *Units[M, P]) await(s, replicas *stream.Stream) error {
	of, err := gpu.StreamOf(s).CaptureID()
	if err != nil {
		return err
	}
	if id, err := gpu.StreamOf(replicas).CaptureID(); err != nil || id != of {
		return err
	}
	return s.WaitStream(replicas)
}
