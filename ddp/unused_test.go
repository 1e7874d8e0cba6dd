package ddp_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A trainer is a reducer with the gradients of all local ranks, on devices and as
// they should be.
type trainer struct {
	t    *testing.T
	g    *comm.Group
	bs   []backward
	red  *ddp.Reducer
	op   comm.Op
	want [][][]float32 // by rank and gradient
}

func newTrainer(t *testing.T, g *comm.Group, flat bool, cfg *ddp.ReducerConfig) *trainer {
	t.Helper()
	tr := &trainer{t: t, g: g, bs: backwards(t, g, flat), op: comm.Avg}
	if cfg.Op != nil {
		tr.op = *cfg.Op
	}
	var lists [][]memory.Slice[float32]
	for i, b := range tr.bs {
		lists = append(lists, b.grads)
		tr.want = append(tr.want, nil)
		for j, n := range gradLens {
			tr.want[i] = append(tr.want[i], make([]float32, n))
			tr.fill(i, j, -1) // what is there before the first step
		}
	}
	var err error
	tr.red, err = ddp.NewReducer(g, lists, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, tr.red.Close()) })
	return tr
}

// part is what a rank adds to a gradient in a step: numbers whose sums and means
// over 1 to 4 ranks are exact in all types.
func part(step, rank, j, k int) float32 { return float32(12 * ((step*7+rank*3+j*5+k)%21 - 10)) }

// fill makes gradient j of rank i.
func (tr *trainer) fill(i, j, step int) {
	tr.t.Helper()
	h := tr.want[i][j]
	for k := range h {
		h[k] = part(step, i, j, k)
	}
	require.NoError(tr.t, tr.bs[i].grads[j].CopyFrom(tr.bs[i].s, h))
}

// run runs the step until Finish, with the gradients that each rank uses in an
// order.
func (tr *trainer) run(step int, used [][]bool, order []int) {
	tr.t.Helper()
	for i, b := range tr.bs {
		for _, j := range order {
			if used[i][j] {
				tr.fill(i, j, step)
				require.NoError(tr.t, tr.red.Ready(b.s, j))
			}
		}
	}
	tr.expect(step, used)
}

// expect notes what the gradients are after the step.
func (tr *trainer) expect(step int, used [][]bool) {
	for j := range gradLens {
		if !slices.ContainsFunc(used, func(u []bool) bool { return u[j] }) {
			continue // nobody's: what is there stays
		}
		for k := range gradLens[j] {
			sum := float32(0)
			for i := range tr.bs {
				if used[i][j] {
					sum += part(step, i, j, k)
				}
			}
			if tr.op == comm.Avg {
				sum /= float32(len(tr.bs))
			}
			for i := range tr.bs {
				tr.want[i][j][k] = sum
			}
		}
	}
}

func (tr *trainer) finish() {
	tr.t.Helper()
	streams := tr.streams()
	slices.Reverse(streams) // they may come in any order
	require.NoError(tr.t, tr.red.Finish(streams...))
}

func (tr *trainer) streams() []*stream.Stream {
	var streams []*stream.Stream
	for _, b := range tr.bs {
		streams = append(streams, b.s)
	}
	return streams
}

func (tr *trainer) check(step int) {
	tr.t.Helper()
	for i, b := range tr.bs {
		for j, n := range gradLens {
			h := make([]float32, n)
			require.NoError(tr.t, b.grads[j].CopyTo(b.s, h))
			for k := range h {
				if h[k] != tr.want[i][j][k] {
					tr.t.Fatalf("step %d rank %d gradient %d element %d: %v: want %v", step, i, j, k, h[k], tr.want[i][j][k])
				}
			}
		}
	}
}

func (tr *trainer) step(step int, used [][]bool, order []int) {
	tr.t.Helper()
	tr.run(step, used, order)
	tr.finish()
	tr.check(step)
}

// usage draws which gradients each rank uses. Some are used by nobody, but at least one is used,
// because Finish refuses a step without gradients.
func usage(r *rand.Rand, ranks int) [][]bool {
	used := make([][]bool, ranks)
	for i := range used {
		used[i] = make([]bool, len(gradLens))
	}
	for j := range gradLens {
		often := r.IntN(3) // of 2
		for i := range used {
			used[i][j] = r.IntN(2) < often
		}
	}
	used[r.IntN(ranks)][r.IntN(len(gradLens))] = true
	return used
}

func all(ranks int) [][]bool {
	used := make([][]bool, ranks)
	for i := range used {
		used[i] = slices.Repeat([]bool{true}, len(gradLens))
	}
	return used
}

// cases runs fn for 1 to 4 ranks and every way in which gradients go over the
// wire.
func cases(t *testing.T, fn func(t *testing.T, g *comm.Group, flat bool, cfg ddp.ReducerConfig, r *rand.Rand)) {
	turns := testgpu.TurnsRaced(t, 3)
	for ranks := 1; ranks <= 4; ranks++ {
		t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				g := local(t, devs)
				seed := rand.Uint64()
				t.Logf("seed %d", seed)
				r := rand.New(rand.NewPCG(seed, 0))
				for _, flat := range []bool{true, false} {
					for i, wire := range []memory.DType{memory.Invalid, memory.BFloat16, memory.Float16} {
						if !turns(ranks, i) {
							continue
						}
						bytes := []int{1, 4096, 0}[r.IntN(3)]
						op := []comm.Op{comm.Sum, comm.Avg}[r.IntN(2)]
						if wire != memory.Invalid {
							op = comm.Avg
						}
						t.Run(fmt.Sprintf("flat=%v/wire=%v/bucket=%d/%v", flat, wire, bytes, op), func(t *testing.T) {
							fn(t, g, flat, ddp.ReducerConfig{BucketBytes: bytes, Op: &op, Compress: wire}, r)
						})
					}
				}
			})
		})
	}
}

