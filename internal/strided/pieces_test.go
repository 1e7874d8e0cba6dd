package strided_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// eachPair runs fn where two devices reach each other, and where they do not.
func eachPair(t *testing.T, fn func(t *testing.T, a, b *stream.Stream)) {
	run := func(t *testing.T, devs []*device.Device) { fn(t, newStream(t, devs[0]), newStream(t, devs[1])) }
	testgpu.Each(t, 2, run)
	t.Run("no peers", func(t *testing.T) {
		t.Setenv(env.P2P.Name, "off")
		run(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	})
}

func random(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Log("seed", seed)
	return rand.New(rand.NewPCG(seed, 5))
}

// Copies within a device, to and from another one, of runs, rows and anything, more than
// a launch takes.
func TestCopyAllAcross(t *testing.T) {
	eachPair(t, func(t *testing.T, s, o *stream.Stream) {
		r := random(t)
		for round, all := range []func(*stream.Stream, []tensor.Tensor, []tensor.Tensor) error{tensor.CopyAll, strided.CopyByKernel[tensor.Tensor]} {
			for _, n := range []int{1, 3, 260} {
				var dst, src []tensor.Tensor
				var to, from []*field
				on := []*stream.Stream{s, o}
				for range n {
					d := []memory.DType{memory.Int8, memory.Float16, memory.Float32, memory.Float64}[r.IntN(4)]
					shape := [][]int{{r.IntN(9)}, {1 + r.IntN(4), 8}, {2, 1 + r.IntN(3), 4}}[r.IntN(3)]
					i, j := 0, r.IntN(2)
					if r.IntN(2) == 0 {
						i, j = j, i
					}
					a, b := fieldOf(t, r, on[i], d, shape), fieldOf(t, r, on[j], d, shape)
					to, from = append(to, a), append(from, b)
					dst, src = append(dst, a.view), append(src, b.view)
				}
				require.NoError(t, s.WaitStream(o))
				require.NoError(t, all(s, dst, src))
				require.NoError(t, o.WaitStream(s))
				for i := range to {
					place := s
					if dst[i].Device() == o.Device() {
						place = o
					}
					require.Equal(t, want(to[i], from[i]), to[i].get(t, place), "round %d: %v to %v", round, src[i], dst[i])
				}
			}
		}
	})
}

// Rows and runs that are large have launches of their own width; all arrive.
func TestCopyLargeRows(t *testing.T) {
	eachPair(t, func(t *testing.T, s, o *stream.Stream) {
		r := random(t)
		const rows, columns = 300, 641
		in := make([]uint8, rows*columns)
		for i := range in {
			in[i] = uint8(r.Uint32())
		}
		x, err := memory.MakeFrom(s, in)
		require.NoError(t, err)
		defer x.Close()
		whole, err := tensor.Of(x, rows, columns)
		require.NoError(t, err)
		sizes := []int{128, 256, 255, 2} // whose widths differ, as does that of a row of the whole
		parts, err := whole.SplitSizes(sizes, 1)
		require.NoError(t, err)
		var to []tensor.Tensor
		for _, n := range sizes {
			to = append(to, allocate(t, o, memory.Uint8, []int{rows, n}))
		}
		require.NoError(t, s.WaitStream(o))
		require.NoError(t, tensor.CopyAll(s, to, parts))
		require.NoError(t, o.WaitStream(s))
		at := 0
		for i, n := range sizes {
			out := make([]uint8, rows*n)
			require.NoError(t, raw(t, to[i]).CopyTo(o, out))
			for row := range rows {
				require.Equal(t, in[row*columns+at:][:n], out[row*n:][:n], "part %d, row %d", i, row)
			}
			at += n
			require.Equal(t, n, strided.RowBytes(to[i], parts[i]))
		}
		require.Equal(t, rows*sizes[0], strided.RowBytes(to[0], to[0]))
		turned := allocate(t, s, memory.Uint8, []int{5, 4, 3})
		back, err := turned.Permute(2, 1, 0)
		require.NoError(t, err)
		require.Zero(t, strided.RowBytes(allocate(t, s, memory.Uint8, []int{3, 4, 5}), back), "no rows")
		require.NoError(t, s.WaitStream(o))
	})
}

// Flatten puts tensors one after the other, to several places.
func TestFlatten(t *testing.T) {
	testhost.Serial(t)
	eachPair(t, func(t *testing.T, s, o *stream.Stream) {
		r := random(t)
		for _, n := range []int{0, 1, 5, 600} {
			for _, ways := range []int{1, 3, 19} {
				for _, gaps := range []bool{false, true} {
					d := []memory.DType{memory.Int8, memory.BFloat16, memory.Float32, memory.Int64}[r.IntN(4)]
					var from []tensor.Tensor
					want := []byte{}
					for range n {
						shape := []int{1 + r.IntN(3), r.IntN(4) * 4}
						if gaps && r.IntN(3) == 0 {
							f := fieldOf(t, r, s, d, shape)
							each(f.view, f.view, func(i, _ int) { want = append(want, f.bytes[i*d.Size():][:d.Size()]...) })
							from = append(from, f.view)
							continue
						}
						at := r.IntN(2) // which may be aligned for one element only
						x, err := allocate(t, s, d, []int{shape[0]*shape[1] + 1}).Narrow(0, at, shape[0]*shape[1])
						require.NoError(t, err)
						b := noise(r, x.Bytes())
						require.NoError(t, raw(t, x).CopyFrom(s, b))
						from, want = append(from, x), append(want, b...)
					}
					var to []tensor.Tensor
					var on []*stream.Stream
					for i := range ways {
						on = append(on, []*stream.Stream{s, o}[i%2])
						to = append(to, allocate(t, on[i], d, []int{len(want) / d.Size()}))
					}
					require.NoError(t, s.WaitStream(o))
					require.NoError(t, strided.Flatten(s, to, from))
					require.NoError(t, o.WaitStream(s))
					for i := range to {
						got := make([]byte, len(want))
						require.NoError(t, raw(t, to[i]).CopyTo(on[i], got))
						require.Equal(t, want, got, "%d tensors, place %d of %d", n, i, ways)
					}
				}
			}
		}
		x, y := allocate(t, s, memory.Int8, []int{2}), allocate(t, s, memory.Int16, []int{2})
		require.ErrorContains(t, strided.Flatten(s, []tensor.Tensor{x}, []tensor.Tensor{x, y}), "want one type")
		require.ErrorContains(t, strided.Flatten(s, []tensor.Tensor{x}, []tensor.Tensor{y}), "want as many, of one dimension without gaps and of the same type")
		require.ErrorContains(t, strided.Flatten(s, []tensor.Tensor{y}, []tensor.Tensor{y, y}), "4 elements to int16 [2]")
	})
}

// A graph repeats the kernels for many tensors.
func TestTablesInGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, r := newStream(t, devs[0]), random(t)
		of := func(n int) tensor.Tensor { return allocate(t, s, memory.Uint8, []int{n}) }
		lists := [][]tensor.Tensor{{of(3), of(40)}, {of(3), of(40)}}
		sum, flat := of(43), of(43)
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			return errors.Join(strided.AddAll(s, sum, lists), strided.Flatten(s, []tensor.Tensor{flat}, lists[1]))
		}, nil)
		require.NoError(t, err)
		defer g.Close()
		for range 2 {
			a, b := noise(r, 43), noise(r, 43)
			for i, in := range [][]byte{a, b} {
				require.NoError(t, raw(t, lists[i][0]).CopyFrom(s, in[:3]))
				require.NoError(t, raw(t, lists[i][1]).CopyFrom(s, in[3:]))
			}
			require.NoError(t, g.Launch(s))
			for i := range a {
				a[i] += b[i]
			}
			got := make([]byte, 43)
			require.NoError(t, raw(t, sum).CopyTo(s, got))
			require.Equal(t, a, got)
			require.NoError(t, raw(t, flat).CopyTo(s, got))
			require.Equal(t, b, got)
		}
	})
}

