package comm_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// element is what rank r has at i: small whole numbers, whose sums are exact.
func element(r, i int) float32 { return float32((r*7919+i*31)%2001 - 1000) }

// conform checks every collective on a group of any layout, by what each rank is
// known to have. All processes of the group call it.
func conform(ctx context.Context, g *comm.Group) error {
	for _, check := range []func(context.Context, *comm.Group, int) error{conformAllReduce, conformRooted, conformParts, conformUneven} {
		for _, n := range []int{0, 1, 5, 4099} {
			if err := check(ctx, g, n); err != nil {
				return fmt.Errorf("with %d elements: %w", n, err)
			}
		}
	}
	return conformValues(ctx, g)
}

// localRanks are the local ranks.
func localRanks(g *comm.Group) []int {
	list := make([]int, g.Locals())
	for i := range list {
		list[i] = g.Communicator(i).Rank()
	}
	return list
}

// having makes slices of which rank r has n(r) elements, each by of.
func having(g *comm.Group, n func(r int) int, of func(r, i int) float32) (comm.Shards[float32], error) {
	var xs comm.Shards[float32]
	for i, r := range localRanks(g) {
		data := make([]float32, n(r))
		for k := range data {
			data[k] = of(r, k)
		}
		x, err := memory.MakeFrom(g.Stream(i), data)
		if err != nil {
			return nil, err
		}
		xs = append(xs, x)
	}
	return xs, nil
}

func always(n int) func(int) int { return func(int) int { return n } }

// wrong is what destinations have before.
func wrong(int, int) float32 { return -12345 }

// expect compares the slices with n(r) elements by of; n(r) < 0 is not looked at. It
// closes them.
func expect(ctx context.Context, g *comm.Group, what string, xs comm.Shards[float32], n func(r int) int, of func(r, i int) float32) error {
	if err := g.Wait(ctx); err != nil {
		return err
	}
	for i, r := range localRanks(g) {
		if n(r) < 0 {
			continue
		}
		got := make([]float32, xs[i].Len())
		if err := xs[i].CopyTo(g.Stream(i), got); err != nil {
			return err
		}
		if len(got) != n(r) {
			return fmt.Errorf("%s: rank %d has %d elements, want %d", what, r, len(got), n(r))
		}
		for k, v := range got {
			if v != of(r, k) {
				return fmt.Errorf("%s: rank %d has %v at %d, want %v", what, r, v, k, of(r, k))
			}
		}
	}
	return nil
}

// sumOf is the sum over all ranks.
func sumOf(g *comm.Group, i int) (s float32) {
	for r := range g.Size() {
		s += element(r, i)
	}
	return s
}

func conformAllReduce(ctx context.Context, g *comm.Group, n int) error {
	xs, err := having(g, always(n), element)
	if err != nil {
		return err
	}
	defer xs.Close()
	w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, xs...) })
	if err != nil {
		return err
	}
	if err := w.Wait(ctx); err != nil {
		return err
	}
	return expect(ctx, g, "all-reduce", xs, always(n), func(_, i int) float32 { return sumOf(g, i) })
}

func conformRooted(ctx context.Context, g *comm.Group, n int) error {
	size := g.Size()
	for root := range size {
		if n > 1000 && testhost.On && root != size-1 {
			continue // one root is enough for long tensors
		}
		only := func(k int) func(int) int {
			return func(r int) int {
				if r == root {
					return k
				}
				return -1
			}
		}
		xs, err1 := having(g, always(n), element)
		dst, err2 := having(g, always(n), wrong)
		wide, err3 := having(g, always(n*size), wrong)
		src, err4 := having(g, always(n*size), element)
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			return err
		}
		away := !slices.Contains(localRanks(g), root)
		at := func(s comm.Shards[float32]) comm.Shards[float32] {
			if away {
				return nil // what only the root has
			}
			return s
		}
		if err := errors.Join(
			comm.ReduceTo(g, root, comm.Sum, at(dst), xs),
			expect(ctx, g, "reduce", dst, only(n), func(_, i int) float32 { return sumOf(g, i) }),
			comm.GatherTo(g, root, at(wide), xs),
			expect(ctx, g, "gather", wide, only(n*size), func(_, i int) float32 { return element(i/n, i%n) }),
			comm.ScatterFrom(g, root, dst, at(src)),
			expect(ctx, g, "scatter", dst, always(n), func(r, i int) float32 { return element(root, r*n+i) }),
			comm.BroadcastFrom(g, root, xs...),
			expect(ctx, g, "broadcast", xs, always(n), func(_, i int) float32 { return element(root, i) }),
			xs.Close(), dst.Close(), wide.Close(), src.Close(),
		); err != nil {
			return err
		}
	}
	return g.Barrier(ctx)
}

