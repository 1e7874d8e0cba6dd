package ddp_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A powerReference is PowerSGD of one gradient in float64.
type powerReference struct {
	cfg          ddp.PowerSGD
	n, m, number int
	errs         [][]float64 // by rank
	q            []float64   // transposed, by row
	steps        int
}

// step returns the sum over the ranks of what they have given.
func (p *powerReference) step(given [][]float64) []float64 {
	p.steps++
	r := min(p.n, p.m, p.cfg.Rank)
	if float64((p.n+p.m)*r)*p.cfg.MinCompression >= float64(p.n*p.m) || p.steps <= p.cfg.StartStep {
		return total(given)
	}
	if p.errs == nil {
		p.errs = make([][]float64, len(given))
		for i := range p.errs {
			p.errs[i] = make([]float64, p.n*p.m)
		}
	}
	fresh := make([]float64, r*p.m)
	normal := rand.New(rand.NewPCG(p.cfg.Seed, uint64(p.steps)<<32|uint64(p.number)))
	for k := range fresh {
		fresh[k] = normal.NormFloat64()
	}
	if p.q == nil || p.cfg.NoWarmStart {
		p.q = fresh
	}
	sent := make([][]float64, len(given))
	for i, x := range given {
		sent[i] = append([]float64{}, x...)
		if !p.cfg.NoErrorFeedback {
			sent[i] = total([][]float64{x, p.errs[i]})
		}
	}
	m := total(sent)
	orthonormalize(p.q, r)
	ps := product(p.q, m, r, p.m, p.n, func(i, j int) int { return j*p.m + i })
	orthonormalize(ps, r)
	p.q = product(ps, m, r, p.n, p.m, func(i, j int) int { return i*p.m + j })
	out := make([]float64, p.n*p.m)
	for i := range p.n {
		for j := range p.m {
			for k := range r {
				out[i*p.m+j] += ps[k*p.n+i] * p.q[k*p.m+j]
			}
		}
	}
	for i := range sent {
		for k := range out {
			p.errs[i][k] = sent[i][k] - out[k]/float64(len(sent))
		}
	}
	return out
}

func total(xs [][]float64) []float64 {
	sum := make([]float64, len(xs[0]))
	for _, x := range xs {
		for k := range x {
			sum[k] += x[k]
		}
	}
	return sum
}

// product returns the r×n product of an r×inner matrix and of y, whose elements at finds.
func product(x, y []float64, r, inner, n int, at func(i, j int) int) []float64 {
	z := make([]float64, r*n)
	for k := range r {
		for j := range n {
			for i := range inner {
				z[k*n+j] += x[k*inner+i] * y[at(i, j)]
			}
		}
	}
	return z
}

// orthonormalize orthonormalizes rows.
func orthonormalize(rows []float64, count int) {
	n := len(rows) / count
	for range 2 {
		for i := range count {
			row := rows[i*n : (i+1)*n]
			for j := range i {
				before := rows[j*n : (j+1)*n]
				dot := 0.0
				for k := range row {
					dot += row[k] * before[k]
				}
				for k := range row {
					row[k] -= dot * before[k]
				}
			}
			square := 0.0
			for _, x := range row {
				square += x * x
			}
			for k := range row {
				row[k] /= math.Sqrt(square)
			}
		}
	}
}

// powerModel returns a reducer by PowerSGD for gradients of shapes, in one type.
func powerModel(t *testing.T, g *comm.Group, x memory.DType, cfg *ddp.ReducerConfig, shapes ...[]int) (*model, *ddp.Reducer) {
	t.Helper()
	m := &model{g: g, shapes: shapes}
	for range shapes {
		m.types = append(m.types, x)
	}
	for i := range g.Locals() {
		m.grads = append(m.grads, m.allocate(t, i, map[memory.DType]bool{x: true}))
	}
	red, err := ddp.NewReducer(g, m.grads, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, red.Close()) })
	return m, red
}

