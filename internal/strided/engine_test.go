package strided_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// calls counts the calls of the driver that fn makes; nil on CUDA.
func calls(d *device.Device, fn func()) map[string]int {
	m := gpu.DeviceOf(d).System().Machine
	if m == nil {
		fn()
		return nil
	}
	stop := m.CountCalls()
	fn()
	return stop()
}

// Rows of another device's tensor that become one run are a copy engine's, on a stream of
// either device, and all arrives whoever copies.
func TestRowsByEngine(t *testing.T) {
	eachPair(t, func(t *testing.T, s, o *stream.Stream) {
		strided.SetEngineBytes(t, 64, 1024)
		r := random(t)
		reach, err := mem.Reach(s.Device(), o.Device())
		require.NoError(t, err)
		for _, c := range []struct {
			name     string
			rows, n  int // elements of a row
			of       int // the row that it is part of
			to       int // the row in the destination
			of1, to1 int // how many come before it
			engine   bool
		}{
			{"long rows", 16, 64, 200, 64, 0, 0, true},
			{"anywhere", 64, 16, 17, 16, 1, 0, true},
			{"short rows", 80, 15, 17, 15, 0, 0, false},
			{"few", 15, 16, 17, 16, 0, 0, false},
			{"strided to strided", 16, 64, 200, 65, 3, 1, false},
			{"dense to strided", 16, 64, 64, 200, 0, 9, false},
			{"one run", 16, 64, 64, 64, 0, 0, false},
		} {
			t.Run(c.name, func(t *testing.T) {
				for _, by := range []*stream.Stream{s, o} {
					in, gap := make([]int32, c.rows*c.of), make([]int32, c.rows*c.to+8)
					for i := range in {
						in[i] = r.Int32()
					}
					for i := range gap {
						gap[i] = r.Int32()
					}
					x, err := memory.MakeFrom(s, in)
					require.NoError(t, err)
					y, err := memory.MakeFrom(o, gap)
					require.NoError(t, err)
					src, err := tensor.Of(x, c.rows, c.of)
					require.NoError(t, err)
					src, err = src.Narrow(1, c.of1, c.n)
					require.NoError(t, err)
					dst, err := tensor.Of(y.Slice(4, 4+c.rows*c.to), c.rows, c.to)
					require.NoError(t, err)
					dst, err = dst.Narrow(1, c.to1, c.n)
					require.NoError(t, err)
					require.Equal(t, c.engine || c.name == "one run", strided.ByEngine(dst, src))

					require.NoError(t, s.WaitStream(o))
					require.NoError(t, o.WaitStream(s))
					got := calls(s.Device(), func() { require.NoError(t, tensor.Copy(by, dst, src)) })
					require.NoError(t, s.WaitStream(o))
					require.NoError(t, o.WaitStream(s))
					if got != nil {
						require.Equal(t, c.engine && reach, got["cuMemcpy2DAsync"] == 1, "%v", got)
						require.Equal(t, c.engine && reach || c.name == "one run", got["cuLaunchKernel"] == 0, "%v", got)
					}
					for i := range c.rows {
						copy(gap[4+i*c.to+c.to1:][:c.n], in[i*c.of+c.of1:][:c.n])
					}
					out, kept := make([]int32, len(gap)), make([]int32, len(in))
					require.NoError(t, y.CopyTo(o, out))
					require.NoError(t, x.CopyTo(s, kept))
					require.Equal(t, gap, out)
					require.Equal(t, in, kept)
					require.NoError(t, x.Close())
					require.NoError(t, y.Close())
				}
			})
		}
	})
}

// Rows that share memory, or are one row again and again, are no rows of an engine's.
func TestRowsThatAreNone(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		strided.SetEngineBytes(t, 64, 1024)
		s, o := newStream(t, devs[0]), newStream(t, devs[1])
		in := make([]int32, 64)
		for i := range in {
			in[i] = int32(i * i)
		}
		x, err := memory.MakeFrom(s, in)
		require.NoError(t, err)
		defer x.Close()
		one, err := tensor.Of(x, 1, 64)
		require.NoError(t, err)
		many, err := one.Expand(32, 64)
		require.NoError(t, err)
		to := allocate(t, o, memory.Int32, []int{32, 64})
		require.False(t, strided.ByEngine(to, many))
		require.NoError(t, o.WaitStream(s))
		require.NoError(t, tensor.Copy(o, to, many))
		require.NoError(t, s.WaitStream(o))
		out := make([]int32, 32*64)
		flat, err := tensor.Slice[int32](to)
		require.NoError(t, err)
		require.NoError(t, flat.CopyTo(o, out))
		for i, v := range out {
			require.Equal(t, in[i%64], v)
		}
		half := allocate(t, o, memory.Float16, []int{32, 64})
		require.False(t, strided.ByEngine(half, to), "another type")
	})
}
