package comm_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// What tensor.chunk gives in torch: the shapes and the first elements of each chunk.
func TestScatterChunksAreTorchs(t *testing.T) {
	files, err := filepath.Glob("testdata/scatter_chunks*.json")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	if dir := env.Fixtures.Value(); dir != "" {
		more, err := filepath.Glob(filepath.Join(dir, "scatter_chunks*.json"))
		require.NoError(t, err)
		files = append(files, more...)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			var cases []struct {
				Shape   []int
				Dim     int
				Devices int
				Chunks  [][]int
				First   [][]int64
			}
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			require.NoError(t, json.Unmarshal(text, &cases))
			require.NotEmpty(t, cases)
			testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
				g := local(t, devs)
				for _, c := range cases {
					n := 1
					for _, d := range c.Shape {
						n *= d
					}
					h := make([]int64, n)
					for i := range h {
						h[i] = int64(i)
					}
					x, err := tensor.OfHost(h, c.Shape...)
					require.NoError(t, err)
					cfg := &comm.ScatterConfig{Dim: c.Dim}
					for i := range c.Devices {
						cfg.Devices = append(cfg.Devices, devs[i%2])
					}
					ys, err := comm.Scatter(g, x, cfg)
					require.NoError(t, err)
					require.Len(t, ys, len(c.Chunks), "%v along %d over %d", c.Shape, c.Dim, c.Devices)
					for i, y := range ys {
						require.Equal(t, c.Chunks[i], y.Shape())
						require.Same(t, cfg.Devices[i], y.Device())
						out, err := tensor.MakeHost(memory.Int64, y.Shape()...)
						require.NoError(t, err)
						require.NoError(t, tensor.Copy(g.Stream(i%2), out, y))
						got, err := tensor.Data[int64](out)
						require.NoError(t, err)
						require.Equal(t, c.First[i], got[:len(c.First[i])])
					}
					closing(t, ys...)
				}
			})
		})
	}
}

