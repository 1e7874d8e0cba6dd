package ddp_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// slowly lets later work on s wait for some milliseconds.
func slowly(s *stream.Stream) error {
	return s.Callback(func() { time.Sleep(50 * time.Millisecond) })
}

func localWith(t *testing.T, devs []*device.Device, cfg *comm.Config) *comm.Group {
	t.Helper()
	g, err := comm.Local(testgpu.Context(t), devs, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// The setting with the fastest steps is chosen, whichever it is. Gradients are right in all steps, and the
// groups that were not chosen may be closed.
func TestAutotuneChoosesTheFastest(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for fastest := range 4 {
			for _, flat := range []bool{true, false} {
				t.Run(fmt.Sprintf("%d/flat=%v", fastest, flat), func(t *testing.T) {
					g, other := local(t, devs), localWith(t, devs, &comm.Config{HighPriority: true})
					tr := newTrainer(t, g, flat, &ddp.ReducerConfig{FindUnused: true, Uneven: true, DivideByActive: true, BucketBytes: 4096, Autotune: &ddp.Autotune{
						Groups: []*comm.Group{other}, BucketBytes: []int{1, 4096}, Steps: 2}})
					settings := []ddp.Measurement{{Group: 0, BucketBytes: 4096}, {Group: 0, BucketBytes: 1}, {Group: 1, BucketBytes: 4096}, {Group: 1, BucketBytes: 1}}
					times, sorted := timesOf(settings, fastest)
					used := all(2)
					used[0][2], used[1][2], used[1][4] = false, false, false
					steps := tr.red.TrialSteps()
					require.Equal(t, 3+2*4*3, steps)
					tr.red.InjectTimes(times)
					for step := range steps {
						require.Nil(t, tr.red.Measurements())
						tr.step(step, used, backwardOrder)
					}
					require.Equal(t, sorted, tr.red.Measurements())
					require.Equal(t, settings[fastest], tr.red.Setting())
					if fastest < 2 {
						require.NoError(t, other.Close())
					}
					for step := range 3 {
						tr.step(step, used, backwardOrder)
					}
					require.Len(t, tr.red.Measurements(), 4)
				})
			}
		}
	})
}

// timesOf returns times of settings, of which one is the fastest, and the settings with them, the fastest first.
func timesOf(settings []ddp.Measurement, fastest int) (times func(ddp.Measurement) time.Duration, sorted []ddp.Measurement) {
	for i := range settings {
		m := settings[(fastest+i)%len(settings)]
		m.Step = time.Duration(1000 + i)
		sorted = append(sorted, m)
	}
	return func(m ddp.Measurement) time.Duration {
		for _, x := range sorted {
			if x.Group == m.Group && x.BucketBytes == m.BucketBytes && x.Prefetch == m.Prefetch {
				return x.Step
			}
		}
		return 0
	}, sorted
}

// inGroups runs fn for each rank, as if each were a process, with n groups of all ranks.
func inGroups(t *testing.T, devs []*device.Device, n int, fn func(gs []*comm.Group) error) []error {
	t.Helper()
	byRank := make([][]*comm.Group, len(devs))
	for range n {
		gs, errs := join(t, testgpu.Context(t), devs)
		require.NoError(t, errors.Join(errs...))
		for rank, g := range gs {
			byRank[rank] = append(byRank[rank], g)
		}
	}
	errs := make([]error, len(devs))
	var wg sync.WaitGroup
	for rank, gs := range byRank {
		wg.Go(func() { errs[rank] = fn(gs) })
	}
	wg.Wait()
	return errs
}

// oneGradient is a model of a gradient of two elements that is reduced by Sum.
type oneGradient struct {
	s   *stream.Stream
	x   memory.Slice[float32]
	red *ddp.Reducer
}

func newOneGradient(g *comm.Group, cfg *ddp.ReducerConfig) (m oneGradient, err error) {
	if m.s, err = stream.New(g.Device(0), nil); err != nil {
		return m, err
	}
	if m.x, err = memory.Make[float32](m.s, 2); err != nil {
		return m, errors.Join(err, m.s.Close())
	}
	cfg.Op = new(comm.Sum)
	m.red, err = ddp.NewReducer(g, [][]memory.Slice[float32]{{m.x}}, cfg)
	return m, err
}

func (m *oneGradient) close() error { return errors.Join(m.red.Close(), m.x.Close(), m.s.Close()) }

