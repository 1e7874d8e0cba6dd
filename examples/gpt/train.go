package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"slices"
	"time"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// A trainer trains the replicas of the local ranks.
type trainer[T kernels.Float] struct {
	g        *comm.Group
	cfg      *config
	of       *preset
	accum    int // micro-batches
	replicas []*replica[T]
	streams  []*stream.Stream // of the replicas
	red      *ddp.Reducer     // nil if parameters are sharded
	shards   *sharded[T]      // or nil
	exec     *graph.Exec      // a step; nil if it is not captured
	saver    *checkpoint.Saver
	first    int // step
}

// train trains on all local ranks of the group, and returns the results of all ranks.
func train[T kernels.Float](ctx context.Context, g *comm.Group, cfg *config) (res *result, err error) {
	t := &trainer[T]{g: g, cfg: cfg}
	defer func() { err = errors.Join(err, t.close()) }()
	text, err := t.check()
	if err != nil {
		return nil, err
	}
	if cfg.fsdp {
		if t.shards, err = newSharded[T](g, t.of); err != nil {
			return nil, err
		}
	}
	for i := range g.Locals() {
		r, err := t.newReplica(i, text)
		if err != nil {
			return nil, err
		}
		t.replicas, t.streams = append(t.replicas, r), append(t.streams, r.s)
	}
	if cfg.fsdp {
		err = t.shards.units.Refresh(t.streams...)
	} else {
		err = first(t.reduceGradients(), t.broadcast())
	}
	if err != nil {
		return nil, err
	}
	if err := t.open(ctx); err != nil {
		return nil, err
	}
	return t.run(ctx)
}

// check completes the flags by those of the model, and returns the text.
func (t *trainer[T]) check() (text func(to []int32, i int), err error) {
	of, err := presetOf(t.cfg.model)
	if err != nil {
		return nil, err
	}
	p := *of
	t.of, t.accum = &p, t.cfg.accum
	p.batch = cmp.Or(t.cfg.batch, p.batch)
	least := p.batch / t.g.Size()
	if t.cfg.micro > 0 {
		most := (p.batch + t.g.Size() - 1) / t.g.Size()
		t.accum = (most + t.cfg.micro - 1) / t.cfg.micro
	}
	if least < 1 {
		return nil, fmt.Errorf("a batch of %d sequences for %d ranks: want one or more for each rank", p.batch, t.g.Size())
	}
	if t.accum > least || t.accum < 1 || t.cfg.steps < 1 || t.cfg.micro < 0 {
		return nil, fmt.Errorf("%d steps of %d micro-batches: want 1 or more of each, and %d ranks have %d sequences each, or one more",
			t.cfg.steps, t.accum, t.g.Size(), least)
	}
	if t.cfg.data != "" {
		return p.readText(t.cfg.data)
	}
	return p.generated(&p), nil
}

// open resumes a training and prepares checkpoints, if the flags say so.
func (t *trainer[T]) open(ctx context.Context) (err error) {
	if t.cfg.ckpt == "" {
		if t.cfg.resume || t.cfg.every != 0 {
			return errors.New("-resume and -every need -ckpt")
		}
		return nil
	}
	if t.cfg.resume {
		if err := t.resume(ctx); err != nil {
			return err
		}
	}
	t.saver, err = checkpoint.NewSaver(ctx, t.g, t.cfg.ckpt, t.parts(), &checkpoint.SaverConfig{KeepLast: 2})
	return err
}

// reduceGradients creates the reducer. Gradients are divided by the targets of the whole batch
// already, so they are summed.
func (t *trainer[T]) reduceGradients() (err error) {
	var grads [][]floats
	for _, r := range t.replicas {
		grads = append(grads, append(slices.Clone(r.params.grads), r.params.loss))
		r.model.access.ready = func(i int) error { return t.red.Ready(r.s, i) }
	}
	t.red, err = ddp.NewReducer(t.g, grads, &ddp.ReducerConfig{BucketBytes: t.of.bucket, FirstBucketBytes: t.of.bucket, Op: new(comm.Sum)})
	return err
}