func conformParts(ctx context.Context, g *comm.Group, n int) error {
	size := g.Size()
	one, err1 := having(g, always(n), element)
	all, err2 := having(g, always(n*size), element)
	wide, err3 := having(g, always(n*size), wrong)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	return errors.Join(
		comm.AllGather(g, wide, one),
		expect(ctx, g, "all-gather", wide, always(n*size), func(_, i int) float32 { return element(i/n, i%n) }),
		comm.AllToAll(g, wide, all),
		expect(ctx, g, "all-to-all", wide, always(n*size), func(r, i int) float32 { return element(i/n, r*n+i%n) }),
		comm.ReduceScatter(g, comm.Sum, one, all),
		expect(ctx, g, "reduce-scatter", one, always(n), func(r, i int) float32 { return sumOf(g, r*n+i) }),
		one.Close(), all.Close(), wide.Close(),
	)
}

// conformUneven gives rank r parts of n+r elements, and 0 to the last one.
func conformUneven(ctx context.Context, g *comm.Group, n int) error {
	size := g.Size()
	counts := make([]int, size)
	begin := make([]int, size)
	total := 0
	for r := range size {
		begin[r] = total
		if r < size-1 {
			counts[r] = n + r
		}
		total += counts[r]
	}
	whose := func(i int) (r, at int) {
		for r = size - 1; begin[r] > i || counts[r] == 0; r-- {
		}
		return r, i - begin[r]
	}
	own := func(r int) int { return counts[r] }
	one, err1 := having(g, own, element)
	all, err2 := having(g, always(total), element)
	wide, err3 := having(g, always(total), wrong)
	// Rank a sends counts[b] elements to each b, and so gets counts[a] from each.
	into, err4 := having(g, func(r int) int { return counts[r] * size }, wrong)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	var sends, recvs [][]int
	for _, r := range localRanks(g) {
		sends, recvs = append(sends, counts), append(recvs, slices.Repeat([]int{counts[r]}, size))
	}
	return errors.Join(
		comm.AllGatherV(g, wide, one, counts),
		expect(ctx, g, "all-gather", wide, always(total), func(_, i int) float32 { return element(whose(i)) }),
		comm.AllToAllV(g, into, recvs, all, sends),
		expect(ctx, g, "all-to-all", into, func(r int) int { return counts[r] * size }, func(r, i int) float32 {
			return element(i/counts[r], begin[r]+i%counts[r])
		}),
		comm.ReduceScatterV(g, comm.Sum, one, all, counts),
		expect(ctx, g, "reduce-scatter", one, own, func(r, i int) float32 { return sumOf(g, begin[r]+i) }),
		one.Close(), all.Close(), wide.Close(), into.Close(),
	)
}

// A setting is a value of the host.
type setting struct {
	Name  string
	Rate  float64
	Sizes []int
	Tags  map[string]bool
}

func settingOf(r int) setting {
	return setting{strings.Repeat("r", r), 1 / float64(r+3), make([]int, r*100), map[string]bool{fmt.Sprint(r): true}}
}

func (s setting) same(o setting) bool {
	return s.Name == o.Name && s.Rate == o.Rate && len(s.Sizes) == len(o.Sizes) && maps.Equal(s.Tags, o.Tags)
}

