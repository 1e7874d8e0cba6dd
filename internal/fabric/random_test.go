package fabric_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A step is one operation of a plan, whose operands lie in buffers of bytes that all
// steps of a part share.
type step interface {
	// bytes is how much room the destination and the source take.
	bytes(ranks int) (dst, src int)
	prepare(rank, ranks int, src []byte)
	enqueue(m member, dst, src memory.Slice[byte]) error
	expect(rank, ranks int, dst []byte)
	fmt.Stringer
}

type typedStep[T memory.Element] struct {
	call
	kit kit[T]
}

func (p typedStep[T]) String() string { return fmt.Sprint(p.call, " of ", memory.DTypeOf[T]()) }

func (p typedStep[T]) elements(ranks int) (dst, src int) {
	dst, src = p.n, p.n
	if p.name == "all-gather" || p.name == "all-to-all" {
		dst *= ranks
	}
	if p.name == "reduce-scatter" || p.name == "all-to-all" {
		src *= ranks
	}
	return dst, src
}

func (p typedStep[T]) bytes(ranks int) (dst, src int) {
	dst, src = p.elements(ranks)
	return (p.skip + dst) * sizeOf[T](), (p.skip + src) * sizeOf[T]()
}

func (p typedStep[T]) prepare(rank, _ int, src []byte) {
	xs := viewOf[T](src)[p.skip:]
	for i := range xs {
		xs[i] = p.kit.of(input(rank, i))
	}
}

func (p typedStep[T]) enqueue(m member, dst, src memory.Slice[byte]) error {
	d, s := p.elements(m.Ranks())
	x, err := memory.View[T](dst.Buffer(), dst.Offset()+p.skip*sizeOf[T](), d)
	if err != nil {
		return err
	}
	y, err := memory.View[T](src.Buffer(), src.Offset()+p.skip*sizeOf[T](), s)
	if err != nil {
		return err
	}
	return anySlice[T]{x, y}.enqueue(p.call, m)
}

func (p typedStep[T]) expect(rank, ranks int, dst []byte) {
	n, _ := p.elements(ranks)
	expect(p.kit, p.call, rank, ranks, viewOf[T](dst)[p.skip:p.skip+n])
}

// randomStep draws a collective, mostly a short one.
func randomStep(rng *rand.Rand, m member) step {
	switch rng.IntN(5) {
	case 0:
		return randomOf(rng, m, integers[int8]())
	case 1:
		return randomOf(rng, m, integers[uint64]())
	case 2:
		return randomOf(rng, m, floats(memory.Float16Of))
	case 3:
		return randomOf(rng, m, floats(func(x float32) float32 { return x }))
	}
	return randomOf(rng, m, floats(memory.BFloat16Of))
}

func randomOf[T memory.Element](rng *rand.Rand, m member, k kit[T]) typedStep[T] {
	names := []string{"all-reduce", "all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"}
	l := m.Limits()
	c := call{name: names[rng.IntN(len(names))], op: allOps[rng.IntN(len(allOps))], skip: rng.IntN(3), root: rng.IntN(m.Ranks())}
	limit := l.Part
	switch {
	case m.Pushes():
		slot, _ := m.Sizes()
		c.name, c.algorithm, limit = "all-reduce", fabric.Pushed, 3*slot*m.Ranks()
	case c.name == "all-reduce":
		c.algorithm = fabric.Algorithm(rng.IntN(6))
		limit = [...]int{l.TwoShot, l.OneShot, l.TwoShotPackets, l.TwoShot, l.TwoShotLines, 2 * l.TwoShot}[c.algorithm]
	case c.name != "broadcast" && rng.IntN(2) == 0:
		c.algorithm = fabric.Pipelined
	}
	limit /= sizeOf[T]()
	switch x := rng.IntN(100); {
	case x < 2:
		c.n = limit - rng.IntN(10)
	case x < 20:
		c.n = 1 + rng.IntN(limit/8)
	default:
		c.n = 1 + rng.IntN(100)
	}
	return typedStep[T]{c, k}
}