// Wrong arguments are found before anything is enqueued or allocated, and named.
func TestTorchErrors(t *testing.T) {
	all := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	devs := all[:2]
	g := local(t, devs)
	r := rand.New(rand.NewPCG(1, 1))
	const f4, i4 = memory.Float32, memory.Int32
	on := func(rank int, d memory.DType, shape ...int) tensor.Tensor {
		return sampleOf(t, g, r, rank, d, shape, false).x
	}
	x, y, host := on(0, f4, 2, 3), on(1, f4, 2, 3), on(-1, f4, 2, 3)
	scalar := on(0, f4)
	s2 := newStream(t, all[2])
	strange, err := tensor.Make(s2, f4, 2, 3)
	require.NoError(t, err)
	defer strange.Close()
	closed := on(0, f4, 2, 3)
	require.NoError(t, closed.Close())
	ts := func(xs ...tensor.Tensor) []tensor.Tensor { return xs }
	dl := func(ds ...*device.Device) []*device.Device { return ds }
	wide, err := on(1, f4, 1, 3).Expand(2, 3)
	require.NoError(t, err)
	square := on(0, f4, 3, 3)
	upper, err := square.Narrow(0, 0, 2)
	require.NoError(t, err)
	lower, err := square.Narrow(0, 1, 2)
	require.NoError(t, err)
	first, err := square.Narrow(0, 0, 1)
	require.NoError(t, err)
	last, err := square.Narrow(0, 2, 1)
	require.NoError(t, err)
	shut := newStream(t, devs[1])
	require.NoError(t, shut.Close())

	broadcast := func(x tensor.Tensor, c *comm.BroadcastConfig) func() error {
		return func() error { _, err := comm.Broadcast(g, x, c); return err }
	}
	coalesced := func(c *comm.BroadcastCoalescedConfig, xs ...tensor.Tensor) func() error {
		return func() error { _, err := comm.BroadcastCoalesced(g, xs, c); return err }
	}
	add := func(c *comm.ReduceAddConfig, xs ...tensor.Tensor) func() error {
		return func() error { _, err := comm.ReduceAdd(g, xs, c); return err }
	}
	addCoalesced := func(c *comm.ReduceAddCoalescedConfig, xs ...[]tensor.Tensor) func() error {
		return func() error { _, err := comm.ReduceAddCoalesced(g, xs, c); return err }
	}
	scatter := func(x tensor.Tensor, c *comm.ScatterConfig) func() error {
		return func() error { _, err := comm.Scatter(g, x, c); return err }
	}
	gather := func(c *comm.GatherConfig, xs ...tensor.Tensor) func() error {
		return func() error { _, err := comm.Gather(g, xs, c); return err }
	}
	type bc = comm.BroadcastConfig
	type sc = comm.ScatterConfig
	cases := []struct {
		text string
		f    func() error
	}{
		{"comm: broadcast: exactly one of Devices and Out must be specified", broadcast(x, &bc{Devices: devs, Out: ts(y)})},
		{"broadcast: the tensor: no tensor given", broadcast(tensor.Tensor{}, nil)},
		{"use after Close", broadcast(closed, nil)},
		{"broadcast: the tensor is on virtual:2, which no rank of the group is on", broadcast(strange, nil)},
		{"broadcast: device 1 of 2 is virtual:2, which no rank of the group is on", broadcast(x, &bc{Devices: dl(devs[0], all[2])})},
		{"device 0 of 1 is <nil>", broadcast(x, &bc{Devices: dl(nil)})},
		{"expected all output tensors to be on devices, but output tensor at index 1 is on the host", broadcast(x, &bc{Out: ts(y, host)})},
		{"expected all output tensors to have the shape of the source tensor [2 3], but output tensor at index 1 has shape [3 2]", broadcast(x, &bc{Out: ts(y, on(1, f4, 3, 2))})},
		{"output tensor at index 0: float32 [2 3] on virtual:0 to float32 [2 3] on virtual:1 with strides [0 1]: several elements", broadcast(x, &bc{Out: ts(wide)})},
		{"the output tensors at indexes 0 and 1 share some memory", broadcast(x, &bc{Out: ts(y, y)})},
		{"output tensor at index 0 is on virtual:2", broadcast(x, &bc{Out: ts(strange)})},

		{"broadcast-coalesced: all tensors must be on the first device virtual:0, but tensor 1 is float32 [2 3] on virtual:1", coalesced(nil, x, y)},
		{"all tensors must be on the first device virtual:0, but tensor 0 is float32 [2 3] on the host", coalesced(nil, host)},
		{"all tensors must be on the first device virtual:1", coalesced(&comm.BroadcastCoalescedConfig{Devices: dl(devs[1], devs[0])}, x)},
		{"expected at least one device", coalesced(&comm.BroadcastCoalescedConfig{Devices: []*device.Device{}}, x)},
		{"a buffer of -1 bytes", coalesced(&comm.BroadcastCoalescedConfig{BufferSize: -1}, x)},

		{"reduce-add: expected at least one tensor", add(nil)},
		{"expects all tensors to be on devices, but tensor 1 is on the host", add(nil, x, host)},
		{"tensor 1 has invalid size: got 3x2, but expected 2x3", add(nil, x, on(1, f4, 3, 2))},
		{"expects the destination virtual:1 to be the device of one of the tensors", add(&comm.ReduceAddConfig{Destination: devs[1]}, x)},
		{"the destination is virtual:2, which no rank of the group is on", add(&comm.ReduceAddConfig{Destination: all[2]}, x)},
		{"tensor 2 is of float32: a sum of float32 cannot be cast to int32, the type of the first two", add(nil, on(0, i4, 2), on(1, i4, 2), on(1, f4, 2))},
		{"tensor 1: torch has no type for the numbers of both int32 and uint64", add(nil, on(0, i4, 2), on(1, memory.Uint64, 2))},

		{"reduce-add-coalesced: expected at least one list", addCoalesced(nil)},
		{"expects all tensors to be on devices, but tensor 0 of list 1 is on the host", addCoalesced(nil, ts(x), ts(host))},
		{"of list 0 tensor 0 is on virtual:0 and tensor 1 on virtual:1", addCoalesced(nil, ts(x, y))},
		{"tensor 0 of list 1 has invalid size: got 3x2, but expected 2x3", addCoalesced(nil, ts(x), ts(on(1, f4, 3, 2)))},
		{"tensor 0 of list 1 is of int32, and that of list 0 of float32", addCoalesced(nil, ts(x), ts(on(1, i4, 2, 3)))},
		{"expects the destination virtual:0 to be the device of one of the lists", addCoalesced(nil, ts(y), ts(y))},

		{"scatter: Devices must not be specified when Out is specified", scatter(x, &sc{Devices: devs, Out: ts(y)})},
		{"ChunkSizes must not be specified when Out is specified, but got [2]", scatter(x, &sc{ChunkSizes: []int{2}, Out: ts(y)})},
		{"expected at least one device to scatter to", scatter(x, &sc{Devices: []*device.Device{}})},
		{"expected Devices and ChunkSizes to be of same length, but got 2 devices and 1 sizes", scatter(x, &sc{ChunkSizes: []int{2}})},
		{"want sizes that sum exactly to 2", scatter(x, &sc{ChunkSizes: []int{1, 2}})},
		{"want no negative sizes", scatter(x, &sc{ChunkSizes: []int{3, -1}})},
		{"dimension out of range (expected to be in range of [-2, 1], but got 2)", scatter(x, &sc{Dim: 2})},
		{"the tensor has no dimensions", scatter(scalar, nil)},
		{"expected the device of the stream at index 1 (was virtual:0) to match the device at that index (expected virtual:1)", scatter(x, &sc{Streams: []*stream.Stream{nil, g.Stream(0)}})},
		{"use after Close", scatter(x, &sc{Streams: []*stream.Stream{nil, shut}})},
		{"expected the device of the stream at index 0 (was virtual:0)", scatter(x, &sc{Streams: []*stream.Stream{g.Stream(0)}, Out: ts(y)})},
		{"expected at least one output tensor to scatter to", scatter(x, &sc{Out: []tensor.Tensor{}})},
		{"but output tensor at index 0 is on the host", scatter(x, &sc{Out: ts(host)})},
		{"output tensor at index 0 has incorrect shape: []: expected same shape except for scatter dimension 0 as the source tensor: [2 3]", scatter(x, &sc{Out: ts(scalar)})},
		{"output tensor at index 1 has incorrect shape: [1 2]", scatter(x, &sc{Out: ts(on(0, f4, 1, 3), on(1, f4, 1, 2))})},
		{"output tensor at index 0 shares some memory with the chunk of the source tensor at index 1", scatter(square, &sc{Out: ts(last, on(1, f4, 2, 3))})},
		{"output tensor at index 1 shares some memory with the chunk of the source tensor at index 0", scatter(square, &sc{Out: ts(on(1, f4, 2, 3), first)})},
		{"total size for output tensors along scatter dimension 1 does not match the source tensor's: expected 3, but got 2", scatter(x, &sc{Dim: -1, Out: ts(on(1, f4, 2, 2))})},

		{"gather: Destination and Host must not be specified when Out is specified", gather(&comm.GatherConfig{Out: &x, Destination: devs[0]}, y)},
		{"Destination and Host must not be specified when Out is specified", gather(&comm.GatherConfig{Out: &x, Host: true}, y)},
		{"Destination must not be specified when Host is", gather(&comm.GatherConfig{Host: true, Destination: devs[0]}, y)},
		{"expected at least one tensor to gather from", gather(nil)},
		{"expected all input tensors to be on devices, but tensor at index 1 is on the host", gather(nil, x, host)},
		{"expected all input tensors to have the same number of dimensions, but tensor at index 1 has 1 dimensions (expected 2)", gather(nil, x, on(1, f4, 3))},
		{"input tensor at index 1 has invalid shape [5 4], but expected [5 3]", gather(nil, x, on(1, f4, 5, 4))},
		{"expected the output tensor to have shape [4 3], but got [2 3]", gather(&comm.GatherConfig{Out: &x}, y, y)},
		{"tensor at index 0: float32 [2 3] on virtual:0 to float32 [2 3] on virtual:0: they share some memory", gather(&comm.GatherConfig{Out: &upper}, lower)},
		{"tensor at index 0 shares some memory with the output tensor", gather(&comm.GatherConfig{Out: &square}, last, y)},
		{"dimension out of range", gather(&comm.GatherConfig{Dim: 2}, x)},
		{"no dimension to gather along", gather(nil, scalar)},
		{"the destination is virtual:2", gather(&comm.GatherConfig{Destination: all[2]}, x)},
	}
	before := memoryOf(t, all)
	for _, c := range cases {
		err := c.f()
		require.ErrorContains(t, err, c.text)
		require.ErrorIs(t, err, comm.ErrMismatch, c.text)
	}
	require.Equal(t, before, memoryOf(t, all))
	require.NoError(t, g.Err(), "a wrong argument does not break the group")
	require.NoError(t, g.Close())
	for _, f := range []func() error{broadcast(x, nil), coalesced(nil, x), add(nil, x), addCoalesced(nil, ts(x)), scatter(x, nil), gather(nil, x)} {
		require.ErrorIs(t, f(), device.ErrClosed)
	}
}

