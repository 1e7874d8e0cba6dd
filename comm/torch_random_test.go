package comm_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// random runs fn many times on groups of 1 to 8 virtual devices, which reach each
// other or not, and on the GPUs that are there. Each time all memory must go back.
func random(t *testing.T, rounds int, fn func(t *testing.T, g *comm.Group, r *rand.Rand)) {
	t.Helper()
	run := func(t *testing.T, devs []*device.Device, rounds int) {
		r := seededPCG(t)(3)
		g := local(t, devs)
		for round := range rounds {
			t.Run(fmt.Sprint(round), func(t *testing.T) {
				balanced(t, devs)
				fn(t, g, r)
			})
		}
	}
	for _, n := range []int{1, 2, 3, 8} {
		t.Run(fmt.Sprint("virtual/", n), func(t *testing.T) {
			run(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}), rounds)
		})
	}
	t.Run("virtual, each copy by itself", func(t *testing.T) {
		comm.SetDirectBytes(t, -1)
		for _, n := range []int{2, 3} {
			run(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}), rounds)
		}
	})
	t.Run("virtual, no peers", func(t *testing.T) {
		t.Setenv(env.P2P.Name, "off")
		run(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), rounds)
	})
	for _, n := range []int{1, 2, 8} {
		t.Run(fmt.Sprint("cuda/", n), func(t *testing.T) { run(t, testgpu.CUDA(t, n), 4*rounds) })
		t.Run(fmt.Sprint("cuda, each copy by itself/", n), func(t *testing.T) {
			comm.SetDirectBytes(t, -1)
			run(t, testgpu.CUDA(t, n), 2*rounds)
		})
	}
}

// someDevices are devices of the group, some several times, or nil.
func someDevices(g *comm.Group, r *rand.Rand, n int) []*device.Device {
	if r.IntN(3) == 0 {
		return nil
	}
	devs := []*device.Device{}
	for range n {
		devs = append(devs, g.Device(r.IntN(g.Locals())))
	}
	return devs
}

func orAll(g *comm.Group, devs []*device.Device) []*device.Device {
	if devs == nil {
		for i := range g.Locals() {
			devs = append(devs, g.Device(i))
		}
	}
	return devs
}

func TestBroadcastRandom(t *testing.T) {
	random(t, 30, func(t *testing.T, g *comm.Group, r *rand.Rand) {
		src := sampleOf(t, g, r, r.IntN(g.Locals()+1)-1, pickType(r), shapeOf(r, r.IntN(4)), r.IntN(3) == 0)
		if r.IntN(3) == 0 {
			var out []tensor.Tensor
			for range r.IntN(5) {
				d := src.dtype
				if r.IntN(2) == 0 {
					d = pickType(r)
				}
				out = append(out, sampleOf(t, g, r, r.IntN(g.Locals()), d, src.shape, r.IntN(2) == 0).x)
			}
			if out == nil {
				out = []tensor.Tensor{}
			}
			ys, err := comm.Broadcast(g, src.x, &comm.BroadcastConfig{Out: out})
			require.NoError(t, err)
			require.Len(t, ys, len(out))
			for i, y := range ys {
				require.Equal(t, out[i].Ptr(), y.Ptr())
				src.as(y.DType()).holds(t, g, nil, y)
			}
			closing(t, ys...)
			return
		}
		devs := someDevices(g, r, r.IntN(6))
		ys, err := comm.Broadcast(g, src.x, &comm.BroadcastConfig{Devices: devs})
		require.NoError(t, err)
		devs = orAll(g, devs)
		require.Len(t, ys, len(devs))
		for i, y := range ys {
			require.Same(t, devs[i], y.Device())
			src.holds(t, g, nil, y)
			if devs[i] == src.x.Device() {
				require.Equal(t, src.x.Ptr(), y.Ptr())
				require.Equal(t, src.x.Strides(), y.Strides())
			} else {
				require.True(t, y.Contiguous())
			}
		}
		closing(t, ys...)
	})
}