// A part is some steps with their operands on one rank.
type part struct {
	steps    []step
	dst, src memory.Slice[byte]
	ds, ss   []memory.Slice[byte]
	want     []byte
	exec     *graph.Exec // of the steps, where they were captured
}

func newPart(t testing.TB, m member, steps []step) *part {
	p := &part{steps: steps}
	var dstAt, srcAt []int
	d, s := 0, 0
	for _, x := range steps {
		dst, src := x.bytes(m.Ranks())
		dstAt, srcAt = append(dstAt, d), append(srcAt, s)
		d, s = (d+dst+15)/16*16, (s+src+15)/16*16
	}
	host := make([]byte, s)
	p.want = make([]byte, d)
	var err error
	p.dst, err = memory.Make[byte](m.s, d)
	require.NoError(t, err)
	p.src, err = memory.Make[byte](m.s, s)
	require.NoError(t, err)
	for i, x := range steps {
		dst, src := x.bytes(m.Ranks())
		x.prepare(m.Rank.Rank(), m.Ranks(), host[srcAt[i]:srcAt[i]+src])
		x.expect(m.Rank.Rank(), m.Ranks(), p.want[dstAt[i]:dstAt[i]+dst])
		p.ds = append(p.ds, p.dst.Slice(dstAt[i], dstAt[i]+dst))
		p.ss = append(p.ss, p.src.Slice(srcAt[i], srcAt[i]+src))
	}
	require.NoError(t, p.src.CopyFrom(m.s, host))
	require.NoError(t, p.dst.Zero(m.s))
	return p
}

func (p *part) enqueue(m member) error {
	for i, x := range p.steps {
		if err := x.enqueue(m, p.ds[i], p.ss[i]); err != nil {
			return fmt.Errorf("%v: %w", x, err)
		}
	}
	return nil
}

func (p *part) check(t testing.TB, m member) {
	got := make([]byte, len(p.want))
	require.NoError(t, p.dst.CopyTo(m.s, got))
	for i := 0; !bytes.Equal(got, p.want) && i < len(p.steps); i++ {
		at := p.ds[i].Offset() - p.dst.Offset()
		if n := p.ds[i].Len(); !bytes.Equal(got[at:at+n], p.want[at:at+n]) {
			t.Errorf("rank %d: step %d of %d is wrong: %v", m.Rank.Rank(), i, len(p.steps), p.steps[i])
			return
		}
	}
	require.Equal(t, p.want, got, "something between the destinations was written")
}

func (p *part) close(t testing.TB) {
	if p.exec != nil {
		require.NoError(t, p.exec.Close())
	}
	require.NoError(t, p.dst.Close())
	require.NoError(t, p.src.Close())
}

// A plan is what all ranks do: sequences of steps, before and after launches of graphs
// of other sequences.
type plan struct {
	seed            uint64
	eager, captured [][]step
	launches        []int // which graph; beyond their number none
}

func newPlan(seed uint64, m member, rounds int) *plan {
	rng := rand.New(rand.NewPCG(seed, 0))
	sequences := func(n int) (all [][]step) {
		for range n {
			steps := make([]step, 1+rng.IntN(40))
			for i := range steps {
				steps[i] = randomStep(rng, m)
			}
			all = append(all, steps)
		}
		return all
	}
	p := &plan{seed: seed, eager: sequences(rounds), captured: sequences(3)}
	for range rounds {
		p.launches = append(p.launches, rng.IntN(len(p.captured)+1))
	}
	return p
}

// run is one rank's way through the plan.
func (x *plan) run(t *testing.T, m member) {
	rng := rand.New(rand.NewPCG(x.seed, uint64(m.Rank.Rank()+1)))
	var graphs []*part
	for _, steps := range x.captured {
		p := newPart(t, m, steps)
		exec, err := graph.Capture([]*stream.Stream{m.s}, func() error { return p.enqueue(m) }, nil)
		if err != nil {
			t.Error(err)
			return
		}
		p.exec = exec
		graphs = append(graphs, p)
	}
	for i, steps := range x.eager {
		p := newPart(t, m, steps)
		var replayed *part
		if x.launches[i] < len(graphs) {
			replayed = graphs[x.launches[i]]
			require.NoError(t, replayed.dst.Zero(m.s))
			require.NoError(t, replayed.exec.Launch(m.s))
		}
		dawdle(rng)
		if err := p.enqueue(m); err != nil {
			t.Error(err)
			return
		}
		if replayed != nil {
			replayed.check(t, m)
			require.NoError(t, replayed.exec.Launch(m.s))
		}
		dawdle(rng)
		p.check(t, m)
		p.close(t)
		if t.Failed() {
			break
		}
	}
	for _, p := range graphs {
		p.close(t)
	}
}

