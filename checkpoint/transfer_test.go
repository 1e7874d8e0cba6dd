package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// number is element i of the tensor of a seed: a whole number that all types have.
func number(seed, i int) float64 { return float64((seed*7919 + i*31) % 101) }

// makePart allocates a part of a tensor on s with its elements, or with poison.
func makePart(t testing.TB, s *stream.Stream, p Part, dt memory.DType, shape []int, value func(i int) float64) Part {
	t.Helper()
	var err error
	p.Data, err = tensor.Make(s, dt, shape...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Data.Close()) })
	host := make([]float64, p.Data.Len())
	for k, i := range elementsOf(p) {
		host[k] = value(i)
	}
	if len(host) > 0 {
		x, err := tensor.OfHost(host, shape...)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, p.Data, x))
	}
	return p
}

// elementsOf returns the numbers of the part's elements in the whole tensor, one by one.
func elementsOf(p Part) []int {
	have := p.Data.Shape()
	list := make([]int, 0, p.Data.Len())
	index := make([]int, len(have))
	for k := range p.Data.Len() {
		if p.Shape == nil || p.Flat {
			list = append(list, p.Start+k)
			continue
		}
		rest := k
		for d := len(have) - 1; d >= 0; d-- {
			index[d], rest = rest%have[d], rest/have[d]
		}
		index[p.Dim] += p.Start
		i := 0
		for d, n := range p.Shape {
			i = i*n + index[d]
		}
		list = append(list, i)
	}
	return list
}

// numbersOf returns the elements of a part.
func numbersOf(t testing.TB, s *stream.Stream, p Part) []float64 {
	t.Helper()
	host := make([]float64, p.Data.Len())
	if len(host) > 0 {
		x, err := tensor.OfHost(host, p.Data.Shape()...)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, x, p.Data))
	}
	return host
}

var transferTypes = []memory.DType{memory.Float32, memory.BFloat16, memory.Float16, memory.Float64, memory.Int64, memory.Int32, memory.Uint8}

// A randomTensor is a tensor that ranks have and want.
type randomTensor struct {
	name  string
	seed  int
	shape []int
	has   memory.DType
}

// random returns a random part of the tensor, and its shape.
func (x *randomTensor) random(r *rand.Rand) (Part, []int) {
	n := product(x.shape)
	switch r.IntN(3) {
	case 0:
		return Part{Name: x.name}, x.shape
	case 1:
		start := r.IntN(n + 1)
		return Part{Name: x.name, Shape: x.shape, Flat: true, Start: start}, []int{r.IntN(n - start + 1)}
	}
	return x.along(r.IntN(len(x.shape)), func(size int) (int, int) {
		start := r.IntN(size + 1)
		return start, r.IntN(size - start + 1)
	})
}

func (x *randomTensor) along(dim int, of func(size int) (start, n int)) (Part, []int) {
	start, n := of(x.shape[dim])
	shape := slices.Clone(x.shape)
	shape[dim] = n
	return Part{Name: x.name, Shape: x.shape, Dim: dim, Start: start}, shape
}

// covering returns parts of all ranks that have together each element, some of them several times.
func (x *randomTensor) covering(r *rand.Rand, ranks int) (parts []Part, shapes [][]int) {
	n, dim, flat := product(x.shape), r.IntN(len(x.shape)), r.IntN(3) == 0
	for rank := range ranks {
		of := func(size int) (start, n int) {
			start, end := size*rank/ranks, size*(rank+1)/ranks
			start, end = max(0, start-r.IntN(3)), min(size, end+r.IntN(3))
			return start, end - start
		}
		p, shape := x.along(dim, of)
		switch {
		case r.IntN(5) == 0:
			p, shape = Part{Name: x.name}, x.shape
		case flat:
			start, k := of(n)
			p, shape = Part{Name: x.name, Shape: x.shape, Flat: true, Start: start}, []int{k}
		}
		parts, shapes = append(parts, p), append(shapes, shape)
	}
	return parts, shapes
}

