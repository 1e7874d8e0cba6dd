package comm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// An expertsCase has the operands of all ranks. The outputs are computed on the host.
type expertsCase[T memory.Element] struct {
	number[T]
	cfg     comm.ExpertsConfig
	ranks   int
	x       [][]T       // by rank
	ids     [][]int32   // by rank
	weights [][]float32 // by rank
	tokens  []int       // of fill, by rank; nil: any number
}

// drawExperts draws a layer and its operands.
func drawExperts[T memory.Element](r *rand.Rand, x number[T], ranks int) *expertsCase[T] {
	own := 1 + r.IntN(4)
	cfg := comm.ExpertsConfig{
		DType: memory.DTypeOf[T](), Experts: own * ranks, TopK: 1 + r.IntN(8), Hidden: []int{8, 32, 200, 512, 1064}[r.IntN(5)], MaxTokens: 1 + r.IntN(40),
	}
	c := &expertsCase[T]{number: x, cfg: cfg, ranks: ranks}
	c.fill(r)
	return c
}

// fill draws other operands.
func (c *expertsCase[T]) fill(r *rand.Rand) {
	c.x, c.ids, c.weights = nil, nil, nil
	for rank := range c.ranks {
		tokens := []int{0, 1, c.cfg.MaxTokens, r.IntN(c.cfg.MaxTokens + 1)}[r.IntN(4)]
		if c.tokens != nil {
			tokens = c.tokens[rank]
		}
		x, ids, weights := make([]T, tokens*c.cfg.Hidden), make([]int32, tokens*c.cfg.TopK), make([]float32, tokens*c.cfg.TopK)
		for i := range x {
			x[i] = c.of(float32(r.NormFloat64()))
		}
		for i := range ids {
			if ids[i], weights[i] = int32(r.IntN(c.cfg.Experts)), r.Float32(); r.IntN(5) == 0 {
				ids[i] = []int32{-1, int32(c.cfg.Experts), math.MinInt32, math.MaxInt32}[r.IntN(4)]
			}
		}
		c.x, c.ids, c.weights = append(c.x, x), append(c.ids, ids), append(c.weights, weights)
	}
}

func (c *expertsCase[T]) own() int      { return c.cfg.Experts / c.ranks }
func (c *expertsCase[T]) capacity() int { return c.ranks * c.cfg.MaxTokens }

// choices returns the ids of a token.
func (c *expertsCase[T]) choices(rank, t int) []int32 { return c.ids[rank][t*c.cfg.TopK:][:c.cfg.TopK] }

func (c *expertsCase[T]) row(rank, t int) []T { return c.x[rank][t*c.cfg.Hidden:][:c.cfg.Hidden] }

// result is what an expert makes of a token.
func (c *expertsCase[T]) result(rank, t, expert int) []T {
	row := slices.Clone(c.row(rank, t))
	for i := range row {
		row[i] = c.of(c.wide(row[i])*float32(expert+1) + float32(i%7))
	}
	return row
}

// each calls fn with the expert, place, rank and token of all rows.
func (c *expertsCase[T]) each(fn func(expert, place, rank, t int)) {
	for e := range c.cfg.Experts {
		place := 0
		for rank := range c.ranks {
			for t := range len(c.ids[rank]) / c.cfg.TopK {
				if slices.Contains(c.choices(rank, t), int32(e)) {
					fn(e, place, rank, t)
					place++
				}
			}
		}
	}
}

// An expertsRun has the operands on the local ranks of a group.
type expertsRun[T memory.Element] struct {
	*expertsCase[T]
	g                    *comm.Group
	e                    *comm.Experts
	rows                 []comm.ExpertRows
	x, ids, weights, y   []tensor.Tensor
	out, choiceRows      []tensor.Tensor
	routes, made         []tensor.Tensor
	weighted, eachChoice bool
	weightedBy           func(rank int) bool // of all ranks in a dispatch; nil is weighted
}

// poison is an element that no operation makes.
func (c *expertsCase[T]) poison() T { return c.of(-12345) }

// tensorOf copies elements to the device of a local rank.
func tensorOf[T memory.Element](g *comm.Group, i int, data []T, shape ...int) (tensor.Tensor, error) {
	t, err := tensor.Make(g.Stream(i), memory.DTypeOf[T](), shape...)
	if err != nil || len(data) == 0 {
		return t, err
	}
	return t, write(g, i, t, data)
}

func write[T memory.Element](g *comm.Group, i int, t tensor.Tensor, data []T) error {
	x, err := tensor.Slice[T](t)
	if err != nil || len(data) == 0 {
		return err
	}
	return x.CopyFrom(g.Stream(i), data)
}