// step reduces a gradient of ones, and checks that the sum is of so many ranks, unless sum is 0.
func (m *oneGradient) step(sum float32) error {
	if err := errors.Join(m.x.CopyFrom(m.s, []float32{1, 1}), m.red.Ready(m.s, 0), m.red.Finish(m.s)); err != nil {
		return err
	}
	if sum == 0 {
		return nil
	}
	h := make([]float32, 2)
	if err := m.x.CopyTo(m.s, h); err != nil {
		return err
	}
	if h[0] != sum || h[1] != sum {
		return fmt.Errorf("the sums are %v: want %v", h, sum)
	}
	return nil
}

// Processes choose the same setting, although they have different times, passes without a reduction, and steps that fail.
func TestAutotuneOfProcesses(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		chosen := make([][]ddp.Measurement, 3)
		for rank, err := range inGroups(t, devs[:3], 2, func(gs []*comm.Group) error {
			rank := gs[0].Rank()
			m, err := newOneGradient(gs[0], &ddp.ReducerConfig{BucketBytes: 1024, Autotune: &ddp.Autotune{Groups: gs[1:], BucketBytes: []int{8}, Steps: 2}})
			if err != nil {
				return err
			}
			for step := range m.red.TrialSteps() {
				if m.red.Setting().Group == 0 && rank == 1 {
					err = slowly(m.s)
				}
				for range rank * (step % 2) { // passes without a reduction
					err = errors.Join(err, m.x.CopyFrom(m.s, []float32{5, 5}))
				}
				if rank == 2 && step%5 == 3 { // no gradient, and no step
					if m.red.Finish(m.s) == nil {
						return errors.New("a step without gradients")
					}
				}
				if err = errors.Join(err, m.step(3)); err != nil {
					return err
				}
			}
			chosen[rank] = m.red.Measurements()
			return errors.Join(m.step(3), m.close())
		}) {
			require.NoError(t, err, rank)
		}
		require.Equal(t, 1, chosen[0][0].Group)
		require.Equal(t, chosen[0], chosen[1])
		require.Equal(t, chosen[0], chosen[2])
		for _, m := range chosen[0] { // the others wait for rank 1
			require.Equal(t, m.Group == 0, m.Step >= 50*time.Millisecond, "%v: %v", m, m.Step)
		}
	})
}

// Ranks that give the groups in another order would wait for each other in different groups.
func TestAutotuneOfGroupsInAnotherOrder(t *testing.T) {
	const want = "Autotune.Groups[0] is one group on rank 0 and another one on rank 1: give the same on all ranks"
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for rank, err := range inGroups(t, devs[:2], 3, func(gs []*comm.Group) error {
			tried := &ddp.Autotune{Groups: slices.Clone(gs[1:])}
			if gs[0].Rank() == 1 {
				slices.Reverse(tried.Groups)
			}
			m, reducing := newOneGradient(gs[0], &ddp.ReducerConfig{Autotune: tried})
			u, sharding := ddp.NewUnits[float32, float32](gs[0], [][]int{{2}}, &ddp.UnitsConfig{Autotune: tried})
			for _, err := range []error{reducing, sharding} {
				if err == nil || !errors.Is(err, comm.ErrMismatch) || !strings.HasSuffix(err.Error(), want) {
					return fmt.Errorf("accepted, or an unclear error: %w", err)
				}
			}
			return errors.Join(m.close(), u.Close())
		}) {
			require.NoError(t, err, rank)
		}
	})
}

// A step in which a rank lacks a gradient is a step of all ranks.
func TestAutotuneAfterAStepThatFails(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for rank, err := range inGroups(t, devs[:2], 2, func(gs []*comm.Group) error {
			g := gs[0]
			s := g.Stream(0)
			flat, grads, err := memory.MakeFlat[float32](s, 4, 4)
			if err != nil {
				return err
			}
			red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, &ddp.ReducerConfig{BucketBytes: 16, Verify: true, Autotune: &ddp.Autotune{Groups: gs[1:], Steps: 1}})
			if err != nil {
				return err
			}
			for step := range red.TrialSteps() + 1 {
				lacks := step%4 == 1 && g.Rank() == step/4%2
				err := errors.Join(flat.Zero(s), red.Ready(s, 1))
				if !lacks {
					err = errors.Join(err, red.Ready(s, 0))
				}
				if err != nil {
					return err
				}
				if err := red.Finish(s); (err != nil) != (step%4 == 1) {
					return fmt.Errorf("step %d: %w", step, err)
				}
			}
			if red.Measurements() == nil {
				return errors.New("no choice")
			}
			return errors.Join(red.Close(), flat.Close())
		}) {
			require.NoError(t, err, rank)
		}
	})
}

