package comm_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/quant"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
)

// A number converts elements of T.
type number[T memory.Element] struct {
	of   func(float32) T
	wide func(T) float32
}

var (
	halfs   = number[memory.Float16Bits]{memory.Float16Of, memory.Float16Bits.Float32}
	bfloats = number[memory.BFloat16Bits]{memory.BFloat16Of, memory.BFloat16Bits.Float32}
	floats  = number[float32]{func(x float32) float32 { return x }, func(x float32) float32 { return x }}
)

// A quantizedSum has the operands of AllReduceQuantized on the local ranks of a group, and the
// elements of all ranks.
type quantizedSum[T memory.Element] struct {
	number[T]
	g    *comm.Group
	op   comm.Op
	cfg  comm.QuantizedConfig
	xs   comm.Shards[T]
	from [][]T // by rank
}

// newQuantizedSum allocates the operands. The elements begin at an address that is not aligned if
// shifted is 1.
func newQuantizedSum[T memory.Element](t testing.TB, g *comm.Group, x number[T], n, shifted int) *quantizedSum[T] {
	q := &quantizedSum[T]{number: x, g: g, op: comm.Sum, from: make([][]T, g.Size())}
	all, err := comm.Make[T](g, n+shifted)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, all.Close()) })
	for i := range all {
		q.xs = append(q.xs, all[i].Slice(shifted, n+shifted))
	}
	return q
}

// feedBack allocates errors, which are zeros.
func (q *quantizedSum[T]) feedBack(t testing.TB) {
	errs, err := comm.Make[float32](q.g, q.xs[0].Len())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errs.Close()) })
	for i := range errs {
		require.NoError(t, errs[i].Zero(q.g.Stream(i)))
	}
	q.cfg.Errors = errs
}

// fill sets the elements of all ranks, alike in all processes.
func (q *quantizedSum[T]) fill(of func(rank, k int) float32) error {
	for rank := range q.from {
		q.from[rank] = make([]T, q.xs[0].Len())
		for k := range q.from[rank] {
			q.from[rank][k] = q.of(of(rank, k))
		}
	}
	return q.write()
}

// write writes the elements to the local ranks.
func (q *quantizedSum[T]) write() error {
	var errs []error
	for i, x := range q.xs {
		errs = append(errs, x.CopyFrom(q.g.Stream(i), q.from[q.g.Communicator(i).Rank()]))
	}
	return errors.Join(errs...)
}

func (q *quantizedSum[T]) enqueue() error { return comm.AllReduceQuantized(q.g, q.op, q.xs, &q.cfg) }

// read returns the results of the local ranks, which must have the same bits.
func (q *quantizedSum[T]) read() ([]T, error) {
	var first []T
	for i, x := range q.xs {
		got := make([]T, x.Len())
		if err := x.CopyTo(q.g.Stream(i), got); err != nil {
			return nil, err
		}
		if i == 0 {
			first = got
		} else if !testgpu.SameBits(first, got) {
			return nil, fmt.Errorf("local ranks 0 and %d have different bits", i)
		}
	}
	return first, nil
}

// sum runs the call.
func (q *quantizedSum[T]) sum() ([]T, error) {
	if err := errors.Join(q.write(), q.enqueue()); err != nil {
		return nil, err
	}
	return q.read()
}

// check compares results with the sums in float64, by the documented bound.
func (q *quantizedSum[T]) check(got []T) error {
	n, ranks := len(got), q.g.Size()
	share, u := quant.ShareLen(n, ranks), 1.0/17
	if q.cfg.Format == memory.Int8 {
		u = 1.0 / 127
	}
	for begin := 0; begin < n; begin += quant.BlockLen {
		end := min(n, begin+quant.BlockLen)
		sums, most, sizes := make([]float64, end-begin), 0.0, make([]float64, end-begin)
		for rank, x := range q.from {
			largest := 0.0
			for k := range sums {
				v := float64(q.wide(x[begin+k]))
				sums[k] += v
				sizes[k] += math.Abs(v)
				largest = max(largest, math.Abs(v))
			}
			if rank != begin/share {
				most += largest
			}
		}
		if ranks == 1 {
			u = 0
		}
		largest := 0.0
		for _, x := range sums {
			largest = max(largest, math.Abs(x)+u*most)
		}
		divisor := 1.0
		if q.op == comm.Avg {
			divisor = float64(ranks)
		}
		for k, sum := range sums {
			bound := (u*(most+largest) + sizes[k]*1e-6) / divisor
			have := float64(q.wide(got[begin+k]))
			if !(math.Abs(have-sum/divisor) <= bound+math.Ldexp(1, -24)) {
				return fmt.Errorf("element %d of %d on %d ranks, %s: %g: want %g ± %g", begin+k, n, ranks, q.op, have, sum/divisor, bound)
			}
		}
	}
	return nil
}