func readTensor[T memory.Element](g *comm.Group, i int, t tensor.Tensor) ([]T, error) {
	data := make([]T, t.Len())
	x, err := tensor.Slice[T](t)
	if err != nil || len(data) == 0 {
		return data, err
	}
	return data, x.CopyTo(g.Stream(i), data)
}

// newExpertsRun allocates the operands. The caller closes them.
func newExpertsRun[T memory.Element](g *comm.Group, e *comm.Experts, c *expertsCase[T]) (x *expertsRun[T], err error) {
	x = &expertsRun[T]{expertsCase: c, g: g, e: e}
	if x.rows, err = e.Make(); err != nil {
		return nil, err
	}
	for i := range g.Locals() {
		rank := g.Rank() + i
		tokens := len(c.ids[rank]) / c.cfg.TopK
		make1 := func(list *[]tensor.Tensor, t tensor.Tensor, e error) {
			*list, err = append(*list, t), errors.Join(err, e)
		}
		t, e := tensorOf(g, i, c.x[rank], tokens, c.cfg.Hidden)
		make1(&x.x, t, e)
		t, e = tensorOf(g, i, c.ids[rank], tokens, c.cfg.TopK)
		make1(&x.ids, t, e)
		t, e = tensorOf(g, i, c.weights[rank], tokens, c.cfg.TopK)
		make1(&x.weights, t, e)
		t, e = tensorOf[T](g, i, nil, c.own(), c.capacity(), c.cfg.Hidden)
		make1(&x.y, t, e)
		t, e = tensorOf[T](g, i, nil, tokens, c.cfg.Hidden)
		make1(&x.out, t, e)
		t, e = tensorOf[T](g, i, nil, tokens, c.cfg.TopK, c.cfg.Hidden)
		make1(&x.choiceRows, t, e)
		x.routes = append(x.routes, x.rows[i].Routes)
		x.made = append(x.made, x.rows[i].Rows)
	}
	return x, err
}

func (x *expertsRun[T]) close() (err error) {
	for _, list := range [][]tensor.Tensor{x.x, x.ids, x.weights, x.y, x.out, x.choiceRows} {
		for _, t := range list {
			err = errors.Join(err, t.Close())
		}
	}
	for i := range x.rows {
		err = errors.Join(err, x.rows[i].Close())
	}
	return err
}

// openExperts makes a layer and its operands on a group.
func openExperts[T memory.Element](t testing.TB, g *comm.Group, c *expertsCase[T]) *expertsRun[T] {
	t.Helper()
	e, err := comm.NewExperts(testgpu.Context(t), g, &c.cfg)
	require.NoError(t, err)
	run, err := newExpertsRun(g, e, c)
	require.NoError(t, err)
	return run
}

// end closes the operands and the layer.
func (x *expertsRun[T]) end() error { return errors.Join(x.close(), x.e.Close()) }

// spoil fills all outputs with poison.
func (x *expertsRun[T]) spoil() (err error) {
	for i := range x.rows {
		for _, t := range []tensor.Tensor{x.rows[i].Rows, x.y[i], x.out[i], x.choiceRows[i]} {
			err = errors.Join(err, write(x.g, i, t, slices.Repeat([]T{x.poison()}, t.Len())))
		}
		for _, t := range []tensor.Tensor{x.rows[i].Counts, x.rows[i].Routes} {
			err = errors.Join(err, write(x.g, i, t, slices.Repeat([]int32{-77}, t.Len())))
		}
	}
	return err
}

func (x *expertsRun[T]) dispatch() error {
	cfg := &comm.DispatchConfig{}
	if x.weighted {
		cfg.Weights = x.weights
	}
	return x.e.Dispatch(x.rows, x.x, x.ids, cfg)
}

// combine combines y, or what a dispatch has given.
func (x *expertsRun[T]) combine(y []tensor.Tensor) error {
	cfg := &comm.CombineConfig{}
	if x.weighted {
		cfg.Weights = x.weights
	}
	if x.eachChoice {
		cfg.Rows = x.choiceRows
	}
	return x.e.Combine(x.out, y, x.routes, cfg)
}