// broadcast gives all ranks the parameters of rank 0.
func (t *trainer[T]) broadcast() error {
	flat := make(comm.Shards[float32], len(t.replicas))
	for i, r := range t.replicas {
		flat[i] = r.flat
		if err := t.g.Stream(i).WaitStream(r.s); err != nil {
			return err
		}
	}
	if err := comm.BroadcastFrom(t.g, 0, flat...); err != nil {
		return err
	}
	for i, r := range t.replicas {
		if err := first(r.s.WaitStream(t.g.Stream(i)), r.params.refresh(r.s)); err != nil {
			return err
		}
	}
	return nil
}

// run does all steps. The host waits for the devices only to report the progress.
func (t *trainer[T]) run(ctx context.Context) (*result, error) {
	res := &result{First: t.first, Ranks: t.g.Size(), Backend: t.g.Device(0).System().Backend()}
	var begun, last time.Time
	var steps []time.Duration // of a step, between two reports
	reported := t.first + 1
	for s := t.first; s < t.cfg.steps; s++ {
		if s == t.first+1 { // the first step has compiled kernels and connected the ranks
			if err := t.prepare(ctx); err != nil {
				return nil, err
			}
			begun = time.Now()
			last = begun
		}
		for _, r := range t.replicas {
			if err := r.feed.load(ctx, r.s); err != nil {
				return nil, err
			}
		}
		if err := t.launch(); err != nil {
			return nil, err
		}
		if err := t.save(ctx, s+1); err != nil {
			return nil, err
		}
		if done := s + 1; done == t.cfg.steps || done%max(t.cfg.steps/6, 1) == 0 {
			if err := t.report(ctx, res, done); err != nil { // it has waited for the devices
				return nil, err
			}
			if done > reported {
				now := time.Now()
				steps, last, reported = append(steps, now.Sub(last)/time.Duration(done-reported)), now, done
			}
		}
	}
	if n := t.cfg.steps - t.first - 1; n > 0 {
		res.StepSeconds = time.Since(begun).Seconds() / float64(n)
		res.MedianSeconds = res.StepSeconds
	}
	if n := len(steps); n > 0 {
		slices.Sort(steps)
		res.MedianSeconds = steps[n/2].Seconds()
	}
	if res.MedianSeconds > 0 {
		res.TokensPerSecond = float64(t.of.batch*t.of.Context) / res.MedianSeconds
	}
	for i := range t.g.Locals() {
		n, err := memory.MaxAllocated(t.g.Device(i))
		if err != nil {
			return nil, err
		}
		res.PeakBytes = max(res.PeakBytes, n)
	}
	return res, nil
}

// prepare waits for the first step, and captures the following ones.
func (t *trainer[T]) prepare(ctx context.Context) (err error) {
	if t.cfg.graph {
		if t.exec, err = graph.Capture(t.streams, t.step, &graph.Config{Name: "step"}); err != nil {
			return err
		}
		if err := t.exec.Upload(t.streams[0]); err != nil {
			return err
		}
	}
	if err := t.wait(ctx); err != nil {
		return err
	}
	for i := range t.g.Locals() {
		if err := memory.ResetPeakStats(t.g.Device(i)); err != nil {
			return err
		}
	}
	return nil
}

// launch enqueues a step, as a graph if there is one.
func (t *trainer[T]) launch() error {
	if t.exec == nil {
		return t.step()
	}
	begin := t.streams[0] // the graph begins behind this stream, and the others continue behind the graph
	for _, s := range t.streams[1:] {
		if err := begin.WaitStream(s); err != nil {
			return err
		}
	}
	if err := t.exec.Launch(begin); err != nil {
		return err
	}
	for _, s := range t.streams[1:] {
		if err := s.WaitStream(begin); err != nil {
			return err
		}
	}
	return nil
}

// step enqueues a step on all local ranks, which go from unit to unit together.
func (t *trainer[T]) step() error {
	for i := range t.accum {
		for _, r := range t.replicas {
			n := r.feed.tokens.Len() / r.feed.line
			from, to := share(n, i, t.accum)
			text := r.feed.tokens.Slice(from*r.feed.line, to*r.feed.line)
			r.model.begin(text, t.of.batch*t.of.Context, pass{add: i > 0 && t.shards == nil, addLoss: i > 0, final: i == t.accum-1})
		}
		if err := t.pass(); err != nil {
			return err
		}
	}
	if t.shards == nil {
		if err := t.red.Finish(t.streams...); err != nil {
			return err
		}
	}
	if err := t.norms(); err != nil {
		return err
	}
	for _, r := range t.replicas {
		if err := r.update(); err != nil {
			return err
		}
	}
	if t.shards != nil {
		return t.shards.units.Refresh(t.streams...)
	}
	return nil
}

