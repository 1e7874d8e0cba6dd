package ddp_test

import (
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

var (
	reducerRuns = flag.Int("ddp.runs", 25, "random reducers")
	reducerSeed = flag.Uint64("ddp.seed", 0, "seed of the random reducers; 0 draws one")
)

func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := *reducerSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d (-ddp.seed=%[1]d)", seed)
	return seed
}

// A model is the gradients of all local ranks in random types and shapes, and their values.
type model struct {
	g      *comm.Group
	types  []memory.DType
	shapes [][]int
	grads  [][]tensor.Tensor // by local rank
	values [][][]float64     // by local rank and gradient, as stored
}

var floatTypes = []memory.DType{memory.Float32, memory.Float64, memory.Float16, memory.BFloat16}

// newModel draws gradients. Those of a type may lie together.
func newModel(t *testing.T, r *rand.Rand, g *comm.Group) *model {
	t.Helper()
	m := &model{g: g}
	together := map[memory.DType]bool{}
	for _, x := range floatTypes {
		together[x] = r.IntN(2) == 0
	}
	for range 1 + r.IntN(8) {
		m.types = append(m.types, floatTypes[r.IntN(1+r.IntN(len(floatTypes)))])
		m.shapes = append(m.shapes, [][]int{{r.IntN(300)}, {1 + r.IntN(20), 1 + r.IntN(20)}, {3, 2, 1 + r.IntN(9)}}[r.IntN(3)])
	}
	for i := range g.Locals() {
		m.grads = append(m.grads, m.allocate(t, i, together))
	}
	return m
}

func size(shape []int) int {
	n := 1
	for _, x := range shape {
		n *= x
	}
	return n
}

// allocate allocates the gradients of a local rank. Gradients that lie together begin at multiples
// of 16 bytes, as those of memory.MakeFlat.
func (m *model) allocate(t *testing.T, i int, together map[memory.DType]bool) []tensor.Tensor {
	t.Helper()
	s, flats, at := m.g.Stream(i), map[memory.DType]tensor.Tensor{}, map[memory.DType]int{}
	make := func(x memory.DType, shape ...int) tensor.Tensor {
		y, err := tensor.Make(s, x, shape...)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, y.Close()) })
		bytes, err := tensor.Slice[uint8](must(t)(must(t)(y.View(y.Len())).ViewDType(memory.Uint8)))
		require.NoError(t, err)
		require.NoError(t, bytes.Zero(s))
		return y
	}
	for _, x := range floatTypes {
		if together[x] {
			flats[x] = make(x, 8*300*8)
		}
	}
	var list []tensor.Tensor
	for j, x := range m.types {
		if !together[x] {
			list = append(list, make(x, m.shapes[j]...))
			continue
		}
		n := size(m.shapes[j])
		list = append(list, must(t)(must(t)(flats[x].Narrow(0, at[x], n)).View(m.shapes[j]...)))
		align := 16 / x.Size()
		at[x] += (n + align - 1) / align * align
	}
	return list
}

func must(t *testing.T) func(x tensor.Tensor, err error) tensor.Tensor {
	return func(x tensor.Tensor, err error) tensor.Tensor {
		t.Helper()
		require.NoError(t, err)
		return x
	}
}

// fill draws the gradients of a step for the local ranks that are active; the others keep their
// memory and count as zeros.
func (m *model) fill(t *testing.T, r *rand.Rand, active []bool) {
	t.Helper()
	m.values = make([][][]float64, len(m.grads))
	for i, list := range m.grads {
		m.values[i] = make([][]float64, len(list))
		for j, x := range list {
			h := make([]float64, x.Len())
			if active[i] {
				for k := range h {
					h[k] = r.NormFloat64()
				}
				write(t, m.g, i, x, h)
				h = m.read(t, i, j)
			}
			m.values[i][j] = h
		}
	}
}

func write(t *testing.T, g *comm.Group, i int, x tensor.Tensor, h []float64) {
	t.Helper()
	require.NoError(t, tensor.Copy(g.Stream(i), x, must(t)(tensor.OfHost(h, x.Shape()...))))
}

func (m *model) read(t *testing.T, i, j int) []float64 {
	t.Helper()
	x := m.grads[i][j]
	h := make([]float64, x.Len())
	require.NoError(t, tensor.Copy(m.g.Stream(i), must(t)(tensor.OfHost(h, x.Shape()...)), x))
	return h
}

// check compares the gradients of all ranks with the sums of float64, divided by a number. The
// coarsest type on the way has the given rounding error; the sum rounds once for each rank, and
// conversions and divisions add three.
func (m *model) check(t *testing.T, by float64, coarsest func(memory.DType) float64, note string) {
	t.Helper()
	for j := range m.types {
		eps := coarsest(m.types[j])
		for i := range m.grads {
			got := m.read(t, i, j)
			for k := range got {
				sum, abs := 0.0, 0.0
				for _, v := range m.values {
					sum += v[j][k] / by
					abs += math.Abs(v[j][k]) / by
				}
				if bound := float64(len(m.grads)+3)*eps*abs + 1e-6*eps/epsilon(memory.Float16); !(math.Abs(got[k]-sum) <= bound) {
					t.Fatalf("%s: rank %d gradient %d (%s %v) element %d: %v: want %v within %v", note, i, j, m.types[j], m.shapes[j], k, got[k], sum, bound)
				}
			}
		}
	}
}

