package comm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A countingExchange counts the calls of all ranks.
type countingExchange struct {
	*testgpu.Exchange
	calls *atomic.Int64
}

func (b countingExchange) Set(ctx context.Context, key string, value []byte) error {
	b.calls.Add(1)
	return b.Exchange.Set(ctx, key, value)
}

func (b countingExchange) Get(ctx context.Context, key string) ([]byte, error) {
	b.calls.Add(1)
	return b.Exchange.Get(ctx, key)
}

// A gatheringExchange gets several values by one call, as a store of package cluster does.
type gatheringExchange struct{ countingExchange }

func (b gatheringExchange) GetAll(ctx context.Context, keys ...string) (all [][]byte, err error) {
	b.calls.Add(1)
	for _, key := range keys {
		value, err := b.Exchange.Get(ctx, key)
		if err != nil {
			return nil, err
		}
		all = append(all, value)
	}
	return all, nil
}

// eachRank calls fn for all ranks of a exchange at the same time, and returns the number of calls.
func eachRank(t *testing.T, ranks int, gathers bool, fn func(rank int, r comm.Rendezvous) error) int {
	var calls atomic.Int64
	bs := exchanges(t.Context(), ranks)
	require.NoError(t, errors.Join(atOnce(ranks, func(rank int) error {
		b := countingExchange{bs[rank], &calls}
		if gathers {
			return fn(rank, gatheringExchange{b})
		}
		return fn(rank, b)
	})...))
	return int(calls.Load())
}

// TestExchange exchanges values of all lengths, also together longer than one value of a store may be.
func TestExchange(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 200} {
		values := make([][]byte, ranks)
		for i := range values {
			values[i] = bytes.Repeat([]byte{byte(i)}, []int{0, 1, 300, 12345}[i%4])
		}
		for _, gathers := range []bool{false, true} {
			calls := eachRank(t, ranks, gathers, func(rank int, r comm.Rendezvous) error {
				exchange := comm.ExchangeBy(r, "x/", rank, ranks)
				for round := range 2 {
					all, err := exchange(testgpu.Context(t), values[rank])
					if err != nil {
						return err
					}
					for i := range values {
						if !bytes.Equal(values[i], all[i]) {
							return fmt.Errorf("round %d: the value of rank %d differs", round, i)
						}
					}
				}
				return nil
			})
			require.LessOrEqual(t, calls, 2*(4*ranks+2), "calls of %d ranks", ranks)
		}
	}
}

// TestExchangeOfWrongValues reads what a faulty rank 0 publishes.
func TestExchangeOfWrongValues(t *testing.T) {
	for name, value := range map[string]string{"empty": "", "long": "\xff\xff\xff\xff", "cut": "\x00\x00\x00\x03\x05ab", "few": "\x00\x00\x00\x01\x00", "many": "\x00\x00\x00\x03\x00\x00\x00"} {
		bs := testgpu.Exchanges(t.Context(), 2)
		require.NoError(t, bs[0].Set(t.Context(), "x/0/all/0", []byte(value)))
		_, err := comm.ExchangeBy(bs[1], "x/", 1, 2)(t.Context(), []byte("1"))
		require.ErrorIs(t, err, comm.ErrMismatch, name)
	}
}

// TestCallsOfAJoin counts the calls of the store when processes join: each further rank adds as many, except for a few that depend on
// whether a group closes before its reporter asks for something. If each rank asked for a value of each other one, the counts would
// differ by 18 or more.
func TestCallsOfAJoin(t *testing.T) {
	const most = 9
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: most})
	for _, gathers := range []bool{false, true} {
		count := func(ranks int) int {
			return eachRank(t, ranks, gathers, func(rank int, r comm.Rendezvous) error {
				g, err := comm.Join(testgpu.Context(t), r, devs[rank], nil)
				if err != nil {
					return err
				}
				return g.Close()
			})
		}
		few, more, many := count(3), count(6), count(9)
		require.InDelta(t, more-few, many-more, 6, "%d, %d and %d calls", few, more, many)
		require.LessOrEqual(t, many, 12*most)
	}
}

// A hostExchange has the name of a host, as sessions do.
type hostExchange struct {
	*testgpu.Exchange
	host string
}

func (b hostExchange) Host() string { return b.host }

// TestJoinNamesHosts has two ranks on one GPU. The error has the name of the host in the job.
func TestJoinNamesHosts(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	_, errs := joinBy(t, []*device.Device{dev, dev}, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) { return hostExchange{b, "pod-a"}, nil })
	for _, err := range errs {
		require.ErrorContains(t, err, " of host pod-a") // and its cause, which CHORUS_SHARE_GPUS changes
	}
}

// A collective between two points of other streams sees what they wrote before, and they see
// its result; virtual devices report every access that is not ordered.
func TestBetween(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var ss []*stream.Stream
		var xs []memory.Slice[float32]
		for i, d := range devs {
			s := streamtest.NewStream(t, d)
			x, err := memory.MakeFrom(s, []float32{float32(i + 1)})
			require.NoError(t, err)
			defer x.Close()
			ss, xs = append(ss, s), append(xs, x)
		}
		sum := func() error { return comm.AllReduce(g, comm.Sum, xs...) }
		require.NoError(t, g.Between(ss, sum))
		require.NoError(t, g.Between([]*stream.Stream{g.Stream(0), ss[1]}, func() error { return nil }))
		for i, s := range ss {
			out := make([]float32, 1)
			require.NoError(t, xs[i].CopyTo(s, out))
			require.Equal(t, float32(3), out[0])
		}
		failed := errors.New("failed")
		require.ErrorIs(t, g.Between(ss, func() error { return failed }), failed)
		require.ErrorContains(t, g.Between(ss[:1], sum), "1 streams")
		require.ErrorContains(t, g.Between(ss, nil), "a function is given: false")
		require.ErrorContains(t, g.Between([]*stream.Stream{ss[1], ss[0]}, sum), "stream 0 is nil or on another device")
		require.NoError(t, g.Shutdown(testgpu.Context(t)))
		require.ErrorIs(t, g.Between(ss, sum), device.ErrClosed)
	})
}