func TestScatterRandom(t *testing.T) {
	random(t, 30, func(t *testing.T, g *comm.Group, r *rand.Rand) {
		shape := shapeOf(r, 1+r.IntN(3))
		dim := r.IntN(len(shape))
		cfg := &comm.ScatterConfig{Dim: dim - len(shape)*r.IntN(2), Devices: someDevices(g, r, 1+r.IntN(5))}
		devs := orAll(g, cfg.Devices)
		src := sampleOf(t, g, r, r.IntN(g.Locals()+1)-1, pickType(r), shape, r.IntN(3) == 0)
		var sizes []int
		form := r.IntN(3)
		switch form {
		case 0: // torch.chunk
			each := (shape[dim] + len(devs) - 1) / len(devs)
			for at := 0; at < shape[dim]; at += each {
				sizes = append(sizes, min(each, shape[dim]-at))
			}
			if shape[dim] == 0 {
				sizes = make([]int, len(devs))
			}
		default:
			left := shape[dim]
			for range len(devs) - 1 {
				sizes = append(sizes, r.IntN(left+1))
				left -= sizes[len(sizes)-1]
			}
			sizes = append(sizes, left)
			cfg.ChunkSizes = sizes
		}
		streams := make([]*stream.Stream, len(sizes))
		for i := range sizes {
			streams[i] = g.Stream(rankOf(g, devs[i]))
			if r.IntN(4) == 0 {
				streams[i] = newStream(t, devs[i])
				for len(cfg.Streams) < i {
					cfg.Streams = append(cfg.Streams, g.Stream(rankOf(g, devs[len(cfg.Streams)])))
				}
				cfg.Streams = append(cfg.Streams, streams[i])
			}
		}
		var last *stream.Stream // is current until the end of the call
		for i := range sizes {
			if form != 2 && devs[i] == src.x.Device() {
				continue
			}
			if i < len(cfg.Streams) {
				last = cfg.Streams[i]
			} else if last != nil && last.Device() == devs[i] {
				streams[i] = last
			}
		}
		if form == 2 {
			cfg.Devices, cfg.ChunkSizes = nil, nil
			for i, n := range sizes {
				part := src.along(dim, 0, 0)
				part.shape[dim] = n
				d := src.dtype
				if r.IntN(2) == 0 {
					d = pickType(r)
				}
				out := sampleOf(t, g, r, rankOf(g, devs[i]), d, part.shape, r.IntN(2) == 0)
				require.NoError(t, streams[i].WaitStream(g.Stream(rankOf(g, devs[i]))))
				cfg.Out = append(cfg.Out, out.x)
			}
		}
		ys, err := comm.Scatter(g, src.x, cfg)
		require.NoError(t, err)
		require.Len(t, ys, len(sizes))
		at := 0
		for i, y := range ys {
			require.Same(t, devs[i], y.Device())
			s := streams[i]
			alias := cfg.Out == nil && devs[i] == src.x.Device()
			if alias {
				s = nil
				part, err := src.x.Narrow(dim, at, sizes[i])
				require.NoError(t, err)
				require.Equal(t, part.Ptr(), y.Ptr())
				require.Equal(t, part.Strides(), y.Strides())
			}
			src.along(dim, at, sizes[i]).as(y.DType()).holds(t, g, s, y)
			at += sizes[i]
			if s != nil {
				require.NoError(t, g.Stream(rankOf(g, devs[i])).WaitStream(s))
			}
		}
		closing(t, ys...)
	})
}

func TestGatherRandom(t *testing.T) {
	random(t, 30, func(t *testing.T, g *comm.Group, r *rand.Rand) {
		shape := shapeOf(r, 1+r.IntN(4))
		dim := r.IntN(len(shape))
		cfg := &comm.GatherConfig{Dim: dim - len(shape)*r.IntN(2)}
		d := pickType(r)
		var parts []*sample
		var xs []tensor.Tensor
		total := 0
		for range 1 + r.IntN(5) {
			of := append([]int{}, shape...)
			of[dim] = r.IntN(5)
			total += of[dim]
			parts = append(parts, sampleOf(t, g, r, r.IntN(g.Locals()), d, of, r.IntN(3) == 0))
			xs = append(xs, parts[len(parts)-1].x)
			if r.IntN(4) == 0 {
				d = pickType(r)
			}
		}
		dtype, on := parts[0].dtype, r.IntN(g.Locals()+1)-1
		switch form := r.IntN(3); {
		case form == 0:
			of := append([]int{}, shape...)
			of[dim] = total
			dtype = pickType(r)
			out := sampleOf(t, g, r, on, dtype, of, r.IntN(2) == 0)
			cfg.Out = &out.x
		case on < 0:
			cfg.Host = true
		case on > 0 || form == 1:
			cfg.Destination = g.Device(on)
		}
		y, err := comm.Gather(g, xs, cfg)
		require.NoError(t, err)
		require.Equal(t, on < 0, y.IsHost())
		if on >= 0 {
			require.Same(t, g.Device(on), y.Device())
		}
		require.Equal(t, dtype, y.DType())
		require.Equal(t, total, y.Size(dim))
		at := 0
		for _, p := range parts {
			got, err := y.Narrow(dim, at, p.shape[dim])
			require.NoError(t, err)
			p.as(dtype).holds(t, g, nil, got)
			at += p.shape[dim]
		}
		if cfg.Out != nil {
			require.Equal(t, cfg.Out.Ptr(), y.Ptr())
		}
		closing(t, y)
	})
}