func memoryOf(t testing.TB, devs []*device.Device) (bytes []int64) {
	t.Helper()
	for _, d := range devs {
		s, err := memory.StatsOf(d)
		require.NoError(t, err)
		bytes = append(bytes, s.AllocatedBytes.All.Current)
	}
	return bytes
}

// A group with ranks elsewhere has the collectives of slices only.
func TestTorchNeedsAllRanks(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	gs := joined(t, context.Background(), devs)
	x, err := tensor.Make(gs[0].Stream(0), memory.Float32, 2)
	require.NoError(t, err)
	defer x.Close()
	_, err = comm.Broadcast(gs[0], x, nil)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "1 of the group's 2 ranks are in this process")
}

// NCCL takes part where torch has it take part, but for what one kernel does.
func TestWhatNCCLTakes(t *testing.T) { bothWays(t, whatNCCLTakes) }

func whatNCCLTakes(t *testing.T, direct bool) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: "ncclBroadcast#*=ncclInternalError,ncclReduce#*=ncclInternalError"})
	r := rand.New(rand.NewPCG(2, 2))
	on := func(t *testing.T, g *comm.Group, rank int, d memory.DType, strided bool, shape ...int) tensor.Tensor {
		return sampleOf(t, g, r, rank, d, shape, strided).x
	}
	type tensors = []tensor.Tensor
	const i2, i4, b2, f4 = memory.Int16, memory.Int32, memory.BFloat16, memory.Float32
	broadcast := func(cfg *comm.BroadcastConfig, rank int, strided bool, shape ...int) func(*testing.T, *comm.Group) (tensors, error) {
		return func(t *testing.T, g *comm.Group) (tensors, error) {
			return comm.Broadcast(g, on(t, g, rank, i2, strided, shape...), cfg)
		}
	}
	// add adds a tensor of each of some devices.
	add := func(cfg *comm.ReduceAddConfig, strided bool, types ...memory.DType) func(*testing.T, *comm.Group) (tensors, error) {
		return func(t *testing.T, g *comm.Group) (tensors, error) {
			var xs tensors
			for i, d := range types {
				xs = append(xs, on(t, g, i, d, strided, 3, 4))
			}
			y, err := comm.ReduceAdd(g, xs, cfg)
			return tensors{y}, err
		}
	}
	for _, c := range []struct {
		name string
		nccl bool
		f    func(t *testing.T, g *comm.Group) (tensors, error)
	}{
		{"broadcast", true, broadcast(nil, 1, false, 4)},
		{"broadcast of none", false, broadcast(nil, 1, false, 4, 0)},
		{"strided", false, broadcast(nil, 1, true, 4, 2)},
		{"of the host", false, broadcast(nil, -1, false, 4)},
		{"twice on a device", false, broadcast(&comm.BroadcastConfig{Devices: []*device.Device{devs[0], devs[0]}}, 1, false, 4)},
		{"to some of the group", false, broadcast(&comm.BroadcastConfig{Devices: devs[:2]}, 1, false, 4)},
		{"to other types", false, func(t *testing.T, g *comm.Group) (tensors, error) {
			return comm.Broadcast(g, on(t, g, 1, i2, false, 4), &comm.BroadcastConfig{Out: tensors{on(t, g, 0, i4, false, 4), on(t, g, 2, i2, false, 4)}})
		}},
		{"to tensors", true, func(t *testing.T, g *comm.Group) (tensors, error) {
			return comm.Broadcast(g, on(t, g, 1, i2, false, 4), &comm.BroadcastConfig{Out: tensors{on(t, g, 2, i2, false, 4), on(t, g, 0, i2, false, 4)}})
		}},
		{"coalesced", true, func(t *testing.T, g *comm.Group) (tensors, error) {
			yss, err := comm.BroadcastCoalesced(g, tensors{on(t, g, 0, memory.Bool, true, 4)}, nil)
			return slices.Concat(yss...), err
		}},
		{"add", true, add(nil, false, b2, b2, b2)},
		{"add in order", false, add(&comm.ReduceAddConfig{Deterministic: true}, false, b2, b2, b2)},
		{"add what NCCL does not", false, add(nil, false, i2, i2, i2)},
		{"add two types", false, add(nil, false, i4, i4, i2)},
		{"add strided", false, add(nil, true, f4, f4, f4)},
		{"add some", false, add(nil, false, f4, f4)},
	} {
		t.Run(c.name, func(t *testing.T) {
			balanced(t, devs)
			g := local(t, devs)
			ys, err := c.f(t, g)
			if c.nccl && !direct {
				require.ErrorIs(t, err, comm.ErrBroken)
				return
			}
			require.NoError(t, err)
			closing(t, ys...)
		})
	}
}