// checkDispatch compares the outputs of a dispatch with those of the host. If small is set, the rows are not exact.
func (x *expertsRun[T]) checkDispatch() error {
	small := x.cfg.Payload == memory.Float8E4M3
	for i := range x.rows {
		rank := x.g.Rank() + i
		rows, counts := slices.Repeat([]T{x.poison()}, x.rows[i].Rows.Len()), make([]int32, x.own())
		var routes []int32
		for r := range x.ranks {
			part := slices.Repeat([]int32{-1}, x.cfg.MaxTokens*x.cfg.TopK)
			for k, id := range x.expertsCase.ids[r] {
				if id >= 0 && int(id) < x.cfg.Experts {
					part[k] = id
				}
			}
			routes = append(routes, part...)
		}
		bounds := make([]float64, len(rows)) // by element of the rows
		x.each(func(expert, place, r, t int) {
			if expert/x.own() != rank {
				return
			}
			counts[expert%x.own()]++
			at := (expert%x.own()*x.capacity() + place) * x.cfg.Hidden
			factor := float32(0)
			for k, id := range x.choices(r, t) {
				if int(id) == expert {
					factor += x.expertsCase.weights[r][t*x.cfg.TopK+k]
				}
			}
			for k, v := range x.row(r, t) {
				most := 0.0
				for _, other := range x.row(r, t)[k/32*32 : min(k/32*32+32, x.cfg.Hidden)] {
					most = max(most, math.Abs(float64(x.wide(other))))
				}
				if bounds[at+k] = most / 17; x.weighted && x.weightedBy == nil || x.weightedBy != nil && x.weightedBy(r) {
					v = x.of(x.wide(v) * factor)
					bounds[at+k] = most/17*float64(factor) + 0x1p-7*math.Abs(float64(x.wide(v)))
				}
				rows[at+k] = v
			}
		})
		got, err := readTensor[T](x.g, i, x.rows[i].Rows)
		gotCounts, errCounts := readTensor[int32](x.g, i, x.rows[i].Counts)
		gotRoutes, errRoutes := readTensor[int32](x.g, i, x.rows[i].Routes)
		if err := errors.Join(err, errCounts, errRoutes); err != nil {
			return err
		}
		if !slices.Equal(counts, gotCounts) {
			return fmt.Errorf("rank %d: counts %v: want %v", rank, gotCounts, counts)
		}
		if !slices.Equal(routes, gotRoutes) {
			return fmt.Errorf("rank %d: routes %v: want %v", rank, gotRoutes, routes)
		}
		for k := range rows {
			a, b := float64(x.wide(rows[k])), float64(x.wide(got[k]))
			if !small && a != b || small && !(math.Abs(a-b) <= bounds[k]) {
				return fmt.Errorf("rank %d: row %d of expert %d, element %d is %v: want %v", rank, k/x.cfg.Hidden%x.capacity(), k/x.cfg.Hidden/x.capacity(), k%x.cfg.Hidden, b, a)
			}
		}
	}
	return nil
}

// fillResults writes the results of the experts to y, between poison.
func (x *expertsRun[T]) fillResults() (err error) {
	for i := range x.y {
		y := slices.Repeat([]T{x.poison()}, x.y[i].Len())
		x.each(func(expert, place, r, t int) {
			if expert/x.own() == x.g.Rank()+i {
				copy(y[(expert%x.own()*x.capacity()+place)*x.cfg.Hidden:], x.result(r, t, expert))
			}
		})
		err = errors.Join(err, write(x.g, i, x.y[i], y))
	}
	return err
}

// checkCombine compares the outputs of a combine of results, such as those of fillResults.
func (x *expertsRun[T]) checkCombine(result func(rank, t, expert int) []T) error {
	for i := range x.out {
		rank := x.g.Rank() + i
		got, err := readTensor[T](x.g, i, x.out[i])
		gotRows, errRows := readTensor[T](x.g, i, x.choiceRows[i])
		if err := errors.Join(err, errRows); err != nil {
			return err
		}
		for t := range len(x.expertsCase.ids[rank]) / x.cfg.TopK {
			sum := make([]float32, x.cfg.Hidden)
			for k, id := range x.choices(rank, t) {
				row := make([]T, x.cfg.Hidden)
				if id >= 0 && int(id) < x.cfg.Experts {
					row = result(rank, t, int(id))
					w := float32(1)
					if x.weighted {
						w = x.expertsCase.weights[rank][t*x.cfg.TopK+k]
					} else if slices.Contains(x.choices(rank, t)[:k], id) {
						w = 0
					}
					for j := range sum {
						sum[j] = dtype.FMA(w, x.wide(row[j]), sum[j])
					}
				}
				if !x.eachChoice {
					row = slices.Repeat([]T{x.poison()}, x.cfg.Hidden)
				}
				if have := gotRows[(t*x.cfg.TopK+k)*x.cfg.Hidden:][:x.cfg.Hidden]; !testgpu.SameBits(row, have) {
					return fmt.Errorf("rank %d: the row of choice %d of token %d is %v: want %v", rank, k, t, have, row)
				}
			}
			for j := range sum {
				if have := got[t*x.cfg.Hidden+j]; x.wide(have) != x.wide(x.of(sum[j])) {
					return fmt.Errorf("rank %d: element %d of token %d is %v: want %v", rank, j, t, x.wide(have), sum[j])
				}
			}
		}
	}
	return nil
}

