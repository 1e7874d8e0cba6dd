package perf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/nccl"
)

// Run measures the plan on all ranks of the group. All ranks call Run with the
// same plan. On rank 0 it calls row for each row as soon as it is measured; row
// may be nil. The Report is the same on all ranks. If an operation fails or ctx
// ends, Run stops and closes the group; the Report then has the rows before that and the error.
func Run(ctx context.Context, g *comm.Group, p *Plan, row func(*Row)) (*Report, error) {
	jobs, err := p.jobs(g.Size())
	if err != nil {
		return nil, err
	}
	if p.only != nil {
		jobs = slices.DeleteFunc(jobs, func(j job) bool { return !p.only(j) })
	}
	// Ranks with different plans would wait for each other.
	if err := groups.Of(g).CheckSame(ctx, "perf", fmt.Sprintf("the flags %+v", *p.summary())); err != nil {
		_ = g.Shutdown(ctx)
		return nil, err
	}
	r, err := describe(g)
	if err != nil {
		return nil, err
	}
	r.Plan = p.summary()
	if len(jobs) == 0 {
		return r, nil
	}
	err = r.run(ctx, g, p, jobs, row)
	r.sumUp()
	if err != nil {
		r.Error, r.Verdict = err.Error(), nil
	}
	return r, err
}

// run measures the jobs on all local ranks.
func (r *Report) run(ctx context.Context, g *comm.Group, p *Plan, jobs []job, row func(*Row)) error {
	bytes := 0
	for _, j := range jobs {
		bytes = max(bytes, j.layout.size()*j.dtype.Size())
	}
	return spmd(ctx, g, (bytes+step-1)/step*step, p.Register, func(ctx context.Context, x *rank) error {
		for _, j := range jobs {
			one, err := x.row(ctx, p, j)
			if err != nil {
				return err
			}
			if x.c.Rank() != g.Rank() {
				continue // another local rank returns the same row
			}
			r.Rows = append(r.Rows, one)
			if row != nil && x.c.Rank() == 0 {
				row(one)
			}
		}
		return nil
	})
}

// spmd runs fn for all local ranks concurrently, each on a locked OS thread, with
// buffers of the given size. The first error cancels the others.
func spmd(ctx context.Context, g *comm.Group, bytes int, reg Registration, fn func(context.Context, *rank) error) error {
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan error, 1)
	// Closing the group aborts operations that use the buffers or wait for another rank.
	stop := context.AfterFunc(ctx, func() {
		broken := g.Err() // names the failed rank
		_ = g.Close()
		ended <- broken
	})
	ranks, shared := make([]*rank, g.Locals()), &localState{localCalls: make([][]issue, g.Locals()), batch: groups.Of(g).NewBatch()}
	onThreads(len(ranks), func(i int) {
		var err error
		if ranks[i], err = newRank(ctx, g, i, shared, bytes, reg); err == nil {
			err = fn(ctx, ranks[i])
		}
		if err != nil {
			cancel(err)
		}
	})
	var err error
	if !stop() {
		err = <-ended
		if cause := context.Cause(asked); err == nil || cause != nil && errors.Is(err, nccl.ErrorRemote) {
			// A broken connection is a consequence of the cancellation.
			err = cmp.Or(cause, context.Cause(ctx)) // the first error; the others are consequences
		}
	}
	var errs []error
	for _, r := range ranks {
		errs = append(errs, r.close())
	}
	if err != nil {
		return err
	}
	return errors.Join(errs...)
}

// onThreads calls fn with each number below n concurrently, each on a locked OS thread.
func onThreads(n int, fn func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			fn(i)
		})
	}
	wg.Wait()
}

// Pairs holds the bandwidth and latency between every two ranks, measured one pair at a time.
type Pairs struct {
	Bytes     int         `json:"size"`
	Bandwidth [][]float64 `json:"bandwidth"` // [from][to], 10^9 bytes a second, one way
	Latency   [][]float64 `json:"latency"`   // [a][b], half the time of a round trip of 8 bytes, in µs
}

// PairPlan configures the measurement of pairs.
type PairPlan struct {
	Bytes      int // bytes of a transfer
	Iterations int
	Warmups    int
}

// Check validates a plan for n ranks.
func (p *PairPlan) Check(n int) error {
	switch {
	case n < 2:
		return fmt.Errorf("pairs need 2 ranks or more: the group has %d", n)
	case p.Bytes < latencyBytes || p.Iterations < 1 || p.Warmups < 0:
		return fmt.Errorf("%d bytes, %d iterations, %d warm-ups: want %d bytes and 1 iteration or more", p.Bytes, p.Iterations, p.Warmups, latencyBytes)
	}
	return nil
}