// A rank without input takes part in the steps, and in the choice, by Join.
func TestAutotuneOfUnevenRanks(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for steps := range 12 { // of rank 1; the choice is in one of these steps
			for rank, err := range inGroups(t, devs[:2], 2, func(gs []*comm.Group) error {
				m, err := newOneGradient(gs[0], &ddp.ReducerConfig{Uneven: true, Autotune: &ddp.Autotune{Groups: gs[1:], BucketBytes: []int{25 << 20}, Steps: 1}})
				if err != nil {
					return err
				}
				n := m.red.TrialSteps() + 1
				if gs[0].Rank() == 1 {
					n = steps
				}
				for step := range n {
					sum := float32(1)
					if step < steps {
						sum = 2
					}
					if gs[0].Rank() == 1 { // Join is called while the steps go on
						sum = 0
					}
					if err := m.step(sum); err != nil {
						return fmt.Errorf("step %d: %w", step, err)
					}
				}
				last, err := m.red.Join(testgpu.Context(t), m.s)
				if err != nil {
					return err
				}
				if last != 0 {
					return fmt.Errorf("rank %d has the newest parameters", last)
				}
				if len(m.red.Measurements()) != 2 {
					return errors.New("no choice")
				}
				return errors.Join(m.step(2), m.close())
			}) {
				require.NoError(t, err, "rank %d of %d steps", rank, steps)
			}
		}
	})
}

// In a group with deterministic reductions, all bits are those of a Reducer without Autotune.
func TestAutotuneKeepsBits(t *testing.T) {
	testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
		cfg := &comm.Config{Deterministic: &comm.Order{}}
		g, other := localWith(t, devs[:4], cfg), localWith(t, devs[:4], cfg)
		for _, flat := range []bool{true, false} {
			plain, tuned := backwards(t, g, flat), backwards(t, g, flat)
			reducer := func(bs []backward, a *ddp.Autotune) *ddp.Reducer {
				lists := make([][]memory.Slice[float32], len(bs))
				for i := range bs {
					lists[i] = bs[i].grads
				}
				r, err := ddp.NewReducer(g, lists, &ddp.ReducerConfig{BucketBytes: 4096, Autotune: a})
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, r.Close()) })
				return r
			}
			a := reducer(plain, nil)
			b := reducer(tuned, &ddp.Autotune{Groups: []*comm.Group{other}, Steps: 1})
			r := rand.New(rand.NewPCG(3, 4))
			for range b.TrialSteps() + 2 {
				var streams []*stream.Stream
				for i := range plain {
					for j := len(gradLens) - 1; j >= 0; j-- {
						h := make([]float32, gradLens[j])
						for k := range h {
							h[k] = float32(r.NormFloat64())
						}
						require.NoError(t, plain[i].grads[j].CopyFrom(plain[i].s, h))
						require.NoError(t, tuned[i].grads[j].CopyFrom(tuned[i].s, h))
						require.NoError(t, errors.Join(a.Ready(plain[i].s, j), b.Ready(tuned[i].s, j)))
					}
					streams = append(streams, plain[i].s, tuned[i].s)
				}
				require.NoError(t, a.Finish(streams[0], streams[2], streams[4], streams[6]))
				require.NoError(t, b.Finish(streams[1], streams[3], streams[5], streams[7]))
				for i := range plain {
					for j, n := range gradLens {
						want, got := make([]float32, n), make([]float32, n)
						require.NoError(t, plain[i].grads[j].CopyTo(plain[i].s, want))
						require.NoError(t, tuned[i].grads[j].CopyTo(tuned[i].s, got))
						require.True(t, testgpu.SameBits(want, got), "gradient %d of rank %d with %v", j, i, b.Setting())
					}
				}
			}
			require.Len(t, b.Measurements(), 4) // larger buckets are the same
		}
	})
}

