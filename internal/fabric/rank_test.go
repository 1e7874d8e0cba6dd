package fabric_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func makeOf[T memory.Element](t testing.TB, s *stream.Stream, n int) memory.Slice[T] {
	t.Helper()
	x, err := memory.Make[T](s, n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	require.NoError(t, x.Zero(s))
	return x
}

// Ranks that wait for one that does not come end when they are aborted, whatever they
// wait in, and take nothing any more.
func TestAbort(t *testing.T) {
	each(t, []int{3}, func(t *testing.T, devs []*device.Device) {
		for _, name := range []string{"one-shot", "two-shot-packets", "two-shot", "two-shot-lines", "pipelined", "pushed", "pushed graph", "all-gather", "reduce-scatter", "broadcast", "all-to-all", "graph"} {
			t.Run(name, func(t *testing.T) {
				cfg := &fabric.Config{Bytes: 1}
				if strings.HasPrefix(name, "pushed") {
					if cfg = &pushes; tooMany(devs) {
						t.Skip("more than two ranks share a GPU")
					}
				}
				group := open(t, devs, cfg)
				absent := group[len(group)-1]
				for _, m := range group[:len(group)-1] {
					dst, src := makeOf[float32](t, m.s, len(group)*1000), makeOf[float32](t, m.s, len(group)*1000)
					c := call{name: name, root: absent.Rank.Rank()}
					x := anySlice[float32]{dst, src}
					switch name {
					case "all-gather":
						x.src = src.Slice(0, 1000)
					case "reduce-scatter":
						x.dst = dst.Slice(0, 1000)
					case "one-shot", "two-shot-packets", "two-shot", "two-shot-lines", "pipelined", "pushed", "pushed graph", "graph":
						c.name = "all-reduce"
						for _, a := range append(fabric.Algorithms[:len(fabric.Algorithms):len(fabric.Algorithms)], fabric.Pushed) {
							if a.String() == strings.TrimSuffix(name, " graph") {
								c.algorithm = a
							}
						}
					}
					enqueue := func() error { return errors.Join(x.enqueue(c, m), x.enqueue(c, m)) }
					if strings.HasSuffix(name, "graph") {
						g, err := graph.Capture([]*stream.Stream{m.s}, enqueue, nil)
						require.NoError(t, err)
						defer func() { require.NoError(t, g.Close()) }()
						enqueue = func() error { return g.Launch(m.s) }
					}
					require.NoError(t, enqueue())
					require.NoError(t, m.Err())
				}
				for _, m := range group[:len(group)-1] {
					done, err := m.s.Query()
					require.NoError(t, err)
					require.False(t, done, "nobody has come")
				}
				for _, m := range group[:len(group)-1] {
					m.Abort()
				}
				for _, m := range group[:len(group)-1] {
					require.NoError(t, m.s.Sync(testgpu.Context(t)))
					require.ErrorIs(t, m.Err(), fabric.ErrAborted)
					if cfg == nil || !cfg.Pushes {
						require.ErrorContains(t, m.Err(), "given up")
					}
					x := makeOf[float32](t, m.s, 1)
					require.ErrorIs(t, fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, nil), fabric.ErrAborted)
				}
				require.NoError(t, absent.Err(), "nobody has aborted it")
			})
		}
	})
}

func TestAbortIdle(t *testing.T) {
	each(t, []int{1, 2}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1})
		m := group[0]
		x, y := makeOf[float32](t, m.s, 1), makeOf[float32](t, m.s, 1)
		reduce := func() error { return fabric.AllReduce(m.Rank, m.s, x, y, collective.Sum, nil) }
		g, err := graph.Capture([]*stream.Stream{m.s}, reduce, nil)
		if len(devs) > 1 {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, "there is no kernel for that")
		}
		m.Abort()
		m.Abort()
		require.ErrorIs(t, m.Err(), fabric.ErrAborted)
		require.NotContains(t, m.Err().Error(), "given up")
		require.ErrorIs(t, reduce(), fabric.ErrAborted)
		if len(devs) > 1 {
			require.ErrorIs(t, g.Launch(m.s), fabric.ErrAborted)
		}
		require.NoError(t, g.Close())
		closeAll(t, group)
		closeAll(t, group)
		m.Abort()
		require.ErrorIs(t, group[1%len(group)].Err(), device.ErrClosed)
		require.ErrorIs(t, reduce(), device.ErrClosed)
		var none *fabric.Rank
		none.Abort()
		require.NoError(t, none.Close())
	})
}

