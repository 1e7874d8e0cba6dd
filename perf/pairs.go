package perf

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/nccl"
)

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
	case p.Bytes < LatencyBytes || p.Iterations < 1 || p.Warmups < 0:
		return fmt.Errorf("%d bytes, %d iterations, %d warm-ups: want %d bytes and 1 iteration or more", p.Bytes, p.Iterations, p.Warmups, LatencyBytes)
	}
	return nil
}

// LatencyBytes is the size of a ping.
const LatencyBytes = 8

// MeasurePairs measures every pair of ranks, so all ranks must call it.
func MeasurePairs(ctx context.Context, g *comm.Group, p *PairPlan) (*Report, error) {
	switch {
	case g == nil:
		return nil, errNoGroup
	case p == nil:
		return nil, errNoPlan
	}
	if err := p.Check(g.Size()); err != nil {
		return nil, err
	}
	if err := route.GroupOf(g).CheckSame(ctx, "perf", fmt.Sprintf("the flags of pairs %+v", *p)); err != nil {
		return nil, err
	}
	r, err := Describe(g)
	if err != nil {
		return nil, err
	}
	if r.GPUs, err = gpusOf(ctx, g); err != nil {
		return nil, err
	}
	err = spmd(ctx, g, p.Bytes, unregistered, func(ctx context.Context, x *rank) error {
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
	x := r.bufs[0].Slice(0, LatencyBytes)
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