func noise(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// The sums are those of adding one list after the other with rounding to the type.
func TestAddAll(t *testing.T) {
	eachPair(t, func(t *testing.T, s, o *stream.Stream) {
		r := random(t)
		reach, err := inside.Reach(s.Device(), o.Device())
		require.NoError(t, err)
		turns := testgpu.TurnsRaced(t, 3)
		for i, d := range allTypes {
			for k, c := range []struct{ lists, n, each int }{{1, 3, 7}, {2, 1, 64}, {3, 150, 5}, {8, 70, 16}, {9, 3, 300}, {2, 0, 0}} {
				if !turns(i, k%3) {
					continue
				}
				t.Run(fmt.Sprint(d, c), func(t *testing.T) {
					var lists [][]tensor.Tensor
					want := []byte{}
					for i := range c.lists {
						var list []tensor.Tensor
						all := []byte{}
						on := []*stream.Stream{s, o}[r.IntN(2)]
						for k := range c.n {
							x := allocate(t, on, d, []int{c.each + k%3*16})
							b := terms(r, d, x.Len())
							require.NoError(t, raw(t, x).CopyFrom(on, b))
							list, all = append(list, x), append(all, b...)
						}
						lists = append(lists, list)
						if i == 0 {
							want = all
							continue
						}
						for at := range len(all) / d.Size() {
							x, y := dtype.Of(d).Load(want, at), dtype.Of(d).Load(all, at)
							if dtype.Of(d).IsFloat() {
								dtype.Of(d).Store(want, at, dtype.FloatValue(x.Float64()+y.Float64()))
							} else {
								dtype.Of(d).Store(want, at, dtype.IntValue(x.Int64()+y.Int64()))
							}
						}
					}
					dst := allocate(t, s, d, []int{len(want) / d.Size()})
					require.NoError(t, s.WaitStream(o))
					near := !slices.ContainsFunc(lists, func(l []tensor.Tensor) bool { return len(l) > 0 && l[0].Device() != s.Device() })
					can, err := strided.CanAddAll(s, dst, lists)
					require.NoError(t, err)
					require.Equal(t, near || reach, can)
					if can {
						require.NoError(t, strided.AddAll(s, dst, lists))
						got := make([]byte, len(want))
						require.NoError(t, raw(t, dst).CopyTo(s, got))
						require.Equal(t, want, got)
					}
					require.NoError(t, o.WaitStream(s))
				})
			}
		}
	})
}

// terms are elements whose sums are rounded, where they can be.
func terms(r *rand.Rand, d memory.DType, n int) []byte {
	b := noise(r, n*d.Size())
	for i := range n {
		switch {
		case dtype.Of(d).IsFloat():
			dtype.Of(d).Store(b, i, dtype.FloatValue((r.Float64()-0.5)*float64(int(1)<<r.IntN(6))))
		case d == memory.Bool:
			b[i] &= 1
		}
	}
	return b
}

func TestWhatCannotBeAdded(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s := newStream(t, devs[0])
	of := func(d memory.DType, shape ...int) tensor.Tensor { return allocate(t, s, d, shape) }
	dst := of(memory.Float32, 6)
	gaps, err := of(memory.Float32, 6, 2).Select(1, 0)
	require.NoError(t, err)
	host := allocate(t, nil, memory.Float32, []int{6})
	for name, lists := range map[string][][]tensor.Tensor{
		"none":             nil,
		"another type":     {{of(memory.Float32, 6)}, {of(memory.Int32, 6)}},
		"gaps":             {{of(memory.Float32, 6)}, {gaps}},
		"of the host":      {{of(memory.Float32, 6)}, {host}},
		"too short":        {{of(memory.Float32, 5)}, {of(memory.Float32, 5)}},
		"other lengths":    {{of(memory.Float32, 4), of(memory.Float32, 2)}, {of(memory.Float32, 2), of(memory.Float32, 4)}},
		"fewer":            {{of(memory.Float32, 4), of(memory.Float32, 2)}, {of(memory.Float32, 4)}},
		"too many to list": slices.Repeat([][]tensor.Tensor{{of(memory.Float32, 6)}}, 251),
	} {
		can, err := strided.CanAddAll(s, dst, lists)
		require.NoError(t, err)
		require.False(t, can, name)
	}
	can, err := strided.CanAddAll(s, dst, slices.Repeat([][]tensor.Tensor{{of(memory.Float32, 2, 3)}}, 250))
	require.NoError(t, err)
	require.True(t, can)
	require.NoError(t, strided.AddAll(s, dst, slices.Repeat([][]tensor.Tensor{{of(memory.Float32, 2, 3)}}, 250)))
}

// Views of several tensors, each with a share of its own.
func TestUnflattenEach(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s := newStream(t, devs[0])
	make := func(d memory.DType, shape ...int) tensor.Tensor {
		x, err := tensor.Make(s, d, shape...)
		require.NoError(t, err)
		return x
	}
	like := []tensor.Tensor{allocate(t, s, memory.Int8, []int{2, 3}).T(), allocate(t, nil, memory.Int8, []int{4})}
	flats := []tensor.Tensor{make(memory.Int8, 10), make(memory.Int8, 10), make(memory.Int16, 10)}
	all, err := strided.UnflattenEach(flats, like)
	require.NoError(t, err)
	for i, views := range all {
		want, err := flats[i].Unflatten(like)
		require.NoError(t, err)
		require.Len(t, views, 2)
		require.NoError(t, flats[i].Close())
		for k, v := range views {
			require.Equal(t, want[k].Ptr(), v.Ptr())
			require.Equal(t, want[k].Shape(), v.Shape())
			require.Equal(t, want[k].Strides(), v.Strides())
			require.Equal(t, want[k].DType(), v.DType())
			require.NoError(t, strided.Check("test", v, devs[0]), "the memory is there until the last share")
			require.NoError(t, v.Close())
		}
		require.ErrorIs(t, strided.Check("test", views[0], nil), device.ErrClosed)
	}
	_, err = strided.UnflattenEach(flats[:1], []tensor.Tensor{like[1], like[1], like[1]})
	require.ErrorContains(t, err, "the first 3 have 12 elements")
	two := strided.RetainAll([]tensor.Tensor{like[0], like[1], {}})
	require.NoError(t, two[0].Close())
	require.NoError(t, strided.Check("test", like[0], nil))
}