// Random tensors go from random layouts and types to others, twice, with other values the second time.
func TestTransferRandom(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, ranks := range []int{1, 2, 4} {
		for range 3 {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				g := localGroup(t, devs[:ranks])
				dst, src := make([][]Part, ranks), make([][]Part, ranks)
				seeds := map[string]int{}
				for k := range 6 {
					x := &randomTensor{name: fmt.Sprint("tensor", k), seed: k, has: transferTypes[r.IntN(len(transferTypes))]}
					for range 1 + r.IntN(3) {
						x.shape = append(x.shape, 1+r.IntN(13))
					}
					if k == 0 {
						x.shape = []int{97, 71, 3}
					}
					seeds[x.name] = k
					parts, shapes := x.covering(r, ranks)
					alike, wanted := r.IntN(2) == 0, transferTypes[r.IntN(len(transferTypes))]
					for rank := range ranks {
						src[rank] = append(src[rank], makePart(t, g.Stream(rank), parts[rank], x.has, shapes[rank], func(i int) float64 { return number(k, i) }))
						if r.IntN(4) > 0 {
							p, shape := x.random(r)
							if !alike {
								wanted = transferTypes[r.IntN(len(transferTypes))]
							}
							dst[rank] = append(dst[rank], makePart(t, g.Stream(rank), p, wanted, shape, func(int) float64 { return 113 }))
						}
					}
				}
				round := []int{0, 1, 100, 4096}[r.IntN(4)]
				tr, err := NewTransfer(t.Context(), g, dst, src, &TransferConfig{RoundBytes: round})
				require.NoError(t, err)
				for _, l := range tr.locals {
					require.LessOrEqual(t, l.scratch.Len(), max(round, packAlign)+defaultRound*(1-min(round, 1)))
				}
				for again := range 2 {
					for rank := range ranks {
						for _, p := range src[rank] {
							writeNumbers(t, g.Stream(rank), p, seeds[p.Name]+again)
						}
					}
					require.NoError(t, tr.Run())
					require.NoError(t, g.Wait(t.Context()))
					for rank := range ranks {
						for _, p := range dst[rank] {
							want := make([]float64, 0, p.Data.Len())
							for _, i := range elementsOf(p) {
								want = append(want, number(seeds[p.Name]+again, i))
							}
							sameNumbers(t, want, numbersOf(t, g.Stream(rank), p), fmt.Sprintf("rank %d, %+v", rank, p))
						}
					}
				}
				require.NoError(t, tr.Close())
				require.ErrorContains(t, tr.Run(), "it was closed")
			})
		}
	}
}

// sameNumbers compares numbers without a list of all differences.
func sameNumbers(t testing.TB, want, got []float64, what string) {
	t.Helper()
	require.Len(t, got, len(want), what)
	for i := range want {
		if want[i] != got[i] {
			require.Equal(t, want[i], got[i], "%s: element %d of %d", what, i, len(want))
		}
	}
}

// writeNumbers changes the elements of a part.
func writeNumbers(t testing.TB, s *stream.Stream, p Part, seed int) {
	t.Helper()
	host := make([]float64, p.Data.Len())
	for k, i := range elementsOf(p) {
		host[k] = number(seed, i)
	}
	if len(host) > 0 {
		x, err := tensor.OfHost(host, p.Data.Shape()...)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, p.Data, x))
	}
}

