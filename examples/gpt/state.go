package main

import (
	"context"
	"log"
	"os"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/examples/internal/resume"
)

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
