package fabric_test

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// An expertsCase is a layer with the operands of all ranks. A combine gets the rows of the dispatch before it.
type expertsCase[T memory.Element] struct {
	layer    fabric.ExpertLayer
	each     bool
	weighted []bool // by rank
	x        [][]T
	ids      [][]int32
	weights  [][]float32
}

func drawExperts[T memory.Element](r *rand.Rand, ranks int, f float[T]) *expertsCase[T] {
	c := &expertsCase[T]{each: r.IntN(2) == 0, layer: fabric.ExpertLayer{
		DType: memory.DTypeOf[T](), Experts: ranks * (1 + r.IntN(4)), TopK: 1 + r.IntN(8), Hidden: 32 * (1 + r.IntN(18)), MaxTokens: 1 + r.IntN(20), Small: r.IntN(2) == 0, Ranks: ranks,
	}}
	for range ranks {
		tokens := r.IntN(c.layer.MaxTokens + 1)
		x, ids, weights := make([]T, tokens*c.layer.Hidden), make([]int32, tokens*c.layer.TopK), make([]float32, tokens*c.layer.TopK)
		for i := range x {
			x[i] = f.of(float32(r.NormFloat64()))
		}
		for i := range ids {
			ids[i], weights[i] = int32(r.IntN(c.layer.Experts+2)-1), r.Float32()
		}
		c.x, c.ids, c.weights, c.weighted = append(c.x, x), append(c.ids, ids), append(c.weights, weights), append(c.weighted, r.IntN(2) == 0)
	}
	return c
}

// An expertsOutput has the outputs of a rank.
type expertsOutput[T memory.Element] struct {
	rows           []T
	counts, routes []int32
	out, choices   []T
}

// poisoned has elements with all bytes 0x55.
func poisoned[T any](n int) []T {
	list := make([]T, n)
	if n > 0 {
		b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(list))), n*int(unsafe.Sizeof(list[0])))
		copy(b, bytes.Repeat([]byte{0x55}, len(b)))
	}
	return list
}

// onDevice copies elements to the device. Empty memory has the address 0.
func onDevice[T memory.Element](t *testing.T, m member, list []T) (x memory.Slice[T], at uint64) {
	if len(list) == 0 {
		return x, 0
	}
	x, err := memory.Make[T](m.s, len(list))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	require.NoError(t, x.CopyFrom(m.s, list))
	return x, x.Ptr()
}

func fetch[T memory.Element](t *testing.T, m member, x memory.Slice[T]) []T {
	list := make([]T, x.Len())
	if len(list) > 0 {
		require.NoError(t, x.CopyTo(m.s, list))
	}
	return list
}

// runExperts dispatches and combines on all ranks.
func runExperts[T memory.Element](t *testing.T, group []member, c *expertsCase[T]) []expertsOutput[T] {
	got := make([]expertsOutput[T], len(group))
	atOnce(group, func(i int, m member) {
		l := c.layer
		l.Rank = i
		tokens := len(c.ids[i]) / l.TopK
		rows, atRows := onDevice(t, m, poisoned[T](l.Own()*l.Capacity()*l.Hidden))
		counts, atCounts := onDevice(t, m, poisoned[int32](l.Own()))
		routes, atRoutes := onDevice(t, m, poisoned[int32](l.Capacity()*l.TopK))
		out, atOut := onDevice(t, m, poisoned[T](tokens*l.Hidden))
		choices, atChoices := onDevice(t, m, poisoned[T](tokens*l.TopK*l.Hidden))
		_, x := onDevice(t, m, c.x[i])
		_, ids := onDevice(t, m, c.ids[i])
		_, weights := onDevice(t, m, c.weights[i])
		if !c.weighted[i] {
			weights = 0
		}
		if !c.each {
			atChoices = 0
		}
		require.NoError(t, fabric.LoadExperts(m.Device(), &l))
		require.NoError(t, m.Dispatch(m.s, &l, &fabric.Dispatch{Tokens: tokens, X: x, IDs: ids, Weights: weights, Rows: atRows, Counts: atCounts, Routes: atRoutes}))
		require.NoError(t, m.Combine(m.s, &l, &fabric.Combine{Tokens: tokens, Y: atRows, Routes: atRoutes, Weights: weights, Out: atOut, Rows: atChoices}))
		got[i] = expertsOutput[T]{fetch(t, m, rows), fetch(t, m, counts), fetch(t, m, routes), fetch(t, m, out), fetch(t, m, choices)}
	})
	return got
}