// A graph cannot capture steps before the choice, and can afterwards.
func TestAutotuneAndGraphs(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g, other := local(t, devs), localWith(t, devs, nil)
		tr := newTrainer(t, g, false, &ddp.ReducerConfig{BucketBytes: 4096, Autotune: &ddp.Autotune{Groups: []*comm.Group{other}, Steps: 1}})
		tr.red.InjectTimes(func(m ddp.Measurement) time.Duration { return time.Duration(10000*(2-m.Group) + m.BucketBytes) })
		tr.step(0, all(2), backwardOrder)
		capture := func() error { return tr.capture(all(2)) }
		_, err := graph.Capture(tr.streams(), capture, nil)
		var refused *device.CaptureError
		require.ErrorAs(t, err, &refused)
		require.ErrorContains(t, err, "ddp: gradient ready: ")
		require.ErrorContains(t, err, "Autotune has not chosen a setting yet: capture after 18 more steps, when Measurements is not nil")
		for step := 1; step < tr.red.TrialSteps(); step++ {
			tr.step(step, all(2), backwardOrder)
		}
		exec, err := graph.Capture(tr.streams(), capture, nil)
		require.NoError(t, err)
		defer exec.Close()
		for step := range 2 {
			for i := range tr.bs {
				for j := range gradLens {
					tr.fill(i, j, step)
				}
			}
			tr.expect(step, all(2))
			require.NoError(t, tr.bs[1].s.WaitStream(tr.bs[0].s))
			require.NoError(t, exec.Launch(tr.bs[1].s))
			require.NoError(t, tr.bs[0].s.WaitStream(tr.bs[1].s))
			tr.check(step)
		}
	})
}

// Wrong options are errors of all ranks, and so are options that differ.
func TestAutotuneErrors(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g, one := local(t, devs), localWith(t, devs[:1], nil)
		ordered, swapped := localWith(t, devs, &comm.Config{Deterministic: &comm.Order{}}), localWith(t, []*device.Device{devs[1], devs[0]}, nil)
		closed := localWith(t, devs, nil)
		require.NoError(t, closed.Close())
		groups := func(gs ...*comm.Group) ddp.Autotune { return ddp.Autotune{Groups: gs} }
		grads := [][]memory.Slice[float32]{}
		for _, b := range backwards(t, g, true) {
			grads = append(grads, b.grads)
		}
		for want, a := range map[string]ddp.Autotune{
			"Autotune measures -1 steps at a time: want 1 to 1000, or 0":              {Steps: -1},
			"Autotune measures 1001 steps at a time: want 1 to 1000":                  {Steps: 1001},
			"Autotune measures 9223372036854775807 steps at a time":                   {Steps: math.MaxInt},
			"Autotune tries buckets of 0 bytes: want a positive size":                 {BucketBytes: []int{8, 0}},
			"Autotune tries a prefetch of [2] units, which a Reducer does not have":   {Prefetch: []int{2}},
			"no group given (Autotune.Groups[0])":                                     groups(nil),
			"Autotune.Groups[1] is given twice":                                       groups(swapped, g),
			"has 1 ranks, of which 1 are local, instead of 2 and 2":                   groups(one),
			"Autotune.Groups[0] has rank 0 on " + devs[1].String():                    groups(swapped),
			"has another comm.Config.Deterministic, so that the sums would depend on": groups(ordered),
			"closed": groups(closed),
		} {
			if want == "Autotune.Groups[1] is given twice" {
				a = groups(localWith(t, devs, nil), g)
			}
			_, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{Autotune: &a})
			require.ErrorContains(t, err, want)
		}
		blocks := groups(localWith(t, devs, &comm.Config{Deterministic: &comm.Order{Block: 1}}))
		_, err := ddp.NewReducer(ordered, grads, &ddp.ReducerConfig{Autotune: &blocks})
		require.ErrorContains(t, err, "Autotune.Groups[0] has another comm.Config.Deterministic")
		_, err = ddp.NewReducer(g, grads, &ddp.ReducerConfig{Autotune: &ddp.Autotune{}, Hook: &ddp.PowerSGD{}})
		require.ErrorContains(t, err, "Autotune with a hook, whose state belongs to buckets that Autotune replaces")
		_, err = ddp.NewUnits[float32, float32](g, unitLens, &ddp.UnitsConfig{Autotune: &ddp.Autotune{BucketBytes: []int{8}}})
		require.ErrorContains(t, err, "Autotune tries buckets of [8] bytes: a unit is one bucket")
		_, err = ddp.NewUnits[float32, float32](g, unitLens, &ddp.UnitsConfig{Autotune: &ddp.Autotune{Prefetch: []int{-1}}})
		require.ErrorContains(t, err, "Autotune tries a prefetch of -1 units: want 0 or more")
		for _, err := range processes(t, devs, func(g *comm.Group) error {
			m, err := newOneGradient(g, &ddp.ReducerConfig{Autotune: &ddp.Autotune{Steps: 1 + g.Rank()}})
			return errors.Join(err, m.red.Close(), m.x.Close(), m.s.Close())
		}) {
			require.ErrorIs(t, err, comm.ErrMismatch)
			require.ErrorContains(t, err, "and 1 steps and rank 1 ")
		}
		// The defaults are the same whether they are given or not, and an error shows them.
		for _, err := range processes(t, devs, func(g *comm.Group) error {
			m, err := newOneGradient(g, &ddp.ReducerConfig{Autotune: &ddp.Autotune{Steps: 6 * g.Rank()}})
			return errors.Join(err, m.close())
		}) {
			require.NoError(t, err)
		}
		for _, err := range processes(t, devs, func(g *comm.Group) error {
			m, err := newOneGradient(g, &ddp.ReducerConfig{Autotune: &ddp.Autotune{Steps: 7 * g.Rank()}})
			return errors.Join(err, m.close())
		}) {
			require.ErrorContains(t, err, "with Autotune of 0 further groups, buckets of [6553600 104857600] bytes and 6 steps and rank 1 ")
		}
		for _, err := range processes(t, devs, func(g *comm.Group) error {
			u, err := ddp.NewUnits[float32, float32](g, unitLens, &ddp.UnitsConfig{Autotune: &ddp.Autotune{Steps: 7 * g.Rank()}})
			return errors.Join(err, u.Close())
		}) {
			require.ErrorContains(t, err, "with Autotune of 0 further groups, a prefetch of [2] units and 6 steps and rank 1 ")
		}
	})
}