// Random sequences, of which some are graphs that are launched several times, with
// ranks that are out of step.
func TestRandom(t *testing.T) {
	each(t, []int{2, 3, 8}, func(t *testing.T, devs []*device.Device) {
		seed := rand.Uint64()
		t.Log("seed ", seed)
		group := open(t, devs, &fabric.Config{Bytes: 1})
		rounds := testgpu.Rounds(testhost.Rounds(12, 25), 100) // of 20 operations
		switch {
		case devs[0].System().Backend() == "cuda":
			rounds = 500
		case len(devs) == 8:
			rounds = testgpu.Rounds(testhost.Rounds(5, 10), 30)
		}
		atOnce(group, func(_ int, m member) { newPlan(seed, m, rounds).run(t, m) })
	})
}

// dawdle puts the ranks out of step.
func dawdle(rng *rand.Rand) {
	if rng.IntN(3) == 0 {
		time.Sleep(time.Duration(rng.IntN(500)) * time.Microsecond)
	}
	for range rng.IntN(5) {
		runtime.Gosched()
	}
}

// One graph of all ranks, launched many times.
func TestGraphOfAllRanks(t *testing.T) {
	each(t, []int{3}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1})
		rng := rand.New(rand.NewPCG(1, 2))
		steps := make([]step, 12)
		for i := range steps {
			steps[i] = randomStep(rng, group[0])
		}
		var parts []*part
		var streams []*stream.Stream
		for _, m := range group {
			parts = append(parts, newPart(t, m, steps))
			streams = append(streams, m.s)
		}
		for _, m := range group[1:] {
			require.NoError(t, m.s.Sync(testgpu.Context(t)))
		}
		x, err := graph.Capture(streams, func() error {
			for i, m := range group {
				if err := parts[i].enqueue(m); err != nil {
					return err
				}
			}
			return nil
		}, nil)
		require.NoError(t, err)
		for range 5 {
			for i, m := range group {
				require.NoError(t, parts[i].dst.Zero(m.s))
				require.NoError(t, m.s.Sync(testgpu.Context(t)))
			}
			require.NoError(t, x.Launch(streams[0]))
			require.NoError(t, streams[0].Sync(testgpu.Context(t)))
			for i, m := range group {
				parts[i].check(t, m)
			}
		}
		require.ErrorContains(t, group[1].Close(), "close the graph first")
		require.NoError(t, x.Close())
		for _, p := range parts {
			p.close(t)
		}
	})
}

// Epochs go on where the halves that packets carry wrap around, and what an epoch of
// the same lower half has left is not taken for what is to come.
func TestEpochs(t *testing.T) {
	each(t, []int{3}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1})
		set := func(epoch uint64) {
			for _, m := range group {
				require.NoError(t, m.SetEpoch(m.s, epoch))
				require.NoError(t, m.s.Sync(testgpu.Context(t)))
			}
		}
		for _, epoch := range []uint64{0, 1<<32 - 5, 2 << 32, 3<<32 - 4, 1<<55 - 3} {
			set(epoch)
			for i := range 12 {
				k := integers[uint64]()
				algorithm := fabric.Algorithms[i%len(fabric.Algorithms)]
				carryOut(t, group, k, call{name: "all-reduce", algorithm: algorithm, n: 100 + i})
				carryOut(t, group, k, call{name: "broadcast", n: 100 - i, root: i % len(devs)})
				carryOut(t, group, k, call{name: "all-to-all", n: 37 + i})
			}
		}
	})
}
