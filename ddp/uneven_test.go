package ddp_test

import (
	"errors"
	"fmt"
	"math"
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

// An unevenJob is what the ranks of a test do: rank r has steps[r] steps.
type unevenJob struct {
	steps []int
	cfg   ddp.ReducerConfig
	accum int // backward passes of a step, the last of which reduces
}

func (j *unevenJob) most() int {
	n := 0
	for _, s := range j.steps {
		n = max(n, s)
	}
	return n
}

// gradient is an element of a gradient of a rank in a backward pass: its sums over passes and
// ranks, and means over 1 to 4 ranks, are exact.
func (j *unevenJob) gradient(rank, step, grad, k int) float32 {
	return part(step, rank, grad, k)
}

// want is the element that the gradients of all ranks have after a step.
func (j *unevenJob) want(step, grad, k int) float32 {
	sum, active := float32(0), 0
	for rank, steps := range j.steps {
		if step < steps {
			sum += float32(j.accum) * j.gradient(rank, step, grad, k)
			active++
		}
	}
	switch {
	case *j.cfg.Op == comm.Sum:
		return sum
	case j.cfg.DivideByActive:
		return sum / float32(active)
	}
	return sum / float32(len(j.steps))
}

var unevenLens = []int{3, 40, 7}

// run is a rank of the job. It checks the gradients after each of its steps, and after Join.
func (j *unevenJob) run(t *testing.T, g *comm.Group) (last int, err error) {
	s := g.Stream(0)
	flat, grads, err := memory.MakeFlat[float32](s, unevenLens...)
	if err != nil {
		return 0, err
	}
	defer flat.Close()
	red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, &j.cfg)
	if err != nil {
		return 0, err
	}
	defer red.Close()
	for epoch := range 2 {
		mine := j.steps[g.Rank()]
		for step := range mine {
			if err := j.step(g, red, grads, step); err != nil {
				return 0, fmt.Errorf("epoch %d, step %d: %w", epoch, step, err)
			}
		}
		if last, err = red.Join(testgpu.Context(t), s); err != nil {
			return 0, err
		}
		if n := j.most(); n > 0 {
			if err := j.check(g, grads, n-1); err != nil {
				return 0, fmt.Errorf("epoch %d, joined after %d steps: %w", epoch, mine, err)
			}
		}
	}
	return last, nil
}

func (j *unevenJob) step(g *comm.Group, red *ddp.Reducer, grads []memory.Slice[float32], step int) error {
	s := g.Stream(0)
	for i := len(grads) - 1; i >= 0; i-- {
		h := make([]float32, unevenLens[i])
		for pass := range j.accum { // as a kernel would add to the gradients of the passes before
			for k := range h {
				h[k] = float32(pass+1) * j.gradient(g.Rank(), step, i, k)
			}
			if err := grads[i].CopyFrom(s, h); err != nil {
				return err
			}
		}
		if err := red.Ready(s, i); err != nil {
			return err
		}
	}
	if err := red.Finish(s); err != nil {
		return err
	}
	return j.check(g, grads, step)
}

func (j *unevenJob) check(g *comm.Group, grads []memory.Slice[float32], step int) error {
	for i, x := range grads {
		h := make([]float32, x.Len())
		if err := x.CopyTo(g.Stream(0), h); err != nil {
			return err
		}
		for k := range h {
			if want := j.want(step, i, k); h[k] != want && !(j.cfg.DivideByActive && near(h[k], want)) {
				return fmt.Errorf("rank %d: step %d, gradient %d, element %d: %v: want %v", g.Rank(), step, i, k, h[k], want)
			}
		}
	}
	return nil
}

// near allows for the two roundings of a factor.
func near(x, want float32) bool { return max(x-want, want-x) <= max(want, -want)*1e-6 }

// Ranks with random numbers of steps reduce the gradients of those that have input, with the
// divisors of torch's Join, and agree on the rank with the newest parameters.
func TestJoin(t *testing.T) {
	r := rand.New(rand.NewPCG(seedOf(t), 3))
	for run := range max(8, *reducerRuns/2) {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1 + run%4})
		op := []comm.Op{comm.Avg, comm.Sum}[r.IntN(2)]
		j := &unevenJob{accum: 1 + r.IntN(2), cfg: ddp.ReducerConfig{Op: &op, Uneven: true, BucketBytes: 1 << r.IntN(9), FirstBucketBytes: 8}}
		j.cfg.DivideByActive = op == comm.Avg && r.IntN(2) == 0
		j.cfg.FindUnused, j.cfg.Verify = r.IntN(3) == 0, r.IntN(3) == 0
		if r.IntN(4) == 0 {
			j.cfg.Hook = sumIn[float64]()
		}
		most := 4
		if j.cfg.Hook == nil && r.IntN(2) == 0 { // it chooses after 15 steps, in one of two epochs
			j.cfg.Autotune, most = &ddp.Autotune{Steps: 1}, 16
		}
		for range devs {
			j.steps = append(j.steps, r.IntN(most))
		}
		last := make([]int, len(devs))
		for rank, err := range processes(t, devs, func(g *comm.Group) (err error) {
			last[g.Rank()], err = j.run(t, g)
			return err
		}) {
			require.NoError(t, err, "rank %d of steps %v, %+v", rank, j.steps, j.cfg)
		}
		newest := 0
		for rank, steps := range j.steps {
			if steps == j.most() {
				newest = rank
			}
		}
		for _, x := range last {
			require.Equal(t, newest, x, "steps %v", j.steps)
		}
	}
}