// The sum in order is the last of the destination's tensors, then the others, rounded
// after each.
func TestOrderOfTheSum(t *testing.T) { bothWays(t, orderOfTheSum) }

func orderOfTheSum(t *testing.T, _ bool) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var xs []tensor.Tensor
		for _, v := range []struct {
			rank int
			x    float32
		}{{0, 2048}, {1, 1}, {0, 1}, {1, 1}} {
			m, err := memory.MakeFrom(g.Stream(v.rank), []memory.Float16Bits{memory.Float16Of(v.x)})
			require.NoError(t, err)
			defer m.Close()
			x, err := tensor.Of(m, 1)
			require.NoError(t, err)
			xs = append(xs, x)
		}
		number := func(i int, y tensor.Tensor) float32 {
			got, err := readTensor[memory.Float16Bits](g, i, y)
			require.NoError(t, err)
			return got[0].Float32()
		}
		for _, c := range []struct {
			destination int
			want        float32
		}{
			{0, 2048}, // ((1 + 2048) + 1) + 1: each sum is a tie, rounded down
			{1, 2048}, // ((1 + 2048) + 1) + 1
		} {
			y, err := comm.ReduceAdd(g, xs, &comm.ReduceAddConfig{Destination: devs[c.destination]})
			require.NoError(t, err)
			require.Equal(t, c.want, number(c.destination, y))
			closing(t, y)
		}
		// Coalesced too the destination's comes first: 1 + 1 + 2048 is exact.
		two := func(i int) []tensor.Tensor { return []tensor.Tensor{xs[i], xs[i]} }
		sums, err := comm.ReduceAddCoalesced(g, [][]tensor.Tensor{two(2), two(0), two(1)},
			&comm.ReduceAddCoalescedConfig{ReduceAddConfig: comm.ReduceAddConfig{Destination: devs[1], Deterministic: true}})
		require.NoError(t, err)
		for _, y := range sums {
			require.Equal(t, float32(2050), number(1, y))
		}
		closing(t, sums...)
		// 1 + 1 first and 2048 last is exact: the order shows.
		y, err := comm.ReduceAdd(g, []tensor.Tensor{xs[2], xs[0], xs[1]}, &comm.ReduceAddConfig{Destination: devs[1]})
		require.NoError(t, err)
		require.Equal(t, float32(2050), number(1, y))
		closing(t, y)
	})
}

