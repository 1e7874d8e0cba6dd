package nccl_test

import (
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// apart connects two ranks that behave as if processes of their own had them. Each has completed one operation.
func apart(t *testing.T, devs []*device.Device, timeout time.Duration) ([]rank, []memory.Slice[int64]) {
	t.Helper()
	ranks, xs := afterOnce(t, devs, 8, timeout)
	for _, r := range ranks {
		r.c.LeaveLocalRanks()
	}
	return ranks, xs
}

// bounds are the bound of processes that share GPUs, and the bound of others, with the same number.
var bounds = map[string]string{env.ShareGPUs.Name: "yes", env.NCCLInFlight.Name: strconv.Itoa(nccl.MostInFlight)}

// mostAhead is the number of operations that a rank can issue after its first one while the other rank issues none. A call
// waits at the end of a part for the operations before the parts of the bound.
const mostAhead = nccl.MostInFlight + nccl.MostInFlight/nccl.RoomParts - 2

// issuers issue an all-reduce in the two ways that have code of their own.
var issuers = map[string]func(r rank, x memory.Slice[int64]) error{
	"a call": func(r rank, x memory.Slice[int64]) error { return nccl.AllReduce(r.c, r.s, x, x, nccl.Sum) },
	"a batch": func(r rank, x memory.Slice[int64]) error {
		return nccl.Group(func(b *nccl.Batch) error { return nccl.AllReduce(b.On(r.c), r.s, x, x, nccl.Sum) })
	},
}

// TestFewOperationsInFlight checks that a rank is never more than the bound ahead of the other
// rank, which issues its operations when the first rank has no more room.
func TestFewOperationsInFlight(t *testing.T) {
	const total = 5 * nccl.MostInFlight
	for variable, value := range bounds {
		for name, issue := range issuers {
			t.Run(variable+" "+name, func(t *testing.T) {
				t.Setenv(variable, value)
				streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
					ranks, xs := apart(t, devs, time.Minute)
					var ahead, behind atomic.Int64
					var lead int64
					each(t, devs, func(i int) error {
						for n := int64(1); n <= total; n++ {
							if i == 1 {
								full := (n + nccl.MostInFlight - 1) / nccl.MostInFlight * nccl.MostInFlight
								until(t, func() bool { return ahead.Load() >= full })
								behind.Add(1)
							}
							if err := issue(ranks[i], xs[i]); err != nil {
								return err
							}
							if i == 0 {
								lead = max(lead, n-behind.Load())
								ahead.Add(1)
							}
						}
						return ranks[i].c.Wait(testgpu.Context(t), ranks[i].s)
					})
					require.LessOrEqual(t, lead, int64(mostAhead)+1)
					require.GreaterOrEqual(t, lead, int64(nccl.MostInFlight))
				})
			})
		}
	}
}

// TestBoundGivesWay checks that a rank whose operations wait for something that it does later waits once, and not for
// each operation, unless its process shares its GPU with others.
func TestBoundGivesWay(t *testing.T) {
	t.Setenv(env.NCCLInFlight.Name, bounds[env.NCCLInFlight.Name])
	for name, issue := range issuers {
		t.Run(name, func(t *testing.T) {
			streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
				ranks, xs := apart(t, devs, time.Minute)
				for range 2 {
					begun := time.Now()
					for range 5 * nccl.MostInFlight {
						require.NoError(t, issue(ranks[0], xs[0]))
					}
					require.GreaterOrEqual(t, time.Since(begun), nccl.RoomTimeout)
					require.Less(t, time.Since(begun), nccl.RoomTimeout*5/4)
					for range 5 * nccl.MostInFlight {
						require.NoError(t, issue(ranks[1], xs[1]))
					}
					for _, r := range ranks {
						require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
					}
				}
			})
		})
	}
}