// runExperts checks a random case on the local ranks of a group, with other operands several times.
func runExperts[T memory.Element](ctx context.Context, g *comm.Group, x number[T], r *rand.Rand) (err error) {
	c := drawExperts(r, x, g.Size())
	if c.cfg.Hidden%32 == 0 && r.IntN(3) == 0 {
		c.cfg.Payload = memory.Float8E4M3
	}
	e, err := comm.NewExperts(ctx, g, &c.cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	for range 3 {
		run, err := newExpertsRun(g, e, c)
		if err != nil {
			return err
		}
		of := [2]bool{r.IntN(2) == 0, r.IntN(2) == 0} // of the process of rank 0, and of the other ones
		run.weightedBy = func(rank int) bool { return of[min(rank, g.Size()-g.Locals(), 1)] }
		run.weighted, run.eachChoice = run.weightedBy(g.Rank()), r.IntN(2) == 0
		err = errors.Join(run.spoil(), run.dispatch())
		if err == nil {
			err = run.checkDispatch()
		}
		if err == nil {
			err = errors.Join(run.fillResults(), run.combine(run.y))
		}
		if err == nil {
			err = run.checkCombine(c.result)
		}
		if err = errors.Join(err, run.close()); err != nil {
			return fmt.Errorf("%+v on %d ranks, weighted %t: %w", c.cfg, c.ranks, run.weighted, err)
		}
		c.fill(r)
	}
	return g.Wait(ctx)
}

func runAllExperts(ctx context.Context, g *comm.Group, r *rand.Rand) error {
	return errors.Join(runExperts(ctx, g, bfloats, r), runExperts(ctx, g, floats, r), runExperts(ctx, g, halfs, r))
}

// All tokens come to their experts, and the results back, on any number of ranks by either way.
func TestExperts(t *testing.T) {
	pcg := seededPCG(t)
	for ranks := 1; ranks <= 8; ranks++ {
		t.Run(fmt.Sprint("virtual/", ranks), func(t *testing.T) {
			for i, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
				g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks}), comm.Config{Strategy: s})
				for k := range testhost.Rounds(1, 3) {
					require.NoError(t, runAllExperts(testgpu.Context(t), g, pcg(uint64(100*ranks+10*k+i))), s)
				}
			}
		})
	}
	t.Run("cuda", func(t *testing.T) {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			g := groupBy(t, testgpu.CUDA(t, 2), comm.Config{Strategy: s})
			for k := range 10 {
				require.NoError(t, runAllExperts(testgpu.Context(t), g, pcg(uint64(k))), s)
			}
		}
	})
}

// Ranks may be spread over processes unevenly, with several in one process.
func TestExpertsOfProcesses(t *testing.T) {
	pcg := seededPCG(t)
	for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		lists := cut(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4}), 1, 3)
		errs := joinDevices(t, lists, &comm.Config{Strategy: s}, func(ctx context.Context, g *comm.Group) error { return runAllExperts(ctx, g, pcg(1)) })
		require.NoError(t, errors.Join(errs...), s)
	}
}

// Graphs read other tokens, ids and weights at each launch, between other operations.
func TestExpertsInGraphs(t *testing.T) {
	pcg := seededPCG(t)
	for ranks := 1; ranks <= 3; ranks++ {
		testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
			for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
				r := pcg(uint64(ranks))
				g := groupBy(t, devs, comm.Config{Strategy: s})
				c := drawExperts(r, bfloats, ranks)
				run := openExperts(t, g, c)
				run.eachChoice = true
				exec, err := graph.Capture(g.Streams(), func() error { return errors.Join(run.dispatch(), run.combine(run.made)) }, nil)
				require.NoError(t, err)
				require.ErrorContains(t, run.e.Close(), "graph")
				require.Equal(t, 1, strings.Count(run.e.Close().Error(), "experts"), "%v", run.e.Close())
				for i := range ranks { // the shapes of a graph stay
					c.tokens = append(c.tokens, len(c.ids[i])/c.cfg.TopK)
				}
				for range 4 {
					c.fill(r)
					require.NoError(t, run.spoil())
					for i := range ranks {
						require.NoError(t, errors.Join(write(g, i, run.x[i], c.x[i]), write(g, i, run.ids[i], c.ids[i])))
					}
					require.NoError(t, errors.Join(g.Wait(testgpu.Context(t)), exec.Launch(g.Stream(0)), g.Wait(testgpu.Context(t))))
					require.NoError(t, run.checkDispatch())
					require.NoError(t, run.checkCombine(func(rank, t, _ int) []memory.BFloat16Bits { return c.row(rank, t) }))
					require.NoError(t, run.dispatch(), "not in a graph")
				}
				require.NoError(t, g.Wait(testgpu.Context(t)))
				require.NoError(t, errors.Join(exec.Close(), run.end()))
			}
		})
	}
}

