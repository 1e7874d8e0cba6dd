package ddp

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A usedMap tells the devices which gradients any rank uses. The host does not know.
type usedMap[T memory.Element] struct {
	locals []localUsed
	all    comm.Shards[uint8] // by local rank: 1 for each gradient that any rank uses
	known  bool               // the answer holds for all later steps
	unused []unused[T]
}

type localUsed struct {
	mine []bool              // what own holds; nil before the first step
	own  memory.Slice[uint8] // 1 for each gradient that this rank uses
}

// unused is a gradient of a local rank that gets the result or keeps its value.
type unused[T memory.Element] struct {
	local, grad int
	old         memory.Slice[T] // its value before the step; none if it still has the value
}

func newUsedMap[T memory.Element](g *comm.Group, n int) (*usedMap[T], error) {
	c := &usedMap[T]{}
	for _, s := range g.Streams() {
		own, errOwn := memory.Make[uint8](s, n)
		all, errAll := memory.Make[uint8](s, n)
		c.locals, c.all = append(c.locals, localUsed{own: own}), append(c.all, all)
		if err := errors.Join(errOwn, errAll); err != nil {
			return nil, errors.Join(err, c.close())
		}
	}
	return c, nil
}

func (c *usedMap[T]) close() error {
	if c == nil {
		return nil
	}
	errs := []error{c.all.Close()}
	for _, l := range c.locals {
		errs = append(errs, l.own.Close())
	}
	for _, u := range c.unused {
		errs = append(errs, u.old.Close())
	}
	return errors.Join(errs...)
}

// zeroUnused puts zeros into the wire for the gradients that a local rank does not use in this
// step. If the wire is their own memory, zeroUnused saves their values.
func (r *Reducer[T]) zeroUnused(k, local int) error {
	b, w, s := &r.queue.buckets[k], r.parts[k].wire, r.g.Stream(local)
	for j, i := range b.grads {
		x := r.grads[local][i]
		if r.queue.seen[local][i] || x.Len() == 0 {
			continue
		}
		u := unused[T]{local: local, grad: i}
		if r.used == nil { // it is missing: Finish returns the error
			if err := w.zero(s, local, b.at[j], x.Len()); err != nil {
				return err
			}
			continue
		}
		if w.inPlace(local) {
			var err error
			if u.old, err = memory.Make[T](s, x.Len()); err != nil {
				return err
			}
			if err := memory.Copy(s, u.old, x); err != nil {
				return errors.Join(err, u.old.Close())
			}
		}
		r.used.unused = append(r.used.unused, u)
		if err := w.zero(s, local, b.at[j], x.Len()); err != nil {
			return err
		}
	}
	return nil
}

// reduceUsed lets the ranks tell each other which gradients they use, and brings the
// unused ones into order.
func (r *Reducer[T]) reduceUsed() error {
	c := r.used
	for i := range c.locals {
		s, l := r.g.Stream(i), &c.locals[i]
		if err := l.write(s, r.queue.seen[i]); err != nil {
			return fmt.Errorf("ddp: find unused gradients: %w", err)
		}
		if err := memory.Copy(s, c.all[i], l.own); err != nil {
			return fmt.Errorf("ddp: find unused gradients: %w", err)
		}
	}
	if err := comm.AllReduce(r.g, comm.Max, c.all...); err != nil {
		return err
	}
	if err := r.restore(); err != nil {
		return err
	}
	for k := range r.parts { // restore has read their wires again
		if err := r.queue.record(k); err != nil {
			return err
		}
	}
	if r.cfg.StaticGraph {
		c.known = true
		for _, seen := range r.queue.seen {
			r.queue.static = append(r.queue.static, slices.Clone(seen))
		}
	}
	return nil
}

// write tells the device what this rank uses, if it does not know yet.
func (l *localUsed) write(s *stream.Stream, seen []bool) error {
	if slices.Equal(l.mine, seen) {
		return nil
	}
	host, err := memory.MakePinned[uint8](s.Device(), len(seen))
	if err != nil {
		return err
	}
	for i, is := range seen {
		host.Data()[i] = 0
		if is {
			host.Data()[i] = 1
		}
	}
	if err := l.own.CopyFromPinned(s, host); err != nil {
		return errors.Join(err, host.Close())
	}
	l.mine = slices.Clone(seen)
	return host.Close()
}

// restore gives unused gradients the result if another rank uses them, and their old value
// if none does.
func (r *Reducer[T]) restore() error {
	list := r.used.unused
	r.used.unused = list[:0]
	var errs []error
	for _, u := range list {
		errs = append(errs, r.restoreOne(&u, r.g.Stream(u.local)), u.old.Close())
	}
	return errors.Join(errs...)
}

func (r *Reducer[T]) restoreOne(u *unused[T], s *stream.Stream) error {
	at, x, old := r.queue.of[u.grad], r.grads[u.local][u.grad], u.old
	if old.Buffer() == nil {
		old = x
	}
	used := r.used.all[u.local].Slice(u.grad, u.grad+1)
	return r.parts[at.bucket].wire.choose(s, u.local, r.queue.buckets[at.bucket].at[at.nth], x, used, old)
}
