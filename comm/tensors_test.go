package comm_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A operandSample is an operand of each rank: as many tensors as parts, or one of all parts.
type operandSample struct {
	parts [][][]byte // by rank and part
	lists [][]tensor.Tensor
}

// operandOf makes an operand with n parts for each rank. The tensors have random layouts, and
// are one for all parts, separate, or views of one memory.
func operandOf(t testing.TB, g *comm.Group, r *rand.Rand, d memory.DType, shape []int, n int) (x operandSample) {
	for rank := range g.Size() {
		var parts [][]byte
		var list []tensor.Tensor
		if form := r.IntN(3); n == 1 || form == 0 {
			for range n {
				s := sampleOf(t, g, r, rank, d, shape, r.IntN(2) == 0)
				parts, list = append(parts, s.want), append(list, s.x)
			}
		} else {
			s := sampleOf(t, g, r, rank, d, append([]int{n}, shape...), r.IntN(2) == 0)
			parts, list = equalParts(s.want, n), []tensor.Tensor{s.x}
			if form == 1 {
				list = nil
				for k := range n {
					part, err := s.x.Select(0, k)
					require.NoError(t, err)
					list = append(list, part)
				}
			}
		}
		x.parts, x.lists = append(x.parts, parts), append(x.lists, list)
	}
	return x
}

func (x *operandSample) first() (ts []tensor.Tensor) {
	for _, list := range x.lists {
		ts = append(ts, list[0])
	}
	return ts
}

// read returns the parts of a rank as they are on the device.
func (x *operandSample) read(t testing.TB, g *comm.Group, rank int) [][]byte {
	all := []byte{}
	for _, list := range x.lists[rank] {
		all = append(all, bytesIn(t, g, nil, list)...)
	}
	return equalParts(all, len(x.parts[rank]))
}

// equalParts divides bytes into n equal parts.
func equalParts(b []byte, n int) (parts [][]byte) {
	for k := range n {
		parts = append(parts, b[k*len(b)/n:(k+1)*len(b)/n])
	}
	return parts
}

// sumOf returns the sum of part k of all ranks.
func (x *operandSample) sumOf(d memory.DType, k int) []byte {
	out := make([]byte, len(x.parts[0][k]))
	for i := range len(out) / d.Size() {
		sum := 0.0
		for _, parts := range x.parts {
			v := make([]byte, 8)
			dtype.Of(memory.Float64).Store(v, 0, dtype.Of(d).Load(parts[k], i))
			f := make([]byte, 8)
			dtype.Of(memory.Int64).Store(f, 0, dtype.Of(memory.Float64).Load(v, 0))
			sum += float64(dtype.Of(memory.Int64).Load(f, 0).Int64())
		}
		dtype.Of(d).Store(out, i, dtype.FloatValue(sum))
	}
	return out
}

// part returns part k of each rank's list.
func (x *operandSample) part(k int) (list [][]byte) {
	for _, parts := range x.parts {
		list = append(list, parts[k])
	}
	return list
}

// A tensorCase issues a collective and returns the operand that is written, with the expected
// parts of each rank; nil for a rank whose operand is not written.
type tensorCase func(t *testing.T, x *tensorProgram) (out operandSample, want [][][]byte)

// A tensorProgram is a collective with random arguments.
type tensorProgram struct {
	g     *comm.Group
	on    comm.TensorIssuer
	r     *rand.Rand
	d     memory.DType
	shape []int
	root  int
	issue []func() error
}

func (x *tensorProgram) operand(t *testing.T, n int) operandSample {
	return operandOf(t, x.g, x.r, x.d, x.shape, n)
}

// onAll returns the same parts for each rank, and onRoot for the root only.
func (x *tensorProgram) onAll(parts [][]byte) [][][]byte {
	return slices.Repeat([][][]byte{parts}, x.g.Size())
}

func (x *tensorProgram) onRoot(parts [][]byte) [][][]byte {
	want := make([][][]byte, x.g.Size())
	want[x.root] = parts
	return want
}

