package graph_test

import (
	"errors"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// params returns the parameters of an optimiser: one slice with its gradient.
func (r *rig) params() []optim.Group {
	return []optim.Group{{Params: []optim.Param{optim.Of(r.x, r.y)}}}
}

// optimizer returns one that has taken a step, unless it is new.
func (r *rig) optimizer(isNew bool) *optim.Optimizer {
	o, err := optim.NewAdamW(r.home, r.params(), &optim.AdamConfig{LR: 0.1})
	r.must(err)
	r.later(o.Close)
	if !isNew {
		r.must(o.Step(r.home, nil))
	}
	return o
}

func (r *rig) grads() *optim.Grads {
	t, err := tensor.Of(r.y, elems)
	r.must(err)
	g, err := optim.NewGrads(r.home, t)
	r.must(err)
	r.later(g.Close)
	_, err = g.Powers(r.home, 2)
	r.must(err)
	return g
}

// factor returns a scalar on the device.
func (r *rig) factor() memory.Slice[float32] { return r.slice(r.home, 1) }

func makes(name string, fn func(r *rig, s *stream.Stream) (*optim.Optimizer, error)) call {
	return call{name: name, prepare: func(r *rig) func() error {
		return func() error {
			o, err := fn(r, r.on)
			if err == nil {
				r.later(o.Close)
			}
			return err
		}
	}}
}

func withOptimizer(name string, fn func(r *rig, o *optim.Optimizer) error) call {
	return call{name: name, prepare: func(r *rig) func() error {
		o := r.optimizer(false)
		return func() error { return fn(r, o) }
	}}
}

func withGrads(name string, fn func(r *rig, g *optim.Grads) error) call {
	return call{name: name, prepare: func(r *rig) func() error {
		g := r.grads()
		return func() error { return fn(r, g) }
	}}
}

var optimCalls = []call{
	makes("optim.NewAdamW", func(r *rig, s *stream.Stream) (*optim.Optimizer, error) {
		return optim.NewAdamW(s, r.params(), nil)
	}),
	makes("optim.NewAdam", func(r *rig, s *stream.Stream) (*optim.Optimizer, error) {
		return optim.NewAdam(s, r.params(), nil)
	}),
	makes("optim.NewSGD", func(r *rig, s *stream.Stream) (*optim.Optimizer, error) {
		return optim.NewSGD(s, r.params(), nil)
	}),
	{name: "optim.Optimizer.Step: first", prepare: func(r *rig) func() error {
		o := r.optimizer(true)
		return func() error { return o.Step(r.on, nil) }
	}},
	withOptimizer("optim.Optimizer.Step: later", func(r *rig, o *optim.Optimizer) error { return o.Step(r.on, nil) }),
	withOptimizer("optim.Optimizer.SetLR", func(r *rig, o *optim.Optimizer) error { return o.SetLR(r.on, 0, 0.5) }),
	withOptimizer("optim.Optimizer.SetStep", func(r *rig, o *optim.Optimizer) error { return o.SetStep(r.on, 0, 3) }),
	withOptimizer("optim.Optimizer.RefreshCopies", func(r *rig, o *optim.Optimizer) error { return o.RefreshCopies(r.on) }),
	withOptimizer("optim.Optimizer.LoadState", func(r *rig, o *optim.Optimizer) error { return o.LoadState(r.on, o.State()) }),
	{name: "optim.Optimizer.SetGradients", prepare: func(r *rig) func() error {
		o := r.optimizer(false)
		g, err := o.Grads(r.home)
		r.must(err)
		r.later(g.Close)
		t, err := tensor.Of(r.slice(r.home, elems), elems)
		r.must(err)
		return func() error { return o.SetGradients(r.on, t) }
	}},
	withOptimizer("optim.Optimizer.Grads", func(r *rig, o *optim.Optimizer) error {
		g, err := o.Grads(r.on)
		if err == nil {
			r.later(g.Close)
		}
		return err
	}),
	withOptimizer("optim.Optimizer.Close", func(r *rig, o *optim.Optimizer) error { return o.Close() }),
	{name: "optim.NewGrads", prepare: func(r *rig) func() error {
		t, err := tensor.Of(r.y, elems)
		r.must(err)
		return func() error {
			g, err := optim.NewGrads(r.on, t)
			if err == nil {
				r.later(g.Close)
			}
			return err
		}
	}},
	withGrads("optim.Grads.Powers", func(r *rig, g *optim.Grads) error { _, err := g.Powers(r.on, 2); return err }),
	withGrads("optim.Grads.Powers, optim.Grads.Coef", func(r *rig, g *optim.Grads) error {
		_, err := g.Powers(r.on, 2)
		_, _, of := g.Coef(r.on, 1)
		return errors.Join(err, of)
	}),
	withGrads("optim.Grads.ClipNorm", func(r *rig, g *optim.Grads) error { _, err := g.ClipNorm(r.on, 1, 2); return err }),
	withGrads("optim.Grads.ClipValue", func(r *rig, g *optim.Grads) error { return g.ClipValue(r.on, 1) }),
	{name: "optim.Grads.Scale", prepare: func(r *rig) func() error {
		g, f := r.grads(), r.factor()
		return func() error { return g.Scale(r.on, f) }
	}},
	{name: "optim.Grads.Unscale", prepare: func(r *rig) func() error {
		g, inverse, found := r.grads(), r.factor(), r.factor()
		return func() error { return g.Unscale(r.on, inverse, found) }
	}},
}

// scaler returns a Scaler and an optimiser. If it is not new, it has scaled a loss and taken a step.
func (r *rig) scaler(isNew bool) (*amp.Scaler, *optim.Optimizer, tensor.Tensor) {
	sc, err := amp.NewScaler(r.home, nil)
	r.must(err)
	r.later(sc.Close)
	o, loss := r.optimizer(isNew), r.matrix()
	if !isNew {
		r.must(errors.Join(sc.Scale(r.home, loss), sc.Step(r.home, o, nil), sc.Update(r.home)))
	}
	return sc, o, loss
}

func scales(name string, isNew bool, fn func(r *rig, sc *amp.Scaler, o *optim.Optimizer, loss tensor.Tensor) error) call {
	return call{name: name, prepare: func(r *rig) func() error {
		sc, o, loss := r.scaler(isNew)
		return func() error { return fn(r, sc, o, loss) }
	}}
}

var ampCalls = []call{
	{name: "amp.NewScaler", prepare: func(r *rig) func() error {
		return func() error {
			sc, err := amp.NewScaler(r.on, nil)
			if err == nil {
				r.later(sc.Close)
			}
			return err
		}
	}},
	scales("amp.Scaler.Scale: first", true, func(r *rig, sc *amp.Scaler, _ *optim.Optimizer, loss tensor.Tensor) error {
		return sc.Scale(r.on, loss)
	}),
	scales("amp.Scaler.Scale: later", false, func(r *rig, sc *amp.Scaler, _ *optim.Optimizer, loss tensor.Tensor) error {
		return sc.Scale(r.on, loss)
	}),
	scales("amp.Scaler.Unscale", false, func(r *rig, sc *amp.Scaler, o *optim.Optimizer, _ tensor.Tensor) error {
		return sc.Unscale(r.on, o)
	}),
	scales("amp.Scaler.Check", false, func(r *rig, sc *amp.Scaler, o *optim.Optimizer, _ tensor.Tensor) error {
		return sc.Check(r.on, o)
	}),
	scales("amp.Scaler.Step, amp.Scaler.Update: first", true, func(r *rig, sc *amp.Scaler, o *optim.Optimizer, _ tensor.Tensor) error {
		return errors.Join(sc.Step(r.on, o, nil), sc.Update(r.on))
	}),
	scales("amp.Scaler.Scale, amp.Scaler.Step, amp.Scaler.Update: later", false, func(r *rig, sc *amp.Scaler, o *optim.Optimizer, loss tensor.Tensor) error {
		return errors.Join(sc.Scale(r.on, loss), sc.Step(r.on, o, nil), sc.Update(r.on))
	}),
	scales("amp.Scaler.SetScale", false, func(r *rig, sc *amp.Scaler, _ *optim.Optimizer, _ tensor.Tensor) error {
		return sc.SetScale(r.on, 2)
	}),
	scales("amp.Scaler.State", false, func(r *rig, sc *amp.Scaler, _ *optim.Optimizer, _ tensor.Tensor) error {
		_, err := sc.State(r.on)
		return err
	}),
	{name: "amp.Scaler.LoadState", prepare: func(r *rig) func() error {
		sc, _, _ := r.scaler(false)
		was, err := sc.State(r.home)
		r.must(err)
		return func() error { return sc.LoadState(r.on, was) }
	}},
	{name: "amp.Agree", prepare: func(r *rig) func() error {
		g := r.used()
		sc, o, _ := r.scaler(false)
		return func() error { return errors.Join(sc.Check(r.on, o), amp.Agree(g, sc)) }
	}},
	{name: "amp.Autocast.Cast", prepare: func(r *rig) func() error {
		a, b := r.matrix(), r.matrix()
		return func() error {
			ts, err := amp.Autocast{Lower: memory.BFloat16}.Cast(r.on, "mm", a, b)
			for _, t := range ts {
				r.later(t.Close)
			}
			return err
		}
	}},
}

func (r *rig) reducer(cfg *ddp.ReducerConfig) *ddp.Reducer {
	d, err := ddp.NewReducer(r.used(), [][]memory.Slice[float32]{{r.x}}, cfg)
	r.must(err)
	r.later(d.Close)
	return d
}

var ddpCalls = []call{
	{name: "ddp.Powers", prepare: func(r *rig) func() error {
		g, grads := r.used(), r.grads()
		return func() error {
			return ddp.Powers(g, 2, []*optim.Grads{grads}, []*stream.Stream{r.on})
		}
	}},
	{name: "ddp.Reducer.Join", prepare: func(r *rig) func() error {
		d := r.reducer(&ddp.ReducerConfig{Uneven: true})
		return func() error { _, err := d.Join(r.ctx, r.on); return err }
	}},
	{name: "ddp.Reducer.Ready, ddp.Reducer.Finish: PowerSGD, first", prepare: func(r *rig) func() error {
		d := r.reducer(&ddp.ReducerConfig{Hook: &ddp.PowerSGD{}})
		return func() error { return errors.Join(d.Ready(r.on, 0), d.Finish(r.on)) }
	}},
	{name: "ddp.Sharder.WaitOn", prepare: func(r *rig) func() error {
		d, err := ddp.NewSharder[float32](r.used(), []int{elems}, nil)
		r.must(err)
		r.later(d.Close)
		return func() error {
			return errors.Join(d.Ready(r.on, 0), d.Finish(r.on), d.AllGather(r.on), d.WaitOn(r.on, 0))
		}
	}},
	{name: "ddp.NewUnits", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			d, err := ddp.NewUnits[float32, float32](g, [][]int{{elems}}, nil)
			if err == nil {
				r.later(d.Close)
			}
			return err
		}
	}},
	{name: "ddp.Units.Use, ddp.Units.Done, ddp.Units.Refresh", prepare: func(r *rig) func() error {
		d := r.units()
		return func() error {
			_, err := d.Use(r.on, 0)
			return errors.Join(err, d.Done(r.on, 0), d.Refresh(r.on))
		}
	}},
	{name: "ddp.Units.Grads, ddp.Units.Ready, ddp.Units.Finish", prepare: func(r *rig) func() error {
		d := r.units()
		return func() error {
			_, err := d.Grads(r.on, 0)
			return errors.Join(err, d.Ready(r.on, 0), d.Finish(r.on))
		}
	}},
	{name: "comm.Group.Between", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error {
			return g.Between([]*stream.Stream{r.on}, func() error { return comm.AllReduce(g, comm.Sum, r.y) })
		}
	}},
	{name: "comm.AllToAll", prepare: func(r *rig) func() error {
		g := r.used()
		return func() error { return comm.AllToAll(g, comm.Shards[float32]{r.y}, comm.Shards[float32]{r.x}) }
	}},
}

