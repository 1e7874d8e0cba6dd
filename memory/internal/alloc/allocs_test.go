package alloc

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// A hit makes no Go allocation and no call of the driver.
func TestHitAllocatesNothing(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"} {
		for _, n := range []uint64{1, 512, 65536, 1 << 20, 3 << 20, 64 << 20} {
			m := newMachine(t, 1<<40)
			d := m.device(conf)
			a := must(d.Default().Arena(m.stream()))
			pair := func() {
				addr, _ := a.Alloc(n)
				_ = d.Free(addr)
			}
			pair()
			calls := m.calls
			require.Zero(t, testing.AllocsPerRun(1000, pair), "%q, %d bytes", conf, n)
			require.Equal(t, calls, m.calls)
		}
	}
}

// Random sizes make none either, once the lists have their lengths.
func TestChurnAllocatesNothing(t *testing.T) {
	if testhost.On {
		t.Skip("the race detector allocates, and takes a minute here")
	}
	for _, most := range []float64{16, 24} {
		m := newMachine(t, 1<<44)
		d := m.device("")
		a := must(d.Default().Arena(m.stream()))
		r := rand.New(rand.NewPCG(1, 2))
		size := func() uint64 { return uint64(math.Exp2(most * r.Float64())) }
		live := make([]uint64, 2000)
		for i := range live {
			live[i] = must(a.Alloc(size()))
		}
		step := func() {
			for range 100 {
				i := r.IntN(len(live))
				_ = d.Free(live[i])
				live[i], _ = a.Alloc(size())
			}
		}
		for range 5000 {
			step()
		}
		require.LessOrEqual(t, testing.AllocsPerRun(1000, step), 1.0, "in 100 pairs")
		d.check(t)
	}
}

// Many blocks slow nothing down that programs do.
func TestManySmallBlocks(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		m := newMachine(t, 8<<30)
		d := m.device(conf)
		s, other := m.stream(), m.stream()
		a := must(d.Default().Arena(s))
		live := make([]uint64, testhost.Rounds(10_000, 100_000))
		for i := range live {
			live[i] = must(a.Alloc(512 + uint64(i%7)*512))
		}
		for _, addr := range live {
			require.NoError(t, d.RecordStream(addr+300, other)) // a view of it
		}
		d.check(t)
		other.work(live[0], 512) // and is late
		for i := range live {
			require.NoError(t, d.Free(live[i*7919%len(live)]))
		}
		require.Less(t, m.calls, len(live)+2000, "one event for each block")
		calls := m.calls
		require.NoError(t, d.Free(must(a.Alloc(512))))
		require.Less(t, m.calls-calls, 10, "an allocation asks for one event of a stream that is late")
		require.NoError(t, d.Empty())
		m.requireNothing()
		d.check(t)
	}
}