// The plan covers each wanted element once, from a rank that has it; what one rank can send in one piece is one
// message, and replicas share the work.
func TestTransferPlan(t *testing.T) {
	info := func(name string, dt memory.DType, n int) partInfo {
		return partInfo{Name: name, Format: formats[dt], Shape: []int{n}, Box: box{1, n, 0, n}}
	}
	const n = 8 << 20
	has := []partInfo{info("w", memory.Float32, n)}
	rounds, scratch, err := planTransfer([][]partInfo{nil, nil, has, has}, [][]partInfo{has, has, nil, nil}, 256<<20)
	require.NoError(t, err)
	require.Len(t, rounds, 1)
	require.Equal(t, []int{0, 0, 0, 0}, scratch, "runs of one type need no scratch memory")
	sent := make([]int, 4)
	for _, s := range rounds[0].sends {
		sent[s.from] += s.bytes
	}
	require.Equal(t, []int{4 * n, 4 * n, 0, 0}, sent, "two ranks share the work")

	// One rank pushes to three: it sends each element once, and they forward it in the next round.
	rounds, _, err = planTransfer([][]partInfo{nil, has, has, has}, [][]partInfo{has, nil, nil, nil}, 256<<20)
	require.NoError(t, err)
	require.Len(t, rounds, 2)
	got, forwarded := make([]int, 4), 0
	for i, r := range rounds {
		for _, s := range r.sends {
			require.Equal(t, i == 1, s.from != 0)
			if got[s.to] += s.bytes; s.from != 0 {
				forwarded += s.bytes
			}
		}
	}
	require.Equal(t, []int{0, 4 * n, 4 * n, 4 * n}, got)
	require.Equal(t, 2*4*n, forwarded)

	var small []partInfo
	for i := range 100 {
		small = append(small, info(fmt.Sprint(i), memory.Float32, 10))
	}
	rounds, scratch, err = planTransfer([][]partInfo{nil, small}, [][]partInfo{small, nil}, 256<<20)
	require.NoError(t, err)
	require.Len(t, rounds, 1)
	require.Len(t, rounds[0].sends, 1, "small tensors are one message")
	require.Equal(t, []int{4800, 4800}, scratch)

	// The shorter type is on the way.
	for _, types := range [][2]memory.DType{{memory.Float32, memory.BFloat16}, {memory.BFloat16, memory.Float32}} {
		rounds, _, err = planTransfer([][]partInfo{nil, {info("w", types[1], n)}}, [][]partInfo{{info("w", types[0], n)}, nil}, 256<<20)
		require.NoError(t, err)
		total := 0
		for _, r := range rounds {
			for _, s := range r.sends {
				total += s.bytes
			}
		}
		require.Equal(t, 2*n, total)
	}
}

// All ranks return the same error, which names the tensor, the ranks and the elements.
func TestTransferRefuses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	gs := joinedGroups(t, devs)
	at := func(rank int, p Part, dt memory.DType, shape ...int) Part {
		return makePart(t, gs[rank].Stream(0), p, dt, shape, func(int) float64 { return 1 })
	}
	rows := func(start int) Part { return Part{Name: "w", Shape: []int{8, 4}, Start: start} }
	whole := at(2, Part{Name: "w"}, memory.Float32, 8, 4)
	half, err := whole.Data.Narrow(0, 0, 4)
	require.NoError(t, err)
	for name, c := range map[string]struct {
		src, dst [3][]Part
		says     string
	}{
		"nobody has it": {dst: [3][]Part{2: {whole}}, says: `tensor "w": no rank has elements 0 to 31 of shape \[8 4\], in row-major order, which rank 2 wants`},
		"a gap": {[3][]Part{{at(0, rows(0), memory.Float32, 3, 4)}, {at(1, rows(5), memory.Float32, 3, 4)}}, [3][]Part{2: {whole}},
			`tensor "w": no rank has elements 12 to 19 of shape \[8 4\], .* rank 2 wants`},
		"shapes": {[3][]Part{{at(0, Part{Name: "w"}, memory.Float32, 4, 8)}}, [3][]Part{2: {whole}}, `tensor "w": it has shape \[8 4\] on rank 2 and \[4 8\] on rank 0`},
		"types": {[3][]Part{{at(0, rows(0), memory.Float32, 4, 4)}, {at(1, rows(4), memory.Float16, 4, 4)}}, [3][]Part{2: {whole}},
			`tensor "w": rank 0 has it as F32 and rank 1 as F16`},
		"overlap": {[3][]Part{{at(0, Part{Name: "w"}, memory.Float32, 8, 4)}, nil, {{Name: "v", Data: half}}}, [3][]Part{2: {whole}},
			`rank 2: .*the parts of tensors "w" and "v" share memory, and one is to be written|rank 2: .*the parts of tensors "v" and "w" share memory`},
		"twice":    {[3][]Part{1: {at(1, Part{Name: "w"}, memory.Float32, 2), at(1, Part{Name: "w"}, memory.Float32, 2)}}, [3][]Part{}, `rank 1: .*two parts of tensor "w"`},
		"nameless": {[3][]Part{1: {at(1, Part{}, memory.Float32, 2)}}, [3][]Part{}, `rank 1: .*it has no name`},
	} {
		t.Run(name, func(t *testing.T) {
			errs := make([]error, 3)
			var wg sync.WaitGroup
			for rank, g := range gs {
				wg.Go(func() { _, errs[rank] = NewTransfer(t.Context(), g, [][]Part{c.dst[rank]}, [][]Part{c.src[rank]}, nil) })
			}
			wg.Wait()
			for _, err := range errs {
				require.Regexp(t, "checkpoint: new transfer: .*"+c.says, err)
			}
		})
	}
	errs := make([]error, 3)
	var wg sync.WaitGroup
	for rank, cfg := range []*TransferConfig{nil, {RoundBytes: 1 << 20}, {RoundBytes: -1}} {
		wg.Go(func() { _, errs[rank] = NewTransfer(t.Context(), gs[rank], nil, nil, cfg) })
	}
	wg.Wait()
	for _, err := range errs {
		require.ErrorContains(t, err, "checkpoint: new transfer: rank 2: RoundBytes is -1")
	}
	for rank, cfg := range []*TransferConfig{nil, {RoundBytes: 1 << 20}, nil} {
		wg.Go(func() { _, errs[rank] = NewTransfer(t.Context(), gs[rank], nil, nil, cfg) })
	}
	wg.Wait()
	for _, err := range errs {
		require.ErrorContains(t, err, "give the same RoundBytes on all ranks")
	}
}