// Close ends what waits, and who is left may go on to write to who has closed.
func TestClose(t *testing.T) {
	each(t, []int{2, 4}, func(t *testing.T, devs []*device.Device) {
		before := fabric.Scratches()
		group := open(t, devs, &fabric.Config{Bytes: 1})
		require.Equal(t, before+len(group), fabric.Scratches())
		require.Len(t, accounted(t, devs), len(group))
		for i, m := range group {
			x := makeOf[float32](t, m.s, 1000)
			require.NoError(t, fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, nil))
			if i < len(group)-1 {
				continue // which wait for the last one
			}
			require.NoError(t, fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, nil))
		}
		for i, m := range slices.Backward(group) {
			require.NoError(t, m.Close())
			done, err := m.s.Query()
			require.NoError(t, err)
			require.True(t, done)
			if i > 0 {
				x := makeOf[float32](t, group[0].s, 1000)
				require.NoError(t, fabric.AllReduce(group[0].Rank, group[0].s, x, x, collective.Sum, nil))
				require.Equal(t, before+len(group), fabric.Scratches(), "the first may write to all of them")
			}
		}
		require.Equal(t, before, fabric.Scratches())
		require.Empty(t, accounted(t, devs))
	})
}

// accounted returns what memory.Ledger tells of the scratch memory of the devices.
func accounted(t *testing.T, devs []*device.Device) (list []memory.Use) {
	for _, d := range devs {
		u, err := memory.Ledger(d)
		require.NoError(t, err)
		for _, x := range u.Uses {
			if x.Owner == "memory of Chorus kernels for collectives" {
				list = append(list, x)
			}
		}
	}
	return list
}

// A rank that waits while its device is lost ends, and can be closed.
func TestDeviceLost(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "cuLaunchHostFunc#1=CUDA_ERROR_ILLEGAL_ADDRESS"})
	group, err := openAll(t, sys.Devices(), &fabric.Config{Bytes: 1})
	require.NoError(t, err)
	m, other := group[0], newStream(t, sys.Devices()[0])
	x, err := memory.Make[float32](m.s, 1000)
	require.NoError(t, err)
	require.NoError(t, fabric.AllReduce(m.Rank, m.s, x, x, collective.Sum, nil))
	require.Error(t, other.Callback(func() {}))
	require.ErrorIs(t, m.s.Sync(testgpu.Context(t)), device.ErrorIllegalAddress)
	_ = x.Close() // what it says is what the device said
	_ = m.Close()
	require.NoError(t, group[1].Close())
	require.Zero(t, fabric.Scratches())
}

// What no kernel takes is refused before anything is enqueued: the ranks stay in step.
func TestEnqueueRefuses(t *testing.T) {
	each(t, []int{2, 4}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1})
		n, r, s := len(group), group[0].Rank, group[0].s
		x, bools, i16 := makeOf[float32](t, s, 64), makeOf[bool](t, s, 8), makeOf[int16](t, s, 8)
		f8, big := makeOf[memory.Float8E4M3Bits](t, s, 8), makeOf[byte](t, s, 70000*n)
		l := r.Limits()
		first := func(n int) memory.Slice[byte] { return big.Slice(0, n) }
		for name, err := range map[string]error{
			"no such reduction":  fabric.AllReduce(r, s, x, x, 5, nil),
			"a PreMulSum":        fabric.AllReduce(r, s, x, x, -1, nil),
			"bools":              fabric.AllReduce(r, s, bools, bools, collective.Max, nil),
			"8-bit floats":       fabric.AllReduce(r, s, f8, f8, collective.Sum, nil),
			"16-bit integers":    fabric.ReduceScatter(r, s, i16.Slice(0, 1), i16.Slice(0, n), collective.Sum),
			"nothing":            fabric.AllReduce(r, s, x.Slice(0, 0), x.Slice(0, 0), collective.Sum, nil),
			"more than two-shot": fabric.AllReduce(r, s, first(l.AllReduce()+1), first(l.AllReduce()+1), collective.Sum, nil),
			"more than one-shot": fabric.AllReduce(r, s, first(l.OneShot+1), first(l.OneShot+1), collective.Sum, &fabric.AllReduceConfig{Algorithm: fabric.OneShot}),
			"a long part":        fabric.Broadcast(r, s, first(l.Part+1), first(l.Part+1), 0),
			"long parts":         fabric.AllGather(r, s, first(n*(l.Part+1)), first(l.Part+1)),
		} {
			require.ErrorContains(t, err, "there is no kernel for that", name)
			require.Regexp(t, "^fabric: [a-z-]+ on rank 0 of ", err.Error(), name)
		}
		done, err := s.Query()
		for ; !done && err == nil; done, err = s.Query() {
		}
		require.NoError(t, err)
		carryOut(t, group, floats(func(x float32) float32 { return x }), call{name: "all-reduce", n: 100})
	})
	require.Equal(t, "op 5, algorithm 9", fmt.Sprint(collective.Reduction(5), ", ", fabric.Algorithm(9)))
}

