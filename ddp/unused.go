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
type usedMap struct {
	locals []localUsed
	all    comm.Shards[uint8] // by local rank: 1 for each gradient that any rank uses
	known  bool               // the answer holds for all later steps
	unused []unused
}

type localUsed struct {
	mine []bool              // what own holds; nil before the first step
	own  memory.Slice[uint8] // 1 for each gradient that this rank uses
}

// unused is a gradient of a local rank that gets the result or keeps its value.
type unused struct {
	local, grad int
	old         *memory.Buffer // its value before the step; nil if it still has the value
}

func newUsedMap(g *comm.Group, n int) (*usedMap, error) {
	c := &usedMap{}
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

func (c *usedMap) close() error {
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
func (r *Reducer) zeroUnused(k, local int) error {
	part, s := r.parts[k], r.g.Stream(local)
	for j, i := range r.queue.buckets[k].grads {
		if r.queue.seen[local][i] || r.grads[local][i].len == 0 {
			continue
		}
		if r.used != nil { // otherwise it is missing, and Finish returns the error
			old, err := part.save(s, local, j)
			if err != nil {
				return err
			}
			r.used.unused = append(r.used.unused, unused{local, i, old})
		}
		if err := part.zero(s, local, j); err != nil {
			return err
		}
	}
	return nil
}

// reduceUsed lets the ranks tell each other which gradients they use, and brings the
// unused ones into order.
func (r *Reducer) reduceUsed() error {
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
func (r *Reducer) restore() error {
	list := r.used.unused
	r.used.unused = list[:0]
	var errs []error
	for _, u := range list {
		errs = append(errs, r.restoreOne(&u, r.g.Stream(u.local)), u.old.Close())
	}
	return errors.Join(errs...)
}

func (r *Reducer) restoreOne(u *unused, s *stream.Stream) error {
	at := r.queue.of[u.grad]
	return r.parts[at.bucket].choose(s, u.local, at.nth, r.used.all[u.local].Slice(u.grad, u.grad+1), u.old)
}