// Descriptions of other processes that do not fit a shape are refused before anything is computed by them.
func TestTransferHostile(t *testing.T) {
	good := partInfo{Name: "w", Format: formats[memory.Float32], Shape: []int{4, 6}, Stored: []int{4, 6}, Box: box{4, 6, 0, 6}}
	for _, change := range []func(*partInfo){
		func(p *partInfo) { p.Box.Width = 0 },
		func(p *partInfo) { p.Box.Width = 5 },
		func(p *partInfo) { p.Box.Rows = 1 << 60 },
		func(p *partInfo) { p.Box.Start = -1 },
		func(p *partInfo) { p.Box.Len = 7 },
		func(p *partInfo) { p.Shape = []int{-4, -6} },
		func(p *partInfo) { p.Shape = []int{1 << 40, 1 << 40} },
		func(p *partInfo) { p.Format = 0 },
		func(p *partInfo) { p.Shape = []int{0}; p.Box.Rows = 3 },
	} {
		bad := good
		change(&bad)
		_, _, err := planTransfer([][]partInfo{{good}, nil}, [][]partInfo{nil, {bad}}, 1<<20)
		require.ErrorIs(t, err, comm.ErrMismatch, "%+v", bad)
		require.ErrorIs(t, checkDescriptions("new saver", "f", [][]partInfo{{good}, {bad}}), comm.ErrMismatch, "%+v", bad)
	}
	for _, stored := range [][]int{nil, {24, 2}, {-4, -6}, {1 << 40, 1 << 40}} {
		bad := good
		bad.Stored = stored
		require.ErrorContains(t, checkDescriptions("restore", "f", [][]partInfo{{good}, {bad}}), "rank 1 describes a part of tensor \"w\"", "%v", stored)
	}
	require.NoError(t, checkDescriptions("restore", "f", [][]partInfo{{good}, nil, {good}}))
	_, _, err := planTransfer([][]partInfo{{good}, nil}, [][]partInfo{nil, {good}}, 1<<20)
	require.NoError(t, err)
}

