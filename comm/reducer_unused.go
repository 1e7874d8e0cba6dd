package comm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A census finds out which gradients any rank uses. The answer is on the devices
// only.
type census[T memory.Element] struct {
	locals []localCensus
	known  bool // the answer is that of all steps to come
	unused []unused[T]
}

type localCensus struct {
	mine []bool              // what own holds; nil before the first step
	own  memory.Slice[uint8] // 1 for each gradient that this rank uses
	all  memory.Slice[uint8] // 1 for each that any rank uses
}

// unused is a gradient of a local rank that is to have the result or what it had.
type unused[T memory.Element] struct {
	local, grad int
	old         memory.Slice[T] // what it had; none if it has it still
}

func newCensus[T memory.Element](g *Group, n int) (*census[T], error) {
	c := &census[T]{}
	for i := range g.members {
		var l localCensus
		var errOwn, errAll error
		l.own, errOwn = memory.Make[uint8](g.members[i].stream, n)
		l.all, errAll = memory.Make[uint8](g.members[i].stream, n)
		c.locals = append(c.locals, l)
		if err := errors.Join(errOwn, errAll); err != nil {
			return nil, errors.Join(err, c.close())
		}
	}
	return c, nil
}

func (c *census[T]) close() error {
	if c == nil {
		return nil
	}
	var errs []error
	for _, l := range c.locals {
		errs = append(errs, l.own.Close(), l.all.Close())
	}
	for _, u := range c.unused {
		errs = append(errs, u.old.Close())
	}
	return errors.Join(errs...)
}

// blank puts zeros into the wire for the gradients that a local rank does not
// use in this step. Where the wire is their own memory, what they had is saved.
func (r *Reducer[T]) blank(k, local int) error {
	b, l, s := &r.queue.buckets[k], &r.parts[k][local], r.g.members[local].stream
	for j, i := range b.grads {
		x := r.grads[local][i]
		if r.queue.seen[local][i] || x.Len() == 0 {
			continue
		}
		u := unused[T]{local: local, grad: i}
		if r.census == nil { // it is missing, of which Finish tells
			if err := l.wire.zero(s, b.at[j], x.Len()); err != nil {
				return err
			}
			continue
		}
		if _, own := l.wire.(inPlace[T]); own {
			var err error
			if u.old, err = memory.Make[T](s, x.Len()); err != nil {
				return err
			}
			if err := memory.Copy(s, u.old, x); err != nil {
				return errors.Join(err, u.old.Close())
			}
		}
		r.census.unused = append(r.census.unused, u)
		if err := l.wire.zero(s, b.at[j], x.Len()); err != nil {
			return err
		}
	}
	return nil
}

// agree lets the ranks tell each other which gradients they use, and brings the
// unused ones into order.
func (r *Reducer[T]) agree() error {
	c := r.census
	for i := range c.locals {
		if err := c.locals[i].write(&r.g.members[i], r.queue.seen[i]); err != nil {
			return fmt.Errorf("comm: find unused gradients: %w", err)
		}
	}
	err := r.g.each(func(i int, m *member) error {
		return nccl.AllReduce(m.comm, m.stream, c.locals[i].all, c.locals[i].own, Max)
	})
	if err != nil {
		return err
	}
	if err := r.restore(); err != nil {
		return err
	}
	for k := range r.parts { // whose wires have been read again
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
func (l *localCensus) write(m *member, seen []bool) error {
	if slices.Equal(l.mine, seen) {
		return nil
	}
	host, err := memory.MakePinned[uint8](m.comm.Device(), len(seen))
	if err != nil {
		return err
	}
	for i, is := range seen {
		host.Data()[i] = 0
		if is {
			host.Data()[i] = 1
		}
	}
	if err := l.own.CopyFromPinned(m.stream, host); err != nil {
		return errors.Join(err, host.Close())
	}
	l.mine = slices.Clone(seen)
	return host.Close()
}

// restore gives unused gradients the result where another rank uses them, and
// what they had where none does.
func (r *Reducer[T]) restore() error {
	list := r.census.unused
	r.census.unused = list[:0]
	var errs []error
	for _, u := range list {
		errs = append(errs, r.restoreOne(&u, r.g.members[u.local].stream), u.old.Close())
	}
	return errors.Join(errs...)
}

func (r *Reducer[T]) restoreOne(u *unused[T], s *stream.Stream) error {
	at, x, old := r.queue.of[u.grad], r.grads[u.local][u.grad], u.old
	if old.Buffer() == nil {
		old = x
	}
	used := r.census.locals[u.local].all.Slice(u.grad, u.grad+1)
	return r.parts[at.bucket][u.local].wire.choose(s, r.queue.buckets[at.bucket].at[at.nth], x, used, old)
}
