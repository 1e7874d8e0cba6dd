package comm

import (
	"errors"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A bucket is a run of gradients that are reduced together.
type bucket[T memory.Element] struct {
	first, last int // gradients first to last-1
	at          []int
	locals      []localBucket[T] // one for each local rank
}

// localBucket is a bucket on one local rank.
type localBucket[T memory.Element] struct {
	flat    memory.Slice[T] // what goes over the wire
	inPlace bool            // the gradients themselves lie there
	pending int             // gradients that are not ready in this step
	stream  *stream.Stream  // the one that the last of them was ready on
	ready   *stream.Event   // all of them are in flat
	reduced *stream.Event   // the result is in the gradients
}

// wireAlign is the alignment of each gradient in a bucket, in bytes, that of
// memory.MakeFlat. The layout depends on the lengths only, so that all ranks
// have the same.
const wireAlign = 16

// layout places gradients of the given lengths in a bucket.
func layout[T memory.Element](lens []int) (at []int, total int) {
	align := wireAlign / memory.DTypeOf[T]().Size()
	for _, n := range lens {
		at = append(at, total)
		total += (n + align - 1) / align * align
	}
	return at, total
}

// split cuts the gradients into buckets of at most size bytes, from the last
// gradient to the first because backward makes them in that order. The first
// bucket is smaller, so that reducing starts early.
func split[T memory.Element](lens []int, firstBytes, bytes int) []bucket[T] {
	var bs []bucket[T]
	size := memory.DTypeOf[T]().Size()
	limit := firstBytes
	for last := len(lens); last > 0; limit = bytes {
		first, sum := last-1, lens[last-1]*size
		for first > 0 && sum+lens[first-1]*size <= limit {
			first--
			sum += lens[first] * size
		}
		at, _ := layout[T](lens[first:last])
		bs = append(bs, bucket[T]{first: first, last: last, at: at})
		last = first
	}
	return bs
}

// open prepares the bucket for the gradients of one local rank.
func (b *bucket[T]) open(m *member, grads []memory.Slice[T]) error {
	part := grads[b.first:b.last]
	var lb localBucket[T]
	var err error
	if lb.flat, lb.inPlace = b.adjacent(part); !lb.inPlace {
		_, total := layout[T](lengths(part))
		if lb.flat, err = memory.Make[T](m.stream, total); err != nil {
			return err
		}
		// The gaps between gradients are reduced too: they must be numbers.
		if err := lb.flat.Zero(m.stream); err != nil {
			return errors.Join(err, lb.flat.Close())
		}
	}
	b.locals = append(b.locals, lb)
	l := &b.locals[len(b.locals)-1]
	if l.ready, err = stream.NewEvent(m.comm.Device(), nil); err != nil {
		return err
	}
	if l.reduced, err = stream.NewEvent(m.comm.Device(), nil); err != nil {
		return err
	}
	// Until it is recorded for the first time, reduced stands for the zeroing.
	if err := l.reduced.Record(m.stream); err != nil {
		return err
	}
	l.pending = b.last - b.first
	return nil
}

// adjacent returns the memory over the gradients if they lie in it exactly as in
// the bucket, as those of memory.MakeFlat do: then nothing has to be copied.
func (b *bucket[T]) adjacent(part []memory.Slice[T]) (memory.Slice[T], bool) {
	root := part[0].Buffer()
	size := memory.DTypeOf[T]().Size()
	for i, x := range part {
		if root == nil || x.Buffer() != root || x.Offset() != part[0].Offset()+b.at[i]*size {
			return memory.Slice[T]{}, false
		}
	}
	_, total := layout[T](lengths(part))
	flat, err := memory.View[T](root, part[0].Offset(), total)
	return flat, err == nil
}

func (l *localBucket[T]) close() error {
	err := errors.Join(l.ready.Close(), l.reduced.Close())
	if l.inPlace {
		return err
	}
	return errors.Join(err, l.flat.Close())
}

func lengths[T memory.Element](xs []memory.Slice[T]) []int {
	n := make([]int, len(xs))
	for i, x := range xs {
		n[i] = x.Len()
	}
	return n
}
