package memory_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// usesOf returns the bytes of the ledger by owner.
func usesOf(t *testing.T, d *device.Device) map[string]int {
	t.Helper()
	u, err := memory.Ledger(d)
	require.NoError(t, err)
	require.Equal(t, d.String(), u.Device)
	by, sum := map[string]int{}, uint64(0)
	for _, x := range u.Uses {
		require.Zero(t, by[x.Owner], "%s comes twice", x.Owner)
		by[x.Owner] = int(x.Bytes)
		sum += x.Bytes
	}
	require.LessOrEqual(t, u.Total-u.Free, sum, "all used memory has an owner")
	return by
}

// The ledger divides what the allocator has reserved, and what others have accounted.
func TestLedger(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s, p := newStream(t, d), newPool(t, nil)
		x, err := memory.Make[byte](s, 30*mib)
		require.NoError(t, err)
		y := makeIn(t, p, s, 20*mib)
		var z memory.Slice[byte]
		g, err := graph.Capture([]*stream.Stream{s}, func() (err error) {
			if z, err = memory.Make[byte](s, 4*mib); err != nil {
				return err
			}
			return z.Zero(s)
		}, nil)
		require.NoError(t, err)
		by := usesOf(t, d)
		reserved, err := memory.Reserved(d)
		require.NoError(t, err)
		require.Equal(t, []int{30 * mib, 20 * mib, 4 * mib}, []int{by["buffers"], by["buffers in pools"], by["buffers of graphs"]})
		const cached = "free memory that the caching allocator keeps"
		require.Equal(t, int(reserved)-54*mib, by[cached])

		stopInside := mem.Account(d, func() (mem.Use, bool) { return mem.Use{Owner: "scratch", Bytes: 8 * mib, Inside: true}, true })
		stop := mem.Account(d, func() (mem.Use, bool) { return mem.Use{Owner: "a library", Bytes: 3 * mib}, true })
		stopAgain := mem.Account(d, func() (mem.Use, bool) { return mem.Use{Owner: "a library", Bytes: 2 * mib}, true })
		stopUnknown := mem.Account(d, func() (mem.Use, bool) { return mem.Use{Owner: "busy", Bytes: 1}, false })
		by = usesOf(t, d)
		require.Equal(t, []int{22 * mib, 8 * mib, 5 * mib}, []int{by["buffers"], by["scratch"], by["a library"]})
		require.NotContains(t, by, "busy")
		for _, f := range []func(){stopInside, stop, stopAgain, stopUnknown} {
			f()
		}
		require.NotContains(t, usesOf(t, d), "a library")
		require.NoError(t, errors.Join(z.Close(), g.Close(), x.Close(), y.Close()))
		require.NotContains(t, usesOf(t, d), "buffers")
	})
}

// Memory of an Allocator without a cache is in the ledger too.
func TestLedgerWithoutCache(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		require.NoError(t, memory.EnableCaching(d, false))
		x, err := memory.Make[byte](newStream(t, d), 30*mib)
		require.NoError(t, err)
		require.GreaterOrEqual(t, usesOf(t, d)["buffers"], 30*mib)
		require.NoError(t, x.Close())
	})
}

// The error of an allocation names large uses outside of the allocator.
func TestOutOfMemoryNamesOtherUses(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		_, total, err := d.MemoryInfo()
		require.NoError(t, err)
		defer mem.Account(d, func() (mem.Use, bool) { return mem.Use{Owner: "a library", Bytes: total / 2}, true })()
		limit(t, d, 100*mib)
		_, err = memory.Make[byte](newStream(t, d), 200*mib)
		oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
		require.True(t, ok, "%v", err)
		require.Contains(t, oom.Uses, memory.Use{Owner: "a library", Bytes: total / 2})
		_, after, ok := strings.Cut(err.Error(), "; memory outside of the allocator: ")
		require.True(t, ok, "%v", err)
		require.Regexp(t, `GiB for a library`, after)
	})
}