// pass enqueues the forward and backward passes of a micro-batch.
func (t *trainer[T]) pass() error {
	n := t.of.layers + 1 // units
	for k := range 2 * n {
		for _, r := range t.replicas {
			var err error
			if k < n {
				err = r.model.forward(k)
			} else {
				err = r.model.backward(2*n - 1 - k)
			}
			if err != nil {
				return err
			}
		}
	}
	if t.shards != nil {
		return t.shards.units.Finish(t.streams...)
	}
	return nil
}

// norms prepares the norm of the gradients, which are the same on all ranks or,
// if they are sharded, are divided over them, in which case the losses are not
// summed yet.
func (t *trainer[T]) norms() error {
	var grads []*optim.Grads
	var losses comm.Shards[float32]
	for i, r := range t.replicas {
		grads, losses = append(grads, r.grads), append(losses, r.params.loss)
		var err error
		if t.shards == nil {
			_, err = r.grads.Powers(r.s, 2)
		} else {
			err = t.shards.setGradients(r, i)
		}
		if err != nil {
			return err
		}
	}
	if t.shards == nil {
		return nil
	}
	return first(t.shards.reduceLoss(t.streams, losses), ddp.Powers(t.g, 2, grads, t.streams))
}

// report copies the log of the steps so far to the host, and prints the last one on rank 0.
func (t *trainer[T]) report(ctx context.Context, res *result, done int) error {
	if err := t.wait(ctx); err != nil {
		return err
	}
	r, host := t.replicas[0], make([]float32, 2*(done-t.first))
	if err := r.log.Slice(2*t.first, 2*done).CopyTo(r.s, host); err != nil {
		return err
	}
	for at := 2 * len(res.Losses); at < len(host); at += 2 {
		res.Losses, res.GradNorms = append(res.Losses, host[at]), append(res.GradNorms, host[at+1])
	}
	if t.g.Rank() == 0 {
		n := len(res.Losses) - 1
		fmt.Printf("step %d of %d: loss %.4f, gradient norm %.4f\n", done, t.cfg.steps, res.Losses[n], res.GradNorms[n])
	}
	return nil
}

// wait waits for all local ranks, by the group, which returns an error if
// another rank is lost.
func (t *trainer[T]) wait(ctx context.Context) error {
	for i, s := range t.streams {
		if err := t.g.Stream(i).WaitStream(s); err != nil {
			return err
		}
	}
	return t.g.Wait(ctx)
}

func (t *trainer[T]) close() error {
	errs := []error{t.saver.Close(), t.exec.Close(), t.red.Close()}
	for _, r := range t.replicas {
		errs = append(errs, r.close())
	}
	if t.shards != nil {
		errs = append(errs, t.shards.units.Close())
	}
	return errors.Join(errs...)
}

// parts returns the state of the training on each local rank. If all ranks have the same parameters,
// one of them writes each. The names do not depend on the number of ranks and not on -fsdp.
func (t *trainer[T]) parts() [][]checkpoint.Part {
	all := make([][]checkpoint.Part, len(t.replicas))
	for i, r := range t.replicas {
		states := r.opt.State()
		for j, x := range r.order {
			all[i] = append(all[i], x.part(x.name, x.Value))
			for key, of := range states[j].All() {
				all[i] = append(all[i], x.part("state."+x.name+"."+key, of))
			}
		}
		all[i] = append(all[i], checkpoint.Part{Name: "step", Data: matrix(r.step, 1)})
	}
	return all
}

// resume restores the newest checkpoint, which any number of ranks may have saved, and continues
// after its step. If the folder has no checkpoint, the training begins with step 0.
func (t *trainer[T]) resume(ctx context.Context) (err error) {
	x := &training.Resume{Folder: t.cfg.ckpt, Steps: t.cfg.steps, Print: log.New(os.Stderr, "gpt: ", 0).Printf,
		Restore: func(saved *checkpoint.Saved) error { return t.restore(ctx, saved) }}
	t.first, err = x.Run(ctx, t.g)
	return err
}