// latencyBytes is the size of a ping.
const latencyBytes = 8

// MeasurePairs measures every pair of ranks. All ranks must call it.
func MeasurePairs(ctx context.Context, g *comm.Group, p *PairPlan) (*Report, error) {
	if err := p.Check(g.Size()); err != nil {
		return nil, err
	}
	if err := groups.Of(g).CheckSame(ctx, "perf", fmt.Sprintf("the flags of pairs %+v", *p)); err != nil {
		return nil, err
	}
	r, err := describe(g)
	if err != nil {
		return nil, err
	}
	err = spmd(ctx, g, p.Bytes, Unregistered, func(ctx context.Context, x *rank) error {
		m, err := x.pairs(ctx, p)
		if err == nil && x.c.Rank() == g.Rank() {
			r.Pairs = m
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	r.sumUp()
	return r, nil
}

func (r *rank) pairs(ctx context.Context, p *PairPlan) (*Pairs, error) {
	n := r.c.Size()
	m := &Pairs{Bytes: p.Bytes, Bandwidth: square(n), Latency: square(n)}
	for a := range n {
		for b := range n {
			if a == b {
				continue
			}
			us, err := r.pair(ctx, a, b, p, r.oneWay(p.Bytes))
			if err != nil {
				return nil, err
			}
			m.Bandwidth[a][b] = float64(p.Bytes) / 1e3 / us
			if a > b {
				continue
			}
			if us, err = r.pair(ctx, a, b, p, r.pingPong); err != nil {
				return nil, err
			}
			m.Latency[a][b], m.Latency[b][a] = us/2, us/2
		}
	}
	return m, nil
}

// pair times an exchange of ranks a and b in µs while the other ranks wait.
func (r *rank) pair(ctx context.Context, a, b int, p *PairPlan, do func(a, b int) error) (float64, error) {
	issue := func(int) error { return nil }
	if rank := r.c.Rank(); rank == a || rank == b {
		issue = func(int) error { return do(a, b) }
	}
	for i := range max(p.Warmups, 1) {
		if err := issue(i); err != nil {
			return 0, err
		}
	}
	mean, err := r.timed(ctx, p.Iterations, issue)
	if err != nil {
		return 0, err
	}
	all, err := r.share(ctx, micros(mean))
	if err != nil {
		return 0, err
	}
	return max(all[a][0], all[b][0]), nil
}

func (r *rank) oneWay(bytes int) func(a, b int) error {
	x := r.bufs[0].Slice(0, bytes)
	return func(a, b int) error {
		if r.c.Rank() == a {
			return nccl.Send(r.c, r.s, x, b)
		}
		return nccl.Recv(r.c, r.s, x, a)
	}
}

// pingPong sends to b, which sends back.
func (r *rank) pingPong(a, b int) error {
	x := r.bufs[0].Slice(0, latencyBytes)
	if r.c.Rank() == a {
		return errors.Join(nccl.Send(r.c, r.s, x, b), nccl.Recv(r.c, r.s, x, b))
	}
	return errors.Join(nccl.Recv(r.c, r.s, x, a), nccl.Send(r.c, r.s, x, a))
}

func square(n int) [][]float64 {
	m := make([][]float64, n)
	for i := range m {
		m[i] = make([]float64, n)
	}
	return m
}

// slowPart is the fraction of the median below which a pair is slow.
const slowPart = 0.8

// Slow returns the pairs [from, to] with a bandwidth below slowPart of the median.
func (m *Pairs) Slow() (list [][2]int) {
	limit := slowPart * m.median()
	for a, row := range m.Bandwidth {
		for b, bw := range row {
			if a != b && bw < limit {
				list = append(list, [2]int{a, b})
			}
		}
	}
	return list
}

// median returns the median bandwidth.
func (m *Pairs) median() float64 { return quantile(m.all(), 0.5) }

func (m *Pairs) all() []float64 {
	var all []float64
	for a, row := range m.Bandwidth {
		for b, bw := range row {
			if a != b {
				all = append(all, bw)
			}
		}
	}
	return all
}

// spreadOf returns the minimum, the median and the maximum.
func spreadOf(all []float64) (least, median, most float64) {
	if len(all) == 0 {
		return math.NaN(), math.NaN(), math.NaN()
	}
	return slices.Min(all), quantile(all, 0.5), slices.Max(all)
}