// The sum of 16-bit floats is that of float32, in rank order, rounded once;
// the same bits on all ranks by each algorithm.
func TestRounding(t *testing.T) {
	each(t, []int{3, 8}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1})
		seed := rand.Uint64()
		t.Log("seed ", seed)
		rounding(t, group, rand.New(rand.NewPCG(seed, 1)), memory.Float16Of, memory.Float16Bits.Float32)
		rounding(t, group, rand.New(rand.NewPCG(seed, 2)), memory.BFloat16Of, memory.BFloat16Bits.Float32)
		same := func(x float32) float32 { return x }
		rounding(t, group, rand.New(rand.NewPCG(seed, 3)), same, same)
	})
}

func rounding[T memory.Element](t *testing.T, group []member, rng *rand.Rand, narrow func(float32) T, wide func(T) float32) {
	const n = 1001
	in := make([][]T, len(group))
	for r := range in {
		for range n {
			in[r] = append(in[r], narrow(float32(rng.NormFloat64())*float32(int(1)<<rng.IntN(12))))
		}
	}
	want := make([]T, n)
	for i := range want {
		sum := wide(in[0][i])
		for _, xs := range in[1:] {
			sum += wide(xs[i])
		}
		want[i] = narrow(sum)
	}
	for _, a := range fabric.Algorithms {
		var outs []memory.Slice[T]
		for r, m := range group {
			x := makeOf[T](t, m.s, n)
			require.NoError(t, x.CopyFrom(m.s, in[r]))
			outs = append(outs, x)
		}
		for r, m := range group {
			require.NoError(t, fabric.AllReduce(m.Rank, m.s, outs[r], outs[r], collective.Sum, &fabric.AllReduceConfig{Algorithm: a}))
		}
		for r, m := range group {
			require.Equal(t, want, fetch(t, m, outs[r]), "%s on rank %d", a, r)
		}
	}
}