func conformValues(ctx context.Context, g *comm.Group) error {
	for _, codec := range []comm.Codec{nil, comm.Gob, comm.JSON} {
		var mine []setting
		for _, r := range localRanks(g) {
			mine = append(mine, settingOf(r))
		}
		all, err := comm.GatherValues(ctx, g, codec, mine...)
		if err != nil {
			return err
		}
		for r, s := range all {
			if !s.same(settingOf(r)) {
				return fmt.Errorf("the value of rank %d is %+v", r, s)
			}
		}
		for root := range g.Size() {
			var v setting
			if slices.Contains(localRanks(g), root) {
				v = settingOf(root + 1)
			}
			if err := comm.BroadcastValue(ctx, g, root, &v, codec); err != nil {
				return err
			}
			if !v.same(settingOf(root + 1)) {
				return fmt.Errorf("the value from rank %d is %+v", root, v)
			}
		}
	}
	// What cannot be encoded is told to all.
	last := g.Size() - 1
	values := make([]any, g.Locals())
	for i, r := range localRanks(g) {
		if values[i] = r; r == last {
			values[i] = func() {}
		}
	}
	_, err := comm.GatherValues(ctx, g, comm.JSON, values...)
	if e, ok := errors.AsType[*comm.ValueError](err); !ok || e.Rank != last || !strings.Contains(e.Reason, "func()") {
		return fmt.Errorf("a function as the value of rank %d: %v", last, err)
	}
	v := any(func() {})
	err = comm.BroadcastValue(ctx, g, last, &v, comm.JSON)
	if e, ok := errors.AsType[*comm.ValueError](err); !ok || e.Rank != last {
		return fmt.Errorf("a function as the value from rank %d: %v", last, err)
	}
	return g.Err()
}

func TestLocalConforms(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5, 8} {
		testgpu.Each(t, n, func(t *testing.T, devs []*device.Device) {
			ctx, g := testgpu.Context(t), local(t, devs[:n])
			require.NoError(t, conform(ctx, g))
			if n == 2 {
				require.NoError(t, errors.Join(conformAllReduce(ctx, g, 300_001), conformParts(ctx, g, 300_001), conformRooted(ctx, g, 300_001)))
			}
		})
	}
}

func TestProcessesConform(t *testing.T) {
	eachBackend(t, 3, 2, testgpu.Ranks, func(t *testing.T, backend string, ranks int) {
		code, out, _ := job(t, backend, "conform", ranks)
		require.Equal(t, 0, code, out)
	})
}

// A rank that sends to itself alone is refused, and the group goes on; together with
// the receive it is one of the exchanges.
func TestSendToOneself(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs, hs := shards(t, g, 8)
		ys, _ := shards(t, g, 8)
		require.ErrorContains(t, comm.Send(g, 0, xs[0]), "its own peer")
		require.ErrorContains(t, comm.Recv(g, 0, xs[0]), "its own peer")
		require.NoError(t, g.Err())
		require.NoError(t, comm.SendRecv(g, 0, xs[0], 0, ys[0]))
		require.Equal(t, hs[0], read(t, g, 0, ys[0]))
	})
}

// A group cannot leave its communicators as they are when they fail.
func TestRecoverableGroup(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	_, err := comm.Local(testgpu.Context(t), devs, &comm.Config{NCCL: &nccl.Config{Recoverable: true}})
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "Recoverable")
}

func TestBadRoots(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs, _ := shards(t, g, 8)
		wide, _ := shards(t, g, 16)
		var v int
		for _, err := range []error{
			comm.ReduceTo(g, 0, comm.Sum, nil, xs),
			comm.GatherTo(g, 0, wide[:1], xs),
			comm.AllToAllV(g, wide, [][]int{{8, 8}}, wide, [][]int{{8, 8}, {8, 8}}),
			comm.BroadcastValue(testgpu.Context(t), g, 2, &v, nil),
			second(comm.GatherValues(testgpu.Context(t), g, nil, 1)),
		} {
			require.ErrorIs(t, err, comm.ErrMismatch)
		}
		require.ErrorContains(t, comm.ReduceTo(g, -1, comm.Sum, xs, xs), "rank -1 does not exist")
		require.ErrorContains(t, comm.GatherTo(g, 0, xs, xs), "want 16")
		require.ErrorContains(t, comm.BroadcastValue[int](testgpu.Context(t), g, 0, nil, nil), "v is nil")
		require.NoError(t, g.Err(), "a wrong argument does not break the group")
		require.NoError(t, g.Barrier(testgpu.Context(t)))
	})
}

func second[T any](_ T, err error) error { return err }
