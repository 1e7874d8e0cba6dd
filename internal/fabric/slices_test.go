package fabric

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
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
func AllReduce[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op flight.Reduction, cfg *AllReduceConfig) error {
	o := operation{kind: flight.AllReduce, op: op}
	if cfg != nil {
		o.algorithm = cfg.Algorithm
	}
	return issue(r, s, &o, dst, src)
}

// AllGather enqueues an all-gather of slices, after it has checked them.
func AllGather[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(r, s, &operation{kind: flight.AllGather}, dst, src)
}

// ReduceScatter enqueues a reduce-scatter of slices, after it has checked them.
func ReduceScatter[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op flight.Reduction) error {
	return issue(r, s, &operation{kind: flight.ReduceScatter, op: op}, dst, src)
}

// Broadcast enqueues a broadcast of slices, after it has checked them.
func Broadcast[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(r, s, &operation{kind: flight.Broadcast, root: root}, dst, src)
}

// AllToAll enqueues an all-to-all of slices, after it has checked them.
func AllToAll[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(r, s, &operation{kind: flight.AllToAll}, dst, src)
}

// issue checks an operation and enqueues it.
func issue[T memory.Element](r *Rank, s *stream.Stream, o *operation, dst, src memory.Slice[T]) error {
	if r == nil {
		return fmt.Errorf("fabric: %s: no rank given", o.kind.Plain())
	}
	fail := func(err error) error { return r.errorf(o.kind.Plain(), "%w", err) }
	if err := r.Err(); err != nil {
		return err
	}
	if (s == nil || !gpu.StreamOf(s).Open()) || s.Device() != r.dev {
		return gpu.CheckStream("fabric: "+o.kind.Plain(), s, gpu.DeviceOf(r.dev))
	}
	if o.kind == flight.Broadcast && o.root >= 0 && o.root < r.ranks && r.rank != o.root {
		src = dst
	}
	if err := o.lengths(r, dst.Len(), src.Len(), memory.DTypeOf[T]()); err != nil {
		return fail(err)
	}
	if err := errors.Join(mem.Check("the destination", dst.Buffer(), dst.Len(), r.dev), mem.Check("the source", src.Buffer(), src.Len(), r.dev)); err != nil {
		return fail(err)
	}
	o.dst, o.src = dst.Ptr(), src.Ptr()
	if err := o.overlap(r, dst.Bytes(), src.Bytes()); err != nil {
		return fail(err)
	}
	if o.bytes == 0 {
		return nil
	}
	if err := o.room(r); err != nil {
		return fail(err)
	}
	if r.ranks == 1 {
		if o.dst == o.src {
			return nil
		}
		return memory.Copy(s, dst, src)
	}
	if err := r.enqueue(s, o); err != nil {
		return fail(err)
	}
	return nil
}

// lengths checks the lengths, the type and what names a way or a rank.
func (o *operation) lengths(r *Rank, dst, src int, t memory.DType) error {
	wantDst, wantSrc, part := src, src, src
	switch o.kind {
	case flight.AllGather:
		wantDst = src * r.ranks
	case flight.ReduceScatter:
		wantDst, wantSrc, part = dst, dst*r.ranks, dst
	case flight.AllToAll:
		part = src / r.ranks
	}
	o.bytes, o.dtype = part*t.Size(), t
	switch {
	case dst != wantDst:
		return fmt.Errorf("the destination has %d elements: want %d", dst, wantDst)
	case src != wantSrc:
		return fmt.Errorf("the source has %d elements: want %d", src, wantSrc)
	case o.kind == flight.AllToAll && src%r.ranks != 0:
		return fmt.Errorf("the source has %d elements: want a multiple of %d, the number of ranks", src, r.ranks)
	case o.kind == flight.Broadcast && (o.root < 0 || o.root >= r.ranks):
		return fmt.Errorf("rank %d does not exist", o.root)
	case o.algorithm < Auto || o.algorithm >= algorithms:
		return fmt.Errorf("%s does not exist", o.algorithm)
	}
	if !o.reduces() {
		return nil
	}
	if o.op < 0 || o.op >= flight.NumReductions {
		return fmt.Errorf("%s does not exist: want sum, prod, max, min or avg", o.op)
	}
	if o.format = formatOf[t]; o.format < 0 {
		return fmt.Errorf("%s of %s: want an integer of 8, 32 or 64 bits or a float of at least 16: %w", o.op, t, errors.ErrUnsupported)
	}
	return nil
}

// overlap refuses buffers that share memory in another way than in place.
func (o *operation) overlap(r *Rank, dst, src int) error {
	if o.dst+uint64(dst) <= o.src || o.src+uint64(src) <= o.dst {
		return nil
	}
	own := uint64(r.rank * o.bytes)
	want := "the same memory"
	switch o.kind {
	case flight.AllReduce, flight.Broadcast:
		if o.dst == o.src {
			return nil
		}
	case flight.AllGather:
		if want = "the source to be the rank's part of the destination"; o.src == o.dst+own {
			return nil
		}
	case flight.ReduceScatter:
		if want = "the destination to be the rank's part of the source"; o.dst == o.src+own {
			return nil
		}
	case flight.AllToAll:
		return errors.New("the destination and the source overlap: want no memory in common")
	}
	return fmt.Errorf("the destination and the source overlap: want %s, or none in common", want)
}

// room is fits with an error.
func (o *operation) room(r *Rank) error {
	most, ok := o.fits(r)
	switch {
	case ok:
		return nil
	case o.algorithm == TwoShotLines && r.noLines != "":
		return r.Supports(TwoShotLines)
	case o.kind == flight.AllReduce && o.bytes <= r.Limits().AllReduce():
		return fmt.Errorf("%d bytes: %s takes at most %d", o.bytes, o.algorithm, most)
	}
	return fmt.Errorf("%d bytes a rank: at most %d with this Config.Bytes", o.bytes, most)
}