// The bits do not depend on the strategy, also in 8-bit blocks.
func TestExpertsBitsOfStrategies(t *testing.T) {
	pcg := seededPCG(t)
	for _, ranks := range []int{1, 2, 4} {
		testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
			c := drawExperts(pcg(uint64(ranks)), bfloats, ranks)
			c.cfg.Hidden = 32 * (1 + c.cfg.Hidden%5)
			c.cfg.Payload = memory.Float8E4M3
			c.fill(pcg(uint64(ranks + 10)))
			var bits [2][][]memory.BFloat16Bits
			for by, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
				g := groupBy(t, devs, comm.Config{Strategy: s})
				run := openExperts(t, g, c)
				run.weighted = true
				require.NoError(t, errors.Join(run.spoil(), run.e.Dispatch(run.rows, run.x, run.ids, nil), run.combine(run.made)))
				for i := range run.rows {
					rows, err := readTensor[memory.BFloat16Bits](g, i, run.rows[i].Rows)
					sums, errSums := readTensor[memory.BFloat16Bits](g, i, run.out[i])
					require.NoError(t, errors.Join(err, errSums))
					bits[by] = append(bits[by], rows, sums)
				}
				require.NoError(t, errors.Join(g.Wait(testgpu.Context(t)), run.end()))
			}
			require.True(t, slices.EqualFunc(bits[0], bits[1], testgpu.SameBits[memory.BFloat16Bits]))
		})
	}
}

