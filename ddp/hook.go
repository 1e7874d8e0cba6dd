package ddp

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A Hook reduces the buckets of a Reducer instead of an all-reduce (torch's communication
// hooks, register_comm_hook). [PowerSGD] is one.
//
// Reduce enqueues, on the streams of b.Group, the sum of b.Flat over all ranks, and returns it:
// one tensor for each local rank, with as many elements as Flat, on the same device. It may have
// another type of floats: the reducer converts it. nil means that Flat itself has the sums. The
// tensors are read before the next call. Reduce may overwrite Flat. It runs once for each bucket
// of a step, in the same order on all ranks, and must not wait for the device if steps are
// captured in a graph.
//
// In the first step, the processes of a group compare whether the results are right, and all
// ranks get the error of one. If Reduce returns an error, or a wrong result in a later step, the
// reducer breaks a group of several processes, so that no rank waits for the others. After an
// error the gradients of the step are undefined; Finish returns the error, and ends the step.
type Hook interface {
	Reduce(b *Bucket) (sums []tensor.Tensor, err error)
}

// A Bucket is the gradients that a [Hook] reduces together (torch's GradBucket). The hook must
// not change its fields except State.
type Bucket struct {
	Group  *comm.Group
	Index  int               // counts the buckets of a step
	Last   bool              // of the step
	Params []int             // the numbers of its gradients, ascending
	Flat   []tensor.Tensor   // by local rank: the elements to be summed. Avg has divided them by the number of ranks
	Grads  [][]tensor.Tensor // by local rank: the gradients, as parts of Flat with their shapes
	// State belongs to the hook, and is nil at first. The reducer closes it when it is closed,
	// and when Rebuild makes other buckets.
	State io.Closer

	contents contents
	checked  bool // the ranks have compared a result
}

// AllReduce enqueues the sum of Flat over all ranks, in place (torch's allreduce_hook).
func (b *Bucket) AllReduce() error { return b.contents.reduce(b.Group, comm.Sum) }

// newBuckets returns the buckets that hooks get.
func (r *Reducer) newBuckets(buckets []bucket, parts []contents) ([]Bucket, error) {
	all := make([]Bucket, len(buckets))
	for k, b := range buckets {
		x := Bucket{Group: r.g, Index: k, Last: k == len(buckets)-1, Params: b.grads, contents: parts[k]}
		var err error
		if x.Flat, err = parts[k].tensors(); err != nil {
			return nil, err
		}
		for i, flat := range x.Flat {
			views, err := r.views(&b, i, flat)
			if err != nil {
				return nil, err
			}
			x.Grads = append(x.Grads, views)
		}
		all[k] = x
	}
	return all, nil
}

// views returns the gradients of a bucket in its flat memory.
func (r *Reducer) views(b *bucket, local int, flat tensor.Tensor) ([]tensor.Tensor, error) {
	var views []tensor.Tensor
	for j, i := range b.grads {
		x := &r.grads[local][i]
		part, err := flat.Narrow(0, b.at[j], x.len)
		if err != nil {
			return nil, err
		}
		if part, err = part.View(x.shape...); err != nil {
			return nil, err
		}
		views = append(views, part)
	}
	return views, nil
}

func closeBuckets(bs []Bucket) error {
	var errs []error
	for _, b := range bs {
		if b.State != nil {
			errs = append(errs, b.State.Close())
		}
	}
	return errors.Join(errs...)
}

// reduceByHook calls the hook to reduce bucket k, and ends the step if that
// fails.
func (r *Reducer) reduceByHook(k int) error {
	b := &r.buckets[k]
	if *r.cfg.Op == comm.Avg {
		if err := b.contents.divide(r.g, r.g.Size()); err != nil {
			return err
		}
	}
	sums, err := r.cfg.Hook.Reduce(b)
	if err != nil {
		return r.hookFailed(fmt.Errorf("ddp: the hook of bucket %d on rank %d: %w", k, r.g.Rank(), err))
	}
	if err = b.check(sums); !b.checked {
		if err = agree(context.Background(), r.g, fmt.Sprintf("reduce bucket %d by a hook", k), arguments{}, err); err != nil {
			r.queue.failed = err
			return err
		}
		b.checked = true
	}
	if err != nil {
		return r.hookFailed(err)
	}
	for i, sum := range sums {
		flat := b.Flat[i]
		if sum.Ptr() == flat.Ptr() && sum.DType() == flat.DType() && sum.Contiguous() {
			continue
		}
		if err := tensor.Copy(r.g.Stream(i), flat, sum); err != nil {
			return r.hookFailed(err)
		}
	}
	return nil
}

// hookFailed ends the step with an error on this rank, and breaks the group if
// it has other processes, which would otherwise wait for this one.
func (r *Reducer) hookFailed(err error) error {
	r.queue.failed = err
	if r.g.Locals() < r.g.Size() {
		return errors.Join(err, route.GroupOf(r.g).Fail(err))
	}
	return err
}

// check returns an error if the results of a hook do not fit the bucket.
func (b *Bucket) check(sums []tensor.Tensor) error {
	op := fmt.Sprintf("reduce bucket %d by a hook", b.Index)
	if sums != nil && len(sums) != len(b.Flat) {
		return refuse(op, "it returned %d tensors: want one for each of the %d local ranks", len(sums), len(b.Flat))
	}
	for i, x := range sums {
		flat := b.Flat[i]
		switch {
		case x.DType() == memory.Invalid:
			return refuse(op, "it returned no tensor for local rank %d", i)
		case x.Len() != flat.Len():
			return refuse(op, "it returned %d elements for local rank %d: want the %d of the bucket", x.Len(), i, flat.Len())
		case x.Device() != flat.Device():
			return refuse(op, "it returned a tensor on another device than %s for local rank %d", flat.Device(), i)
		case !isFloat(x.DType()) && x.DType() != flat.DType():
			return refuse(op, "it returned %s for %s on local rank %d: want floats of 16 bits or more", x.DType(), flat.DType(), i)
		case x.Dims() != 1:
			return refuse(op, "it returned shape %v for local rank %d: want one dimension", x.Shape(), i)
		}
	}
	return nil
}

// A mark is a point in a stream that later steps wait for. It does not reach from
// one capture of a graph into another, or out of one: there the program orders the
// launches.
type mark struct {
	event   *stream.Event
	capture uint64 // the capture that set it, or 0
}

// newMark marks where s is.
func newMark(s *stream.Stream) (*mark, error) {
	e, err := s.Record(nil)
	return &mark{event: e}, err
}

func (m *mark) set(s *stream.Stream) (err error) {
	if m.capture, err = gpu.StreamOf(s).CaptureID(); err != nil {
		return err
	}
	return m.event.Record(s)
}

func (m *mark) wait(s *stream.Stream) error {
	capture, err := gpu.StreamOf(s).CaptureID()
	if err != nil || capture != m.capture {
		return err
	}
	return s.Wait(m.event)
}

func (m *mark) close() error {
	if m == nil {
		return nil
	}
	return m.event.Close()
}