// A receiver that leaves within a push costs the sender that push, and nothing else: its group is broken and its parts are as
// before, and it pushes to another group.
func TestTransferReceiverLeaves(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	gs := joinedGroups(t, devs)
	src := makePart(t, gs[0].Stream(0), Part{Name: "w"}, memory.Float32, []int{1 << 20}, func(i int) float64 { return number(1, i) })
	dst := makePart(t, gs[1].Stream(0), Part{Name: "w"}, memory.BFloat16, []int{1 << 20}, func(int) float64 { return 113 })
	trs, errs := make([]*Transfer, 2), make([]error, 2)
	var wg sync.WaitGroup
	for rank, g := range gs {
		wg.Go(func() {
			trs[rank], errs[rank] = NewTransfer(t.Context(), g, [][]Part{nil, {dst}}[rank:rank+1], [][]Part{{src}, nil}[rank:rank+1], nil)
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	ended := make(chan error)
	go func() {
		err := trs[0].Run()
		if err == nil {
			err = gs[0].Wait(t.Context())
		}
		ended <- err
	}()
	require.NoError(t, gs[1].Close())
	require.NoError(t, trs[1].Close())
	require.ErrorIs(t, <-ended, comm.ErrBroken)

	other, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	defer other.Close()
	require.NoError(t, other.WaitStream(gs[0].Stream(0)))
	require.NoError(t, trs[0].Close())
	require.NoError(t, gs[0].Close())
	want := make([]float64, 1<<20)
	for i := range want {
		want[i] = number(1, i)
	}
	sameNumbers(t, want, numbersOf(t, other, src), "the sender's part")
}

// Two ranks that have flat halves in float32 push to two that want columns in bfloat16. The work on streams of their own before and
// after the push is ordered by Between: the host waits for nothing.
func TestTransferBetweenStreams(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	gs := joinedGroups(t, devs)
	shape := []int{64, 96}
	errs := make([]error, len(gs))
	var wg sync.WaitGroup
	for rank, g := range gs {
		s, err := stream.New(devs[rank], nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		var dst, src []Part
		if rank < 2 {
			src = append(src, makePart(t, s, Part{Name: "w", Shape: shape, Flat: true, Start: rank * 3072}, memory.Float32, []int{3072}, func(int) float64 { return 113 }))
		} else {
			dst = append(dst, makePart(t, s, Part{Name: "w", Shape: shape, Dim: 1, Start: (rank - 2) * 48}, memory.BFloat16, []int{64, 48}, func(int) float64 { return 113 }))
		}
		wg.Go(func() {
			tr, err := NewTransfer(t.Context(), g, [][]Part{dst}, [][]Part{src}, nil)
			if errs[rank] = err; err != nil {
				return
			}
			defer tr.Close()
			for step := range 3 {
				for _, p := range src {
					writeNumbers(t, s, p, step)
				}
				if errs[rank] = g.Between([]*stream.Stream{s}, tr.Run); errs[rank] != nil {
					return
				}
				for _, p := range src {
					writeNumbers(t, s, p, step+50)
				}
				for _, p := range dst {
					elements := elementsOf(p)
					for k, v := range numbersOf(t, s, p) {
						if i := elements[k]; v != number(step, i) {
							errs[rank] = fmt.Errorf("step %d: element %d is %v", step, i, v)
							return
						}
					}
				}
			}
			errs[rank] = g.Wait(t.Context())
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// joinedGroups returns a group of one rank for each device, as if each were a process.
func joinedGroups(t *testing.T, devs []*device.Device) []*comm.Group {
	t.Helper()
	gs, errs := make([]*comm.Group, len(devs)), make([]error, len(devs))
	var wg sync.WaitGroup
	for i, r := range testgpu.Exchanges(testgpu.Context(t), len(devs)) {
		wg.Go(func() { gs[i], errs[i] = comm.Join(testgpu.Context(t), r, devs[i], nil) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	t.Cleanup(func() {
		for _, g := range gs {
			wg.Go(func() { _ = g.Close() })
		}
		wg.Wait()
	})
	return gs
}

// ExampleNewTransfer pushes a weight from two ranks that have half of its rows each in float32 to a rank that wants all
// of it in bfloat16.
func ExampleNewTransfer() {
	ctx := context.Background()
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 3})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer sys.Close()
	g, err := comm.Local(ctx, sys.Devices(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer g.Close()
	part := func(rank int, p Part, dt memory.DType, shape ...int) []Part {
		p.Data, err = tensor.Make(g.Stream(rank), dt, shape...)
		return []Part{p}
	}
	src := [][]Part{
		part(0, Part{Name: "w", Shape: []int{4, 8}, Start: 0}, memory.Float32, 2, 8),
		part(1, Part{Name: "w", Shape: []int{4, 8}, Start: 2}, memory.Float32, 2, 8),
		nil,
	}
	dst := [][]Part{nil, nil, part(2, Part{Name: "w"}, memory.BFloat16, 4, 8)}
	tr, err := NewTransfer(ctx, g, dst, src, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer tr.Close()
	fmt.Println(tr.Run(), g.Wait(ctx)) // each time that the weights have changed
	for _, p := range []Part{src[0][0], src[1][0], dst[2][0]} {
		_ = p.Data.Close()
	}
	// Output: <nil> <nil>
}
