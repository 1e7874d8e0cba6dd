package alloc

import (
	"errors"
	"fmt"
	"maps"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// scenario uses everything that asks the driver, and goes on after errors.
func scenario(m *machine, d *Device) (errs []error) {
	s, other := m.stream(), m.stream()
	asyncPool := d.NewPool(PoolConfig{ID: PoolID{0, 1}, Source: asyncSource{m}})
	var live []uint64
	alloc := func(p *Pool, s Stream, n uint64) {
		a, err := p.Arena(s)
		if err == nil {
			var addr uint64
			if addr, err = a.Alloc(n); err == nil {
				live = append(live, addr)
			}
		}
		errs = append(errs, err)
	}
	free := func() {
		for _, addr := range live {
			errs = append(errs, d.RecordStream(addr, other), d.Free(addr))
		}
		live = nil
	}
	for range 3 {
		for _, n := range []uint64{1000, 3 << 20, 30 << 20, 1 << 20} {
			alloc(d.Default(), s, n)
			alloc(asyncPool, s, n)
			alloc(d.Default(), other, n)
		}
		free()
		alloc(d.Default(), s, 90<<20) // more than there is without the cache
		alloc(asyncPool, other, 40<<20)
		free()
		errs = append(errs, d.Empty())
		d.End(other)
		other.ended = true
		other = m.stream()
	}
	errs = append(errs, asyncPool.Close())
	own := d.NewPool(PoolConfig{ID: PoolID{0, 2}})
	alloc(own, s, 30<<20)
	errs = append(errs, own.Close())
	free()
	return errs
}

// Whichever call of the driver fails, the books stay right, and the allocator works
// when the driver does.
func TestEveryCallFails(t *testing.T) {
	testhost.Serial(t)
	for _, conf := range []string{"", "expandable_segments:True", "max_split_size_mb:25", "expandable_segments:True,per_process_memory_fraction:0.9,garbage_collection_threshold:0.2"} {
		counting := newMachine(t, 140<<20)
		scenario(counting, counting.device(conf))
		require.Greater(t, counting.calls, 50)
		for _, broken := range []error{ErrNoMemory, errBroken} {
			for k := 1; k <= counting.calls; k++ {
				failCall(t, conf, k, broken)
			}
		}
	}
}

func failCall(t *testing.T, conf string, k int, broken error) {
	m := newMachine(t, 140<<20)
	d := m.device(conf)
	what := ""
	m.fail = func(call int, name string) error {
		if call != k {
			return nil
		}
		what = fmt.Sprintf("%q: call %d, %s: %v", conf, k, name, broken)
		return broken
	}
	for _, err := range scenario(m, d) {
		require.True(t, err == nil || errors.Is(err, broken) || errors.Is(err, ErrNoMemory), "%s: %v", what, err)
	}
	m.fail = nil
	d.check(t)
	a := must(d.Default().Arena(m.stream()))
	addr, err := a.Alloc(80 << 20)
	require.NoError(t, err, what)
	require.NoError(t, d.Free(addr))
	require.NoError(t, d.Empty())
	d.check(t)
	if !t.Failed() && m.used != 0 {
		t.Fatalf("%s: %d bytes are lost", what, m.used)
	}
	for _, p := range d.pools {
		require.Equal(t, PoolID{}, p.id, "%s: a pool that is closed is forgotten", what)
	}
}

// Where mapping the pages of a block fails half-way, all is as before, also where
// the way back fails.
func TestMappingRollsBack(t *testing.T) {
	for _, name := range []string{"create", "map", "open"} {
		for n := range 10 {
			for _, stays := range []string{"", "unmap", "release"} {
				m := newMachine(t, 1<<30)
				d := m.device("expandable_segments:True")
				a := must(d.Default().Arena(m.stream()))
				held := must(a.Alloc(9 << 20))
				require.NoError(t, d.Free(must(a.Alloc(6<<20))))
				mapped, used := maps.Clone(m.mapped), m.used
				seen := 0
				m.fail = func(_ int, call string) error {
					if call == name {
						seen++
					}
					if call == name && seen > n || call == stays {
						return errBroken
					}
					return nil
				}
				addr, err := a.Alloc(40 << 20)
				if seen <= n {
					require.NoError(t, err)
					require.NoError(t, d.Free(addr))
				} else {
					require.ErrorIs(t, err, errBroken)
				}
				d.check(t)
				if stays == "" && err != nil {
					require.Equal(t, mapped, m.mapped, "%s %d", name, n)
					require.Equal(t, used, m.used)
				}
				m.fail = nil
				m.requireUsable(held, 9<<20)
				require.NoError(t, d.Free(must(a.Alloc(40<<20))))
				require.NoError(t, d.Free(held))
				require.NoError(t, d.Empty())
				d.check(t)
				m.requireNothing()
			}
		}
	}
}

// Where there are no addresses left, segments are plain.
func TestWithoutAddresses(t *testing.T) {
	m := newMachine(t, 1<<30)
	d := m.device("expandable_segments:True")
	m.fail = func(_ int, name string) error {
		if name == "reserve" {
			return errBroken
		}
		return nil
	}
	a := must(d.Default().Arena(m.stream()))
	require.NoError(t, d.Free(must(a.Alloc(30<<20))))
	require.Len(t, m.segments, 1)
	require.Empty(t, m.pages)
	m.fail = nil
	require.NoError(t, d.Free(must(a.Alloc(60<<20))))
	require.Len(t, m.pages, 30)
	d.check(t)
}
