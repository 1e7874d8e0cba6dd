package graph_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// sources counts what must be new in each program.
var sources atomic.Int64

// fresh returns a source that was never compiled.
func fresh() *kernel.Source {
	src := addSource
	src.CUDA += fmt.Sprintf("\n// %d of %d", sources.Add(1), os.Getpid())
	return &src
}

var kernelCalls = []call{
	{name: "kernel.Kernel.Launch", prepare: func(r *rig) func() error {
		return func() error { return r.kit.launch(r.kit.add, r.on, r.y, 1) }
	}},
	{name: "kernel.Kernel.Launch: first of its module", prepare: func(r *rig) func() error {
		k := r.module()
		return func() error { return r.kit.launch(k, r.on, r.y, 1) }
	}},
	{name: "kernel.Kernel.LaunchCooperative", prepare: func(r *rig) func() error {
		return func() error {
			return r.kit.add.LaunchCooperative(r.on, kernel.Cover(elems), kernel.Ptr(r.y), kernel.Scalar[float32](1), kernel.Scalar[int32](elems))
		}
	}},
	{name: "kernel.Kernel.Launch: wrong arguments", prepare: func(r *rig) func() error {
		return func() error { return r.kit.add.Launch(r.on, kernel.Cover(elems), kernel.Ptr(r.y)) }
	}},
	{name: "kernel.Compile, kernel.Module.Close", nowhere: true, prepare: func(r *rig) func() error {
		return func() error {
			m, err := kernel.Compile(r.dev, &addSource)
			if err != nil {
				return err
			}
			r.later(m.Close)
			return m.Close()
		}
	}},
	{name: "kernel.Module.Close", nowhere: true, prepare: func(r *rig) func() error {
		m, err := kernel.Compile(r.dev, &addSource)
		r.must(err)
		r.later(m.Close)
		return m.Close
	}},
	{name: "kernel.Compile: a resident module", nowhere: true, prepare: func(r *rig) func() error {
		src := fresh()
		inside.MakeResident(src)
		return func() error { _, err := kernel.Compile(r.dev, src); return err }
	}},
	{name: "kernel.Module.Kernel, kernel.Kernel.Attributes", nowhere: true, prepare: func(r *rig) func() error {
		m, err := kernel.Compile(r.dev, &addSource)
		r.must(err)
		r.later(m.Close)
		return func() error {
			k, err := m.Kernel("add")
			if err == nil {
				k.Attributes()
			}
			return err
		}
	}},
	{name: "kernel.Kernel.Occupancy", nowhere: true, prepare: onDevice(func(r *rig) error { _, err := r.kit.add.Occupancy(256, 0); return err })},
	{name: "kernel.Kernel.BestBlock", nowhere: true, prepare: onDevice(func(r *rig) error { _, _, err := r.kit.add.BestBlock(0, 0); return err })},
	{name: "kernel.Elementwise.Launch: first", prepare: func(r *rig) func() error {
		e := r.elementwise()
		return func() error { return e.Launch(r.on, kernel.In(r.x), kernel.Out(r.y)) }
	}},
	{name: "kernel.Elementwise.Launch: later", prepare: func(r *rig) func() error {
		e := r.elementwise()
		r.must(e.Launch(r.home, kernel.In(r.x), kernel.Out(r.y)))
		return func() error { return e.Launch(r.on, kernel.In(r.x), kernel.Out(r.y)) }
	}},
	{name: "kernel.Elementwise.Close", nowhere: true, prepare: func(r *rig) func() error {
		e := r.elementwise()
		r.must(e.Launch(r.home, kernel.In(r.x), kernel.Out(r.y)))
		return e.Close
	}},
}

func (r *rig) module() *kernel.Kernel {
	m, err := kernel.Compile(r.dev, &addSource)
	r.must(err)
	r.later(m.Close)
	k, err := m.Kernel("add")
	r.must(err)
	return k
}

func (r *rig) elementwise() *kernel.Elementwise {
	e, err := kernel.NewElementwise(`template <typename T> T twice(T x) { return x + x; }`,
		&kernel.ElementwiseConfig{Floats: func(in, out []float64) { out[0] = 2 * in[0] }})
	r.must(err)
	r.later(e.Close)
	return e
}

// matrix returns a square one of float32, on the idle stream.
func (r *rig) matrix() tensor.Tensor {
	t, err := tensor.Of(r.slice(r.home, 32*32), 32, 32)
	r.must(err)
	return t
}

