package comm_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// joinDevices joins a process for each list of devices, and runs fn for each group at once.
func joinDevices(t *testing.T, lists [][]*device.Device, cfg *comm.Config, fn func(ctx context.Context, g *comm.Group) error) []error {
	t.Helper()
	ctx := testgpu.Context(t)
	bs := exchanges(ctx, len(lists))
	return atOnce(len(lists), func(i int) error {
		g, err := comm.JoinDevices(ctx, bs[i], lists[i], cfg)
		if err != nil {
			return err
		}
		defer g.Close()
		if err := fn(ctx, g); err != nil {
			return err
		}
		return g.Shutdown(ctx)
	})
}

// cut divides devices among processes.
func cut(devs []*device.Device, counts ...int) (lists [][]*device.Device) {
	for _, n := range counts {
		lists, devs = append(lists, devs[:n:n]), devs[n:]
	}
	return lists
}

// The ranks are those of the first process, then those of the second, and all operations work.
func TestJoinDevices(t *testing.T) {
	for _, counts := range [][]int{{2, 2}, {1, 3}, {3, 1, 1}} {
		for _, strategy := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.Windows} {
			t.Run(fmt.Sprint(counts, strategy), func(t *testing.T) {
				testgpu.Each(t, 5, func(t *testing.T, devs []*device.Device) {
					errs := joinDevices(t, cut(devs, counts...), &comm.Config{Strategy: strategy}, func(ctx context.Context, g *comm.Group) error {
						for i, rank := range localRanks(g) {
							if g.Device(i) != devs[rank] {
								return fmt.Errorf("rank %d is on %s, want %s", rank, g.Device(i), devs[rank])
							}
						}
						return errors.Join(conform(ctx, g), conformSplit(ctx, g))
					})
					require.NoError(t, errors.Join(errs...))
				})
			})
		}
	}
}

// All processes learn why a group cannot be.
func TestJoinDevicesRefuses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	others := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	for name, c := range map[string]struct {
		second []*device.Device
		says   string
	}{
		"none":             {nil, "no devices given"},
		"nil":              {[]*device.Device{nil}, "device 0 of 1 is nil"},
		"twice":            {[]*device.Device{devs[2], devs[3], devs[2]}, "local ranks 0 and 2 are both on virtual:2"},
		"two systems":      {[]*device.Device{devs[2], others[1]}, "devices of two systems"},
		"of both":          {[]*device.Device{devs[2], devs[1]}, "ranks 1 .* and 3 .* are both on virtual:1 GPU-.*: a GPU holds one rank"},
		"of both, by UUID": {[]*device.Device{others[1]}, "ranks 1 .* and 2 .* are both on virtual:1 GPU-.*: a GPU holds one rank"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CHORUS_SHARE_GPUS", "no")
			errs := joinDevices(t, [][]*device.Device{devs[:2], c.second}, nil, func(context.Context, *comm.Group) error { return errors.New("it joined") })
			if strings.HasPrefix(name, "of both") {
				require.ErrorIs(t, errs[0], comm.ErrMismatch)
			}
			require.ErrorIs(t, errs[1], comm.ErrMismatch)
			for _, err := range errs {
				require.ErrorContains(t, err, "comm: join as ")
				require.Regexp(t, c.says, err)
			}
			require.ErrorContains(t, errs[0], "comm: join as process 0 of 2 on virtual:0, virtual:1: ")
		})
	}
}

// A process that fails while another one waits is named, and the group of each is broken.
func TestProcessWithSeveralDevicesFails(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	errs := joinDevices(t, cut(devs, 3, 1), nil, func(ctx context.Context, g *comm.Group) error {
		if g.Rank() == 3 {
			return errors.New("rank 3 has failed")
		}
		return conformAllReduce(ctx, g, 1<<10)
	})
	require.ErrorIs(t, errs[0], comm.ErrBroken)
	require.Regexp(t, `rank 3 (aborted|\(in process 1\) has left)`, errs[0])
	require.ErrorContains(t, errs[1], "rank 3 has failed")
}

// Two processes with two GPUs each are one group of four ranks.
func ExampleJoinDevices() {
	process := func(ctx context.Context, r comm.Rendezvous, devs []*device.Device) error {
		g, err := comm.JoinDevices(ctx, r, devs, nil)
		if err != nil {
			return err
		}
		defer g.Close()
		var xs comm.Shards[float32] // one for each local rank
		defer func() { _ = xs.Close() }()
		for i := range g.Locals() {
			x, err := memory.MakeFrom(g.Stream(i), []float32{float32(g.Rank() + i)})
			if err != nil {
				return err
			}
			xs = append(xs, x)
		}
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			return err
		}
		sum := make([]float32, 1)
		if err := xs[0].CopyTo(g.Stream(0), sum); err != nil {
			return err
		}
		if g.Rank() == 0 {
			fmt.Println(g.Locals(), "of", g.Size(), "ranks are local, and the sum is", sum[0])
		}
		return g.Shutdown(ctx)
	}
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 4})
	if err != nil {
		log.Fatal(err)
	}
	defer sys.Close()
	ctx := context.Background()
	rs := testgpu.Exchanges(ctx, 2) // in place of the cluster.Session of each process
	ended := make(chan error, 2)
	for i, r := range rs {
		go func() { ended <- process(ctx, r, sys.Devices()[2*i:2*i+2]) }()
	}
	if err := errors.Join(<-ended, <-ended); err != nil {
		log.Fatal(err)
	}
	// Output: 2 of 4 ranks are local, and the sum is 6
}

// SyncState refuses a group of which one process has several ranks, on all processes.
func TestSyncStateOfUnevenProcesses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	errs := joinDevices(t, cut(devs, 1, 2), nil, func(ctx context.Context, g *comm.Group) error {
		v := 1
		if _, err := comm.SyncState(ctx, g, 1, &v); !errors.Is(err, comm.ErrMismatch) {
			return fmt.Errorf("it has synchronised: %w", err)
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
}
