package rng_test

import (
	"encoding/hex"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
)

func virtual(t *testing.T, n int) []*device.Device {
	return testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n})
}

func TestState(t *testing.T) {
	g := rng.New(virtual(t, 1)[0], 0x0102030405060708)
	require.Equal(t, "08070605040302010000000000000000", state(g))
	require.NoError(t, g.SetOffset(1<<40+4))
	require.Equal(t, "08070605040302010400000000010000", state(g))
	require.EqualValues(t, 1<<40+4, g.Offset())
	require.EqualValues(t, 0x0102030405060708, g.InitialSeed())

	was := g.State()
	g.ManualSeed(1 << 63)
	require.Equal(t, "00000000000000800000000000000000", state(g))
	require.NoError(t, g.SetState(was[:]))
	require.Equal(t, was, g.State())
	require.NoError(t, g.SetState(was[:8]), "a seed alone")
	require.Zero(t, g.Offset())

	now := g.State()
	for _, n := range []int{0, 1, 7, 9, 15, 17, 816} {
		require.ErrorContains(t, g.SetState(make([]byte, n)), "want 16")
	}
	odd, err := hex.DecodeString("08070605040302010600000000000000")
	require.NoError(t, err)
	require.ErrorContains(t, g.SetState(odd), "offset of the state is 6: want a multiple of 4")
	require.ErrorContains(t, g.SetOffset(6), "want a multiple of 4")
	require.Equal(t, now, g.State(), "an error changes nothing")
}

func TestSeedIsRandom(t *testing.T) {
	g := rng.New(virtual(t, 1)[0], 5)
	require.NoError(t, g.SetOffset(8))
	a, b := g.Seed(), g.Seed()
	require.NotEqual(t, a, b)
	require.Equal(t, b, g.InitialSeed())
	require.Zero(t, g.Offset())
	require.Less(t, a|b, uint64(1)<<53)
}

func TestDefault(t *testing.T) {
	devs := virtual(t, 3)
	require.Same(t, rng.Default(devs[0]), rng.Default(devs[0]))
	require.NotEqual(t, rng.Default(devs[0]).InitialSeed(), rng.Default(devs[1]).InitialSeed(), "seeds are random")
	require.Same(t, devs[2], rng.Default(devs[2]).Device())

	require.NoError(t, rng.ManualSeedAll(9, devs...))
	for _, d := range devs {
		require.Equal(t, "09000000000000000000000000000000", state(rng.Default(d)))
	}
	seed, err := rng.SeedAll(devs...)
	require.NoError(t, err)
	require.NoError(t, rng.Default(devs[1]).SetOffset(12))
	states, err := rng.StateAll(devs...)
	require.NoError(t, err)
	require.Len(t, states, 3)
	require.EqualValues(t, 12, states[1][8])
	for _, d := range devs {
		require.Equal(t, seed, rng.Default(d).InitialSeed())
	}

	require.NoError(t, rng.ManualSeedAll(1, devs...))
	require.ErrorContains(t, rng.SetStateAll(states[:2], devs...), "of 3 devices: got 2 states")
	bad := slices.Clone(states)
	bad[2][8] = 1
	require.ErrorContains(t, rng.SetStateAll(bad, devs...), "virtual:2: the offset of the state is 1")
	require.EqualValues(t, 1, rng.Default(devs[0]).InitialSeed(), "an error changes nothing")
	require.NoError(t, rng.SetStateAll(states, devs...))
	again, err := rng.StateAll(devs...)
	require.NoError(t, err)
	require.Equal(t, states, again)
	require.ErrorContains(t, rng.ManualSeedAll(1, devs[0], nil), "device 1 of 2 is nil")
}

// A nil generator is the default one of the stream's device.
func TestNilGenerator(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		fill := func(g *rng.Generator) []float32 {
			rng.Default(devs[0]).ManualSeed(3)
			return fetch(t, s, 1000, func(x memory.Slice[float32]) error { return rng.Uniform(g, s, x, 0, 1) })
		}
		require.Equal(t, fill(rng.New(devs[0], 3)), fill(nil))
		require.EqualValues(t, 4, rng.Default(devs[0]).Offset())
	})
}

// Going back to a state gives the same numbers, and going on gives others.
func TestDeterminism(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		g := rng.New(devs[0], 11)
		normal := func() []float32 {
			return fetch(t, s, 5000, func(x memory.Slice[float32]) error { return rng.Normal(g, s, x, 0, 1) })
		}
		first := normal()
		was := g.State()
		second := normal()
		require.NotEqual(t, first, second)
		require.NoError(t, g.SetState(was[:]))
		require.Equal(t, second, normal())
		g.ManualSeed(11)
		require.Equal(t, first, normal())
		g.ManualSeed(12)
		require.NotEqual(t, first, normal())
	})
}

// Fills at the same time draw what fills one after the other draw, in some order:
// no part of the sequence is drawn twice and none is left out.
func TestConcurrentFills(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		const workers, rounds, n = 8, 10, 300
		draw := func(g *rng.Generator, each int) (all [][]int32) {
			var mu sync.Mutex
			var wg sync.WaitGroup
			for range workers * rounds / each {
				s := newStream(t, devs[0])
				wg.Go(func() {
					for range each {
						got := fetch(t, s, n, func(x memory.Slice[int32]) error { return rng.Random(g, s, x) })
						_ = g.State()
						mu.Lock()
						all = append(all, got)
						mu.Unlock()
					}
				})
			}
			wg.Wait()
			slices.SortFunc(all, func(a, b []int32) int { return slices.Compare(a, b) })
			return all
		}
		g := rng.New(devs[0], 77)
		got := draw(g, rounds)
		require.EqualValues(t, workers*rounds*4, g.Offset())
		require.Len(t, slices.CompactFunc(slices.Clone(got), slices.Equal), workers*rounds, "a part was drawn twice")
		require.Equal(t, draw(rng.New(devs[0], 77), workers*rounds), got)
	})
}

// The first fills on a device, which compile, may come at the same time.
func TestConcurrentFirstFills(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		var wg sync.WaitGroup
		for range 4 {
			s := newStream(t, devs[0])
			wg.Go(func() {
				fetch(t, s, 10, func(x memory.Slice[uint16]) error { return rng.Random(nil, s, x) })
			})
		}
		wg.Wait()
	})
}

// Virtual devices have as many multiprocessors as they are told, and a thread of
// fewer draws more often.
func TestMultiprocessors(t *testing.T) {
	for sms, offset := range map[int]uint64{0: 4, 132: 4, 1: 4 << 20 / (2048 * 4), 2: 2 << 20 / (2048 * 4)} {
		dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualMultiprocessors: sms})[0]
		s, g := newStream(t, dev), rng.New(dev, 1)
		fetch(t, s, 1<<20, func(x memory.Slice[float32]) error { return rng.Uniform(g, s, x, 0, 1) })
		require.Equal(t, offset, g.Offset(), "%d multiprocessors", sms)
	}
}
