package memory_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// grown returns what an allocation adds to the statistics.
func grown(t *testing.T, d *device.Device, fn func()) (allocated, reserved, segments int64) {
	t.Helper()
	a := statsOf(t, d)
	fn()
	b := statsOf(t, d)
	return b.AllocatedBytes.All.Current - a.AllocatedBytes.All.Current, b.ReservedBytes.All.Current - a.ReservedBytes.All.Current,
		b.Segment.All.Current - a.Segment.All.Current
}

// The sizes of blocks and segments are torch's (test_allocator_settings and
// test_graph_memory_stats_and_use_result_after_destroy_graph).
func TestSizesAreTorchs(t *testing.T) {
	for _, c := range []struct {
		conf               string
		bytes, block, segs int64
	}{
		{"", 1, 512, 2 * mib},
		{"", 512, 512, 2 * mib},
		{"", 513, 1024, 2 * mib},
		{"", mib, mib, 2 * mib},
		{"", mib + 1, mib + 512, 20 * mib},
		{"", 10*mib - 512, 10*mib - 512, 20 * mib},
		{"", 10 * mib, 10 * mib, 10 * mib},
		{"", 10*mib + 512, 10*mib + 512, 12 * mib},
		{"", 84 * mib, 84 * mib, 84 * mib},
		{"", 400 * mib, 400 * mib, 400 * mib},
		{"roundup_power2_divisions:4", 84 * mib, 96 * mib, 96 * mib},
		{"roundup_power2_divisions:8", 84 * mib, 88 * mib, 88 * mib},
		{"roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]", 84 * mib, 88 * mib, 88 * mib},
		{"roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:4,>:1]", 400 * mib, 512 * mib, 512 * mib},
		{"roundup_power2_divisions:[1:2,>:1]", 3*mib + 1, 3*mib + 512, 20 * mib},
		{"large_segment_size_mb:64", 2 * mib, 2 * mib, 64 * mib},
	} {
		t.Run(fmt.Sprintf("%s/%d", c.conf, c.bytes), func(t *testing.T) {
			eachFresh(t, c.conf, func(t *testing.T, d *device.Device) {
				s := newStream(t, d)
				var x *memory.Buffer
				allocated, reserved, segments := grown(t, d, func() {
					var err error
					x, err = memory.Alloc(s, int(c.bytes))
					require.NoError(t, err)
				})
				require.EqualValues(t, 1, segments)
				require.Equal(t, c.segs, reserved)
				require.Equal(t, c.block, allocated)
				require.NoError(t, x.Close())
			})
		})
	}
}

// The memory of a graph is torch's to the byte, and what is in use stays when the
// graph is gone (test_graph_memory_stats_and_use_result_after_destroy_graph).
func TestGraphMemoryIsTorchs(t *testing.T) {
	for _, c := range []struct {
		floats                 int
		segments, bytes, after int64
	}{
		{128, 1, 2 * mib, 2 * mib},
		{262144, 2, 4 * mib, 2 * mib},
		{262272, 1, 20 * mib, 20 * mib},
		{2621312, 2, 40 * mib, 20 * mib},
		{2621568, 3, 36 * mib, 12 * mib},
	} {
		t.Run(fmt.Sprint(c.floats), func(t *testing.T) {
			eachFresh(t, "", func(t *testing.T, d *device.Device) {
				s := newStream(t, d)
				in := random(c.floats)
				a, err := memory.MakeFrom(s, in)
				require.NoError(t, err)
				defer a.Close()
				var g *graph.Exec
				var b memory.Slice[float32]
				_, reserved, segments := grown(t, d, func() {
					g, err = graph.Capture([]*stream.Stream{s}, func() (err error) {
						if b, err = memory.Make[float32](s, c.floats); err != nil {
							return err
						}
						err = memory.Copy(s, b, a)
						for range 5 { // as b = b.clone() + 1
							x, e1 := memory.Make[float32](s, c.floats)
							y, e2 := memory.Make[float32](s, c.floats)
							err = errors.Join(err, e1, e2, memory.Copy(s, x, b), memory.Copy(s, y, x), b.Close(), x.Close())
							b = y
						}
						return err
					}, nil)
					require.NoError(t, err)
				})
				require.Equal(t, c.segments, segments)
				require.Equal(t, c.bytes, reserved)
				require.NoError(t, memory.EmptyCache(d))
				_, reserved, _ = grown(t, d, func() { require.NoError(t, memory.EmptyCache(d)) })
				require.Zero(t, reserved, "the graph has its memory for the next launch")
				out := make([]float32, c.floats)
				for range 2 {
					require.NoError(t, g.Launch(s))
					require.NoError(t, b.CopyTo(s, out))
					same(t, in, out)
				}
				_, reserved, segments = grown(t, d, func() {
					require.NoError(t, g.Close())
					require.NoError(t, memory.EmptyCache(d))
				})
				require.Equal(t, 1-c.segments, segments)
				require.Equal(t, c.after-c.bytes, reserved)
				require.NoError(t, b.CopyTo(s, out))
				same(t, in, out, "the result outlives the graph")
				_, reserved, _ = grown(t, d, func() { require.NoError(t, b.Close()) })
				require.Equal(t, -c.after, reserved)
			})
		})
	}
}

// torch's test_allocator_fuzz: what is in a block stays, whatever is allocated,
// freed and given back around it.
func TestContentsStay(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True", "max_split_size_mb:21"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				s := newStream(t, d)
				rnd := rand.New(rand.NewPCG(20, 26))
				type piece struct {
					x    memory.Slice[int32]
					mark int32
				}
				var list []piece
				out := make([]int32, 1)
				take := func(i int) {
					p := list[i]
					for _, at := range []int{0, p.x.Len() - 1} {
						require.NoError(t, p.x.Slice(at, at+1).CopyTo(s, out))
						require.Equal(t, p.mark, out[0])
					}
					require.NoError(t, p.x.Close())
					list[i] = list[len(list)-1]
					list = list[:len(list)-1]
				}
				for i := range 1500 {
					switch {
					case rnd.IntN(100) == 0:
						require.NoError(t, memory.EmptyCache(d))
					case len(list) > 0 && rnd.IntN(100) < 45:
						take(rnd.IntN(len(list)))
					default:
						n := 1 + rnd.IntN(1<<(rnd.IntN(23)))
						x, err := memory.Make[int32](s, n)
						require.NoError(t, err)
						for _, at := range []int{0, n - 1} {
							require.NoError(t, x.Slice(at, at+1).CopyFrom(s, []int32{int32(i)}))
						}
						list = append(list, piece{x, int32(i)})
					}
				}
				for len(list) > 0 {
					take(0)
				}
			})
		})
	}
}