// PowerSGD computes the products of its description in float64, with all of its options, for
// several steps.
func TestPowerSGD(t *testing.T) {
	r := rand.New(rand.NewPCG(seedOf(t), 2))
	for run := range *reducerRuns {
		g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1 + run%4}))
		p := ddp.PowerSGD{Rank: 1 + r.IntN(3), StartStep: r.IntN(3) - 1, MinCompression: 1 + r.Float64(), Seed: r.Uint64(),
			NoErrorFeedback: r.IntN(2) == 0, NoWarmStart: r.IntN(2) == 0}
		op := []comm.Op{comm.Sum, comm.Avg}[r.IntN(2)]
		x := []memory.DType{memory.Float32, memory.Float64}[r.IntN(2)]
		shapes := [][]int{{7}, {12 + r.IntN(8), 9 + r.IntN(8)}, {3, 3}, {11, 2, 1 + r.IntN(9)}, {5}}
		if p.StartStep == 0 {
			p.StartStep = -1
		}
		m, red := powerModel(t, g, x, &ddp.ReducerConfig{Hook: &p, Op: &op}, shapes...)
		refs := make([]*powerReference, len(shapes))
		for j, shape := range shapes {
			if refs[j] = (&powerReference{cfg: p, n: shape[0], m: size(shape) / shape[0], number: j}); len(shape) == 1 {
				refs[j].cfg.StartStep = math.MaxInt
			}
		}
		for step := range 4 {
			m.fill(t, r, []bool{true, true, true, true}[:g.Size()])
			reduceAll(t, g, red, len(shapes))
			note := fmt.Sprintf("%d ranks, %s, %s, %s, step %d", g.Size(), x, op, &p, step)
			m.checkPower(t, refs, op, note)
		}
	}
}

// checkPower compares the gradients of all ranks with the references.
func (m *model) checkPower(t *testing.T, refs []*powerReference, op comm.Op, note string) {
	t.Helper()
	for j, ref := range refs {
		var given [][]float64
		for i := range m.grads {
			h := append([]float64{}, m.values[i][j]...)
			for k := range h {
				if op == comm.Avg {
					h[k] /= float64(len(m.grads))
				}
			}
			given = append(given, h)
		}
		want, tolerance := ref.step(given), 1e-9
		if m.types[j] == memory.Float32 {
			tolerance = 1e-3
		}
		for i := range m.grads {
			for k, x := range m.read(t, i, j) {
				if !(math.Abs(x-want[k]) <= tolerance) {
					t.Fatalf("%s: rank %d gradient %d %v element %d: %v: want %v", note, i, j, m.shapes[j], k, x, want[k])
				}
			}
		}
	}
}

// A gradient of rank 1 is exact with any rank of the product, though the columns of P depend on
// each other then; zeros stay zeros, and numbers after zeros or NaN are right again.
func TestPowerSGDOfDependentColumns(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		m, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{Rank: 3, StartStep: -1}}, []int{16, 24})
		set := func(value func(i, row, column int) float64) []float64 {
			for i, list := range m.grads {
				h := make([]float64, 16*24)
				for k := range h {
					h[k] = value(i, k/24, k%24)
				}
				write(t, g, i, list[0], h)
			}
			reduceAll(t, g, red, 1)
			require.Equal(t, fmt.Sprint(m.read(t, 0, 0)), fmt.Sprint(m.read(t, 1, 0)), "all ranks have the same result")
			return m.read(t, 0, 0)
		}
		rankOne := func(_, row, column int) float64 { return float64(row-3) * float64(column+1) / 16 }
		exact := func() {
			t.Helper()
			for k, x := range set(rankOne) {
				require.InDelta(t, rankOne(0, k/24, k%24), x, 1e-4)
			}
		}
		exact()
		exact()
		for _, x := range set(func(int, int, int) float64 { return 0 }) {
			require.InDelta(t, 0, x, 1e-4)
		}
		exact()
		for _, bad := range []float64{math.NaN(), math.Inf(1), 1e25} {
			found := 0
			for _, x := range set(func(i, row, column int) float64 {
				if i == 1 && row == 2 && column == 5 {
					return bad
				}
				return 1
			}) {
				if math.IsNaN(x) {
					found++
				}
			}
			require.Equal(t, 16*24, found, "%v reaches all ranks", bad)
			exact()
			exact()
		}
	})
}

// The factors are all that the ranks send of a compressed gradient.
func TestPowerSGDSendsLess(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	m, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{Rank: 2, StartStep: 1}}, []int{40, 30}, []int{9})
	counts := func() (n []int) {
		before := len(g.Communicator(0).Trace())
		reduceAll(t, g, red, len(m.shapes))
		for _, o := range g.Communicator(0).Trace()[before:] {
			n = append(n, o.Count)
		}
		return n
	}
	require.Equal(t, []int{1200 + 12}, counts())
	require.Equal(t, []int{12, 80, 60}, counts())
}

// Gradients of 16 bits are reduced as they are.
func TestPowerSGDOfHalfs(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	m, red := powerModel(t, g, memory.BFloat16, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{StartStep: -1}}, []int{20, 20})
	m.fill(t, rand.New(rand.NewPCG(1, 1)), []bool{true, true})
	reduceAll(t, g, red, 1)
	m.check(t, 2, epsilon, "bfloat16")
}