// The rules of the buckets, which differ: torch's C++ and Python.
func TestBuckets(t *testing.T) {
	of := func(d memory.DType, bytes ...int) (ts []tensor.Tensor) {
		for _, n := range bytes {
			x, err := tensor.MakeHost(d, n/d.Size())
			require.NoError(t, err)
			ts = append(ts, x)
		}
		return ts
	}
	const mib = 1 << 20
	u1 := of(memory.Uint8, 4*mib, 4*mib, 4*mib, 1, 10*mib, 3, 0)
	require.Equal(t, [][]int{{0, 1, 2}, {3, 4}, {5, 6}}, comm.BucketsThatReach(u1, 10*mib))
	require.Equal(t, [][]int{{0, 1}, {2, 3}, {4}, {5, 6}}, comm.BucketsWithin(u1, 10*mib))
	exact := of(memory.Uint8, 6*mib, 4*mib, 1)
	require.Equal(t, [][]int{{0, 1}, {2}}, comm.BucketsThatReach(exact, 10*mib))
	require.Equal(t, [][]int{{0, 1}, {2}}, comm.BucketsWithin(exact, 10*mib))
	short := of(memory.Uint8, 6*mib, 4*mib-1, 1)
	require.Equal(t, [][]int{{0, 1, 2}}, comm.BucketsThatReach(short, 10*mib))
	require.Equal(t, [][]int{{0, 1, 2}}, comm.BucketsWithin(short, 10*mib))
	// test_broadcast_coalesced_dense_only: two types between each other, 100 bytes.
	mixed := append(append(of(memory.Int64, 40), of(memory.Float32, 20)...), append(of(memory.Int64, 40, 40), append(of(memory.Int64, 80), of(memory.Float32, 20)...)...)...)
	require.Equal(t, [][]int{{0, 2, 3}, {4}, {1, 5}}, comm.BucketsThatReach(mixed, 100))
	require.Equal(t, [][]int{{0, 2}, {3}, {4}, {1, 5}}, comm.BucketsWithin(mixed, 100))
	require.Equal(t, [][]int{{0}, {1}}, comm.BucketsWithin(of(memory.Uint8, 500, 10), 100))
	require.Equal(t, [][]int{{0, 1}}, comm.BucketsWithin(of(memory.Uint8, 0, 500), 100), "nothing is not too much yet")
	require.Empty(t, comm.BucketsThatReach(nil, 1))
}