// Wrong arguments are refused before anything is enqueued.
func TestExpertsRefuses(t *testing.T) {
	g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.Config{})
	good := comm.ExpertsConfig{DType: memory.BFloat16, Experts: 4, TopK: 2, Hidden: 32, MaxTokens: 3}
	for want, change := range map[string]func(c *comm.ExpertsConfig){
		"elements of int32":                    func(c *comm.ExpertsConfig) { c.DType = memory.Int32 },
		"3 experts for 2 ranks":                func(c *comm.ExpertsConfig) { c.Experts = 3 },
		"0 experts for 2 ranks":                func(c *comm.ExpertsConfig) { c.Experts = 0 },
		"33 experts for each token":            func(c *comm.ExpertsConfig) { c.TopK = 33 },
		"0 experts for each token":             func(c *comm.ExpertsConfig) { c.TopK = 0 },
		"want 1 or more, and a multiple of 8":  func(c *comm.ExpertsConfig) { c.Hidden = 12 },
		"want 1 or more, and a multiple of 32": func(c *comm.ExpertsConfig) { c.Hidden, c.Payload = 40, memory.Float8E4M3 },
		"at most 0 tokens":                     func(c *comm.ExpertsConfig) { c.MaxTokens = 0 },
		"the payload is int8":                  func(c *comm.ExpertsConfig) { c.Payload = memory.Int8 },
		"fewer than 2³¹":                       func(c *comm.ExpertsConfig) { c.MaxTokens = 1 << 40 },
	} {
		c := good
		change(&c)
		_, err := comm.NewExperts(t.Context(), g, &c)
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, want)
	}
	_, err := comm.NewExperts(t.Context(), g, nil)
	require.ErrorContains(t, err, "no configuration")
	c := &expertsCase[memory.BFloat16Bits]{number: bfloats, cfg: good, ranks: 2}
	c.fill(rand.New(rand.NewPCG(1, 1)))
	run := openExperts(t, g, c)
	e := run.e
	other := func(d memory.DType, shape ...int) tensor.Tensor {
		x, err := tensor.Make(g.Stream(1), d, shape...)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, x.Close()) })
		return x
	}
	big := other(memory.BFloat16, 5, 32)
	flat, err := other(memory.BFloat16, 97).Narrow(0, 1, 96)
	require.NoError(t, err)
	shifted, err := flat.View(3, 32)
	require.NoError(t, err)
	tokens := len(c.ids[1]) / 2
	for want, change := range map[string]func(x, ids []tensor.Tensor, rows []comm.ExpertRows){
		"on rank 1, x is":       func(x, _ []tensor.Tensor, _ []comm.ExpertRows) { x[1] = big },
		"x is invalid":          func(x, _ []tensor.Tensor, _ []comm.ExpertRows) { x[1] = tensor.Tensor{} },
		"ids: the tensor is on": func(_, ids []tensor.Tensor, _ []comm.ExpertRows) { ids[1] = ids[0] },
		"begins at":             func(x, ids []tensor.Tensor, _ []comm.ExpertRows) { x[1], ids[1] = shifted, other(memory.Int32, 3, 2) },
		"with strides [1 3]: want a contiguous tensor": func(x, ids []tensor.Tensor, _ []comm.ExpertRows) {
			x[1], ids[1] = other(memory.BFloat16, 32, 3).T(), other(memory.Int32, 3, 2)
		},
		"want a tensor of two dimensions": func(x, _ []tensor.Tensor, _ []comm.ExpertRows) { x[1] = other(memory.BFloat16, 96) },
		"a contiguous tensor of int32":    func(_, ids []tensor.Tensor, _ []comm.ExpertRows) { ids[1] = other(memory.Int64, tokens, 2) },
		"x and rows share memory": func(x, ids []tensor.Tensor, rows []comm.ExpertRows) {
			x[1], ids[1] = first(t, rows[1].Rows, 3), other(memory.Int32, 3, 2)
		},
		"counts is": func(_, _ []tensor.Tensor, rows []comm.ExpertRows) { rows[1].Counts = rows[1].Routes },
		"routes is": func(_, _ []tensor.Tensor, rows []comm.ExpertRows) { rows[1].Routes = rows[1].Counts },
	} {
		x, ids, rows := slices.Clone(run.x), slices.Clone(run.ids), slices.Clone(run.rows)
		change(x, ids, rows)
		err := e.Dispatch(rows, x, ids, nil)
		require.ErrorIs(t, err, comm.ErrMismatch, want)
		require.ErrorContains(t, err, want)
	}
	require.ErrorContains(t, e.Dispatch(run.rows[:1], run.x, run.ids, nil), "1 destinations")
	require.ErrorContains(t, e.Combine(run.out, run.y[:1], run.routes, nil), "1 tensors of rows")
	require.ErrorContains(t, e.Combine(run.out, run.x, run.routes, nil), "y is")
	require.ErrorContains(t, e.Combine(run.out, run.y, run.routes, &comm.CombineConfig{Weights: run.ids}), "weights is")
	require.NoError(t, g.Err(), "nothing was enqueued")
	require.NoError(t, errors.Join(run.spoil(), run.dispatch(), run.fillResults(), run.combine(run.y), run.checkDispatch(), run.checkCombine(c.result)))
	require.NoError(t, errors.Join(run.end(), e.Close(), (*comm.Experts)(nil).Close()))
	require.ErrorIs(t, run.dispatch(), device.ErrClosed)
	require.ErrorContains(t, run.dispatch(), "comm: dispatch: the experts on virtual:0: use after Close")
}

// first returns n rows of the first expert.
func first(t *testing.T, rows tensor.Tensor, n int) tensor.Tensor {
	x, err := rows.Select(0, 0)
	require.NoError(t, err)
	x, err = x.Narrow(0, 0, n)
	require.NoError(t, err)
	return x
}

// The weights of a dispatch count for the tokens of the processes that give them, and for no others.
func TestExpertsWeightsOfOneProcess(t *testing.T) {
	pcg := seededPCG(t)
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for k, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.NCCLOnly, comm.OwnKernels} {
			errs := joinDevices(t, cut(devs, 1, 1), &comm.Config{Strategy: s}, func(ctx context.Context, g *comm.Group) error {
				c := drawExperts(pcg(1), bfloats, 2)
				c.tokens = []int{c.cfg.MaxTokens, c.cfg.MaxTokens}
				c.fill(pcg(2))
				run := openExperts(t, g, c)
				all := errors.Join(run.spoil(), run.dispatch(), run.checkDispatch()) // by no rank
				run.weighted, run.weightedBy = true, func(int) bool { return true }  // by both, so that weights lie about
				all = errors.Join(all, run.spoil(), run.dispatch(), run.checkDispatch())
				run.weightedBy = func(rank int) bool { return rank == k/2 }
				run.weighted = run.weightedBy(g.Rank())
				return errors.Join(all, run.spoil(), run.dispatch(), run.checkDispatch(), g.Wait(ctx), run.end())
			})
			require.NoError(t, errors.Join(errs...), "%s, rank %d has weights", s, k/2)
		}
	})
}