// If a rank has no memory for other buckets, no rank waits for it.
func TestAutotuneWithoutMemory(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	errs := processes(t, devs, func(g *comm.Group) (err error) {
		s, grads := g.Stream(0), make([]memory.Slice[float32], 3)
		for i := range grads {
			if grads[i], err = memory.Make[float32](s, 8<<20); err != nil {
				return err
			}
			defer grads[i].Close()
		}
		red, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, &ddp.ReducerConfig{BucketBytes: 1 << 20, Autotune: &ddp.Autotune{BucketBytes: []int{64 << 20}, Steps: 1}})
		if err != nil {
			return err
		}
		defer red.Close()
		if g.Rank() == 1 {
			err = memory.SetFraction(g.Device(0), 0)
		}
		for range red.TrialSteps() {
			if err = errors.Join(err, red.Ready(s, 2), red.Ready(s, 1), red.Ready(s, 0), red.Finish(s)); err != nil {
				return err
			}
		}
		return err
	})
	require.ErrorContains(t, errs[1], "ddp: autotune: rank 1 cannot change to group 0, buckets of 67108864 bytes: ")
	require.ErrorContains(t, errs[1], "give the best known setting without Autotune")
	require.ErrorIs(t, errs[0], comm.ErrBroken)
}

// reuse writes to new memory of some sizes on s.
func reuse(t *testing.T, s *stream.Stream, sizes ...int) {
	t.Helper()
	var all []memory.Slice[byte]
	for _, n := range sizes {
		for range 4 {
			x, err := memory.Make[byte](s, n)
			require.NoError(t, err)
			require.NoError(t, x.Zero(s))
			all = append(all, x)
		}
	}
	for _, x := range all {
		require.NoError(t, x.Close())
	}
}