// Tensors of one buffer share its memory, 10 MiB if nothing else is said.
func TestCoalescedBuffers(t *testing.T) { bothWays(t, coalescedBuffers) }

func coalescedBuffers(t *testing.T, _ bool) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var xs []tensor.Tensor
		for _, n := range []int{6 << 20, 4<<20 - 1, 1, 1} {
			x, err := tensor.Make(g.Stream(0), memory.Uint8, n)
			require.NoError(t, err)
			defer x.Close()
			raw, err := tensor.Slice[uint8](x)
			require.NoError(t, err)
			require.NoError(t, raw.Zero(g.Stream(0)))
			xs = append(xs, x)
		}
		ys, err := comm.BroadcastCoalesced(g, xs, nil)
		require.NoError(t, err)
		require.Same(t, ys[1][0].Buffer(), ys[1][2].Buffer(), "10 MiB together")
		require.NotSame(t, ys[1][0].Buffer(), ys[1][3].Buffer())
		require.Equal(t, 6<<20+4<<20-1, ys[1][2].Offset())
		for _, list := range ys {
			closing(t, list...)
		}
		zs, err := comm.ReduceAddCoalesced(g, [][]tensor.Tensor{xs}, nil)
		require.NoError(t, err)
		require.Same(t, zs[0].Buffer(), zs[2].Buffer())
		require.Equal(t, xs[3].Ptr(), zs[3].Ptr(), "one tensor of one list is its own sum")
		closing(t, zs...)
	})
}

