package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Join ends the steps of the local ranks, which have no more input, while other
// ranks have (the end of torch's Join context; needs ReducerConfig.Uneven).
// Call it instead of a step. Join takes part in the reductions of the other
// ranks with zeros, whose results the gradients get, until all ranks have
// called it. Give one stream for each local rank, as for Finish. After the
// error of a step with Verify, all ranks are in step, and Join may be called
// again.
//
// Join returns on all ranks the highest rank that has taken part in all steps.
// Its parameters are the model, because the others have missed updates:
//
//	last, err := r.Join(ctx, s)
//	...
//	err = comm.BroadcastFrom(g, last, params)
//
// Then all ranks may begin steps again, such as the next epoch. A rank that adds up gradients of
// several backward passes joins after its last Finish. Join waits for the steps of other ranks.
// If ctx ends first, or the group is broken, it returns the cause, and the ranks are no longer in
// step. With StopTogether, Join returns an error as soon as another rank has another step.
// Collective.
func (r *Reducer) Join(ctx context.Context, streams ...*stream.Stream) (last int, err error) {
	const op = "ddp: join"
	if r == nil || r.owner.Closed() {
		return 0, fmt.Errorf("%s: the reducer: %w", op, device.ErrClosed)
	}
	if r.uneven == nil {
		return 0, fmt.Errorf("%s: the reducer expects the same number of steps on all ranks: set ReducerConfig.Uneven", op)
	}
	by, err := r.queue.sorted(op, streams)
	if err != nil {
		return 0, err
	}
	if err := route.GroupOf(r.g).Check("join"); err != nil {
		return 0, fmt.Errorf("ddp: %w", err)
	}
	if err := r.shadowAll(ctx, by); err != nil {
		return 0, fmt.Errorf("%s after %d steps of other ranks: %w", op, r.uneven.missed, err)
	}
	return r.lastJoined(ctx, r.uneven.missed == 0)
}

// shadowAll takes part in the steps of the other ranks until they have no more, and counts them.
func (r *Reducer) shadowAll(ctx context.Context, by []*stream.Stream) error {
	r.queue.mu.Lock()
	defer r.queue.mu.Unlock()
	if r.queue.begun() {
		return errors.New("in the middle of a step: call Finish before")
	}
	for ; ; r.uneven.missed++ {
		active, err := r.uneven.count(ctx, r)
		if err != nil || active == 0 {
			r.uneven.announced = false
			return err
		}
		if err := errors.Join(r.shadow(by), r.queue.trial.advance(ctx, by)); err != nil {
			return err
		}
		if r.cfg.StopTogether {
			return fmt.Errorf("rank %d exhausted all inputs, and %d of %d ranks have more", r.g.Rank(), active, r.g.Size())
		}
	}
}

// shadow takes part in a step that the local ranks have no gradients for.
func (r *Reducer) shadow(by []*stream.Stream) error {
	err := r.queue.conclude(by, r.agreeUsed)
	r.uneven.announced = false
	return r.verified("finish gradients", err)
}

// lastJoined returns the highest rank that has missed no step.
func (r *Reducer) lastJoined(ctx context.Context, mine bool) (int, error) {
	candidates := make([]int, r.g.Locals())
	for i := range candidates {
		if candidates[i] = -1; mine {
			candidates[i] = r.queue.rank(i)
		}
	}
	last := -1
	err := route.Agree(ctx, r.g, "ddp: join", candidates, nil, func(all []collective.Said[int]) error {
		r.uneven.missed = 0
		for _, x := range all {
			last = max(last, x.Value)
		}
		if last < 0 {
			return errors.New("ddp: join: each rank has missed steps of others since the last Join without an error, so none has all updates: load a checkpoint")
		}
		return nil
	})
	return max(last, 0), err
}

// uneven counts the ranks that have gradients in a step.
type uneven struct {
	locals    []localUneven
	active    comm.Shards[float32] // by local rank: 1 if it has gradients; after the reduction how many ranks have
	factors   comm.Shards[float32] // all ranks divided by the active ones
	host      *memory.Pinned[float32]
	announced bool       // in this step
	missed    int        // steps that updated other ranks since the last Join that succeeded
	work      *comm.Work // the count reaches the host, with StopTogether
}