// blocksOf returns elements whose magnitudes vary much within a block and between ranks.
func blocksOf(r *rand.Rand) func(rank, k int) float32 {
	seed := r.Uint64()
	return func(rank, k int) float32 {
		block := rand.New(rand.NewPCG(seed+uint64(rank), uint64(k/quant.BlockLen)))
		size, spread := block.IntN(12), 1+block.IntN(14)
		x := rand.New(rand.NewPCG(seed+uint64(rank), uint64(k)<<20))
		if x.IntN(40) == 0 {
			return 0
		}
		return float32(math.Ldexp(2*x.Float64()-1, size-x.IntN(spread)))
	}
}

// runQuantized compares several calls with the reference, in the process's group.
func runQuantized[T memory.Element](t testing.TB, g *comm.Group, x number[T], r *rand.Rand) error {
	for _, format := range []memory.DType{0, memory.Float8E4M3, memory.Int8} {
		n := 1 + r.IntN(1<<r.IntN(14))
		q := newQuantizedSum(t, g, x, n, r.IntN(2))
		q.cfg.Format, q.op = format, []comm.Op{comm.Sum, comm.Avg}[r.IntN(2)]
		if err := q.fill(blocksOf(r)); err != nil {
			return err
		}
		first, err := q.sum()
		if err == nil {
			err = q.check(first)
		}
		if err != nil {
			return err
		}
		again, err := q.sum()
		if err != nil {
			return err
		}
		if !testgpu.SameBits(first, again) {
			return fmt.Errorf("the same call gives other bits, with %d elements in %s", n, format)
		}
	}
	return nil
}

func runAllQuantized(t testing.TB, g *comm.Group, r *rand.Rand) error {
	return errors.Join(runQuantized(t, g, halfs, r), runQuantized(t, g, bfloats, r), runQuantized(t, g, floats, r))
}

func seededPCG(t testing.TB) func(stream uint64) *rand.Rand {
	seed := rand.Uint64()
	t.Log("seed", seed)
	return func(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, stream)) }
}

// All ranks get the same bits, within the documented bound, for all types and lengths.
func TestAllReduceQuantized(t *testing.T) {
	pcg := seededPCG(t)
	for ranks := 1; ranks <= 8; ranks++ {
		t.Run(fmt.Sprint("virtual/", ranks), func(t *testing.T) {
			r := pcg(uint64(ranks))
			s := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.CopyEngines, comm.Windows}[r.IntN(4)]
			g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks}), comm.Config{Strategy: s})
			for range testhost.Rounds(1, 3) {
				require.NoError(t, runAllQuantized(t, g, r), s)
			}
		})
	}
	t.Run("cuda", func(t *testing.T) {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			g := groupBy(t, testgpu.CUDA(t, 2), comm.Config{Strategy: s})
			for range 5 {
				require.NoError(t, runAllQuantized(t, g, pcg(9)))
			}
		}
	})
	t.Run("joined", func(t *testing.T) {
		gs := joined(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}))
		groups.Each(t, gs, func(i int, g *comm.Group) error { return runAllQuantized(t, g, pcg(10)) })
	})
}

// Ranks may be spread over processes unevenly, with several in one process.
func TestAllReduceQuantizedOfProcessesWithSeveralRanks(t *testing.T) {
	pcg := seededPCG(t)
	for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		lists := cut(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4}), 1, 3)
		errs := joinDevices(t, lists, &comm.Config{Strategy: s}, func(_ context.Context, g *comm.Group) error { return runAllQuantized(t, g, pcg(11)) })
		require.NoError(t, errors.Join(errs...), s)
	}
}

// Whichever launch fails, the error comes back. The group breaks only if other ranks could wait for this one.
func TestAllReduceQuantizedOverFaults(t *testing.T) {
	for n, broken := range []bool{false, false, true, true, false, false} {
		fault := fmt.Sprintf("cuLaunchKernel#%d=CUDA_ERROR_INVALID_VALUE", n+1)
		t.Run(fault, func(t *testing.T) {
			g, err := comm.Local(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fault}), nil)
			require.NoError(t, err)
			q := newQuantizedSum(t, g, floats, 100, 0)
			t.Cleanup(func() { require.NoError(t, g.Close()) }) // before its memory
			require.NoError(t, q.fill(func(int, int) float32 { return 1 }))
			err = q.enqueue()
			require.ErrorIs(t, err, device.ErrorInvalidValue)
			require.ErrorContains(t, err, fmt.Sprintf("on rank %d", n%2))
			if broken {
				require.ErrorIs(t, g.Err(), comm.ErrBroken)
				return
			}
			require.NoError(t, g.Err())
			got, err := q.sum() // the fault was one call
			require.NoError(t, err)
			require.NoError(t, q.check(got))
		})
	}
}