// The strides of memory formats stay (torch's test_memory_format_scatter_gather).
func TestMemoryFormat(t *testing.T) { bothWays(t, memoryFormat) }

func memoryFormat(t *testing.T, _ bool) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		r := rand.New(rand.NewPCG(4, 4))
		x := sampleOf(t, g, r, 0, memory.Float32, []int{10, 4, 4, 3}, false)
		last, err := x.x.Permute(0, 3, 1, 2)
		require.NoError(t, err)
		ys, err := comm.Scatter(g, last, nil)
		require.NoError(t, err)
		for _, y := range ys {
			require.True(t, y.ChannelsLast())
		}
		for _, cfg := range []*comm.GatherConfig{nil, {Destination: devs[1]}, {Host: true}} {
			z, err := comm.Gather(g, ys, cfg)
			require.NoError(t, err)
			require.Equal(t, last.Strides(), z.Strides())
			back, err := z.Permute(0, 2, 3, 1)
			require.NoError(t, err)
			x.holds(t, g, nil, back)
			closing(t, z)
		}
		plain := sampleOf(t, g, r, 1, memory.Float32, []int{1, 3, 4, 4}, false)
		z, err := comm.Gather(g, append(ys, plain.x), nil)
		require.NoError(t, err)
		require.True(t, z.Contiguous(), "not all are channels-last")
		closing(t, append(ys, z)...)
	})
}

// The functions can be captured, and each launch reads anew (but not from or to
// pageable memory).
func TestTorchInGraph(t *testing.T) { bothWays(t, torchInGraph) }

func torchInGraph(t *testing.T, _ bool) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		ctx := testgpu.Context(t)
		pin, err := memory.MakePinned[float32](devs[0], 8)
		require.NoError(t, err)
		defer pin.Close()
		in, err := tensor.OfPinned(pin, 2, 4)
		require.NoError(t, err)
		var results []tensor.Tensor
		work := func() error {
			parts, err := comm.Scatter(g, in, nil)
			if err != nil {
				return err
			}
			whole, err := comm.Gather(g, parts, &comm.GatherConfig{Destination: devs[1]})
			if err != nil {
				return err
			}
			copies, err := comm.Broadcast(g, whole, nil)
			if err != nil {
				return err
			}
			sum, err := comm.ReduceAdd(g, copies, nil)
			if err != nil {
				return err
			}
			inOrder, err := comm.ReduceAdd(g, append(copies, sum), &comm.ReduceAddConfig{Deterministic: true})
			if err != nil {
				return err
			}
			lists, err := comm.BroadcastCoalesced(g, []tensor.Tensor{sum, inOrder}, nil)
			if err != nil {
				return err
			}
			sums, err := comm.ReduceAddCoalesced(g, lists, nil)
			results = append(append(parts, whole, sum, inOrder), copies...)
			for _, l := range lists {
				results = append(results, l...)
			}
			results = append(results, sums...)
			return err
		}
		require.NoError(t, work()) // NCCL connects, kernels are compiled
		require.NoError(t, g.Wait(ctx))
		closing(t, results...)
		exec, err := graph.Capture(g.Streams(), work, nil)
		require.NoError(t, err)
		defer exec.Close()
		defer func() { closing(t, results...) }()
		out := results[len(results)-2:]
		for round := range 3 {
			for i := range pin.Data() {
				pin.Data()[i] = float32(i + round)
			}
			require.NoError(t, exec.Launch(g.Stream(0)))
			for k, times := range []float32{4, 8} { // 2x and 4x, each on two devices
				host, err := tensor.MakeHost(memory.Float32, 2, 4)
				require.NoError(t, err)
				require.NoError(t, tensor.Copy(g.Stream(0), host, out[k]))
				got, err := tensor.Data[float32](host)
				require.NoError(t, err)
				for i := range got {
					require.Equal(t, times*float32(i+round), got[i], "round %d, sum %d", round, k)
				}
			}
		}
		_, err = graph.Capture(g.Streams(), func() error {
			_, err := comm.Gather(g, results[:2], &comm.GatherConfig{Host: true})
			return err
		}, nil)
		var refused *device.CaptureError
		require.ErrorAs(t, err, &refused)
	})
}