var tensorCases = map[string]tensorCase{
	"all-reduce": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a := x.operand(t, 1)
		x.issue = append(x.issue, func() error { return x.on.AllReduce(comm.Sum, a.first()...) })
		return a, x.onAll([][]byte{a.sumOf(x.d, 0)})
	},
	"broadcast": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a := x.operand(t, 1)
		x.issue = append(x.issue, func() error { return x.on.BroadcastFrom(x.root, a.first()...) })
		return a, x.onAll(a.parts[x.root])
	},
	"reduce": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a, b := x.operand(t, 1), x.operand(t, 1)
		x.issue = append(x.issue, func() error { return x.on.ReduceTo(x.root, comm.Sum, b.first(), a.first()) })
		return b, x.onRoot([][]byte{a.sumOf(x.d, 0)})
	},
	"all-gather": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a, b := x.operand(t, 1), x.operand(t, x.g.Size())
		x.issue = append(x.issue, func() error { return x.on.AllGather(b.lists, a.first()...) })
		return b, x.onAll(a.part(0))
	},
	"gather": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a, b := x.operand(t, 1), x.operand(t, x.g.Size())
		x.issue = append(x.issue, func() error { return x.on.GatherTo(x.root, b.lists, a.first()...) })
		return b, x.onRoot(a.part(0))
	},
	"reduce-scatter": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a, b := x.operand(t, x.g.Size()), x.operand(t, 1)
		x.issue = append(x.issue, func() error { return x.on.ReduceScatter(comm.Sum, b.first(), a.lists...) })
		var want [][][]byte
		for k := range x.g.Size() {
			want = append(want, [][]byte{a.sumOf(x.d, k)})
		}
		return b, want
	},
	"scatter": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a, b := x.operand(t, x.g.Size()), x.operand(t, 1)
		x.issue = append(x.issue, func() error { return x.on.ScatterFrom(x.root, b.first(), a.lists...) })
		var want [][][]byte
		for k := range x.g.Size() {
			want = append(want, [][]byte{a.parts[x.root][k]})
		}
		return b, want
	},
	"all-to-all": func(t *testing.T, x *tensorProgram) (operandSample, [][][]byte) {
		a, b := x.operand(t, x.g.Size()), x.operand(t, x.g.Size())
		x.issue = append(x.issue, func() error { return x.on.AllToAll(b.lists, a.lists...) })
		var want [][][]byte
		for k := range x.g.Size() {
			want = append(want, a.part(k))
		}
		return b, want
	},
}

// checkParts compares an operand on the devices with the expected parts.
func checkParts(t *testing.T, g *comm.Group, out operandSample, want [][][]byte, name string) {
	t.Helper()
	for rank, parts := range want {
		if parts == nil {
			parts = out.parts[rank]
		}
		require.Equal(t, parts, out.read(t, g, rank), "%s: rank %d", name, rank)
	}
}

// Collectives of tensors with random layouts, eager, in a batch and in a graph, against sums
// and copies on the host.
func TestTensorCollectives(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	types := []memory.DType{memory.Float32, memory.Int32, memory.Float64, memory.BFloat16, memory.Uint8}
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		r := rand.New(rand.NewPCG(seed, 1))
		for _, strategy := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.CopyEngines} {
			g := groupBy(t, devs, comm.Config{Strategy: strategy})
			for name, f := range tensorCases {
				for _, mode := range []string{"eager", "batch", "graph"} {
					name := fmt.Sprint(strategy, " ", name, " ", mode)
					x := &tensorProgram{g: g, on: comm.OfTensors(g), r: r, d: types[r.IntN(len(types))], shape: shapeOf(r, r.IntN(4)), root: r.IntN(g.Size())}
					out, want := f(t, x)
					x.run(t, mode, name)
					checkParts(t, g, out, want, name)
				}
			}
		}
	})
}

// run issues the program's collective.
func (x *tensorProgram) run(t *testing.T, mode, name string) {
	t.Helper()
	issue := x.issue[0]
	switch mode {
	case "eager":
		require.NoError(t, issue(), name)
	case "batch":
		require.NoError(t, x.g.Batch(func(b *comm.Batch) error {
			x.on = comm.OfTensors(b)
			return issue()
		}), name)
	case "graph":
		exec, err := graph.Capture(x.g.Streams(), issue, nil)
		require.NoError(t, err, name)
		require.NoError(t, x.g.Stream(0).WaitStream(x.g.Stream(1)))
		require.NoError(t, exec.Launch(x.g.Stream(0)), name)
		require.NoError(t, x.g.Stream(1).WaitStream(x.g.Stream(0)))
		require.NoError(t, x.g.Wait(testgpu.Context(t)), name)
		require.NoError(t, exec.Close())
	}
}

// A send and a receive of different layouts between two processes.
func TestTensorSendRecv(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs := joined(t, testgpu.Context(t), devs)
		var from, to [2]*sample
		for i, g := range gs {
			r := rand.New(rand.NewPCG(7, uint64(i)))
			from[i], to[i] = sampleOf(t, g, r, 0, memory.Float32, []int{3, 5}, true), sampleOf(t, g, r, 0, memory.Float32, []int{5, 3}, i == 0)
		}
		groups.Each(t, gs, func(i int, g *comm.Group) error {
			return g.Batch(func(b *comm.Batch) error {
				on := comm.OfTensors(b)
				return errors.Join(on.Send(1-i, from[i].x), on.Recv(1-i, to[i].x))
			})
		})
		for i, g := range gs {
			require.Equal(t, from[1-i].want, bytesIn(t, g, g.Stream(0), to[i].x))
		}
	})
}