// index returns one of 32 rows, on the idle stream.
// ends are those of one group of 32 elements.
func (r *rig) ends() tensor.Tensor {
	t, err := tensor.MakeFrom(r.home, []int32{32}, 1)
	r.must(err)
	r.later(t.Close)
	return t
}

func (r *rig) index() tensor.Tensor {
	x, err := memory.MakeFrom(r.home, make([]int32, 32))
	r.must(err)
	r.later(x.Close)
	t, err := tensor.Of(x, 32)
	r.must(err)
	return t
}

var tensorCalls = []call{
	{name: "tensor.MatMul: first on the stream", prepare: func(r *rig) func() error {
		a, b, c := r.matrix(), r.matrix(), r.matrix()
		return func() error { return tensor.MatMul(r.on, c, a, b, nil) }
	}},
	{name: "tensor.MatMul: later", prepare: func(r *rig) func() error {
		a, b, c := r.matrix(), r.matrix(), r.matrix()
		r.must(tensor.MatMul(r.on, c, a, b, nil))
		return func() error { return tensor.MatMul(r.on, c, a, b, nil) }
	}},
	{name: "tensor.TuneMatMul", prepare: func(r *rig) func() error {
		rows := int(sources.Add(1)) // a shape that was never tuned
		a, err := tensor.Of(r.slice(r.home, rows*32), rows, 32)
		r.must(err)
		c, err := tensor.Of(r.slice(r.home, rows*32), rows, 32)
		r.must(err)
		b := r.matrix()
		return func() error { _, err := tensor.TuneMatMul(r.ctx, r.on, c, a, b, nil, nil); return err }
	}},
	{name: "tensor.Copy: dense", prepare: func(r *rig) func() error {
		a, b := r.matrix(), r.matrix()
		return func() error { return tensor.Copy(r.on, a, b) }
	}},
	{name: "tensor.Copy: transposed", prepare: func(r *rig) func() error {
		a, b := r.matrix(), r.matrix().T()
		return func() error { return tensor.Copy(r.on, a, b) }
	}},
	{name: "tensor.Copy: part of each row", prepare: func(r *rig) func() error {
		a, err := r.matrix().Narrow(1, 0, 8)
		r.must(err)
		b, err := r.matrix().Narrow(1, 8, 8)
		r.must(err)
		return func() error { return tensor.Copy(r.on, a, b) }
	}},
	{name: "tensor.Copy: from the host", prepare: func(r *rig) func() error {
		h, err := tensor.MakeHost(memory.Float32, 32, 32)
		r.must(err)
		a := r.matrix()
		return func() error { return tensor.Copy(r.on, a, h) }
	}},
	{name: "tensor.Copy: to the host", prepare: func(r *rig) func() error {
		h, err := tensor.MakeHost(memory.Float32, 32, 32)
		r.must(err)
		a := r.matrix()
		return func() error { return tensor.Copy(r.on, h, a) }
	}},
	{name: "tensor.Copy: from pinned memory", prepare: func(r *rig) func() error {
		h, err := tensor.OfPinned(r.pinned(32*32), 32, 32)
		r.must(err)
		a := r.matrix()
		return func() error { return tensor.Copy(r.on, a, h) }
	}},
	{name: "tensor.Copy: to the host, converted", prepare: func(r *rig) func() error {
		h, err := tensor.MakeHost(memory.Float16, 32, 32)
		r.must(err)
		a := r.matrix()
		return func() error { return tensor.Copy(r.on, h, a) }
	}},
	{name: "tensor.CopyAll", prepare: func(r *rig) func() error {
		a, b := []tensor.Tensor{r.matrix(), r.matrix()}, []tensor.Tensor{r.matrix(), r.matrix()}
		return func() error { return tensor.CopyAll(r.on, a, b) }
	}},
	{name: "tensor.Add", prepare: func(r *rig) func() error {
		a, b, c := r.matrix(), r.matrix(), r.matrix()
		return func() error { return tensor.Add(r.on, c, a, b) }
	}},
	{name: "tensor.IndexSelect", prepare: func(r *rig) func() error {
		a, b, index := r.matrix(), r.matrix(), r.index()
		return func() error { return tensor.IndexSelect(r.on, a, b, index) }
	}},
	{name: "tensor.IndexAdd", prepare: func(r *rig) func() error {
		a, b, index := r.matrix(), r.matrix(), r.index()
		return func() error { return tensor.IndexAdd(r.on, a, b, index, tensor.Tensor{}) }
	}},
	{name: "tensor.TopK", prepare: func(r *rig) func() error {
		a, b := r.matrix(), r.matrix()
		values, err := a.Narrow(0, 0, 1)
		r.must(err)
		row, err := b.Narrow(0, 0, 1)
		r.must(err)
		places, err := r.index().View(1, 32)
		r.must(err)
		return func() error { return tensor.TopK(r.on, values, places, row) }
	}},
	{name: "tensor.Softmax", prepare: func(r *rig) func() error {
		a, b := r.matrix(), r.matrix()
		return func() error { return tensor.Softmax(r.on, a, b) }
	}},
	{name: "tensor.SoftmaxGrad", prepare: func(r *rig) func() error {
		a, b, c := r.matrix(), r.matrix(), r.matrix()
		return func() error { return tensor.SoftmaxGrad(r.on, a, b, c) }
	}},
	{name: "tensor.ScatterAdd", prepare: func(r *rig) func() error {
		a, b := r.matrix(), r.matrix()
		to, err := a.Narrow(0, 0, 1)
		r.must(err)
		from, err := b.Narrow(0, 0, 1)
		r.must(err)
		places, err := r.index().View(1, 32)
		r.must(err)
		return func() error { return tensor.ScatterAdd(r.on, to, from, places) }
	}},
	{name: "tensor.Tensor.Zero", prepare: func(r *rig) func() error {
		a := r.matrix()
		return func() error { return a.Zero(r.on) }
	}},
	{name: "tensor.MakeFrom", prepare: func(r *rig) func() error {
		return func() error {
			x, err := tensor.MakeFrom(r.on, make([]float32, 8), 2, 4)
			if err == nil {
				r.later(x.Close)
			}
			return err
		}
	}},
	{name: "tensor.GroupedMatMul", prepare: func(r *rig) func() error {
		a, b, c := r.matrix(), r.matrix(), r.matrix()
		b, err := b.View(1, 32, 32)
		r.must(err)
		return func() error { return tensor.GroupedMatMul(r.on, c, a, b, []int{32}, nil) }
	}},
	{name: "tensor.GroupedMatMulAt", prepare: func(r *rig) func() error {
		a, b, c, ends := r.matrix(), r.matrix(), r.matrix(), r.ends()
		b, err := b.View(1, 32, 32)
		r.must(err)
		return func() error { return tensor.GroupedMatMulAt(r.on, c, a, b, ends, nil) }
	}},
	{name: "tensor.GroupedMatMulInner", prepare: func(r *rig) func() error {
		a, b, c, ends := r.matrix(), r.matrix(), r.matrix(), r.ends()
		c, err := c.View(1, 32, 32)
		r.must(err)
		return func() error { return tensor.GroupedMatMulInner(r.on, c, a, b, ends, nil) }
	}},
	{name: "tensor.Make, tensor.Tensor.Close", prepare: func(r *rig) func() error {
		return func() error {
			t, err := tensor.Make(r.on, memory.Float32, 32, 32)
			return errors.Join(err, t.Close())
		}
	}},
	{name: "tensor.Tensor.RecordStream", prepare: func(r *rig) func() error {
		a := r.matrix()
		return func() error { return a.RecordStream(r.on) }
	}},
}

