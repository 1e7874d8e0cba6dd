package comm_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

const (
	// drillContext is the time after which each context of the drill ends.
	drillContext = time.Second
	// drillLimit is the longest time of a call: the documented limit of Group.Close, and time for a busy machine.
	drillLimit = 30 * time.Second
)

// drillFaults are the functions of the driver and of NCCL that the calls of the drill use and that can hang there. An
// operation that is enqueued has no context: its deadline ends it (TestTimeoutIsNotCompleted).
var drillFaults = []string{
	"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain", "cuStreamCreateWithPriority", "cuMemAlloc", "cuMemHostAlloc",
	"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommInitAll", "ncclGroupStart",
	"cuStreamQuery", "cuEventQuery", "ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort", "cuStreamDestroy",
}

// A drillStep is a public call. A step that fails ends the drill.
type drillStep struct {
	name string
	call func(ctx context.Context, d *drill) error
}

type drill struct {
	faults string
	sys    *device.System
	s      *stream.Stream
	x      memory.Slice[float32]
	e      *stream.Event
	g      *comm.Group
	w      *comm.Work
}

var drillSteps = []drillStep{
	{"device.NewSystem", func(_ context.Context, d *drill) (err error) {
		d.sys, err = device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2, Faults: d.faults})
		return err
	}},
	{"stream.New", func(_ context.Context, d *drill) (err error) {
		d.s, err = stream.New(d.sys.Devices()[0], nil)
		return err
	}},
	{"memory.Make", func(_ context.Context, d *drill) (err error) {
		d.x, err = memory.Make[float32](d.s, 8)
		return err
	}},
	{"memory.Pinned", func(_ context.Context, d *drill) error {
		p, err := memory.MakePinned[float32](d.sys.Devices()[0], 8)
		if err != nil {
			return err
		}
		return p.Close()
	}},
	{"Slice.Zero", func(_ context.Context, d *drill) error { return d.x.Zero(d.s) }},
	{"Stream.Sync", func(ctx context.Context, d *drill) error { return d.s.Sync(ctx) }},
	{"Stream.Record", func(_ context.Context, d *drill) (err error) {
		d.e, err = d.s.Record(nil)
		return err
	}},
	{"Event.Sync", func(ctx context.Context, d *drill) error { return d.e.Sync(ctx) }},
	{"comm.Local", func(ctx context.Context, d *drill) (err error) {
		d.g, err = comm.Local(ctx, d.sys.Devices(), nil)
		return err
	}},
	{"comm.Barrier", func(ctx context.Context, d *drill) error { return d.g.Barrier(ctx) }},
	{"comm.Start", func(_ context.Context, d *drill) (err error) {
		d.w, err = comm.Start(d.g, func() error { return nil })
		return err
	}},
	{"Work.Wait", func(ctx context.Context, d *drill) error { return d.w.Wait(ctx) }},
	{"Group.Wait", func(ctx context.Context, d *drill) error { return d.g.Wait(ctx) }},
	{"Group.Shutdown", func(ctx context.Context, d *drill) error { return d.g.Shutdown(ctx) }},
}

var drillEnds = []drillStep{
	{"Group.Close", func(_ context.Context, d *drill) error { return d.g.Close() }},
	{"Stream.Close", func(_ context.Context, d *drill) error {
		if d.s == nil {
			return nil
		}
		return errors.Join(d.x.Close(), d.s.Close())
	}},
}

// TestDrill calls each function while each function of the driver and of NCCL hangs in turn: every call
// ends with its context, or within its documented limit, and the program can go on and end.
func TestDrill(t *testing.T) {
	t.Setenv(env.DriverTimeout.Name, drillContext.String())
	hung := make(chan string, 1024)
	t.Run("all", func(t *testing.T) {
		for _, fn := range drillFaults {
			for n := 1; n <= 4; n += 1 {
				t.Run(fmt.Sprintf("%s#%d", fn, n), func(t *testing.T) {
					t.Parallel()
					if (&drill{faults: fmt.Sprintf("hang@%s#%d", fn, n)}).run(t) {
						hung <- fn
					}
				})
			}
		}
	})
	close(hung)
	reached := map[string]bool{}
	for fn := range hung {
		reached[fn] = true
	}
	for _, fn := range []string{"cuInit", "cuMemAlloc", "cuStreamQuery", "cuEventQuery", "ncclCommGetAsyncError", "cuStreamCreateWithPriority", "ncclCommFinalize"} {
		require.True(t, reached[fn], "no call has failed because %s hangs", fn)
	}
}

// run calls the steps, and reports whether one of them failed.
func (d *drill) run(t *testing.T) (failed bool) {
	for _, s := range drillSteps {
		if err := d.step(t, s); err != nil {
			failed = true
			break
		}
	}
	for _, s := range drillEnds {
		failed = d.step(t, s) != nil || failed
	}
	return failed
}

func (d *drill) step(t *testing.T, s drillStep) error {
	done := make(chan error, 1)
	ctx, cancel := context.WithTimeout(t.Context(), drillContext)
	defer cancel()
	begun := time.Now()
	go func() { done <- s.call(ctx, d) }()
	select {
	case err := <-done:
		if err != nil {
			t.Logf("%s after %v: %v", s.name, time.Since(begun).Round(time.Millisecond), err)
		}
		return err
	case <-time.After(drillLimit):
		t.Fatalf("%s has not returned after %v", s.name, drillLimit)
		return nil
	}
}