// The bits do not depend on the strategy: one Chorus kernel has those of NCCL, also if it is launched several
// times because the scratch memory is small, and so do the errors.
func TestAllReduceQuantizedBitsOfStrategies(t *testing.T) {
	comm.SetOwnBytes(t, 64<<10, 2<<10)
	pcg := seededPCG(t)
	r := pcg(0)
	run := func(t *testing.T, devs []*device.Device) {
		n := []int{1, 1 + r.IntN(2000), 70000*len(devs) + r.IntN(1000)}[r.IntN(3)]
		op, format, feedback, shifted := []comm.Op{comm.Sum, comm.Avg}[r.IntN(2)], []memory.DType{memory.Float8E4M3, memory.Int8}[r.IntN(2)], r.IntN(2) == 1, r.IntN(2)
		var want []memory.BFloat16Bits
		var wantErrors []float32
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.TwoShot} {
			g := groupBy(t, devs, comm.Config{Strategy: s})
			q := newQuantizedSum(t, g, bfloats, n, shifted)
			if q.op, q.cfg.Format = op, format; feedback {
				q.feedBack(t)
			}
			require.NoError(t, q.fill(blocksOf(pcg(1))))
			_, err := q.sum()
			require.NoError(t, err)
			before := len(g.Communicator(0).Trace())
			got, err := q.sum()
			require.NoError(t, err)
			calls := len(g.Communicator(0).Trace()) - before
			errs := make([]float32, n)
			if feedback {
				require.NoError(t, q.cfg.Errors[len(devs)-1].CopyTo(g.Stream(len(devs)-1), errs))
			}
			if s == comm.NCCLOnly {
				want, wantErrors = got, errs
				require.Equal(t, 1, calls, "one operation, whatever NCCL moves for it")
				continue
			}
			require.Equal(t, 1, calls, "one Chorus kernel")
			require.True(t, testgpu.SameBits(want, got), "%d elements on %d ranks by %s", n, len(devs), s)
			require.True(t, testgpu.SameBits(wantErrors, errs), "errors of %d elements on %d ranks by %s", n, len(devs), s)
		}
	}
	for ranks := 2; ranks <= 5; ranks++ {
		t.Run(fmt.Sprint("virtual/", ranks), func(t *testing.T) { run(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks})) })
	}
	t.Run("cuda", func(t *testing.T) {
		devs := testgpu.CUDA(t, 2)
		for range 10 {
			run(t, devs)
		}
	})
}

// The bits of processes are the same, and those of a group in one process.
func TestAllReduceQuantizedBitsOfProcesses(t *testing.T) {
	pcg := seededPCG(t)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	run := func(g *comm.Group) (bits []float32, err error) {
		q := newQuantizedSum(t, g, floats, 3000, 0)
		if err := q.fill(blocksOf(pcg(1))); err != nil {
			return nil, err
		}
		return q.sum()
	}
	want, err := run(groupBy(t, devs, comm.Config{}))
	require.NoError(t, err)
	gs := joined(t, t.Context(), devs)
	got := make([][]float32, len(gs))
	groups.Each(t, gs, func(i int, g *comm.Group) (err error) {
		got[i], err = run(g)
		return err
	})
	for i := range got {
		require.True(t, testgpu.SameBits(want, got[i]), "rank %d", i)
	}
}

// Sums of numbers of the format are exact, also beside zeros and across ranks with other scales.
func TestAllReduceQuantizedExact(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{})
		for format, most := range map[memory.DType]int{memory.Float8E4M3: 8, memory.Int8: 63} {
			q := newQuantizedSum(t, g, bfloats, 5000, 0)
			q.cfg.Format = format
			r := seededPCG(t)(1)
			require.NoError(t, q.fill(func(_, k int) float32 {
				return float32(math.Ldexp(float64(r.IntN(2*most+1)-most), k/quant.BlockLen%200-100))
			}))
			got, err := q.sum()
			require.NoError(t, err)
			for k := range got {
				require.Equal(t, q.wide(q.from[0][k])+q.wide(q.from[1][k]), q.wide(got[k]), "%s, element %d", format, k)
			}
		}
	})
}