// epsilon is the relative rounding error of a type.
func epsilon(t memory.DType) float64 {
	return map[memory.DType]float64{memory.Float64: 0x1p-53, memory.Float32: 0x1p-24, memory.Float16: 0x1p-11, memory.BFloat16: 0x1p-8}[t]
}

// A hookFunc is a hook of the tests.
type hookFunc func(b *ddp.Bucket) ([]tensor.Tensor, error)

func (f hookFunc) Reduce(b *ddp.Bucket) ([]tensor.Tensor, error) { return f(b) }

type closers []tensor.Tensor

func (c closers) Close() error {
	for _, x := range c {
		if err := x.Close(); err != nil {
			return err
		}
	}
	return nil
}

var _ io.Closer = closers{}

// sumIn is a hook that sums in another type and returns tensors of that type, as compression
// hooks do.
func sumIn[T memory.Element]() hookFunc {
	return func(b *ddp.Bucket) ([]tensor.Tensor, error) {
		var list closers
		var flats comm.Shards[T]
		for i, flat := range b.Flat {
			s := b.Group.Stream(i)
			x, err := tensor.MakeLike(s, flat, memory.DTypeOf[T]())
			if err != nil {
				return nil, err
			}
			list = append(list, x)
			if err := tensor.Copy(s, x, flat); err != nil {
				return nil, err
			}
			y, err := tensor.Slice[T](x)
			if err != nil {
				return nil, err
			}
			flats = append(flats, y)
		}
		if b.State != nil {
			if err := b.State.Close(); err != nil {
				return nil, err
			}
		}
		b.State = list
		return list, comm.AllReduce(b.Group, comm.Sum, flats...)
	}
}

// Random gradients of several types, reduced in random buckets, in another type on the wire, or
// by hooks, are the sums of float64 within the rounding of the types on the way.
func TestRandomReducers(t *testing.T) {
	r := rand.New(rand.NewPCG(seedOf(t), 1))
	for run := range *reducerRuns {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1 + run%4})
		m := newModel(t, r, local(t, devs))
		testRandomReducer(t, r, m)
	}
}

func testRandomReducer(t *testing.T, r *rand.Rand, m *model) {
	t.Helper()
	op := []comm.Op{comm.Sum, comm.Avg}[r.IntN(2)]
	cfg := &ddp.ReducerConfig{Op: &op, BucketBytes: 1 << r.IntN(15), FirstBucketBytes: 1 << r.IntN(15)}
	coarsest := epsilon
	coarser := func(x memory.DType) {
		before := coarsest
		coarsest = func(t memory.DType) float64 { return max(before(t), epsilon(x)) }
	}
	switch r.IntN(4) {
	case 0:
		cfg.Hook = hookFunc(func(b *ddp.Bucket) ([]tensor.Tensor, error) { return nil, b.AllReduce() })
	case 1:
		cfg.Hook = sumIn[float64]()
	case 2:
		cfg.Hook = sumIn[memory.BFloat16Bits]()
		coarser(memory.BFloat16)
	}
	if m.types[0] == memory.Float32 && r.IntN(2) == 0 {
		cfg.Compress = []memory.DType{memory.Float16, memory.BFloat16}[r.IntN(2)]
		coarser(cfg.Compress)
	}
	cfg.Verify = r.IntN(3) == 0
	steps := 3
	if cfg.Hook == nil && r.IntN(2) == 0 {
		var devs []*device.Device
		for i := range m.grads {
			devs = append(devs, m.g.Device(i))
		}
		cfg.Autotune, steps = &ddp.Autotune{Groups: []*comm.Group{local(t, devs)}, Steps: 1}, 29
	}
	red, err := ddp.NewReducer(m.g, m.grads, cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, red.Close()) }()
	all := make([]bool, len(m.grads))
	for i := range all {
		all[i] = true
	}
	for step := range steps {
		m.fill(t, r, all)
		for i := range m.grads {
			for _, j := range r.Perm(len(m.types)) {
				require.NoError(t, red.Ready(m.g.Stream(i), j))
			}
		}
		require.NoError(t, red.Finish(m.g.Streams()...))
		by := 1.0
		if op == comm.Avg {
			by = float64(len(m.grads))
		}
		m.check(t, by, coarsest, fmt.Sprintf("%d ranks, %+v, step %d", len(m.grads), *cfg, step))
		if step == 1 {
			require.NoError(t, red.Rebuild(testgpu.Context(t)))
		}
	}
	require.Equal(t, cfg.Autotune != nil, red.Measurements() != nil)
}