// A contiguous tensor, and adjacent parts, are used without other memory.
func TestContiguousTensorsAreNotCopied(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var wide, xs []tensor.Tensor
		var parts [][]tensor.Tensor
		for i := range devs {
			w, err := tensor.Make(g.Stream(i), memory.Float32, 2, 1000)
			require.NoError(t, err)
			defer w.Close()
			x, err := tensor.Make(g.Stream(i), memory.Float32, 1, 1000)
			require.NoError(t, err)
			defer x.Close()
			chunks, err := w.Chunk(2, 0)
			require.NoError(t, err)
			require.NoError(t, tensor.Copy(g.Stream(i), chunks[i], x))
			wide, xs, parts = append(wide, w), append(xs, x), append(parts, chunks)
		}
		on := comm.OfTensors(g)
		require.NoError(t, g.Wait(testgpu.Context(t)))
		before := allocations(t, devs)
		require.NoError(t, on.AllReduce(comm.Sum, wide...))
		require.NoError(t, on.AllGather(parts, xs...))
		require.NoError(t, on.ReduceScatter(comm.Sum, xs, parts...))
		require.Equal(t, before, allocations(t, devs))
		require.NoError(t, on.AllReduce(comm.Sum, wide[0].T(), wide[1].T()))
		require.Equal(t, before+2, allocations(t, devs))
	})
}

// allocations is the number of allocations on all devices so far.
func allocations(t testing.TB, devs []*device.Device) (n int) {
	t.Helper()
	for _, d := range devs {
		s, err := memory.StatsOf(d)
		require.NoError(t, err)
		n += int(s.Allocation.All.Allocated)
	}
	return n
}

// Arguments that do not fit are refused before anything is enqueued, and the group goes on.
func TestTensorArguments(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		mk := func(rank int, d memory.DType, shape ...int) tensor.Tensor {
			x, err := tensor.Make(g.Stream(rank), d, shape...)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, x.Close()) })
			return x
		}
		const f, i32 = memory.Float32, memory.Int32
		a, b, c := mk(0, f, 2, 3), mk(1, f, 2, 3), mk(1, f, 3, 2)
		wide := mk(0, f, 1, 3)
		repeated, err := wide.Expand(2, 3)
		require.NoError(t, err)
		host, err := tensor.MakeHost(f, 2, 3)
		require.NoError(t, err)
		closed, err := tensor.Make(g.Stream(0), f, 2, 3)
		require.NoError(t, err)
		require.NoError(t, closed.Close())
		on := comm.OfTensors(g)
		list := func(ts ...tensor.Tensor) []tensor.Tensor { return ts }
		issued := len(g.Communicator(0).Trace())
		for want, err := range map[string]error{
			"comm: all-reduce: destinations of 1 and sources of 0 ranks for 2 local ranks":                                               on.AllReduce(comm.Sum, a),
			"the destination of rank 1 is float32 [3 2] on " + devs[1].String() + ", and another tensor is float32 [2 3]":                on.AllReduce(comm.Sum, a, c),
			"the destination of rank 1 is int32 [2 3] on " + devs[1].String() + ", and another tensor is float32":                        on.AllReduce(comm.Sum, a, mk(1, i32, 2, 3)),
			"comm: broadcast: the destination of rank 0":                                                                                 on.BroadcastFrom(0, b, a),
			"the destination of rank 0 is float32 [2 3] on " + devs[0].String() + " with strides [0 1]: several elements have one place": on.AllReduce(comm.Sum, repeated, b),
			"comm: reduce: the source of rank 0":                                                                                         on.ReduceTo(1, comm.Sum, list(a, b), list(host, b)),
			"use after Close":                                                                                                            on.AllReduce(comm.Sum, closed, b),
			"rank 0 has 3 tensors as its destination: want 1 for each of 2 ranks, or 1 with the parts of all":                            on.AllGather([][]tensor.Tensor{{a, a, a}, {b}}, a, b),
			"the destination of rank 0 is float32 [1 3] on " + devs[0].String() + ": want as many elements for each of 2 ranks":          on.AllGather([][]tensor.Tensor{{wide}, {b}}, a, b),
			"which is 6 elements for a rank: other tensors have 3":                                                                       on.AllGather([][]tensor.Tensor{{a}, {b}}, a, b),
			"destination tensors 0 and 1 of rank 0 share some memory":                                                                    on.AllGather([][]tensor.Tensor{{a, a}, {b, b}}, a, b),
			"rank 1 has 0 tensors as its source":                                                                                         on.AllToAll([][]tensor.Tensor{{mk(0, f, 4)}, {mk(1, f, 4)}}, list(mk(0, f, 4)), nil),
			"comm: scatter: rank 0 has no source":                                                                                        on.ScatterFrom(0, list(a, b)),
			"rank 9 does not exist":                                                                                                      on.BroadcastFrom(9, a, b),
			"no group given":                                                                                                             comm.OfTensors(nil).AllReduce(comm.Sum, a),
		} {
			require.ErrorContains(t, err, want)
		}
		require.ErrorIs(t, on.AllReduce(comm.Sum, a), comm.ErrMismatch)
		require.Error(t, g.Batch(func(b *comm.Batch) error { _ = comm.OfTensors(b).AllReduce(comm.Sum, a); return nil }), "the batch fails as a whole")
		require.Len(t, g.Communicator(0).Trace(), issued)
		require.NoError(t, g.Err())
		require.NoError(t, on.AllReduce(comm.Sum, a, b))
	})
}
