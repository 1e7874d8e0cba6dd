package ddp_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
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
		for range devs {
			j.steps = append(j.steps, r.IntN(4))
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