// TestExpertsSourceOnTheHost compiles the CUDA source for the host, and compares the bits of both ways with the results of virtual devices,
// which package comm compares with a model.
func TestExpertsSourceOnTheHost(t *testing.T) {
	onHost(t, expertsOnHost[memory.Float16Bits], expertsOnHost[memory.BFloat16Bits], expertsOnHost[float32])
}

func expertsOnHost[T memory.Element](h *hostSource, f float[T]) {
	t, rng := h.t, h.rng
	h.compile(fabric.ExpertsSourceOnHost(t), &fabric.Config{Slot: 1 << 20}, "-DCHORUS_CODE=E4M3")
	number := map[bool]uint32{true: 1}
	for i := range 6 {
		c := drawExperts(rng, h.ranks, f)
		l := c.layer
		put(t, &h.in, []uint32{uint32(h.ranks), uint32(l.Experts), uint32(l.TopK), uint32(l.Hidden), uint32(l.MaxTokens), number[l.Small], number[c.each],
			uint32(1 + rng.IntN(2)), uint32(32 * (1 + rng.IntN(2))), uint32(i % 2), uint32((l.SlotBytes() + 15) / 16 * 16)})
		for r, got := range runExperts(t, h.group, c) {
			put(t, &h.in, uint32(len(c.ids[r])/l.TopK), number[c.weighted[r]], c.x[r], c.ids[r], c.weights[r])
			put(t, &h.want, got.rows, got.counts, got.routes, got.out, got.choices)
		}
		h.compare("%+v, weighted %v, packed %d", l, c.weighted, i%2)
	}
}

// The blocks that another library moves give the same bits as the kernels that send themselves, on GPUs as on virtual devices.
func TestExperts(t *testing.T) {
	rng := seeded(t)
	each(t, []int{2, 3, 8}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Slot: 1 << 20})
		for range 4 {
			c := drawExperts(rng, len(group), bfloat)
			all := runExperts(t, group, c)
			rows := 0
			for _, got := range all {
				require.Equal(t, all[0].routes, got.routes)
				for _, n := range got.counts {
					rows += int(n)
				}
			}
			want := 0
			for r := range c.ids {
				for k := 0; k < len(c.ids[r]); k += c.layer.TopK {
					ids := slices.Clone(c.ids[r][k:][:c.layer.TopK])
					slices.Sort(ids)
					for _, id := range slices.Compact(ids) {
						if id >= 0 && int(id) < c.layer.Experts {
							want++
						}
					}
				}
			}
			require.Equal(t, want, rows)
		}
	})
}

// An operation that the other ranks do not join ends when its rank is aborted, and what follows is bounded by the ids.
func TestExpertsAborted(t *testing.T) {
	each(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Slot: 1 << 20})
		m, l := group[0], fabric.ExpertLayer{DType: memory.Float32, Experts: 4, TopK: 2, Hidden: 64, MaxTokens: 3, Ranks: 2}
		rows, atRows := onDevice(t, m, poisoned[float32](l.Own()*l.Capacity()*l.Hidden))
		_, counts := onDevice(t, m, poisoned[int32](l.Own()))
		_, routes := onDevice(t, m, poisoned[int32](l.Capacity()*l.TopK))
		_, x := onDevice(t, m, make([]float32, 64))
		_, ids := onDevice(t, m, []int32{0, 1})
		d := &fabric.Dispatch{Tokens: 1, X: x, IDs: ids, Rows: atRows, Counts: counts, Routes: routes}
		require.NoError(t, m.Dispatch(m.s, &l, d))
		ended, err := m.s.Query()
		require.NoError(t, err)
		require.False(t, ended, "it waits for the other rank")
		m.Abort()
		require.NoError(t, m.s.Sync(testgpu.Context(t)))
		require.ErrorContains(t, m.Err(), "an operation was given up")
		require.ErrorIs(t, m.Dispatch(m.s, &l, d), fabric.ErrAborted)
		require.Len(t, fetch(t, m, rows), rows.Len())
		l.MaxTokens = 1 << 20
		require.ErrorContains(t, group[1].Dispatch(group[1].s, &l, d), "the rank was not opened for that")
	})
}