// units returns units that have done a step, which loads the kernels.
func (r *rig) units() *ddp.Units[float32, memory.BFloat16Bits] {
	d, err := ddp.NewUnits[float32, memory.BFloat16Bits](r.used(), [][]int{{elems}}, nil)
	r.must(err)
	r.later(d.Close)
	_, err = d.Grads(r.on, 0)
	r.must(errors.Join(err, d.Ready(r.on, 0), d.Finish(r.on), d.Refresh(r.on)))
	return d
}

// drawCalls are about functions of package rng with parameters or results of their own.
var drawCalls = []call{
	fills("rng.Cauchy", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Cauchy(g, s, x, 0, 1)
	}),
	fills("rng.Poisson", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Poisson(g, s, x, 3.0)
	}),
	fills("rng.Permutation", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Permutation(g, s, x)
	}),
	{name: "rng.Multinomial", prepare: func(r *rig) func() error {
		g, x := rng.New(r.dev, 1), r.indices(8)
		r.must(r.kit.launch(r.kit.add, r.home, r.y, 1))
		return func() error { return rng.Multinomial(g, r.on, x, r.y, elems, true) }
	}},
}

func (r *rig) indices(n int) memory.Slice[int64] {
	x, err := memory.Make[int64](r.home, n)
	r.must(err)
	r.later(x.Close)
	return x
}