// The copies wait for what the group's streams have to do, and what comes after them
// waits for the copies.
func TestTorchIsInTheOrderOfTheStreams(t *testing.T) { bothWays(t, torchIsInTheOrderOfTheStreams) }

func torchIsInTheOrderOfTheStreams(t *testing.T, _ bool) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		other, late := newStream(t, devs[1]), streamtest.NewSpinner(t, devs[0])
		for _, strided := range []bool{false, true} {
			r := rand.New(rand.NewPCG(6, 6))
			was, is := sampleOf(t, g, r, 0, memory.Int32, []int{64, 64}, strided), sampleOf(t, g, r, 0, memory.Int32, []int{64, 64}, false)
			late.On(g.Stream(0), 5*time.Millisecond)
			require.NoError(t, tensor.Copy(g.Stream(0), was.x, is.x)) // late
			ys, err := comm.Scatter(g, was.x, &comm.ScatterConfig{ChunkSizes: []int{0, 64}, Streams: []*stream.Stream{nil, other}})
			require.NoError(t, err)
			zero := onDevice(t, g.Stream(0), memory.Int32, []int{64, 64}, make([]byte, 4*64*64))
			require.NoError(t, tensor.Copy(g.Stream(0), was.x, zero)) // not too early
			is.holds(t, g, other, ys[1])
			closing(t, ys...)
			require.NoError(t, g.Stream(1).WaitStream(other))
		}
	})
}

// NCCL adds only types that it rounds as torch does, and no little.
func TestReduceAddByNCCL(t *testing.T) {
	for _, most := range []int{-1, 15, 16} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			comm.SetDirectBytes(t, most)
			reduceAddByNCCL(t, most)
		})
	}
}

func reduceAddByNCCL(t *testing.T, most int) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	for d, byNCCL := range map[memory.DType]bool{
		memory.Float32: true, memory.BFloat16: true, memory.Int64: true,
		memory.Int16: false, memory.Uint16: false, memory.Float8E4M3: false, memory.Float8E5M2: false,
	} {
		before := g.Communicator(0).Progress().Issued.Record
		var xs []tensor.Tensor
		for i := range 2 {
			xs = append(xs, onDevice(t, g.Stream(i), d, []int{4}, make([]byte, 4*d.Size())))
		}
		sum, err := comm.ReduceAdd(g, xs, nil)
		require.NoError(t, err)
		require.NoError(t, sum.Close())
		byNCCL = byNCCL && 4*d.Size() > most
		require.Equal(t, byNCCL, g.Communicator(0).Progress().Issued.Record > before, d)
	}
}

// An output of a broadcast may be closed right after the call. Its memory is freed stream-ordered, on a stream of its owner's.
func TestBroadcastKeepsItsOutputs(t *testing.T) { bothWays(t, broadcastKeepsItsOutputs) }

func broadcastKeepsItsOutputs(t *testing.T, _ bool) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	g := local(t, devs)
	x := zeros(t, g.Stream(0), 1000)
	for range 20 {
		var out []tensor.Tensor
		var streams []*stream.Stream
		for i := 1; i < 3; i++ {
			s := newStream(t, devs[i])
			out, streams = append(out, zeros(t, s, 1000)), append(streams, s)
			require.NoError(t, g.Stream(i).WaitStream(s))
		}
		ys, err := comm.Broadcast(g, x, &comm.BroadcastConfig{Out: out})
		require.NoError(t, err)
		closing(t, append(ys, out...)...)
		for _, s := range streams {
			closing(t, zeros(t, s, 1000)) // in the same memory, if that is free
		}
	}
	require.NoError(t, g.Wait(testgpu.Context(t)))
	closing(t, x)
}
