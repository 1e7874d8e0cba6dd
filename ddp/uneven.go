package ddp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Join ends the steps of the local ranks, which have no more input, while other ranks have (the
// end of torch's Join context; needs ReducerConfig.Uneven). Call it instead of a step. Join takes
// part in the reductions of the other ranks with zeros until all ranks have called it. The
// gradients get the results of these steps. Give one stream for each local rank, as for Finish.
// After the error of a step with Verify, all ranks are in step, and Join may be called again.
//
// Join returns the highest rank that has taken part in all steps. All ranks return the same one.
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
	if r.owner.Closed() {
		return 0, fmt.Errorf("%s: %w", op, device.ErrClosed)
	}
	if r.uneven == nil {
		return 0, fmt.Errorf("%s: the reducer expects the same number of steps on all ranks: set ReducerConfig.Uneven", op)
	}
	by, err := r.queue.sorted(op, streams)
	if err != nil {
		return 0, err
	}
	if err := groups.Of(r.g).Check("join"); err != nil {
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
		if err := r.shadow(by); err != nil {
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
	all, err := comm.GatherValues(ctx, r.g, nil, candidates...)
	if err != nil {
		return 0, fmt.Errorf("ddp: join: %w", err)
	}
	r.uneven.missed = 0
	last := slices.Max(all)
	if last < 0 {
		return 0, errors.New("ddp: join: each rank has missed steps of others since the last Join without an error, so none has all updates: load a checkpoint")
	}
	return last, nil
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

// announce tells all ranks which local ranks have gradients in this step. It comes before the
// first bucket.
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

// end ends the step. With StopTogether it waits, and returns an error if another rank has joined.
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
