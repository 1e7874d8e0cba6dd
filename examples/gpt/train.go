package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/examples/internal/resume"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// The options of PyTorch's run.
const (
	seed        = 1234
	peakRate    = 3e-3 // learning rate after warmup
	warmup      = 10   // steps
	clipNorm    = 1.0
	weightDecay = 0.1
)

// A trainer trains the replicas of the local ranks.
type trainer[T kernels.Float] struct {
	g        *comm.Group
	cfg      *config
	replicas []*replica[T]
	streams  []*stream.Stream // of the replicas
	red      *ddp.Reducer
	exec     *graph.Exec // a step; nil if it is not captured
	saver    *checkpoint.Saver
	first    int // step
}

// train trains on all local ranks of the group, and returns the results of all ranks.
func train[T kernels.Float](ctx context.Context, g *comm.Group, cfg *config) (res *result, err error) {
	if least := batchSize / g.Size(); cfg.accum > least || cfg.accum < 1 || cfg.steps < 1 {
		return nil, fmt.Errorf("%d steps of %d micro-batches: want 1 or more of each, and %d ranks have %d sequences each, or one more",
			cfg.steps, cfg.accum, g.Size(), least)
	}
	t := &trainer[T]{g: g, cfg: cfg}
	defer func() { err = errors.Join(err, t.close()) }()
	for i := range g.Locals() {
		r, err := newReplica[T](g, i, cfg)
		if err != nil {
			return nil, err
		}
		t.replicas, t.streams = append(t.replicas, r), append(t.streams, r.s)
	}
	if err := t.reduceGradients(); err != nil {
		return nil, err
	}
	if err := t.broadcast(); err != nil {
		return nil, err
	}
	if err := t.open(ctx); err != nil {
		return nil, err
	}
	return t.run(ctx)
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
// already, so they are summed. There are two buckets: the reduction of the second layer
// overlaps with the backward pass of the first layer.
func (t *trainer[T]) reduceGradients() (err error) {
	var grads [][]floats
	for _, r := range t.replicas {
		grads = append(grads, r.params.grads)
		r.model.ready = func(i int) error { return t.red.Ready(r.s, i) }
	}
	const bucket = 216 << 10
	t.red, err = ddp.NewReducer(t.g, grads, &ddp.ReducerConfig{BucketBytes: bucket, FirstBucketBytes: bucket, Op: new(comm.Sum)})
	return err
}

// broadcast gives all ranks the parameters of rank 0.
func (t *trainer[T]) broadcast() error {
	flat := make(comm.Shards[float32], len(t.replicas))
	for i, r := range t.replicas {
		flat[i] = r.params.flat
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
	var begun time.Time
	for s := t.first; s < t.cfg.steps; s++ {
		if s == t.first+1 { // the first step has compiled kernels and connected the ranks
			if err := t.prepare(ctx); err != nil {
				return nil, err
			}
			begun = time.Now()
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
			if err := t.report(ctx, res, done); err != nil {
				return nil, err
			}
		}
	}
	if n := t.cfg.steps - t.first - 1; n > 0 {
		res.StepSeconds = time.Since(begun).Seconds() / float64(n)
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
	return t.wait(ctx)
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

// step enqueues a step on all local ranks.
func (t *trainer[T]) step() error {
	for _, r := range t.replicas {
		if err := r.pass(t.cfg); err != nil {
			return err
		}
	}
	if err := t.red.Finish(t.streams...); err != nil {
		return err
	}
	for _, r := range t.replicas {
		if err := r.update(); err != nil {
			return err
		}
	}
	return nil
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

// wait waits for all local ranks. It waits by the group, which returns an error if another
// rank is lost.
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
	return errors.Join(errs...)
}

// parts returns the state of the training on each local rank. All ranks have the same state, and
// one of them writes each tensor.
func (t *trainer[T]) parts() [][]checkpoint.Part {
	all := make([][]checkpoint.Part, len(t.replicas))
	for i, r := range t.replicas {
		states := r.opt.State()
		for j, x := range shapes {
			all[i] = append(all[i], checkpoint.Part{Name: x.name, Data: matrix(r.params.values[j], x.dims()...)})
			for key, of := range states[j].All() {
				all[i] = append(all[i], checkpoint.Part{Name: "state." + x.name + "." + key, Data: of})
			}
		}
		all[i] = append(all[i],
			checkpoint.Part{Name: "step", Data: matrix(r.step, 1)},
			checkpoint.Part{Name: "lr", Data: matrix(r.opt.LR(0), 1)})
	}
	return all
}

func (p shape) dims() []int {
	if p.in == 0 {
		return []int{p.out}
	}
	return []int{p.out, p.in}
}

// resume restores the newest checkpoint, which any number of ranks may have saved, and continues
// after its step. If the folder has no checkpoint, the training begins with step 0.
func (t *trainer[T]) resume(ctx context.Context) (err error) {
	x := &resume.Training{Folder: t.cfg.ckpt, Steps: t.cfg.steps, Print: log.New(os.Stderr, "gpt: ", 0).Printf,
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
		if err := r.opt.RefreshCopies(r.s); err != nil {
			return err
		}
	}
	return nil
}

// save saves the state after a number of steps, if the flags say so. The next step goes on
// meanwhile.
func (t *trainer[T]) save(ctx context.Context, done int) error {
	if t.saver == nil || done != t.cfg.steps && (t.cfg.every == 0 || done%t.cfg.every != 0) {
		return nil
	}
	return t.saver.Save(ctx, int64(done), t.streams)
}

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

// newReplica returns the replica of local rank i.
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
	if r.model, err = newModel(r.s, r.params, most*sizes.Context); err != nil {
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
	n := r.feed.tokens.Len() / line
	for i := range cfg.accum {
		from, to := share(n, i, cfg.accum)
		text := r.feed.tokens.Slice(from*line, to*line)
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