// An element that is not finite makes its block NaN and no other; so does a sum that is too large for
// float16. A sum that only its rounding makes too large becomes the largest number.
func TestAllReduceQuantizedNotFinite(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{})
		inf, nan := float32(math.Inf(1)), float32(math.NaN())
		q := newQuantizedSum(t, g, halfs, 4096, 0) // two shares of 2048
		q.feedBack(t)
		special := map[[2]int]float32{{0, 5}: inf, {1, 70}: nan, {0, 2048 + 3}: -inf, {1, 2048 + 99}: nan, {0, 300}: 65504, {1, 300}: 32, {0, 2048 + 300}: 57344, {1, 2048 + 300}: 8160, {0, 4000}: 65504, {1, 4000}: 65504}
		require.NoError(t, q.fill(func(rank, k int) float32 {
			if x, ok := special[[2]int{rank, k}]; ok {
				return x
			}
			return 1
		}))
		bad := map[int]bool{} // by block
		for _, k := range []int{5, 70, 2051, 2147, 300, 4000} {
			bad[k/32] = true
		}
		for range 2 { // the errors have no trace of them
			got, err := q.sum()
			require.NoError(t, err)
			for k := range got {
				switch {
				case bad[k/32]:
					require.True(t, math.IsNaN(float64(q.wide(got[k]))), "element %d is %g", k, q.wide(got[k]))
				case k == 2348:
					require.EqualValues(t, 65504, q.wide(got[k]))
				case k/32 != 2348/32:
					require.EqualValues(t, 2, q.wide(got[k]), "element %d", k)
				}
			}
		}
		for i, x := range q.cfg.Errors {
			got := make([]float32, x.Len())
			require.NoError(t, x.CopyTo(g.Stream(i), got))
			for k := range got {
				require.False(t, math.IsNaN(float64(got[k])) || math.IsInf(float64(got[k]), 0), "error %d of rank %d", k, i)
			}
		}
	})
}

// With error feedback, all results together, plus the errors of all ranks, are all that was given. So
// the mean of many calls becomes exact, and without feedback it does not.
func TestAllReduceQuantizedErrors(t *testing.T) {
	pcg := seededPCG(t)
	for ranks := 2; ranks <= 5; ranks++ {
		g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks}), comm.Config{})
		for _, format := range []memory.DType{memory.Float8E4M3, memory.Int8} {
			for _, op := range []comm.Op{comm.Sum, comm.Avg} {
				t.Run(fmt.Sprint(ranks, "/", format, "/", op), func(t *testing.T) {
					const calls, n = 40, 700
					worst := [2]float64{}
					for feedback := range 2 {
						q := newQuantizedSum(t, g, bfloats, n, 0)
						if q.op, q.cfg.Format = op, format; feedback == 1 {
							q.feedBack(t)
						}
						require.NoError(t, q.fill(blocksOf(pcg(3))))
						total, want := make([]float64, n), make([]float64, n)
						for range calls {
							got, err := q.sum()
							require.NoError(t, err)
							for k := range got {
								total[k] += float64(q.wide(got[k]))
							}
						}
						divisor := map[comm.Op]float64{comm.Sum: 1, comm.Avg: float64(ranks)}[op]
						for k := range want {
							for rank := range ranks {
								want[k] += calls * float64(q.wide(q.from[rank][k])) / divisor
							}
							worst[feedback] = max(worst[feedback], math.Abs(want[k]-total[k]))
						}
						for i, x := range q.cfg.Errors {
							errs := make([]float32, n)
							require.NoError(t, x.CopyTo(g.Stream(i), errs))
							for k := range errs {
								total[k] += float64(errs[k]) / divisor
							}
						}
						for k := range want {
							if feedback == 1 {
								require.InDelta(t, want[k], total[k], 0.05, "element %d: %d calls and the errors", k, calls)
							}
						}
					}
					require.Less(t, 5*worst[1], worst[0], "the largest error without and with feedback")
				})
			}
		}
	}
}