// TestNoBound checks the value that turns the bound off, and values that are none.
func TestNoBound(t *testing.T) {
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		t.Setenv(env.NCCLInFlight.Name, "0")
		ranks, xs := apart(t, devs, time.Minute)
		begun := time.Now()
		for range 5 * nccl.MostInFlight {
			require.NoError(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum))
		}
		require.Less(t, time.Since(begun), nccl.RoomTimeout)
		for _, r := range ranks {
			require.NoError(t, r.c.Abort())
		}
	})
	for _, value := range []string{"-1", "3", "many", "", " ", "2.5", "2147483648", "99999999999999999999"} {
		t.Setenv(env.NCCLInFlight.Name, value)
		_, err := nccl.NewCommunicators(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}), nil)
		require.EqualError(t, err, fmt.Sprintf("nccl: env: CHORUS_NCCL_IN_FLIGHT=%q: want a whole number from 4 to 2147483647, or 0 for no bound", value))
	}
}

// TestWaitForRoomEnds checks that a call that waits for room ends with the communicator, with the
// error that later calls have.
func TestWaitForRoomEnds(t *testing.T) {
	for name, issue := range issuers {
		t.Run(name+" while the communicator is aborted", func(t *testing.T) {
			t.Setenv(env.ShareGPUs.Name, "yes")
			ranks, xs := apart(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), time.Minute)
			aborted := make(chan error, 1)
			require.ErrorIs(t, fill(t, ranks[0], xs[0], issue, func() { aborted <- ranks[0].c.Abort() }), device.ErrClosed)
			require.NoError(t, <-aborted)
		})
		t.Run(name+" while an operation times out", func(t *testing.T) {
			t.Setenv(env.ShareGPUs.Name, "yes")
			streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
				ranks, xs := apart(t, devs, ample)
				err := fill(t, ranks[0], xs[0], issue, func() {})
				require.ErrorIs(t, err, nccl.ErrorTimeout)
				require.Equal(t, ranks[0].c.Err(), err)
			})
		})
	}
}

// fill issues operations until one is refused, which must be the first one without room. It calls full
// on a goroutine when there is no more room.
func fill(t *testing.T, r rank, x memory.Slice[int64], issue func(rank, memory.Slice[int64]) error, full func()) error {
	t.Helper()
	for range mostAhead {
		require.NoError(t, issue(r, x))
	}
	go func() {
		until(t, func() bool { return r.c.Progress().Issued.Collective > mostAhead })
		full()
	}()
	err := issue(r, x)
	require.EqualValues(t, 1+mostAhead, r.c.Progress().Issued.Collective)
	return err
}

// TestCaptureWithoutRoom checks that a captured operation waits for nothing.
func TestCaptureWithoutRoom(t *testing.T) {
	t.Setenv(env.ShareGPUs.Name, "yes")
	ranks, xs := apart(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), time.Minute)
	r := ranks[0]
	for range mostAhead {
		require.NoError(t, nccl.AllReduce(r.c, r.s, xs[0], xs[0], nccl.Sum))
	}
	s, err := stream.New(r.c.Device(), nil)
	require.NoError(t, err)
	defer s.Close()
	for _, issue := range issuers {
		g, err := graph.Capture([]*stream.Stream{s}, func() error { return issue(rank{c: r.c, s: s}, xs[0]) }, nil)
		require.NoError(t, err)
		require.NoError(t, g.Close())
	}
	require.NoError(t, r.c.Abort())
}

// TestRoomOfRanksOfOneProcess checks that the bound does not apply if a process has all ranks: one
// goroutine may issue their operations one rank after the other.
func TestRoomOfRanksOfOneProcess(t *testing.T) {
	t.Setenv(env.ShareGPUs.Name, "yes")
	ranks, xs := afterOnce(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), 8, time.Minute)
	for i, r := range ranks {
		for range 2 * mostAhead {
			require.NoError(t, nccl.AllReduce(r.c, r.s, xs[i], xs[i], nccl.Sum))
		}
	}
	for _, r := range ranks {
		require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
	}
}
