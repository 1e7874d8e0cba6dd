// Command bench measures Chorus for docs/PERFORMANCE.md. testdata has equivalent programs in
// C and PyTorch, and scripts that run both alternately. The first argument says what is
// measured:
//
//	bench           frequent operations on one GPU: launches of kernels and graphs, random
//	                numbers, allocations; a line has a name and the median in microseconds
//	bench start     the first calls of a process
//	bench layers    data-parallel training of linear layers; one process of a job
//	bench recovery  the time to recover from the loss of a rank; one process of a job
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"slices"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

var programs = map[string]func(){"start": startMain, "layers": layersMain, "recovery": recoveryMain}

func main() {
	log.SetFlags(0)
	if len(os.Args) > 1 && programs[os.Args[1]] != nil {
		program := programs[os.Args[1]]
		os.Args = append(os.Args[:1], os.Args[2:]...)
		program()
		return
	}
	b := bench{}
	flag.IntVar(&b.rounds, "rounds", 9, "rounds; the output is their median")
	flag.IntVar(&b.launches, "launches", 20000, "launches of a kernel a round")
	flag.IntVar(&b.replays, "replays", 500, "launches of a graph a round")
	flag.IntVar(&b.elements, "elements", 1<<28, "elements of a fill")
	flag.IntVar(&b.pairs, "pairs", 200_000, "allocations and frees a round and stream")
	flag.StringVar(&b.trace, "trace", "", "also time the allocations of this recorded trace")
	flag.BoolVar(&b.allocator, "allocator", false, "time only the allocator")
	flag.Parse()
	if err := b.run(context.Background()); err != nil {
		log.Fatal("bench: ", err)
	}
}

// A bench says how much of each a run does.
type bench struct {
	rounds, launches, replays, elements, pairs int
	trace                                      string
	allocator                                  bool

	s *stream.Stream
}

// A figure is one thing that is timed.
type figure struct {
	name  string
	setup setup
}

// A setup returns a function to measure, the number of operations in it, and a function to
// release its resources.
type setup func(b *bench) (ops int, round func() error, done func() error, err error)

var figures = []figure{
	{"launch of an empty kernel", launches},
	{"launch of a graph of 100 small kernels", replays},
	{"uniform", fills(uniform)},
	{"normal", fills(normal)},
	{"uniform in a graph", captured(uniform)},
	{"normal in a graph", captured(normal)},
}

func (b *bench) run(ctx context.Context) error {
	dev, err := device.Open(0)
	if err != nil {
		return err
	}
	if b.s, err = stream.New(dev, nil); err != nil {
		return err
	}
	defer b.s.Close()
	list := allocations()
	if !b.allocator {
		list = append(slices.Clone(figures), list...)
	}
	if b.trace != "" {
		more, err := traceFigures(b.trace)
		if err != nil {
			return err
		}
		list = append(list, more...)
	}
	for _, f := range list {
		us, err := b.median(ctx, f)
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		fmt.Printf("%s\t%.4f\n", f.name, us)
	}
	return nil
}

// median returns the microseconds of one operation.
func (b *bench) median(ctx context.Context, f figure) (float64, error) {
	ops, round, done, err := f.setup(b)
	if err != nil {
		return 0, err
	}
	defer done()
	var all []float64
	for i := range b.rounds + 1 {
		start := time.Now()
		if err := round(); err != nil {
			return 0, err
		}
		if err := b.s.Sync(ctx); err != nil {
			return 0, err
		}
		if i > 0 { // the first one warms up
			all = append(all, float64(time.Since(start).Nanoseconds())/1e3/float64(ops))
		}
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

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
