package fabric

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Tests issue collectives of slices, which this file checks before it calls Rank.enqueue.
// Package comm calls Rank.Enqueue with addresses that package nccl has checked.

// AllReduceConfig are the options of AllReduce. All ranks have the same.
type AllReduceConfig struct {
	Algorithm Algorithm
}

// AllReduce enqueues an all-reduce of slices, after it has checked them.
func AllReduce[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op collective.Reduction, cfg *AllReduceConfig) error {
	o := operationOf(collective.AllReduce, op, 0)
	if cfg != nil {
		o.Algorithm = int8(cfg.Algorithm)
	}
	return issue(r, s, o, dst, src)
}

// AllGather enqueues an all-gather of slices, after it has checked them.
func AllGather[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], by ...Algorithm) error {
	return issue(r, s, operationOf(collective.AllGather, 0, 0, by...), dst, src)
}

// ReduceScatter enqueues a reduce-scatter of slices, after it has checked them.
func ReduceScatter[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op collective.Reduction, by ...Algorithm) error {
	return issue(r, s, operationOf(collective.ReduceScatter, op, 0, by...), dst, src)
}

// Broadcast enqueues a broadcast of slices, after it has checked them.
func Broadcast[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(r, s, operationOf(collective.Broadcast, 0, root), dst, src)
}

// AllToAll enqueues an all-to-all of slices, after it has checked them.
func AllToAll[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], by ...Algorithm) error {
	return issue(r, s, operationOf(collective.AllToAll, 0, 0, by...), dst, src)
}

func operationOf(k collective.Kind, op collective.Reduction, root int, by ...Algorithm) *operation {
	o := &operation{Call: collective.Call{Request: collective.Request{Kind: k, Reduction: op, Root: root}}}
	for _, a := range by {
		o.Algorithm = int8(a)
	}
	return o
}

// issue checks an operation and enqueues it.
func issue[T memory.Element](r *Rank, s *stream.Stream, o *operation, dst, src memory.Slice[T]) error {
	if r == nil {
		return fmt.Errorf("fabric: %s: no rank given", o.Kind.Plain())
	}
	fail := func(err error) error { return r.errorf(o.Kind.Plain(), "%w", err) }
	if err := r.Err(); err != nil {
		return err
	}
	if (s == nil || !gpu.StreamOf(s).Open()) || s.Device() != r.dev {
		return gpu.CheckStream("fabric: "+o.Kind.Plain(), s, gpu.DeviceOf(r.dev))
	}
	if o.Kind == collective.Broadcast && o.Root >= 0 && o.Root < r.ranks && r.rank != o.Root {
		src = dst
	}
	if err := o.lengths(r, dst.Len(), src.Len(), memory.DTypeOf[T]()); err != nil {
		return fail(err)
	}
	if err := errors.Join(inside.CheckBuffer("the destination", dst.Buffer(), dst.Len(), r.dev), inside.CheckBuffer("the source", src.Buffer(), src.Len(), r.dev)); err != nil {
		return fail(err)
	}
	o.Dst, o.Src, o.Stream = collective.OperandOf(dst), collective.OperandOf(src), s
	if err := o.overlap(r, dst.Bytes(), src.Bytes()); err != nil {
		return fail(err)
	}
	if o.bytes() == 0 {
		return nil
	}
	if err := o.room(r); err != nil {
		return fail(err)
	}
	if r.ranks == 1 {
		if o.Dst.Ptr == o.Src.Ptr {
			return nil
		}
		return memory.Copy(s, dst, src)
	}
	if err := r.enqueue(o); err != nil {
		return fail(err)
	}
	return nil
}

// lengths checks the lengths, the type and what names a way or a rank.
func (o *operation) lengths(r *Rank, dst, src int, t memory.DType) error {
	wantDst, wantSrc, part := src, src, src
	switch o.Kind {
	case collective.AllGather:
		wantDst = src * r.ranks
	case collective.ReduceScatter:
		wantDst, wantSrc, part = dst, dst*r.ranks, dst
	case collective.AllToAll:
		part = src / r.ranks
	}
	o.N, o.DType = part, t
	switch {
	case dst != wantDst:
		return fmt.Errorf("the destination has %d elements: want %d", dst, wantDst)
	case src != wantSrc:
		return fmt.Errorf("the source has %d elements: want %d", src, wantSrc)
	case o.Kind == collective.AllToAll && src%r.ranks != 0:
		return fmt.Errorf("the source has %d elements: want a multiple of %d, the number of ranks", src, r.ranks)
	case o.Kind == collective.Broadcast && (o.Root < 0 || o.Root >= r.ranks):
		return fmt.Errorf("rank %d does not exist", o.Root)
	case Algorithm(o.Algorithm) < Auto || Algorithm(o.Algorithm) > Pushed:
		return fmt.Errorf("%s does not exist", Algorithm(o.Algorithm))
	}
	if !o.reduces() {
		return nil
	}
	if o.Reduction < 0 || o.Reduction >= collective.NumReductions {
		return fmt.Errorf("%s does not exist: want sum, prod, max, min or avg", o.Reduction)
	}
	if formatOf[t] < 0 {
		return fmt.Errorf("%s of %s: want an integer of 8, 32 or 64 bits or a float of at least 16: %w", o.Reduction, t, errors.ErrUnsupported)
	}
	return nil
}

// overlap refuses buffers that share memory in another way than in place.
func (o *operation) overlap(r *Rank, dst, src int) error {
	to, from := uint64(o.Dst.Ptr), uint64(o.Src.Ptr)
	if to+uint64(dst) <= from || from+uint64(src) <= to {
		return nil
	}
	own := uint64(r.rank * o.bytes())
	want := "the same memory"
	switch o.Kind {
	case collective.AllReduce, collective.Broadcast:
		if to == from {
			return nil
		}
	case collective.AllGather:
		if want = "the source to be the rank's part of the destination"; from == to+own {
			return nil
		}
	case collective.ReduceScatter:
		if want = "the destination to be the rank's part of the source"; to == from+own {
			return nil
		}
	case collective.AllToAll:
		return errors.New("the destination and the source overlap: want no memory in common")
	}
	return fmt.Errorf("the destination and the source overlap: want %s, or none in common", want)
}

// room is fits with an error.
func (o *operation) room(r *Rank) error {
	a, most, ok := o.fits(r, Algorithm(o.Algorithm))
	switch {
	case ok:
		return nil
	case a == TwoShotLines && r.noLines != "":
		return r.Supports(TwoShotLines)
	case o.Kind == collective.AllReduce && o.bytes() <= r.Limits().AllReduce():
		return fmt.Errorf("%d bytes: %s takes at most %d", o.bytes(), a, most)
	}
	return fmt.Errorf("%d bytes a rank: at most %d with this Config.Bytes", o.bytes(), most)
}