// A combine into more tokens than were dispatched gives zeros after those, and into fewer only the first ones.
func TestExpertsCombineOtherTokens(t *testing.T) {
	pcg := seededPCG(t)
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			g := groupBy(t, devs, comm.Config{Strategy: s})
			c := drawExperts(pcg(1), floats, 2)
			c.cfg.MaxTokens = 7
			c.tokens = []int{5, 3}
			c.fill(pcg(2))
			run := openExperts(t, g, c)
			require.NoError(t, errors.Join(run.spoil(), run.dispatch(), run.fillResults(), run.combine(run.y), run.checkCombine(c.result)))
			h := c.cfg.Hidden
			var outs, choices []tensor.Tensor
			for i, n := range []int{7, 2} {
				out, err := tensorOf(g, i, slices.Repeat([]float32{c.poison()}, n*h), n, h)
				require.NoError(t, err)
				rows, err := tensorOf(g, i, slices.Repeat([]float32{c.poison()}, n*c.cfg.TopK*h), n, c.cfg.TopK, h)
				require.NoError(t, err)
				outs, choices = append(outs, out), append(choices, rows)
			}
			require.NoError(t, run.e.Combine(outs, run.y, run.routes, &comm.CombineConfig{Rows: choices}))
			for i, both := range []int{5, 2} {
				want, err := readTensor[float32](g, i, run.out[i])
				require.NoError(t, err)
				got, err := readTensor[float32](g, i, outs[i])
				require.NoError(t, err)
				rows, err := readTensor[float32](g, i, choices[i])
				require.NoError(t, err)
				require.Equal(t, want[:both*h], got[:both*h], "%s, rank %d", s, i)
				require.Equal(t, make([]float32, len(got)-both*h), got[both*h:], "%s, rank %d", s, i)
				require.Equal(t, make([]float32, len(rows)-both*c.cfg.TopK*h), rows[both*c.cfg.TopK*h:], "%s, rank %d", s, i)
				require.NoError(t, errors.Join(outs[i].Close(), choices[i].Close()))
			}
			require.NoError(t, run.end())
		}
	})
}

// If one rank gives another configuration, or one that is invalid, all ranks have an error.
func TestExpertsThatDisagree(t *testing.T) {
	for _, change := range []func(c *comm.ExpertsConfig){func(c *comm.ExpertsConfig) { c.MaxTokens++ }, func(c *comm.ExpertsConfig) { c.Experts = 3 }} {
		lists := cut(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), 1, 1)
		errs := joinDevices(t, lists, nil, func(ctx context.Context, g *comm.Group) error {
			cfg := comm.ExpertsConfig{DType: memory.BFloat16, Experts: 4, TopK: 2, Hidden: 32, MaxTokens: 3}
			if g.Rank() == 1 {
				change(&cfg)
			}
			_, err := comm.NewExperts(ctx, g, &cfg)
			return err
		})
		for rank, err := range errs {
			require.ErrorIs(t, err, comm.ErrMismatch, rank)
			require.ErrorContains(t, err, "rank 1", rank)
		}
	}
}

// Whichever launch fails, the error comes back. The group breaks only if other ranks could wait for this one.
func TestExpertsOverFaults(t *testing.T) {
	for n := 1; n <= 4; n++ { // two of kernels that pack, and two of kernels that receive
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fmt.Sprintf("cuLaunchKernel#%d=CUDA_ERROR_INVALID_VALUE", n)})
			g, err := comm.Local(testgpu.Context(t), devs, nil)
			require.NoError(t, err)
			c := drawExperts(rand.New(rand.NewPCG(1, uint64(n))), floats, 2)
			run := openExperts(t, g, c)
			err = run.dispatch()
			require.ErrorIs(t, err, device.ErrorInvalidValue)
			require.ErrorContains(t, err, fmt.Sprintf("on rank %d", 1-n%2))
			if n > 2 {
				require.ErrorIs(t, g.Err(), comm.ErrBroken)
			} else {
				require.NoError(t, g.Err())
				require.NoError(t, errors.Join(run.spoil(), run.dispatch(), run.checkDispatch()), "the fault was one call")
			}
			require.NoError(t, errors.Join(run.end(), g.Close()))
		})
	}
}

// The ranks that wait for one that does not come end with the group, which names it.
func TestExpertsWithoutARank(t *testing.T) {
	lists := cut(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), 1, 1)
	errs := joinDevices(t, lists, &comm.Config{Strategy: comm.OwnKernels}, func(ctx context.Context, g *comm.Group) error {
		c := drawExperts(rand.New(rand.NewPCG(1, 1)), floats, 2)
		e, err := comm.NewExperts(ctx, g, &c.cfg)
		if err != nil || g.Rank() == 1 {
			return errors.Join(err, e.Close(), g.Close())
		}
		defer e.Close()
		run, err := newExpertsRun(g, e, c)
		if err != nil {
			return err
		}
		return errors.Join(run.dispatch(), g.Wait(ctx), run.close())
	})
	require.ErrorIs(t, errs[0], comm.ErrBroken)
	require.ErrorContains(t, errs[0], "rank 1")
}

