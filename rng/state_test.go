package rng_test

import (
	"errors"
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// A state that is saved and restored in a captured function makes the second draw equal
// the first, in each launch with other numbers.
func TestStateInCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		first, second := newDrawer(t, s), newDrawer(t, s)
		g, plain := rng.New(devs[0], 5), rng.New(devs[0], 5)
		require.NoError(t, errors.Join(first.draw(rng.New(devs[0], 1)), s.Sync(testgpu.Context(t))))
		x := capture(t, func() error {
			saved := g.State()
			if err := first.draw(g); err != nil {
				return err
			}
			return errors.Join(g.SetState(saved[:]), second.draw(g))
		}, s)
		require.Equal(t, state(plain), state(g), "the capture has moved nothing")
		var before []byte
		for range 3 {
			want := first.drawn(t, func() error { return first.draw(plain) })
			require.NoError(t, x.Launch(s))
			require.Equal(t, want, first.read(t))
			require.Equal(t, want, second.read(t), "the second draw is the first")
			require.NotEqual(t, before, want, "each launch has numbers of its own")
			require.Equal(t, state(plain), state(g))
			before = want
		}
	})
}

var statePrograms = flag.Int("programs", testhost.Rounds(6, 10), "how many random programs TestStatePrograms captures")

// A program draws, saves, restores and seeds. Captured and launched it draws what it draws
// without a graph, each time that it runs, and leaves the generator at the same place.
func TestStatePrograms(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		r := rand.New(rand.NewPCG(seed, 0))
		ds := []*drawer{newDrawer(t, s), newDrawer(t, s), newDrawer(t, s), newDrawer(t, s)}
		require.NoError(t, ds[0].draw(rng.New(devs[0], 1)))
		for range *statePrograms {
			ops := make([]uint32, 2+r.IntN(10))
			for i := range ops {
				ops[i] = r.Uint32()
			}
			g, plain := rng.New(devs[0], 5), rng.New(devs[0], 5)
			outside := g.State()
			require.NoError(t, s.Sync(testgpu.Context(t)))
			x, err := graph.Capture([]*stream.Stream{s}, func() error { return play(ops, g, ds, outside) }, nil)
			require.NoError(t, err, "program %v", ops)
			for range 3 {
				require.NoError(t, play(ops, plain, ds, outside))
				var want [][]byte
				for _, d := range ds {
					want = append(want, d.read(t))
					require.NoError(t, errors.Join(d.u.Zero(s), d.n.Zero(s), d.r.Zero(s)))
				}
				require.NoError(t, x.Launch(s))
				for i, d := range ds {
					require.Equal(t, want[i], d.read(t), "program %v, drawer %d", ops, i)
				}
				require.Equal(t, state(plain), state(g), "program %v", ops)
				require.NoError(t, errors.Join(ds[0].draw(g), ds[0].draw(plain))) // between the launches
			}
			require.NoError(t, x.Close())
		}
	})
}

// play runs a program: each drawer draws at its end once more, so that every launch writes
// all memory.
func play(ops []uint32, g *rng.Generator, ds []*drawer, outside [rng.StateSize]byte) error {
	saved := [][rng.StateSize]byte{g.State()}
	for _, op := range ops {
		var err error
		switch n := int(op >> 8); op % 16 {
		case 0:
			g.ManualSeed(uint64(n % 3))
		case 1:
			err = g.SetState(outside[:])
		case 2, 3, 4:
			saved = append(saved, g.State())
		case 5, 6, 7, 8:
			s := saved[n%len(saved)]
			err = g.SetState(s[:])
		default:
			err = ds[n%len(ds)].draw(g)
		}
		if err != nil {
			return err
		}
	}
	var err error
	for _, d := range ds {
		err = errors.Join(err, d.draw(g))
	}
	return err
}

// Where a place has no meaning, setting it is an error that changes nothing.
func TestStateThatHasNoMeaning(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		d := newDrawer(t, s)
		g, other := rng.New(devs[0], 5), rng.New(devs[0], 6)
		require.NoError(t, errors.Join(d.draw(rng.New(devs[0], 1)), s.Sync(testgpu.Context(t))))
		var saved [rng.StateSize]byte
		capture(t, func() error {
			saved = g.State()
			require.ErrorContains(t, other.SetState(saved[:]), "from this capture or from outside of captures")
			require.ErrorContains(t, g.SetOffset(8), "call ManualSeed or SetState before")
			require.Equal(t, saved, g.State())
			there := make(chan struct{})
			go func() { // another goroutine sets the generator at once
				defer close(there)
				g.ManualSeed(77)
			}()
			<-there
			require.Equal(t, saved, g.State())
			require.NoError(t, d.draw(g))
			require.NotEqual(t, saved, g.State())
			g.ManualSeed(9)
			require.NoError(t, g.SetOffset(8))
			require.EqualValues(t, 8, g.Offset())
			require.EqualValues(t, 9, g.InitialSeed())
			return nil
		}, s)
		require.EqualValues(t, 77, g.InitialSeed())
		was := state(g)
		require.ErrorContains(t, g.SetState(saved[:]), "a position in the launches of another graph")
		capture(t, func() error {
			require.ErrorContains(t, g.SetState(saved[:]), "a position in the launches of another graph")
			return d.draw(g)
		}, s)
		require.Equal(t, was, state(g))
	})
}
