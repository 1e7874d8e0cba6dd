package main

import (
	"errors"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// sharded is the parameters of all local ranks, of which each rank has a shard (torch's
// fully_shard). The master copy is float32, and units are gathered in T. Gradients are reduced in
// float32 in each micro-batch, and add up in the shards.
type sharded[T kernels.Float] struct {
	g       *comm.Group
	of      *preset
	units   *ddp.Units[float32, T]
	members [][]int // parameters of each unit
}

func newSharded[T kernels.Float](g *comm.Group, of *preset) (u *sharded[T], err error) {
	u = &sharded[T]{g: g, of: of, members: of.units()}
	shapes, lens := of.shapes(), make([][]int, len(u.members))
	for k, members := range u.members {
		for _, i := range members {
			lens[k] = append(lens[k], shapes[i].len())
		}
	}
	u.units, err = ddp.NewUnits[float32, T](g, lens, &ddp.UnitsConfig{Op: new(comm.Sum), Reduce: memory.Float32})
	return u, err
}

// params returns the parameters of a local rank, and draws the initial values
// of its shard. Vectors and embeddings are used in float32, so if T is another
// type, they and their gradients have memory of their own.
func (u *sharded[T]) params(s *stream.Stream, local int) (p *params[T], err error) {
	shapes := u.of.shapes()
	n := len(shapes)
	p = &params[T]{shapes: shapes, values: make([]floats, n), grads: make([]floats, n), copies: make([]memory.Slice[T], n)}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	room := func(n int, to ...*floats) error {
		for _, x := range to {
			if *x, err = memory.Make[float32](s, n); err != nil {
				return err
			}
			p.owned = append(p.owned, *x)
		}
		return nil
	}
	if err := room(1, &p.loss); err != nil {
		return p, err
	}
	if rounds[T]() {
		p.narrow = make([]memory.Slice[T], n)
		for i, x := range shapes {
			if x.in > 0 && i != tok && i != pos {
				continue
			}
			if err := room(x.len(), &p.values[i], &p.grads[i]); err != nil {
				return p, err
			}
		}
	}
	if err := s.WaitStream(u.g.Stream(local)); err != nil {
		return p, err
	}
	return p, u.draw(s, local)
}

// draw draws the initial values of a shard: all parameters, of which it keeps the rank's pieces.
func (u *sharded[T]) draw(s *stream.Stream, local int) error {
	mine := u.optimised(local)
	return draw(s, u.of, func(i int) (floats, func() error, error) {
		x := u.of.shapes()[i]
		whole, err := memory.Make[float32](s, x.len())
		return whole, func() error {
			var errs []error
			for _, p := range mine {
				if p.name == x.name {
					errs = append(errs, tensor.Copy(s, p.Value, matrix(whole.Slice(p.start, p.start+p.len), p.len)))
				}
			}
			return errors.Join(append(errs, whole.Close())...)
		}, err
	})
}

// optimised returns the pieces of parameters in the shard of a local rank.
func (u *sharded[T]) optimised(local int) (list []trained) {
	shapes, shard := u.of.shapes(), u.units.Shard(local)
	for i, p := range u.units.Pieces(local) {
		list = append(list, trained{
			Param: optim.Of(shard.Slice(p.At, p.At+p.Len), floats{}), // the gradients are set in each step
			shape: shapes[u.members[p.Unit][p.Param]], start: p.Start, len: p.Len, piece: i + 1,
		})
	}
	return list
}

// setGradients gives the optimiser of a local rank the gradients of its pieces.
func (u *sharded[T]) setGradients(r *replica[T], local int) error {
	reduced, ordered := u.units.ShardGrads(local), []tensor.Tensor(nil)
	for _, x := range r.order {
		ordered = append(ordered, reduced[x.piece-1])
	}
	return r.opt.SetGradients(r.s, ordered...)
}

// access gathers the units of a model while it uses them, and reduces their gradients. Unit 0
// stays from the beginning of the forward pass to the end of the backward pass, because the head
// is in it.
func (u *sharded[T]) access(m *model[T]) access {
	s, p := m.s, m.p
	return access{
		use: func(k int, backward bool) error {
			if k != 0 || !backward {
				xs, err := u.units.Use(s, k)
				if err != nil {
					return err
				}
				u.assign(k, p.copies, p.values, xs)
			}
			if !backward {
				return u.each(k, p, func(i int) error { return m.k.Widen(p.copies[i], p.values[i], false) })
			}
			xs, err := u.units.Grads(s, k)
			u.assign(k, p.narrow, p.grads, xs)
			return err
		},
		done: func(k int, backward bool) error {
			if backward {
				err := u.each(k, p, func(i int) error {
					return tensor.Copy(s, matrix(p.narrow[i], p.narrow[i].Len()), matrix(p.grads[i], p.grads[i].Len()))
				})
				if err := first(err, u.units.Ready(s, k)); err != nil {
					return err
				}
			}
			if k == 0 && !backward {
				return nil
			}
			return u.units.Done(s, k)
		},
	}
}

// assign lets the model use the memory xs of unit k as T, and as float32 if that is T.
func (u *sharded[T]) assign(k int, to []memory.Slice[T], same []floats, xs []memory.Slice[T]) {
	for j, i := range u.members[k] {
		if j == len(xs) {
			return // after an error
		}
		if to != nil {
			to[i] = xs[j]
		}
		if x, ok := any(xs[j]).(floats); ok {
			same[i] = x
		}
	}
}

// each calls f for the parameters of unit k that have float32 memory of their own.
func (u *sharded[T]) each(k int, p *params[T], f func(i int) error) error {
	if p.narrow == nil {
		return nil
	}
	for _, i := range u.members[k] {
		if p.values[i].Len() > 0 {
			if err := f(i); err != nil {
				return err
			}
		}
	}
	return nil
}

// reduceLoss adds up the losses of all ranks.
func (u *sharded[T]) reduceLoss(streams []*stream.Stream, losses comm.Shards[float32]) error {
	return u.g.Between(streams, func() error { return comm.AllReduce(u.g, comm.Sum, losses...) })
}
