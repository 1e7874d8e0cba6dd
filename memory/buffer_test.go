package memory_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

func pointerError(t testing.TB, err error) *memory.PointerError {
	t.Helper()
	e, ok := errors.AsType[*memory.PointerError](err)
	require.True(t, ok, "%v", err)
	return e
}

// A wrong address is an error that names the block it lies in and, where that was
// recorded, the lines of the program that allocated and freed it.
func TestPointerErrors(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				s := newStream(t, d)
				require.NoError(t, memory.RecordHistory(d, &memory.HistoryConfig{Entries: 1000, Stacks: true}))
				first, err := memory.AllocRaw(s, 100)
				require.NoError(t, err)
				p, err := memory.AllocRaw(s, 5000)
				require.NoError(t, err)
				behind, err := memory.AllocRaw(s, 100)
				require.NoError(t, err)

				for _, at := range []uint64{1, 512, 5000} {
					e := pointerError(t, memory.FreeRaw(d, p+at))
					require.Equal(t, []uint64{p + at, p, 5120}, []uint64{e.Address, e.Block, e.Size})
					require.ErrorContains(t, e, fmt.Sprintf("%#x lies in the block of 5120 bytes at %#x and is not its beginning", p+at, p))
					require.Contains(t, e.Error(), "it was allocated at ")
					require.Contains(t, e.Allocated.String(), "buffer_test.go:")
				}
				require.NoError(t, memory.FreeRaw(d, p), "what is wrong changes nothing")

				e := pointerError(t, memory.FreeRaw(d, p))
				require.Equal(t, p, e.Block)
				require.ErrorContains(t, e, "was freed before")
				require.Contains(t, e.Error(), "; it was allocated at ")
				require.Contains(t, e.Error(), "; it was freed at ")
				require.Contains(t, e.Freed.String(), "buffer_test.go:")
				require.NotEqual(t, e.Allocated.String(), e.Freed.String())

				require.NoError(t, memory.RecordHistory(d, nil))
				e = pointerError(t, memory.FreeRaw(d, p))
				require.NotContains(t, e.Error(), "; it was")
				for _, foreign := range []uint64{1, 1 << 47, math.MaxUint64} {
					e = pointerError(t, memory.FreeRaw(d, foreign))
					require.Zero(t, e.Block)
					require.ErrorContains(t, e, "is not memory of this allocator")
					pointerError(t, memory.RecordStreamRaw(foreign, newStream(t, d)))
				}
				require.NoError(t, errors.Join(memory.FreeRaw(d, first), memory.FreeRaw(d, behind)))
				require.NoError(t, memory.EmptyCache(d))
				require.ErrorContains(t, memory.FreeRaw(d, p), "went back to the driver")
				require.Zero(t, statsOf(t, d).Allocation.All.Current)
			})
		})
	}
}

// An address of one device is nothing to another.
func TestFreeOnTheWrongDevice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		a, b := devs[0], devs[1]
		s := newStream(t, a)
		p, err := memory.AllocRaw(s, 100)
		require.NoError(t, err)
		pointerError(t, memory.FreeRaw(b, p))
		require.NoError(t, memory.FreeRaw(a, p))
		require.ErrorContains(t, memory.FreeRaw(nil, p), "no device given")
	})
}

// A buffer whose memory was freed behind its back says so.
func TestBufferFreedRaw(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		x, err := memory.Make[int32](s, 100)
		require.NoError(t, err)
		require.NoError(t, memory.FreeRaw(d, x.Ptr()))
		require.ErrorContains(t, pointerError(t, x.Close()), "was freed before")
		require.NoError(t, x.Close())
	})
}

// Sizes that no device has are refused before anything is asked.
func TestAbsurdSizes(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		for _, n := range []int{-1, math.MinInt} {
			_, err := memory.AllocRaw(s, n)
			require.ErrorContains(t, err, fmt.Sprintf("allocate %d bytes on %s: the size is negative", n, d))
		}
		for _, n := range []int{1 << 60, math.MaxInt} {
			_, err := memory.AllocRaw(s, n)
			require.ErrorIs(t, err, device.ErrorOutOfMemory)
			require.ErrorContains(t, err, "more than any device has: check the size")
		}
		_, err := memory.AllocRaw(s, 800000000<<30)
		require.ErrorContains(t, err, "tried to allocate 800000000.00 GiB", "torch's test_out_of_memory")
		require.Zero(t, statsOf(t, d).ReservedBytes.All.Current)
	})
}

// Stacks name the program's own lines, innermost first.
func TestStackString(t *testing.T) {
	s := memory.Stack{
		{Name: "github.com/gochorus/chorus/memory.AllocRaw", Filename: "/chorus/memory/raw.go", Line: 1},
		{Name: "main.a", Filename: "/a.go", Line: 2}, {Name: "main.b", Filename: "/b.go", Line: 3},
		{Name: "main.c", Filename: "/c.go", Line: 4}, {Name: "main.d", Filename: "/d.go", Line: 5},
	}
	require.Equal(t, "/a.go:2, from /b.go:3, from /c.go:4", s.String())
	require.Empty(t, strings.TrimSpace(memory.Stack(nil).String()))
}