// rngCalls are about a generator that the capture has drawn from.
var rngCalls = []call{
	fills("rng.Uniform", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Uniform(g, s, x, 0, 1)
	}),
	fills("rng.Normal", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Normal(g, s, x, 0, 1)
	}),
	fills("rng.LogNormal", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.LogNormal(g, s, x, 0, 1)
	}),
	fills("rng.Exponential", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Exponential(g, s, x, 1)
	}),
	fills("rng.Bernoulli", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Bernoulli(g, s, x, 0.5)
	}),
	fills("rng.Geometric", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.Geometric(g, s, x, 0.5)
	}),
	fills("rng.Random", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error { return rng.Random(g, s, x) }),
	fills("rng.RandomFromTo", func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error {
		return rng.RandomFromTo(g, s, x, 0, 10)
	}),
	drawn("rng.Generator.ManualSeed", func(g *rng.Generator, _ [rng.StateSize]byte) error { g.ManualSeed(2); return nil }),
	drawn("rng.Generator.Seed", func(g *rng.Generator, _ [rng.StateSize]byte) error { g.Seed(); return nil }),
	drawn("rng.Generator.InitialSeed", func(g *rng.Generator, _ [rng.StateSize]byte) error { g.InitialSeed(); return nil }),
	drawn("rng.Generator.Offset", func(g *rng.Generator, _ [rng.StateSize]byte) error { g.Offset(); return nil }),
	drawn("rng.Generator.SetOffset", func(g *rng.Generator, _ [rng.StateSize]byte) error { return g.SetOffset(0) }),
	drawn("rng.Generator.State", func(g *rng.Generator, _ [rng.StateSize]byte) error { g.State(); return nil }),
	drawn("rng.Generator.SetState", func(g *rng.Generator, was [rng.StateSize]byte) error { return g.SetState(was[:]) }),
}

