package main

import (
	"errors"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// A replica is a local rank's copy of the model, with its part of each batch.
type replica[T kernels.Float] struct {
	s      *stream.Stream
	params *params[T]
	model  *model[T]
	feed   *feed
	opt    *optim.Optimizer
	grads  *optim.Grads
	step   memory.Slice[int32] // steps done
	log    floats              // loss and norm of the gradients of each step
}

// newReplica makes the replica of local rank i.
func newReplica[T kernels.Float](g *comm.Group, i int, cfg *config) (r *replica[T], err error) {
	r = &replica[T]{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.s, err = stream.New(g.Device(i), nil); err != nil {
		return r, err
	}
	from, to := share(batchSize, g.Communicator(i).Rank(), g.Size())
	if r.feed, err = newFeed(r.s, from, to); err != nil {
		return r, err
	}
	if r.params, err = newParams[T](r.s, seed); err != nil {
		return r, err
	}
	most := (to - from + cfg.accum - 1) / cfg.accum // sequences of a micro-batch
	if r.model, err = newModel(r.s, r.params, most*kernels.Context); err != nil {
		return r, err
	}
	if r.step, err = memory.MakeFrom(r.s, []int32{0}); err != nil {
		return r, err
	}
	if r.log, err = memory.Make[float32](r.s, 2*cfg.steps); err != nil {
		return r, err
	}
	r.opt, err = optim.NewAdamW(r.s, []optim.Group{{Params: r.params.list()}},
		&optim.AdamConfig{LR: peakRate / warmup, Betas: [2]float64{0.9, 0.95}, Eps: 1e-8, WeightDecay: new(weightDecay)})
	if err != nil {
		return r, err
	}
	r.grads, err = optim.NewGrads(r.s, r.opt.Gradients()...)
	return r, err
}

// pass enqueues the forward and backward passes of the rank's part of a batch.
func (r *replica[T]) pass(cfg *config) error {
	n := r.feed.tokens.Len() / kernels.Line
	for i := range cfg.accum {
		from, to := share(n, i, cfg.accum)
		text := r.feed.tokens.Slice(from*kernels.Line, to*kernels.Line)
		r.model.add, r.model.final = i > 0, i == cfg.accum-1
		if err := first(r.model.forward(text), r.model.backward(text)); err != nil {
			return err
		}
	}
	return nil
}

// update enqueues the update of the parameters by the reduced gradients, and the end of
// the step.
func (r *replica[T]) update() error {
	if _, err := r.grads.Powers(r.s, 2); err != nil {
		return err
	}
	norm, clip, err := r.grads.Coef(r.s, clipNorm)
	if err != nil {
		return err
	}
	return first(
		r.opt.Step(r.s, &optim.StepConfig{Clip: clip}),
		r.model.k.EndStep(r.params.loss, norm, r.step, r.log, r.opt.LR(0), peakRate, warmup),
	)
}

func (r *replica[T]) close() error {
	errs := []error{r.grads.Close(), r.opt.Close(), r.log.Close(), r.step.Close()}
	if r.model != nil {
		errs = append(errs, r.model.close())
	}
	if r.params != nil {
		errs = append(errs, r.params.close())
	}
	if r.feed != nil {
		errs = append(errs, r.feed.close())
	}
	return errors.Join(append(errs, r.s.Close())...)
}