// What cannot be a group is refused on all ranks, and leaves nothing.
func TestOpenRefuses(t *testing.T) {
	t.Setenv(env.ShareGPUs.Name, "no")
	before := fabric.Scratches()
	refused := func(t *testing.T, devs []*device.Device, want string) {
		group, err := openAll(t, devs, &fabric.Config{Bytes: 1})
		require.ErrorIs(t, err, errors.ErrUnsupported)
		for _, m := range group {
			require.Nil(t, m.Rank)
		}
		require.ErrorContains(t, err, want)
		require.Equal(t, before, fabric.Scratches())
	}
	t.Run("ranks", func(t *testing.T) {
		refused(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 9}), "at most 8 ranks")
	})
	t.Run("two on a GPU", func(t *testing.T) {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
		refused(t, []*device.Device{devs[0], devs[1], devs[0]}, "one for ranks 0 and 2")
		refused(t, []*device.Device{devs[0], devs[0]}, "CHORUS_SHARE_GPUS=yes")
	})
	t.Run("peers", func(t *testing.T) {
		t.Setenv(env.P2P.Name, "off")
		refused(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), "peer access")
	})
	t.Run("spoilt", func(t *testing.T) {
		// Copies between two GPUs are tested once each way before.
		faults := &device.SystemConfig{VirtualDevices: 2, Faults: "zero@cuMemcpyDtoDAsync#3"}
		refused(t, testgpu.Virtual(t, faults), "corrupted data from rank")
		t.Setenv(env.P2P.Name, "force")
		faults.Faults = "zero@cuMemcpyDtoDAsync#1"
		group := open(t, testgpu.Virtual(t, faults), &fabric.Config{Bytes: 1})
		carryOut(t, group, integers[uint64](), call{name: "all-reduce", n: 100})
	})
	t.Run("memory", func(t *testing.T) {
		sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "cuMemAlloc#*=CUDA_ERROR_OUT_OF_MEMORY"})
		_, err := openAll(t, sys.Devices(), nil)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.Equal(t, before, fabric.Scratches())
	})
	t.Run("one fails", func(t *testing.T) {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
		for _, failing := range []int{1, 2, 3, 4, 5} { // the exchange in which rank 1 says so
			_, errs := openBy(t, testgpu.Context(t), devs, func(i int, _ *stream.Stream, say collective.Exchange) (collective.Exchange, *fabric.Config) {
				turn := 0
				return func(ctx context.Context, mine []byte) ([][]byte, error) {
					if turn++; i == 1 && turn == failing {
						mine = []byte(`{"Failed": "out of luck"}`)
					}
					return say(ctx, mine)
				}, nil
			})
			require.ErrorContains(t, errs[0], "rank 1 cannot: out of luck")
			require.ErrorContains(t, errs[1], "rank 1 cannot: out of luck")
			require.Equal(t, before, fabric.Scratches())
		}
	})
	t.Run("one ends its context", func(t *testing.T) { // another rank says so first
		ctx, cancel := context.WithCancelCause(testgpu.Context(t))
		said := func(context.Context, []byte) ([][]byte, error) {
			cancel(errors.New("no time"))
			return [][]byte{[]byte(`{}`), []byte(`{"Failed": "no time"}`)}, nil
		}
		_, err := fabric.Open(ctx, newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]), 0, 2, said, nil)
		require.ErrorContains(t, err, "rank 1 cannot: no time")
		require.ErrorIs(t, err, context.Cause(ctx))
	})
	t.Run("one fails to link", func(t *testing.T) {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
		_, errs := openMisled(t, devs, `"Scratch":\d+`, `"Scratch":12345`)
		for _, err := range errs {
			require.ErrorContains(t, err, "its scratch memory is gone")
		}
		require.Equal(t, before, fabric.Scratches())
	})
	t.Run("exchange", func(t *testing.T) {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
		s := newStream(t, devs[0])
		broken := errors.New("broken")
		answer := func(said [][]byte, err error) collective.Exchange {
			return func(context.Context, []byte) ([][]byte, error) { return said, err }
		}
		for want, f := range map[string]collective.Exchange{
			"broken":                 answer(nil, broken),
			"want 2":                 answer([][]byte{{}}, nil),
			"what rank 1 has said":   answer([][]byte{[]byte("{}"), []byte("nonsense")}, nil),
			`broken\x0achorus: fine`: answer([][]byte{[]byte(`{"Failed":"broken\nchorus: fine"}`), []byte("{}")}, nil),
			"in the place of":        answer([][]byte{[]byte("{}"), []byte("{}")}, nil),
			"no exchange":            nil,
		} {
			_, err := fabric.Open(testgpu.Context(t), s, 0, 2, f, nil)
			require.ErrorContains(t, err, want)
		}
		_, err := fabric.Open(testgpu.Context(t), s, 2, 2, answer(nil, nil), nil)
		require.ErrorContains(t, err, "rank 2 of 2 does not exist")
		_, err = fabric.Open(testgpu.Context(t), s, 0, 2, answer(nil, nil), &fabric.Config{Bytes: -1})
		require.ErrorContains(t, err, "Bytes is -1")
		_, err = fabric.Open(testgpu.Context(t), nil, 0, 2, answer(nil, nil), nil)
		require.ErrorContains(t, err, "no stream")
		require.Equal(t, before, fabric.Scratches())
	})
	t.Run("config", func(t *testing.T) {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
		_, errs := openBy(t, testgpu.Context(t), devs, func(i int, _ *stream.Stream, seat collective.Exchange) (collective.Exchange, *fabric.Config) {
			return seat, &fabric.Config{Bytes: 1 + i<<20}
		})
		require.ErrorContains(t, errs[0], "want the same on all")
		require.ErrorContains(t, errs[1], "want the same on all")
	})
}

func TestLimits(t *testing.T) {
	group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), nil)
	require.Equal(t, fabric.Limits{OneShot: 2 << 20, TwoShotPackets: 4 << 20, TwoShot: 8 << 20, TwoShotLines: 8 << 20 / 128 * 120, Part: 2 << 20}, group[0].Limits())
	group = open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), &fabric.Config{Bytes: 200 << 10})
	require.Equal(t, fabric.Limits{OneShot: 64 << 10, TwoShotPackets: 131064, TwoShot: 256 << 10, TwoShotLines: 682 * 3 * 120, Part: 64 << 10}, group[0].Limits())
}