func fills(name string, fn func(g *rng.Generator, s *stream.Stream, x memory.Slice[float32]) error) call {
	return call{name: name, prepare: func(r *rig) func() error {
		g := rng.New(r.dev, 1)
		return func() error { return fn(g, r.on, r.y) }
	}}
}

func drawn(name string, fn func(g *rng.Generator, was [rng.StateSize]byte) error) call {
	return call{name: name, prepare: func(r *rig) func() error {
		g := rng.New(r.dev, 1)
		return func() error {
			was := g.State()
			if err := rng.Uniform(g, r.on, r.y, 0, 1); err != nil {
				return err
			}
			return fn(g, was)
		}
	}}
}

// file returns the name of a file with zeros.
func (r *rig) file() string {
	dir, err := os.MkdirTemp("", "captures")
	r.must(err)
	r.later(func() error { return os.RemoveAll(dir) })
	path := filepath.Join(dir, "zeros")
	r.must(os.WriteFile(path, make([]byte, 4*elems), 0o644))
	return path
}

var gdsCalls = []call{
	{name: "gds.File.Load", prepare: func(r *rig) func() error {
		f, err := gds.Open(r.file(), nil)
		r.must(err)
		r.later(f.Close)
		return func() error { return f.Load(r.ctx, r.on, r.y.AsBytes(), 0) }
	}},
	{name: "gds.File.Load: later", prepare: func(r *rig) func() error {
		f, err := gds.Open(r.file(), nil)
		r.must(err)
		r.later(f.Close)
		r.must(f.Load(r.ctx, r.home, r.y.AsBytes(), 0))
		return func() error { return f.Load(r.ctx, r.on, r.y.AsBytes(), 0) }
	}},
	{name: "gds.File.ReadAt", prepare: func(r *rig) func() error {
		f, err := gds.Open(r.file(), nil)
		r.must(err)
		r.later(f.Close)
		return func() error { _, err := f.ReadAt(r.ctx, r.on, r.y.AsBytes(), 0); return err }
	}},
	{name: "gds.File.WriteAt", prepare: func(r *rig) func() error {
		f, err := gds.OpenFile(r.file(), os.O_RDWR, nil)
		r.must(err)
		r.later(f.Close)
		return func() error { _, err := f.WriteAt(r.ctx, r.on, r.y.AsBytes(), 0); return err }
	}},
	{name: "gds.File.Save", prepare: func(r *rig) func() error {
		f, err := gds.Create(r.file()+".new", nil)
		r.must(err)
		r.later(f.Close)
		return func() error { return f.Save(r.ctx, r.on, r.y.AsBytes(), 0) }
	}},
	{name: "gds.Open, gds.File.Close", nowhere: true, prepare: func(r *rig) func() error {
		path := r.file()
		return func() error {
			f, err := gds.Open(path, nil)
			return errors.Join(err, f.Close())
		}
	}},
	{name: "checkpoint.SaveTensors", prepare: func(r *rig) func() error {
		path, x := r.file()+".safetensors", r.matrix()
		return func() error {
			return checkpoint.SaveTensors(r.ctx, r.on, path, map[string]tensor.Tensor{"x": x}, nil)
		}
	}},
	{name: "checkpoint.Saver.Save", prepare: func(r *rig) func() error {
		g, x := r.used(), r.matrix()
		v, err := checkpoint.NewSaver(r.ctx, g, filepath.Dir(r.file()), [][]checkpoint.Part{{{Name: "x", Data: x}}}, nil)
		r.must(err)
		r.later(func() error { _ = v.Close(); return nil }) // it has the error of a save that failed
		return func() error { return v.Save(r.ctx, 1, []*stream.Stream{r.on}) }
	}},
	{name: "checkpoint.Checkpoint.LoadOn", prepare: func(r *rig) func() error {
		path := r.file() + ".safetensors"
		r.must(checkpoint.SaveTensors(r.ctx, r.home, path, map[string]tensor.Tensor{"x": r.matrix()}, nil))
		c, err := checkpoint.Open([]string{path}, nil)
		r.must(err)
		r.later(c.Close)
		return func() error {
			w, err := c.LoadOn(r.ctx, r.on, nil)
			if err == nil {
				r.later(w.Close)
			}
			return err
		}
	}},
}