// What a rank does not use counts as zeros, and what nobody uses stays as it is.
func TestUnusedGradients(t *testing.T) {
	cases(t, func(t *testing.T, g *comm.Group, flat bool, cfg ddp.ReducerConfig, r *rand.Rand) {
		cfg.FindUnused = true
		tr := newTrainer(t, g, flat, &cfg)
		for step := range 5 {
			used := usage(r, g.Size())
			switch step {
			case 1:
				used = all(g.Size())
			case 2:
				clear(used[g.Size()-1]) // a rank without any
			}
			tr.step(step, used, r.Perm(len(gradLens)))
		}
	})
}

// With a static graph the first step says what is used.
func TestStaticGraph(t *testing.T) {
	cases(t, func(t *testing.T, g *comm.Group, flat bool, cfg ddp.ReducerConfig, r *rand.Rand) {
		cfg.StaticGraph = true
		tr := newTrainer(t, g, flat, &cfg)
		used := usage(r, g.Size())
		for step := range 5 {
			tr.run(step, used, r.Perm(len(gradLens)))
			if step > 0 && cfg.BucketBytes == 0 && !slices.ContainsFunc(used, func(u []bool) bool { return !slices.Contains(u, true) }) {
				require.Equal(t, 1, tr.red.Launched(), "nothing waits for gradients that do not come")
			}
			tr.finish()
			tr.check(step)
			if step == 2 {
				require.NoError(t, tr.red.Rebuild(testgpu.Context(t)))
			}
		}
	})
}

func TestStaticGraphErrors(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		tr := newTrainer(t, local(t, devs), true, &ddp.ReducerConfig{StaticGraph: true, BucketBytes: 4096})
		used := all(2)
		used[1][2], used[1][4] = false, false
		tr.step(0, used, []int{6, 5, 4, 3, 2, 1, 0})
		b := tr.bs[1]
		err := tr.red.Ready(b.s, 4)
		require.ErrorContains(t, err, "rank 1: gradient 4 was not used in the first step")
		less := all(2)
		less[1][1], less[1][2], less[1][4], less[1][6] = false, false, false, false
		tr.run(1, less, []int{6, 5, 4, 3, 2, 1, 0})
		err = tr.red.Finish(tr.bs[0].s, b.s)
		require.ErrorContains(t, err, "on rank 1 gradients 1, 6 of 7 are not ready: a static graph uses the same")
		tr.step(2, used, []int{6, 5, 4, 3, 2, 1, 0}) // is as good as before
	})
}

// In a static graph the ranks ask each other once: the fourth reduction is that of
// the third step's bucket, and not the second answer.
func TestStaticGraphAsksOnce(t *testing.T) {
	for _, static := range []bool{true, false} {
		devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "ncclAllReduce#4=ncclInternalError"}).Devices()
		tr := newTrainer(t, local(t, devs), true, &ddp.ReducerConfig{StaticGraph: static, FindUnused: true})
		require.Equal(t, 1, tr.red.Buckets())
		order := []int{6, 5, 4, 3, 2, 1, 0}
		tr.step(0, all(1), order)
		if static {
			tr.step(1, all(1), order)
			for _, j := range order[:6] {
				require.NoError(t, tr.red.Ready(tr.bs[0].s, j))
			}
			require.ErrorIs(t, tr.red.Ready(tr.bs[0].s, 0), nccl.ErrorInternal)
			continue
		}
		tr.run(1, all(1), order)
		require.ErrorIs(t, tr.red.Finish(tr.bs[0].s), nccl.ErrorInternal)
	}
}

// A bucket that a rank does not use at all is reduced at the end of the step: the
// streams of the program may still read what was in it.
func TestUnusedBucketWaitsForTheEnd(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		tr := newTrainer(t, local(t, devs), true, &ddp.ReducerConfig{StaticGraph: true, BucketBytes: 1})
		used := all(2)
		used[0][6] = false
		order := []int{6, 5, 4, 3, 2, 1, 0}
		tr.step(0, used, order)
		b := tr.bs[0]
		kept, err := memory.Make[float32](b.s, gradLens[6])
		require.NoError(t, err)
		defer kept.Close()
		require.NoError(t, memory.Copy(b.s, kept, b.grads[6])) // as an optimiser does
		tr.run(1, used, order)
		require.Zero(t, tr.red.Launched())
		tr.finish()
		tr.check(1)
		h := make([]float32, gradLens[6])
		require.NoError(t, kept.CopyTo(b.s, h))
		for k := range h {
			require.Equal(t, part(0, 1, 6, k)/2, h[k])
		}
	})
}