// The flight recorder has the tokens of each rank. In dumps, the name is one that PyTorch's tools know. Tokens are not checked for
// NaN, because those without an expert may have any contents.
func TestExpertsInTheFlightRecorder(t *testing.T) {
	ctx := testgpu.Context(t)
	g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.Config{Strategy: comm.OwnKernels, NCCL: &nccl.Config{NaNCheck: true}})
	c := drawExperts(rand.New(rand.NewPCG(1, 1)), bfloats, 2)
	c.tokens = []int{c.cfg.MaxTokens, 0}
	c.fill(rand.New(rand.NewPCG(1, 2)))
	c.x[0][0] = memory.BFloat16Of(float32(math.NaN()))
	run := openExperts(t, g, c)
	require.NoError(t, errors.Join(run.dispatch(), run.combine(run.made), g.Wait(ctx)))
	var b bytes.Buffer
	require.NoError(t, nccl.DumpTrace(&b))
	type entry struct {
		Name        string  `json:"profiling_name"`
		Kind        string  `json:"kind"`
		Rank        int     `json:"rank"`
		InputSizes  [][]int `json:"input_sizes"`
		OutputSizes [][]int `json:"output_sizes"`
		Uneven      bool    `json:"uneven"`
	}
	var dump struct{ Entries []entry }
	require.NoError(t, json.Unmarshal(b.Bytes(), &dump))
	for rank := range 2 {
		list := g.Communicator(rank).Trace()
		for i, o := range list[len(list)-2:] {
			n := c.tokens[rank] * c.cfg.Hidden
			require.Equal(t, fmt.Sprintf("%s(%d x bfloat16, experts 1) as collective %d", []string{"Dispatch", "Combine"}[i], n, o.Collective), o.String())
			require.Equal(t, []int{n, n}, []int{o.In, o.Out})
			require.Contains(t, dump.Entries, entry{"nccl:all_to_all", []string{"dispatch", "combine"}[i], rank, [][]int{{n}}, [][]int{{n}}, true})
		}
	}
	require.NoError(t, run.end())
}

// A rank that combines while another one dispatches gets an error that names both.
func TestExpertsOfOtherKinds(t *testing.T) {
	lists := cut(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), 1, 1)
	errs := joinDevices(t, lists, &comm.Config{Strategy: comm.OwnKernels}, func(ctx context.Context, g *comm.Group) error {
		c := drawExperts(rand.New(rand.NewPCG(1, 1)), floats, 2)
		run := openExperts(t, g, c)
		defer run.e.Close()
		issue := run.dispatch
		if g.Rank() == 1 {
			issue = func() error { return run.combine(run.y) }
		}
		return errors.Join(issue(), g.Wait(ctx), run.close())
	})
	require.Error(t, errs[0])
	require.Error(t, errs[1])
	requireMismatch(t, errs, "Dispatch(", "Combine(")
}

// Ranks that use two Experts of the same shape in different orders get an error that has both.
func TestExpertsInDifferentOrders(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		errs := joinDevices(t, cut(devs, 1, 1), &comm.Config{Strategy: comm.OwnKernels, NCCL: &nccl.Config{Timeout: 20 * time.Second}}, func(ctx context.Context, g *comm.Group) error {
			c := drawExperts(rand.New(rand.NewPCG(1, 1)), floats, 2)
			var es [2]*comm.Experts
			for i := range es {
				e, err := comm.NewExperts(ctx, g, &c.cfg)
				if err != nil {
					return err
				}
				defer e.Close()
				es[i] = e
			}
			run, err := newExpertsRun(g, es[g.Rank()], c)
			if err != nil {
				return err
			}
			return errors.Join(run.dispatch(), g.Wait(ctx), run.close())
		})
		requireMismatch(t, errs, ", experts 1) as collective", ", experts 2) as collective")
	})
}

// requireMismatch requires an error that has the operations of ranks 0 and 1.
func requireMismatch(t *testing.T, errs []error, of0, of1 string) {
	t.Helper()
	mismatch, found := errors.AsType[*nccl.MismatchError](errors.Join(errs...))
	require.True(t, found, "%v", errs)
	of := map[int]string{mismatch.Rank: mismatch.Operation.String(), mismatch.Other: mismatch.Theirs.String()}
	require.Contains(t, of[0], of0)
	require.Contains(t, of[1], of1)
}