// Memory that was allocated on the streams of the first group is freed behind its use by the other one.
func TestAutotuneFreesBehindAllGroups(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		slower := func(m ddp.Measurement) time.Duration { return time.Duration(10 - m.Group) }
		t.Run("reducer", func(t *testing.T) {
			g, other := local(t, devs), localWith(t, devs, nil)
			r, err := ddp.NewReducer(g, separateGrads(t, g, 3), &ddp.ReducerConfig{FindUnused: true, Uneven: true, DivideByActive: true, Autotune: &ddp.Autotune{
				Groups: []*comm.Group{other}, Steps: 1}})
			require.NoError(t, err)
			r.InjectTimes(slower)
			streams := newStreams(t, g)
			for i, s := range streams {
				require.NoError(t, s.WaitStream(g.Stream(i)))
			}
			for range r.TrialSteps() + 1 {
				for _, s := range streams {
					require.NoError(t, errors.Join(r.Ready(s, 2), r.Ready(s, 0)))
				}
				require.NoError(t, r.Finish(streams...))
			}
			require.Equal(t, 1, r.Measurements()[0].Group)
			require.NoError(t, r.Close())
			for _, s := range g.Streams() {
				reuse(t, s, 3, 4, 1200)
			}
			require.NoError(t, other.Close())
		})
		for _, passes := range []int{5, 12} { // the group changes after the passes 4, 8 and 10
			t.Run(fmt.Sprintf("units/%d", passes), func(t *testing.T) {
				g, other := local(t, devs), localWith(t, devs, nil)
				u, err := ddp.NewUnits[float32, memory.BFloat16Bits](g, [][]int{{500}, {500}, {500}, {500}}, &ddp.UnitsConfig{Keep: []int{3}, Reduce: memory.Float32, Autotune: &ddp.Autotune{
					Groups: []*comm.Group{other}, Prefetch: []int{1}, Steps: 1}})
				require.NoError(t, err)
				u.InjectTimes(slower)
				streams := newStreams(t, g)
				for i, s := range streams {
					require.NoError(t, s.WaitStream(g.Stream(i)))
				}
				require.NoError(t, u.Refresh(streams...))
				again := func() {
					for _, s := range g.Streams() {
						reuse(t, s, 4*u.Len(), 2*u.Len(), 1000, 500)
					}
				}
				sinks := make([]memory.Slice[memory.BFloat16Bits], len(streams))
				use := func(k int) {
					for i, s := range streams {
						ps, err := u.Use(s, k)
						require.NoError(t, err)
						for _, p := range ps {
							require.NoError(t, memory.Copy(s, sinks[i].Slice(0, p.Len()), p))
						}
						require.NoError(t, u.Done(s, k))
					}
				}
				for i, s := range streams {
					sinks[i], err = memory.Make[memory.BFloat16Bits](s, 1000)
					require.NoError(t, err)
				}
				for pass := range passes {
					use(0)
					for k := 3; k >= 0; k-- {
						for _, s := range streams {
							for j := k; j >= 0 && pass%4 == 0; j-- { // the memory of four gradients, and later of two
								_, err := u.Grads(s, j)
								require.NoError(t, err)
							}
							_, err := u.Grads(s, k)
							require.NoError(t, err)
							require.NoError(t, u.Ready(s, k))
						}
						again()
					}
					use(3) // which stays gathered
					require.NoError(t, u.Finish(streams...))
					again()
					if pass%2 == 0 { // gradients add up
						continue
					}
					for i, s := range streams {
						for _, x := range u.ShardGrads(i) {
							require.NoError(t, x.Zero(s))
						}
					}
					require.NoError(t, u.Refresh(streams...))
					again()
				}
				require.Equal(t, 1, u.Setting().Group)
				require.NoError(t, u.Refresh(streams...)) // converts the parameters
				for _, x := range sinks {
					require.NoError(t, x.Close())
				}
				require.NoError(t, u.Close())
				again()
				require.NoError(t, other.Close())
			})
		}
	})
}

