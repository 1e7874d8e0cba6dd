package memory

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

func TestSegmentFor(t *testing.T) {
	for n, want := range map[uintptr]uintptr{
		1: 2 << 20, 1 << 20: 2 << 20, 1<<20 + 1: 20 << 20, 10<<20 - 1: 20 << 20,
		10 << 20: 10 << 20, 10<<20 + 1: 12 << 20, 21 << 20: 22 << 20,
	} {
		require.Equal(t, want, segmentFor(n), "%d bytes", n)
	}
}

// A poolModel says who may use each piece of a pool's memory.
type poolModel struct {
	t    *testing.T
	p    *Pool
	live map[*block]uintptr // what was asked for
	// freed says which stream gave a piece of 512 bytes back in this capture; nil
	// is a piece that several have used.
	freed map[cudadrv.DevicePtr]*stream.Stream
}

func (m *poolModel) pieces(b *block, fn func(cudadrv.DevicePtr)) {
	for at := uintptr(0); at < b.bytes; at += minBlock {
		fn(b.ptr + cudadrv.DevicePtr(at))
	}
}

func (m *poolModel) alloc(s *stream.Stream, n uintptr) {
	b, err := m.p.alloc(s, n)
	require.NoError(m.t, err)
	require.NotContains(m.t, m.live, b)
	require.GreaterOrEqual(m.t, b.bytes, n)
	m.live[b] = n
	m.pieces(b, func(at cudadrv.DevicePtr) {
		if by, ok := m.freed[at]; ok && by != s {
			m.t.Fatalf("%s gets what only %v may use", s, by)
		}
	})
}

func (m *poolModel) free(b *block, capturing, shared bool) {
	if by := b.stream; capturing {
		if shared {
			by = nil
		}
		m.pieces(b, func(at cudadrv.DevicePtr) { m.freed[at] = by })
	}
	delete(m.live, b)
	require.NoError(m.t, m.p.free(b, shared))
}

// check looks at all blocks: they lie side by side, none is free beside another
// that it should be one with, and those in use are the ones that were given out.
func (m *poolModel) check() {
	used := map[*block]bool{}
	for _, b := range m.p.deferred {
		used[b] = true
	}
	for b, n := range m.live {
		used[b] = true
		require.Equal(m.t, n <= smallMost, b.segment.small(), "%d bytes", n)
	}
	seen := 0
	for _, s := range m.p.segments {
		end := s.ptr
		var prev *block
		for b := s.first; b != nil; prev, b = b, b.next {
			require.True(m.t, b.prev == prev && b.ptr == end, "the blocks are a chain")
			require.Equal(m.t, used[b], b.used)
			require.False(m.t, b.joins(b.next), "two free blocks are side by side")
			require.True(m.t, s.small() || b.bytes > smallMost, "a piece of %d bytes that nobody takes", b.bytes)
			if b.used {
				seen++
			}
			end += cudadrv.DevicePtr(b.bytes)
		}
		require.Equal(m.t, s.ptr+cudadrv.DevicePtr(s.bytes), end)
	}
	require.Equal(m.t, len(used), seen)
}

// Captures and closings in any order leave a pool whole, and give no stream what
// another may use still.
func TestPoolStaysWhole(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	var streams []*stream.Stream
	for range 3 {
		s, err := stream.New(dev, nil)
		require.NoError(t, err)
		defer s.Close()
		streams = append(streams, s)
	}
	sizes := []uintptr{1, 512, 513, 4096, 300 << 10, 1 << 20, 1<<20 + 1, 3 << 20, 9 << 20, 10 << 20, 11 << 20}
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		m := &poolModel{t: t, p: PrivatePool(), live: map[*block]uintptr{}, freed: map[cudadrv.DevicePtr]*stream.Stream{}}
		m.p.Hold(nil)
		for capture := range 6 {
			capturing := capture%2 == 0
			if capturing {
				require.NoError(t, m.p.Begin("a graph"))
			}
			for range 60 {
				if capturing && rnd.IntN(2) == 0 && len(m.live) < 30 {
					m.alloc(streams[rnd.IntN(3)], sizes[rnd.IntN(len(sizes))])
				} else if len(m.live) > 0 {
					m.free(m.any(rnd), capturing, rnd.IntN(3) == 0)
				}
				m.check()
			}
			if capturing {
				m.p.End()
				clear(m.freed)
				require.Empty(t, m.p.deferred)
				m.check()
			}
			for _, s := range m.p.segments {
				for b := s.first; b != nil; b = b.next {
					require.True(t, b.used || b.stream == nil, "after a capture any stream may use what is free")
				}
			}
		}
		for b := range m.live {
			m.free(b, false, false)
		}
		m.p.LetGo(nil)
		require.Zero(t, m.p.Reserved())
	}
}

// any returns one of the live blocks; the choice is the same for the same seed.
func (m *poolModel) any(rnd *rand.Rand) *block {
	var all []*block
	for _, s := range m.p.segments {
		for b := s.first; b != nil; b = b.next {
			if _, ok := m.live[b]; ok {
				all = append(all, b)
			}
		}
	}
	return all[rnd.IntN(len(all))]
}