// With StopTogether all ranks get an error in the first step that a rank has no input for.
func TestJoinStopsTogether(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		op := comm.Sum
		j := &unevenJob{accum: 1, steps: []int{4, 2, 3}, cfg: ddp.ReducerConfig{Op: &op, Uneven: true, StopTogether: true}}
		errs := processes(t, devs, func(g *comm.Group) error {
			_, err := j.run(t, g)
			return err
		})
		require.ErrorContains(t, errs[1], "ddp: join after 0 steps of other ranks: rank 1 exhausted all inputs, and 2 of 3 ranks have more")
		for _, i := range []int{0, 2} {
			require.ErrorContains(t, errs[i], "epoch 0, step 2: ddp: finish gradients: 1 of 3 ranks exhausted all inputs, so all stop")
		}
		j.steps = []int{2, 2, 2}
		require.NoError(t, errors.Join(processes(t, devs, func(g *comm.Group) error {
			_, err := j.run(t, g)
			return err
		})...))
	})
}

// A local rank without gradients counts as zeros while another one of the process has some.
func TestJoinOfLocalRanks(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, active := range []bool{false, true} {
			g := local(t, devs)
			bs := backwards(t, g, true)
			red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{bs[0].grads, bs[1].grads}, &ddp.ReducerConfig{Uneven: true, DivideByActive: active})
			require.NoError(t, err)
			for j := range gradLens {
				for i, b := range bs {
					h := make([]float32, gradLens[j])
					for k := range h {
						h[k] = value(0, i, j, k)
					}
					require.NoError(t, b.grads[j].CopyFrom(b.s, h))
				}
				require.NoError(t, red.Ready(bs[1].s, j))
			}
			require.NoError(t, red.Finish(bs[0].s, bs[1].s))
			for j, n := range gradLens {
				for _, b := range bs {
					h := make([]float32, n)
					require.NoError(t, b.grads[j].CopyTo(b.s, h))
					for k := range h {
						want := value(0, 1, j, k)
						if !active {
							want /= 2
						}
						require.Equal(t, want, h[k])
					}
				}
			}
			require.NoError(t, red.Ready(bs[0].s, 1))
			require.ErrorContains(t, red.Finish(bs[0].s, bs[1].s), "on rank 0 gradients 0, 2 to 6 of 7 are not ready: ")
			require.ErrorContains(t, red.Finish(bs[0].s, bs[1].s), "a rank without input calls Join")
			last, err := red.Join(testgpu.Context(t), bs[0].s, bs[1].s)
			require.NoError(t, err)
			require.Equal(t, 1, last)
			require.NoError(t, red.Close())
			_, err = red.Join(testgpu.Context(t), bs[0].s, bs[1].s)
			require.ErrorIs(t, err, device.ErrClosed)
			require.ErrorContains(t, err, "ddp: join: the reducer: use after Close")
		}
	})
}

func TestJoinErrors(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
	b := backwards(t, g, true)[0]
	even, err := ddp.NewReducer(g, [][]memory.Slice[float32]{b.grads}, nil)
	require.NoError(t, err)
	defer even.Close()
	_, err = even.Join(testgpu.Context(t), b.s)
	require.ErrorContains(t, err, "set ReducerConfig.Uneven")
	red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{b.grads}, &ddp.ReducerConfig{Uneven: true})
	require.NoError(t, err)
	defer red.Close()
	require.NoError(t, red.Ready(b.s, 1))
	_, err = red.Join(testgpu.Context(t), b.s)
	require.ErrorContains(t, err, "ddp: join after 0 steps of other ranks: in the middle of a step: call Finish before")
	_, err = red.Join(testgpu.Context(t))
	require.ErrorIs(t, err, comm.ErrMismatch)
}

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
// over 1 to 4 ranks are exact in all types. The greatest is part(0, 0, 0, 20).
func part(step, rank, j, k int) float32 { return float32(12 * ((step*7+rank*3+j*5+k)%21 - 10)) }

// fill writes gradient j of rank i.
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

// bound is how far a gradient may be from what it should be. NCCL multiplies each summand of a
// mean by the rounded inverse of the number of ranks, which is exact for powers of two only.
func (tr *trainer) bound() float64 { return meanBound(tr.op, len(tr.bs)) }

func meanBound(op comm.Op, ranks int) float64 {
	if op != comm.Avg || ranks&(ranks-1) == 0 {
		return 0
	}
	return float64(ranks) * float64(part(0, 0, 0, 20)) * 0x1p-23
}

func (tr *trainer) check(step int) {
	tr.t.Helper()
	for i, b := range tr.bs {
		for j, n := range gradLens {
			h := make([]float32, n)
			require.NoError(tr.t, b.grads[j].CopyTo(b.s, h))
			for k := range h {
				if math.Abs(float64(h[k]-tr.want[i][j][k])) > tr.bound() {
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