func (t *trainer[T]) restore(ctx context.Context, saved *checkpoint.Saved) error {
	if err := t.wait(ctx); err != nil { // the initial values are on other streams than the group's
		return err
	}
	if _, err := saved.Restore(ctx, t.g, t.parts(), nil); err != nil {
		return err
	}
	for _, r := range t.replicas {
		r.feed.next = int(saved.Step())
		for i := range r.groups {
			if err := r.opt.SetLR(r.s, i, t.of.rate(r.feed.next)); err != nil {
				return err
			}
		}
		if err := r.opt.RefreshCopies(r.s); err != nil {
			return err
		}
	}
	if t.shards != nil {
		return t.shards.units.Refresh(t.streams...)
	}
	return nil
}

// save saves the state after a number of steps, if the flags say so, while the
// next step goes on.
func (t *trainer[T]) save(ctx context.Context, done int) error {
	if t.saver == nil || done != t.cfg.steps && (t.cfg.every == 0 || done%t.cfg.every != 0) {
		return nil
	}
	return t.saver.Save(ctx, int64(done), t.streams)
}

// A replica is the model of a local rank, with its part of each batch.
type replica[T kernels.Float] struct {
	s      *stream.Stream
	of     *preset
	params *params[T]
	flat   floats // all parameters, unless they are sharded
	model  *model[T]
	feed   *feed
	opt    *optim.Optimizer
	groups int       // of the optimiser
	order  []trained // what the optimiser updates
	grads  *optim.Grads
	step   memory.Slice[int32] // steps done
	log    floats              // loss and norm of the gradients of each step
}

// newReplica returns the replica of local rank i.
func (t *trainer[T]) newReplica(i int, text func(to []int32, i int)) (r *replica[T], err error) {
	r = &replica[T]{of: t.of}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.s, err = stream.New(t.g.Device(i), nil); err != nil {
		return r, err
	}
	from, to := share(t.of.batch, t.g.Communicator(i).Rank(), t.g.Size())
	r.feed = &feed{text: text, line: t.of.Line(), batch: t.of.batch, from: from, to: to}
	if err := r.feed.open(r.s); err != nil {
		return r, err
	}
	var list []trained
	if t.shards != nil {
		if r.params, err = t.shards.params(r.s, i); err != nil {
			return r, err
		}
		list = t.shards.optimised(i)
	} else {
		if r.params, r.flat, err = newReplicated[T](r.s, t.of); err != nil {
			return r, err
		}
		list = r.params.optimised()
	}
	most := (to - from + t.accum - 1) / t.accum // sequences of a micro-batch
	if r.model, err = newModel(r.s, t.of, r.params, most*t.of.Context); err != nil {
		return r, err
	}
	if t.shards != nil {
		r.model.access = t.shards.access(r.model)
	}
	if r.step, err = memory.MakeFrom(r.s, []int32{0}); err != nil {
		return r, err
	}
	if r.log, err = memory.Make[float32](r.s, 2*t.cfg.steps); err != nil {
		return r, err
	}
	groups, order := t.of.groups(list)
	r.groups, r.order = len(groups), order
	r.opt, err = optim.NewAdamW(r.s, groups,
		&optim.AdamConfig{LR: t.of.peakRate / float64(t.of.warmup), Betas: [2]float64{0.9, 0.95}, Eps: 1e-8, WeightDecay: new(weightDecay)})
	if err != nil {
		return r, err
	}
	r.grads, err = r.opt.Grads(r.s)
	return r, err
}

// update enqueues the update of the parameters by the reduced gradients, and the end of
// the step.
func (r *replica[T]) update() error {
	norm, clip, err := r.grads.Coef(r.s, clipNorm)
	if err != nil {
		return err
	}
	return first(
		r.opt.Step(r.s, &optim.StepConfig{Clip: clip}),
		r.model.k.EndStep(r.params.loss, norm, r.step, r.log, r.opt.LR(0), r.opt.LR(r.groups-1), r.of.peakRate, r.of.warmup),
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
