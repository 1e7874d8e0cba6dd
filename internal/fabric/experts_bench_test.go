package fabric_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// BenchmarkExperts measures a dispatch, a combine, and both in turn, in graphs. The default is 128 tokens of each of 2 ranks, with 7168 elements of
// bfloat16, for 8 of 64 experts. The other cases tell where the time goes: rows of few elements, few tokens, rows that cross no link or
// that all do, other grids, and other numbers of loads in flight.
func BenchmarkExperts(b *testing.B) {
	const ranks, experts = 2, 64
	devs := testgpu.CUDA(b, ranks)
	standard := fabric.ExpertLayer{DType: memory.BFloat16, Experts: experts, TopK: 8, Hidden: 7168, MaxTokens: 128, Ranks: ranks}
	group := open(b, devs, &fabric.Config{Slot: 4 * standard.SlotBytes()})
	all := func(*rand.Rand, int) (first, n int) { return 0, experts }
	local := func(_ *rand.Rand, rank int) (first, n int) { return rank * experts / ranks, experts / ranks }
	remote := func(r *rand.Rand, rank int) (first, n int) { return local(r, 1-rank) }
	type change = func(x *expertsBench)
	run := func(name string, ops string, changes ...change) {
		x := expertsBench{layer: standard, tokens: standard.MaxTokens, choose: all}
		for _, f := range changes {
			f(&x)
		}
		b.Run(name, func(b *testing.B) {
			x.prepare(b, group)
			for _, op := range []string{"dispatch", "combine", "both"} {
				if ops == "" || ops == op {
					b.Run(op, func(b *testing.B) { x.measure(b, group, op) })
				}
			}
		})
	}
	tokens := func(n int) change { return func(x *expertsBench) { x.tokens, x.layer.MaxTokens = n, n } }
	choose := func(f func(*rand.Rand, int) (int, int)) change {
		return func(x *expertsBench) { x.choose = f }
	}
	run("standard", "")
	run("e4m3", "", func(x *expertsBench) { x.layer.Small = true })
	run("hidden=64", "", func(x *expertsBench) { x.layer.Hidden = 64 })
	run("no token", "", func(x *expertsBench) { x.tokens = 0 })
	run("one token of 128", "", func(x *expertsBench) { x.tokens = 1 })
	run("one token of 1", "", tokens(1))
	run("tokens=16", "", tokens(16))
	run("tokens=512", "", tokens(512))
	run("local", "", choose(local))
	run("remote", "", choose(remote))
	defer func() {
		for _, m := range group {
			m.SetGrid(0, 0)
		}
	}()
	for _, g := range [][2]int{{128, 256}, {128, 384}, {64, 512}, {64, 256}, {32, 512}} {
		for _, m := range group {
			m.SetGrid(g[0], g[1])
		}
		run(fmt.Sprintf("grid=%dx%d", g[0], g[1]), "")
	}
	for _, m := range group {
		m.SetGrid(0, 0)
	}
	for _, v := range []struct{ name, old, new string }{
		{"copies=2", "#define COPIES 4 ", "#define COPIES 2 "},
		{"copies=8", "#define COPIES 4 ", "#define COPIES 8 "},
		{"ahead=4", "#define AHEAD (16 / sizeof(T))", "#define AHEAD (8 / sizeof(T))"},
		{"part=512", "#define PART (2 * PIECE)", "#define PART PIECE"},
	} {
		var restore []func()
		for _, d := range devs {
			back, err := fabric.ExpertsVariant(d, &standard, v.old, v.new)
			require.NoError(b, err)
			restore = append(restore, back)
		}
		run(v.name, "")
		for _, back := range restore {
			back()
		}
	}
}

// An expertsBench is a layer whose operands are in the memory of the ranks. choose returns the range of experts that the tokens of a rank name.
type expertsBench struct {
	layer    fabric.ExpertLayer
	tokens   int
	choose   func(r *rand.Rand, rank int) (first, n int)
	dispatch []fabric.Dispatch
	combine  []fabric.Combine
}

// prepare makes the operands, and dispatches once.
func (x *expertsBench) prepare(b *testing.B, group []member) {
	x.dispatch, x.combine = nil, nil
	l := &x.layer
	r := rand.New(rand.NewPCG(1, 2))
	for i, m := range group {
		ids := []int32{}
		for range x.tokens {
			first, n := x.choose(r, i)
			for _, e := range r.Perm(n)[:l.TopK] {
				ids = append(ids, int32(first+e))
			}
		}
		bytes := func(n int) uint64 {
			list, err := memory.Make[uint8](m.s, max(n, 1))
			require.NoError(b, err)
			b.Cleanup(func() { require.NoError(b, list.Close()) })
			require.NoError(b, list.Zero(m.s))
			return list.Ptr()
		}
		given := makeOf[int32](b, m.s, max(len(ids), 1))
		require.NoError(b, given.Slice(0, len(ids)).CopyFrom(m.s, ids))
		row := l.Hidden * l.DType.Size()
		d := fabric.Dispatch{
			Tokens: x.tokens, X: bytes(x.tokens * row), IDs: given.Ptr(),
			Rows: bytes(l.Own() * l.Capacity() * row), Counts: bytes(4 * l.Own()), Routes: bytes(4 * l.Capacity() * l.TopK),
		}
		x.dispatch = append(x.dispatch, d)
		x.combine = append(x.combine, fabric.Combine{Tokens: x.tokens, Y: d.Rows, Routes: d.Routes, Weights: bytes(4 * x.tokens * l.TopK), Out: bytes(x.tokens * row)})
	}
	for i, m := range group {
		require.NoError(b, x.operation(i, m, "dispatch")())
	}
	for _, m := range group {
		require.NoError(b, m.s.Sync(testgpu.Context(b)))
	}
}

// operation returns an operation of a rank.
func (x *expertsBench) operation(rank int, m member, op string) func() error {
	l := x.layer
	l.Rank = rank
	dispatch, combine := func() error { return m.Dispatch(m.s, &l, &x.dispatch[rank]) }, func() error { return m.Combine(m.s, &l, &x.combine[rank]) }
	switch op {
	case "dispatch":
		return dispatch
	case "combine":
		return combine
	}
	return func() error { return errors.Join(dispatch(), combine()) }
}

func (x *expertsBench) measure(b *testing.B, group []member, op string) {
	rank := 0
	measureEach(b, group, true, func(m member) func() error {
		rank++
		return x.operation(rank-1, m, op)
	})
}