// A graph repeats the call, with its errors.
func TestAllReduceQuantizedInAGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		var results [4][][]memory.BFloat16Bits
		for i := range results {
			captured := i % 2
			g := groupBy(t, devs, comm.Config{Strategy: []comm.Strategy{comm.NCCLOnly, comm.OwnKernels}[i/2]})
			q := newQuantizedSum(t, g, bfloats, 1234, 0)
			q.feedBack(t)
			require.NoError(t, q.fill(blocksOf(rand.New(rand.NewPCG(1, 1)))))
			run := q.enqueue
			if captured == 1 {
				exec, err := graph.Capture(g.Streams(), q.enqueue, nil)
				require.NoError(t, err)
				defer exec.Close()
				run = func() error { return exec.Launch(g.Stream(0)) }
			}
			for range 3 {
				require.NoError(t, errors.Join(q.write(), g.Wait(testgpu.Context(t)), run(), g.Wait(testgpu.Context(t))))
				got, err := q.read()
				require.NoError(t, err)
				results[i] = append(results[i], got)
			}
			require.False(t, testgpu.SameBits(results[i][0], results[i][1]), "the errors change the second result")
			for k := range results[i] {
				require.True(t, testgpu.SameBits(results[0][k], results[i][k]), "call %d", k)
			}
		}
	})
}

// Wrong arguments are refused, and the group stays usable.
func TestAllReduceQuantizedRefuses(t *testing.T) {
	g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.Config{})
	q := newQuantizedSum(t, g, floats, 64, 0)
	q.feedBack(t)
	wide, err := comm.Make[float64](g, 64)
	require.NoError(t, err)
	defer wide.Close()
	short := comm.Shards[float32]{q.cfg.Errors[0].Slice(0, 63), q.cfg.Errors[1].Slice(0, 63)}
	for want, err := range map[string]error{
		"elements of float64":        comm.AllReduceQuantized(g, comm.Sum, wide, nil),
		"the reduction is max":       comm.AllReduceQuantized(g, comm.Max, q.xs, nil),
		"the format is float8_e5m2":  comm.AllReduceQuantized(g, comm.Sum, q.xs, &comm.QuantizedConfig{Format: memory.Float8E5M2}),
		"1 slices for 2 local ranks": comm.AllReduceQuantized(g, comm.Sum, q.xs[:1], nil),
		"63 errors for 64 elements":  comm.AllReduceQuantized(g, comm.Sum, q.xs, &comm.QuantizedConfig{Errors: short}),
	} {
		require.ErrorContains(t, err, want)
		require.ErrorIs(t, err, comm.ErrMismatch)
	}
	empty := comm.Shards[float32]{q.xs[0].Slice(0, 0), q.xs[1].Slice(0, 0)}
	require.NoError(t, comm.AllReduceQuantized(g, comm.Sum, empty, nil))
	require.NoError(t, runAllQuantized(t, g, seededPCG(t)(1)))
}

// TestAllReduceQuantizedRefusesOverlap checks that errors in the memory of the elements are refused by each strategy, also if they
// share one element on one rank: the ranks' results would differ.
func TestAllReduceQuantizedRefusesOverlap(t *testing.T) {
	for _, strategy := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		t.Run(string(strategy), func(t *testing.T) {
			g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.Config{Strategy: strategy})
			const n = 64
			x, err := comm.Make[float32](g, 3*n)
			require.NoError(t, err)
			defer x.Close()
			at := func(first, second int) comm.Shards[float32] {
				return comm.Shards[float32]{x[0].Slice(first, first+n), x[1].Slice(second, second+n)}
			}
			for _, errs := range []comm.Shards[float32]{at(n, n), at(n+n/2, n+n/2), at(1, 1), at(2*n-1, 2*n-1), at(2*n, n), at(0, 1)} {
				err := comm.AllReduceQuantized(g, comm.Sum, at(n, n), &comm.QuantizedConfig{Errors: errs})
				require.ErrorIs(t, err, comm.ErrMismatch)
				require.ErrorContains(t, err, "the elements and the errors of rank")
			}
			for i := range x {
				require.NoError(t, x[i].Zero(g.Stream(i)))
			}
			require.NoError(t, comm.AllReduceQuantized(g, comm.Sum, at(n, n), &comm.QuantizedConfig{Errors: at(0, 2*n)}), "beside each other")
			half, err := memory.View[memory.Float16Bits](x[0].Buffer(), 0, n)
			require.NoError(t, err)
			other, err := memory.View[memory.Float16Bits](x[1].Buffer(), 0, n)
			require.NoError(t, err)
			halfs := comm.Shards[memory.Float16Bits]{half, other}
			require.NoError(t, comm.AllReduceQuantized(g, comm.Sum, halfs, &comm.QuantizedConfig{Errors: at(n/2, n/2)}), "elements of 2 bytes")
			require.ErrorContains(t, comm.AllReduceQuantized(g, comm.Sum, halfs, &comm.QuantizedConfig{Errors: at(n/2, n/2-1)}), "the errors of rank 1 overlap")
			require.NoError(t, g.Wait(testgpu.Context(t)))
		})
	}
}