func TestReduceAddRandom(t *testing.T) {
	random(t, 30, func(t *testing.T, g *comm.Group, r *rand.Rand) {
		shape := shapeOf(r, r.IntN(4))
		d := pickType(r)
		var parts []*sample
		var xs []tensor.Tensor
		all := r.IntN(2) == 0 // one on each device, as NCCL wants
		n := 1 + r.IntN(5)
		if all {
			n = g.Locals()
		}
		for i := range n {
			if !all {
				i = r.IntN(g.Locals())
			}
			of := d
			if !all && r.IntN(4) == 0 {
				of = pickType(r)
			}
			parts = append(parts, sampleOf(t, g, r, i, of, shape, !all && r.IntN(3) == 0))
			xs = append(xs, parts[len(parts)-1].x)
		}
		cfg := &comm.ReduceAddConfig{Destination: xs[r.IntN(len(xs))].Device(), Deterministic: r.IntN(2) == 0}
		root := 0
		for i, x := range xs {
			if x.Device() == cfg.Destination {
				root = i
			}
		}
		want, fits, first := parts[root], true, true
		for i, p := range parts {
			if i == root || !fits {
				continue
			}
			wide, err := kernel.Promote(want.dtype, p.dtype)
			switch {
			case err != nil || !first && !kernel.CanCast(wide, want.dtype):
				fits = false
			case first:
				want, first = want.plus(wide, p), false
			default:
				want = want.plus(want.dtype, p)
			}
		}
		y, err := comm.ReduceAdd(g, xs, cfg)
		if !fits {
			require.ErrorIs(t, err, comm.ErrMismatch)
			return
		}
		require.NoError(t, err)
		require.Same(t, cfg.Destination, y.Device())
		if len(xs) == 1 {
			require.Equal(t, xs[0].Ptr(), y.Ptr())
		}
		want.holds(t, g, nil, y)
		for i, p := range parts {
			p.holds(t, g, nil, xs[i])
		}
		closing(t, y)
	})
}

func TestBroadcastCoalescedRandom(t *testing.T) {
	random(t, 12, func(t *testing.T, g *comm.Group, r *rand.Rand) {
		devs := someDevices(g, r, 1+r.IntN(4))
		first := rankOf(g, orAll(g, devs)[0])
		var parts []*sample
		var xs []tensor.Tensor
		for range r.IntN(12) {
			d := []memory.DType{memory.Float32, memory.Int64, memory.Bool}[r.IntN(3)]
			parts = append(parts, sampleOf(t, g, r, first, d, shapeOf(r, r.IntN(4)), r.IntN(3) == 0))
			xs = append(xs, parts[len(parts)-1].x)
		}
		ys, err := comm.BroadcastCoalesced(g, xs, &comm.BroadcastCoalescedConfig{Devices: devs, BufferSize: r.IntN(400)})
		require.NoError(t, err)
		devs = orAll(g, devs)
		require.Len(t, ys, len(devs))
		for i, list := range ys {
			require.Len(t, list, len(xs))
			for k, y := range list {
				require.Same(t, devs[i], y.Device())
				parts[k].holds(t, g, nil, y)
				if i == 0 {
					require.Equal(t, xs[k].Ptr(), y.Ptr())
				} else {
					require.True(t, y.Contiguous())
				}
			}
		}
		// The buckets go back with the last of their tensors.
		for _, list := range ys {
			r.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
			closing(t, list...)
		}
	})
}

func TestReduceAddCoalescedRandom(t *testing.T) {
	random(t, 12, func(t *testing.T, g *comm.Group, r *rand.Rand) {
		lists := g.Locals()
		if r.IntN(3) == 0 {
			lists = 1 + r.IntN(3)
		}
		var shapes [][]int
		var types []memory.DType
		n := r.IntN(10)
		for range n {
			shapes, types = append(shapes, shapeOf(r, r.IntN(4))), append(types, []memory.DType{memory.Float32, memory.Int16, memory.Bool}[r.IntN(3)])
		}
		parts, xs := make([][]*sample, lists), make([][]tensor.Tensor, lists)
		for i := range lists {
			on := i % g.Locals()
			for k := range n {
				m := sampleOf(t, g, r, on, types[k], shapes[k], r.IntN(3) == 0)
				parts[i], xs[i] = append(parts[i], m), append(xs[i], m.x)
			}
		}
		xs[lists-1] = append(xs[lists-1], tensor.Tensor{})[:len(xs[lists-1])+r.IntN(2)*min(1, lists-1)] // cut off
		cfg := &comm.ReduceAddCoalescedConfig{BufferSize: r.IntN(400)}
		cfg.Destination = g.Device(r.IntN(min(lists, g.Locals())))
		ys, err := comm.ReduceAddCoalesced(g, xs, cfg)
		require.NoError(t, err)
		require.Len(t, ys, n)
		for k, y := range ys {
			want := parts[0][k]
			for i := 1; i < lists; i++ {
				want = want.plus(want.dtype, parts[i][k]) // whole numbers, in any order
			}
			require.Same(t, cfg.Destination, y.Device())
			require.True(t, y.Contiguous())
			want.holds(t, g, nil, y)
		}
		closing(t, ys...)
	})
}

var newStream = streamtest.NewStream