type localUneven struct{ no, yes memory.Slice[float32] }

func newUneven(g *comm.Group) (*uneven, error) {
	u := &uneven{}
	var err error
	if u.host, err = memory.MakePinned[float32](g.Device(0), 1); err != nil {
		return nil, err
	}
	for i := range g.Locals() {
		var made [4]memory.Slice[float32]
		for j, value := range []float32{0, 1, 0, 0} {
			if made[j], err = memory.MakeFrom(g.Stream(i), []float32{value}); err != nil {
				return nil, errors.Join(err, u.close())
			}
		}
		u.locals = append(u.locals, localUneven{no: made[0], yes: made[1]})
		u.active, u.factors = append(u.active, made[2]), append(u.factors, made[3])
	}
	return u, nil
}

// announce tells all ranks, before the first bucket, which local ranks have
// gradients in this step.
func (u *uneven) announce(r *Reducer) error {
	u.announced = true
	for i, l := range u.locals {
		mine := l.no
		if r.queue.has(i) {
			mine = l.yes
		}
		if err := memory.Copy(r.g.Stream(i), u.active[i], mine); err != nil {
			return err
		}
	}
	if err := comm.AllReduce(r.g, comm.Sum, u.active...); err != nil {
		return err
	}
	if !r.cfg.DivideByActive {
		return nil
	}
	for i, x := range u.factors {
		if err := launch(activeFactor, r.g.Stream(i), kernel.Out(x), kernel.In(u.active[i]), kernel.Set("size", r.g.Size())); err != nil {
			return err
		}
	}
	return nil
}

// activeFactor corrects a mean over all ranks to a mean over the active ones.
var activeFactor = elementwise("active > T(0) ? size / active : T(1)", []string{"active"}, []kernel.Operand{kernel.Set("size", 1)},
	func(in, out []float64) {
		if out[0] = 1; in[0] > 0 {
			out[0] = in[1] / in[0]
		}
	})

// count announces the local ranks, and waits for the number of active ranks.
func (u *uneven) count(ctx context.Context, r *Reducer) (int, error) {
	if err := u.start(r); err != nil {
		return 0, err
	}
	return u.wait(ctx)
}

// start announces the local ranks and copies the number of active ranks to the host.
func (u *uneven) start(r *Reducer) (err error) {
	u.work, err = comm.Start(r.g, func() error {
		if err := u.announce(r); err != nil {
			return err
		}
		return u.active[0].CopyToPinned(r.g.Stream(0), u.host)
	})
	return err
}

func (u *uneven) wait(ctx context.Context) (int, error) {
	w := u.work
	u.work = nil
	if err := w.Wait(ctx); err != nil {
		return 0, errors.Join(err, w.Close())
	}
	return int(u.host.Data()[0]), nil
}

// begin announces the local ranks before the first bucket of a step.
func (u *uneven) begin(r *Reducer) error {
	if u == nil || u.announced {
		return nil
	}
	if r.cfg.StopTogether {
		return u.start(r)
	}
	return u.announce(r)
}

// end ends the step. With StopTogether it waits for the other ranks, and
// returns an error if one of them has joined.
func (u *uneven) end(ctx context.Context, r *Reducer) error {
	if u == nil {
		return nil
	}
	u.announced = false
	if u.work == nil {
		return nil
	}
	active, err := u.wait(ctx)
	if err == nil && active < r.g.Size() {
		err = fmt.Errorf("%d of %d ranks exhausted all inputs, so all stop", r.g.Size()-active, r.g.Size())
	}
	return err
}

func (u *uneven) close() error {
	if u == nil {
		return nil
	}
	var errs []error
	if u.work != nil {
		errs = append(errs, u.work.Close())
	}
	errs = append(errs, u.host.Close(), u.active.Close(), u.factors.Close())
	for _, l := range u.locals {
		errs = append(errs, l.no.Close(), l.yes.Close())
	}
	return errors.Join(errs...)
}

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