// Units choose the prefetch and the group. Parameters, gradients and updates are exact meanwhile.
func TestAutotuneOfUnits(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for fastest := range 4 {
			g, other := local(t, devs), localWith(t, devs, nil)
			cfg := &ddp.UnitsConfig{Keep: []int{3}, Autotune: &ddp.Autotune{Groups: []*comm.Group{other}, Steps: 1}}
			x := newSharding(t, g, cfg, uint64(fastest), memory.BFloat16Of, memory.BFloat16Bits.Float32)
			settings := []ddp.Measurement{{Group: 0, Prefetch: 1}, {Group: 0, Prefetch: 2}, {Group: 1, Prefetch: 1}, {Group: 1, Prefetch: 2}}
			times, sorted := timesOf(settings, fastest)
			x.u.InjectTimes(times)
			_, err := graph.Capture(x.streams, func() error { return x.u.Refresh(x.streams...) }, nil)
			require.ErrorContains(t, err, "Autotune has not chosen a setting yet: capture after 19 more steps")
			var passes []int
			for pass := range 20 {
				if pass < 19 {
					require.Nil(t, x.u.Measurements())
				}
				x.forward()
				x.backward(2*pass, false)
				x.forward()
				x.backward(2*pass+1, true)
				require.NoError(t, x.u.Finish(x.streams...))
				if passes = append(passes, 2*pass, 2*pass+1); pass%3 > 0 { // two of three passes accumulate in the shards
					x.update(passes, 2, 0.5)
					passes = nil
				}
			}
			require.Equal(t, sorted, x.u.Measurements())
			require.Equal(t, settings[fastest], x.u.Setting())
			if len(passes) > 0 {
				x.update(passes, 2, 0.5)
			}
			x.steps(2, 0.5)
		}
	})
}

// Shards of gradients that are reduced over replicas, too, stay in use while the group of the shards changes.
func TestAutotuneOfHybridUnits(t *testing.T) {
	testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		var wg sync.WaitGroup
		gs, errs := join(t, ctx, devs[:4])
		require.NoError(t, errors.Join(errs...))
		subs := make([][]*comm.Group, 4)
		for i, g := range gs {
			wg.Go(func() {
				for _, color := range []int{i / 2, i % 2, i / 2} {
					sub, err := g.Split(ctx, []int{color}, nil)
					if errs[i] = errors.Join(errs[i], err); err != nil {
						return
					}
					subs[i] = append(subs[i], sub[0])
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		for i, all := range subs {
			wg.Go(func() {
				x := newSharding(t, all[0], &ddp.UnitsConfig{Replicas: all[1:2], Autotune: &ddp.Autotune{Groups: all[2:], Steps: 1}}, 7, memory.BFloat16Of, memory.BFloat16Bits.Float32)
				x.offset = i / 2 * 2
				x.u.InjectTimes(func(m ddp.Measurement) time.Duration { return time.Duration(10 - m.Group - m.Prefetch) })
				for range 5 { // of 4 passes
					x.steps(4, 0.25)
				}
				require.Len(t, x.u.Measurements(), 4)
				require.Equal(t, ddp.Measurement{Group: 1, Prefetch: 2, Step: 7}, x.u.Measurements()[0])
				require.NoError(t, x.u.Close())
			})
		}
		wg.Wait()
		for _, all := range subs {
			for _, g := range all {
				require.NoError(t, g.Close())
			}
		}
	})
}

// Rebuild keeps its order while the sizes of buckets change.
func TestAutotuneAfterRebuild(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	g := local(t, devs)
	r, err := ddp.NewReducer(g, separateGrads(t, g, 4), &ddp.ReducerConfig{BucketBytes: 400, Autotune: &ddp.Autotune{BucketBytes: []int{800}, Steps: 1}})
	require.NoError(t, err)
	defer r.Close()
	r.InjectTimes(func(m ddp.Measurement) time.Duration { return time.Duration(1000 - m.BucketBytes) })
	for step := range r.TrialSteps() {
		require.NoError(t, stepInOrder(g, r, 0, 3, 1, 2))
		if step == 4 {
			require.NoError(t, r.Rebuild(testgpu.Context(t)))
		}
	}
	require.Equal(t, 800, r.Measurements()[0].BucketBytes)
	require.Equal(t, [][]int{{0}, {1, 3}, {2}}, r.BucketGrads())
}

// A Reducer may be closed before the choice, and nil has no measurements.
func TestAutotuneEndsEarly(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	m, err := newOneGradient(local(t, devs), &ddp.ReducerConfig{Autotune: &ddp.Autotune{}})
	require.NoError(t, err)
	for range 9 {
		require.NoError(t, m.step(1))
	}
	require.Nil(t, m.red.Measurements())
	require.Equal(t, 6, m.red.OpenEvents())
	require.NoError(t, m.close())
	require.Zero(t, m.red.OpenEvents())
	require.Nil(t, m.red.Measurements())
	require.Nil(t, (*ddp.Reducer)(nil).Measurements())
	require.Nil(t, (*ddp.Units[float32, float32])(nil).Measurements())
	_, err = m.red.Join(context.Background(), m.s)
	require.ErrorIs(t, err, device.ErrClosed)
}
