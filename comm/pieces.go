package comm

import (
	"errors"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// pieceBytes is how much of a tensor of another device is added while the next piece comes:
// a copy waits for one before, which takes the link some microseconds of a hundred.
var pieceBytes = 32 << 20

// A relay is a tensor with the memory, beside the destination, that two pieces of tensors of
// another device come to in turns.
type relay struct {
	to, from *stream.Stream
	near     tensor.Tensor
	room     int              // elements of a piece
	left     [2]*stream.Event // when what came there was used
}

func newRelay(to, from *stream.Stream, t memory.DType) (*relay, error) {
	room := max(pieceBytes/t.Size(), 1)
	near, err := tensor.Make(to, t, 2*room)
	if err != nil {
		return nil, err
	}
	r := &relay{to: to, from: from, near: near, room: room}
	if err := from.WaitStream(to); err != nil {
		return nil, errors.Join(err, r.close(err))
	}
	return r, nil
}

// pass copies piece i to this side, and has use enqueue what uses it here.
func (r *relay) pass(i int, piece tensor.Tensor, use func(near tensor.Tensor) error) error {
	at := i % len(r.left)
	near, err := r.near.Narrow(0, at*r.room, piece.Len())
	if err != nil {
		return err
	}
	if e := r.left[at]; e != nil {
		r.left[at] = nil
		if err := errors.Join(r.from.Wait(e), e.Close()); err != nil {
			return err
		}
	}
	if err := tensor.Copy(r.from, near, piece); err != nil {
		return err
	}
	if err := r.to.WaitStream(r.from); err != nil {
		return err
	}
	if err := use(near); err != nil {
		return err
	}
	r.left[at], err = r.to.Record(nil)
	return err
}

// close frees the memory, behind all uses of it: those after an error nothing else orders.
func (r *relay) close(failed error) (err error) {
	for _, e := range r.left {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	if failed != nil {
		err = errors.Join(err, r.near.RecordStream(r.from))
	}
	return errors.Join(err, r.near.Close())
}

// addPieces adds t, which is on another device and as contiguous as the sums are: one piece
// is added while the next one comes.
func (x *sum) addPieces(result, so, t tensor.Tensor) (err error) {
	to := x.g.streamOf(result)
	r, err := newRelay(to, x.g.streamOf(t), t.DType())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close(err)) }()
	for i := 0; i*r.room < t.Len(); i++ {
		p, err := cut(i*r.room, r.room, result, so, t)
		if err != nil {
			return err
		}
		if err := r.pass(i, p[2], func(near tensor.Tensor) error { return tensor.Add(to, p[0], p[1], near) }); err != nil {
			return err
		}
	}
	return nil
}

// cut returns n elements of contiguous tensors of one shape, or what they have left.
func cut(at, n int, ts ...tensor.Tensor) ([]tensor.Tensor, error) {
	parts := make([]tensor.Tensor, len(ts))
	for i, t := range ts {
		flat, err := t.View(-1)
		if err == nil {
			parts[i], err = flat.Narrow(0, at, min(n, t.Len()-at))
		}
		if err != nil {
			return nil, err
		}
	}
	return parts, nil
}
