package fabric_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var (
	crowdedOps  = flag.Int("crowded", 2000, "how many operations TestCrowded has on GPUs, for each number of ranks")
	crowdedSeed = flag.Uint64("crowdedseed", 0, "the seed of TestCrowded; 0 is a random one")
)

// TestCrowded runs up to eight ranks on one or two GPUs, of which each has several ranks. A call
// that waits for a GPU would wait for kernels that wait for the other ranks. Therefore no rank
// allocates, loads, captures or copies while kernels run.
func TestCrowded(t *testing.T) {
	t.Setenv(env.ShareGPUs.Name, "yes")
	for _, gpus := range []int{1, 2} {
		t.Run(fmt.Sprint("gpus=", gpus), func(t *testing.T) { crowded(t, gpus) })
	}
}

func crowded(t *testing.T, gpus int) {
	testgpu.Each(t, gpus, func(t *testing.T, devs []*device.Device) {
		counts, operations := []int{8}, testgpu.Rounds(20, 40)
		if devs[0].System().Backend() == "cuda" {
			counts, operations = []int{3, 4, 5, 6, 7, 8}, *crowdedOps
		}
		for _, ranks := range counts {
			t.Run(fmt.Sprint(ranks), func(t *testing.T) {
				seed := *crowdedSeed
				if seed == 0 {
					seed = rand.Uint64()
				}
				t.Log("seed ", seed)
				c := openCrowd(t, devs, ranks)
				for _, s := range c.first() { // which loads the kernels
					c.run(t, seed, []step{s}, 0)
				}
				rng := rand.New(rand.NewPCG(seed, 0))
				for done := 0; done < operations && !t.Failed(); {
					steps := make([]step, 1+rng.IntN(20))
					for i := range steps {
						steps[i] = c.step(rng)
					}
					done += c.run(t, rng.Uint64(), steps, rng.IntN(3))
				}
			})
		}
	})
}

// A crowd is ranks of which several have one GPU.
type crowd []member

func openCrowd(t *testing.T, devs []*device.Device, ranks int) crowd {
	list := make([]*device.Device, ranks)
	for i := range list {
		list[i] = devs[i%len(devs)]
	}
	c := open(t, list, nil)
	for _, m := range c {
		m.HaveLines()
	}
	return c
}

// step draws an operation, of few modules: each takes a GPU seconds to load.
func (c crowd) step(rng *rand.Rand) step {
	switch rng.IntN(3) {
	case 0:
		return withOp(randomOf(rng, c[0], integers[int8]()), collective.Max)
	case 1:
		return withOp(randomOf(rng, c[0], floats(memory.BFloat16Of)), collective.Sum)
	}
	return withOp(randomOf(rng, c[0], floats(func(x float32) float32 { return x })), collective.Sum)
}

func withOp[T memory.Element](s typedStep[T], op collective.Reduction) step {
	s.call.op = op
	return s
}

// first has an operation of each module.
func (c crowd) first() []step {
	reduce, gather := call{name: "all-reduce", op: collective.Sum, n: 1}, call{name: "all-gather", n: 1}
	return []step{
		withOp(typedStep[int8]{reduce, integers[int8]()}, collective.Max),
		typedStep[memory.BFloat16Bits]{reduce, floats(memory.BFloat16Of)},
		typedStep[float32]{reduce, floats(func(x float32) float32 { return x })},
		typedStep[int8]{gather, integers[int8]()},
	}
}

// run has all ranks do the steps, or launch a graph of them so often if launches is not 0,
// and returns how many operations that were.
func (c crowd) run(t *testing.T, seed uint64, steps []step, launches int) int {
	parts := make([]*part, len(c))
	atOnce(c, func(i int, m member) {
		p := newPart(t, m, steps)
		if launches > 0 {
			var err error
			p.exec, err = graph.Capture([]*stream.Stream{m.s}, func() error { return p.enqueue(m) }, nil)
			require.NoError(t, err)
		}
		require.NoError(t, m.s.Sync(t.Context()))
		parts[i] = p
	})
	if t.Failed() {
		t.FailNow()
	}
	atOnce(c, func(i int, m member) {
		rng := rand.New(rand.NewPCG(seed, uint64(i+1)))
		dawdle(rng)
		if launches == 0 {
			require.NoError(t, parts[i].enqueue(m))
		}
		for range launches {
			require.NoError(t, parts[i].exec.Launch(m.s))
			dawdle(rng)
		}
		require.NoError(t, m.s.Sync(t.Context()))
	})
	atOnce(c, func(i int, m member) { parts[i].check(t, m) })
	atOnce(c, func(i int, m member) { parts[i].close(t) })
	return len(steps) * max(launches, 1)
}
