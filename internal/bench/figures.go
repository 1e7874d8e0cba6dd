package main

import (
	"errors"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

var source = kernel.Source{
	Name: "bench.cu",
	CUDA: `extern "C" __global__ void empty() {}
extern "C" __global__ void add(float* x, float by, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) x[i] += by;
}`,
	Kernels: []kernel.Def{
		{Name: "empty", Go: func(*kernel.Call) {}},
		{Name: "add", Params: []kernel.Param{kernel.Pointer, kernel.F32, kernel.I32}, Go: func(c *kernel.Call) {
			x := kernel.Update[float32](c, 0, int(kernel.Get[int32](c, 2)))
			for i := range x {
				x[i] += kernel.Get[float32](c, 1)
			}
		}},
	},
}

func load(b *bench, name string) (*kernel.Kernel, *kernel.Module, error) {
	m, err := kernel.Compile(b.s.Device(), &source)
	if err != nil {
		return nil, nil, err
	}
	k, err := m.Kernel(name)
	return k, m, err
}

func launches(b *bench) (int, func() error, func() error, error) {
	k, m, err := load(b, "empty")
	if err != nil {
		return 0, nil, nil, err
	}
	one := kernel.Cover(1)
	round := func() error {
		for range b.launches {
			if err := k.Launch(b.s, one); err != nil {
				return err
			}
		}
		return nil
	}
	return b.launches, round, m.Close, nil
}

// small is the number of kernels in the graph, and apart the distance in elements between
// the starts of the memory of two kernels.
const small, apart = 100, 1 << 18

func replays(b *bench) (int, func() error, func() error, error) {
	k, m, err := load(b, "add")
	if err != nil {
		return 0, nil, nil, err
	}
	// A slice for each kernel, far apart: how long a kernel takes depends on where
	// in the memory its few bytes are, by a tenth.
	x, err := memory.Make[float32](b.s, small*apart)
	if err != nil {
		return 0, nil, nil, err
	}
	if err := x.Zero(b.s); err != nil {
		return 0, nil, nil, err
	}
	add := func(i int) error {
		y := x.Slice(i*apart, i*apart+1024)
		return k.Launch(b.s, kernel.Cover(y.Len()), kernel.Ptr(y), kernel.Scalar[float32](1), kernel.Scalar(int32(y.Len())))
	}
	g, err := graph.Capture([]*stream.Stream{b.s}, func() error {
		for i := range small {
			if err := add(i); err != nil {
				return err
			}
		}
		return nil
	}, nil)
	if err != nil {
		return 0, nil, nil, err
	}
	round := func() error {
		for range b.replays {
			if err := g.Launch(b.s); err != nil {
				return err
			}
		}
		return nil
	}
	return b.replays, round, func() error { return errors.Join(g.Close(), x.Close(), m.Close()) }, nil
}

// filled is how many fills a round has.
const filled = 20

func uniform(b *bench, x memory.Slice[float32]) error { return rng.Uniform(nil, b.s, x, 0, 1) }
func normal(b *bench, x memory.Slice[float32]) error  { return rng.Normal(nil, b.s, x, 0, 1) }

func fills(fill func(*bench, memory.Slice[float32]) error) setup {
	return func(b *bench) (int, func() error, func() error, error) {
		x, err := memory.Make[float32](b.s, b.elements)
		if err != nil {
			return 0, nil, nil, err
		}
		round := func() error {
			for range filled {
				if err := fill(b, x); err != nil {
					return err
				}
			}
			return nil
		}
		return filled, round, x.Close, nil
	}
}

// captured is fills of a graph with one fill.
func captured(fill func(*bench, memory.Slice[float32]) error) setup {
	return func(b *bench) (int, func() error, func() error, error) {
		x, err := memory.Make[float32](b.s, b.elements)
		if err != nil {
			return 0, nil, nil, err
		}
		if err := fill(b, x); err != nil { // loads the kernel
			return 0, nil, nil, err
		}
		g, err := graph.Capture([]*stream.Stream{b.s}, func() error { return fill(b, x) }, nil)
		if err != nil {
			return 0, nil, nil, err
		}
		round := func() error {
			for range filled {
				if err := g.Launch(b.s); err != nil {
					return err
				}
			}
			return nil
		}
		return filled, round, func() error { return errors.Join(g.Close(), x.Close()) }, nil
	}
}
