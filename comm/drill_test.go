package comm_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// drillVar is set in the process of TestDrill.
const drillVar = "COMM_TEST_DRILL"

const (
	// drillContext is the time after which each context of the drill ends, and CHORUS_DRIVER_TIMEOUT.
	drillContext = 3 * time.Second
	// drillSlack is how much longer a call may take on a busy machine.
	drillSlack = 9 * time.Second
	// closeLimit and answerLimit are the documented limits of Group.Close and Group.Err.
	closeLimit, answerLimit = 20 * time.Second, 10 * time.Second
)

// A drillStep is a public call. If a step fails, only the closing steps follow.
type drillStep struct {
	name     string
	limit    time.Duration // after which the call ends
	enqueues bool          // the call has no limit: see enqueuing
	closes   bool
	call     func(ctx context.Context, d *drill) error
}

// enqueuing lists the functions that calls on the hot path use, which have no limit of their own: of the driver only those
// that neither wait nor allocate, and of NCCL those that the deadline of the operation ends.
var enqueuing = map[string]bool{
	"cuCtxSetCurrent": true, "cuStreamIsCapturing": true, "cuStreamGetCaptureInfo": true, "cuThreadExchangeStreamCaptureMode": true,
	"cuEventQuery": true, "cuEventCreate": true, "cuEventDestroy": true, "cuStreamQuery": true, "ncclGroupStart": true, "ncclGroupEnd": true, "ncclCommGetAsyncError": true,
}

type drill struct {
	closesOnly bool // without the steps that shut down

	sys *device.System
	s   *stream.Stream
	x   memory.Slice[float32]
	p   *memory.Pinned[float32]
	e   *stream.Event
	c   []*nccl.Communicator
	g   *comm.Group
	w   *comm.Work
}

func (d *drill) first() *device.Device { return d.sys.Devices()[0] }

var drillSteps = []drillStep{
	{name: "device.MemoryInfo", limit: drillContext, call: func(_ context.Context, d *drill) error {
		_, _, err := d.first().MemoryInfo()
		return err
	}},
	{name: "stream.New", limit: drillContext, call: func(_ context.Context, d *drill) (err error) {
		d.s, err = stream.New(d.first(), nil)
		return err
	}},
	{name: "memory.Make", limit: 2 * drillContext, call: func(_ context.Context, d *drill) (err error) {
		d.x, err = memory.Make[float32](d.s, 8)
		return err
	}},
	{name: "memory.MakePinned", limit: 2 * drillContext, call: func(_ context.Context, d *drill) (err error) {
		d.p, err = memory.MakePinned[float32](d.first(), 8)
		return err
	}},
	{name: "Slice.Zero", enqueues: true, call: func(_ context.Context, d *drill) error { return d.x.Zero(d.s) }},
	{name: "Stream.Record", enqueues: true, call: func(_ context.Context, d *drill) (err error) {
		d.e, err = d.s.Record(nil)
		return err
	}},
	{name: "Stream.Sync", limit: drillContext, call: func(ctx context.Context, d *drill) error { return d.s.Sync(ctx) }},
	{name: "Event.Sync", limit: drillContext, call: func(ctx context.Context, d *drill) error { return d.e.Sync(ctx) }},
	{name: "Device.Sync", limit: drillContext, call: func(ctx context.Context, d *drill) error { return d.first().Sync(ctx) }},
	{name: "nccl.NewCommunicators", limit: drillContext + closeLimit, call: func(ctx context.Context, d *drill) (err error) {
		d.c, err = nccl.NewCommunicators(ctx, d.sys.Devices(), nil)
		return err
	}},
	{name: "Communicator.Shutdown", limit: drillContext + closeLimit, call: func(ctx context.Context, d *drill) error {
		return errors.Join(atOnce(len(d.c), func(i int) error { return d.c[i].Shutdown(ctx) })...)
	}},
	{name: "comm.Local", limit: drillContext + closeLimit, call: func(ctx context.Context, d *drill) (err error) {
		d.g, err = comm.Local(ctx, d.sys.Devices(), nil)
		return err
	}},
	{name: "Group.Barrier", limit: drillContext, call: func(ctx context.Context, d *drill) error { return d.g.Barrier(ctx) }},
	{name: "comm.Start", enqueues: true, call: func(_ context.Context, d *drill) (err error) {
		d.w, err = comm.Start(d.g, func() error { return nil })
		return err
	}},
	{name: "Work.Wait", limit: drillContext, call: func(ctx context.Context, d *drill) error { return d.w.Wait(ctx) }},
	{name: "Group.Wait", limit: drillContext, call: func(ctx context.Context, d *drill) error { return d.g.Wait(ctx) }},
	{name: "Group.Err", limit: answerLimit, call: func(_ context.Context, d *drill) error { return d.g.Err() }},
	{name: "Group.Shutdown", limit: drillContext + closeLimit, call: func(ctx context.Context, d *drill) error { return d.g.Shutdown(ctx) }},
	{name: "Communicator.Close", limit: closeLimit, closes: true, call: func(_ context.Context, d *drill) error {
		var errs []error
		for _, c := range d.c {
			errs = append(errs, c.Close())
		}
		return errors.Join(errs...)
	}},
	{name: "Group.Close", limit: closeLimit, closes: true, call: func(_ context.Context, d *drill) error { return d.g.Close() }},
	{name: "Buffer.Close", enqueues: true, closes: true, call: func(_ context.Context, d *drill) error {
		return errors.Join(d.x.Close(), d.p.Close(), d.e.Close())
	}},
	{name: "Stream.Close", limit: drillContext, closes: true, call: func(_ context.Context, d *drill) error { return d.s.Close() }},
}

// TestDrill calls each function of the table while each function of the driver and of NCCL that it uses hangs in turn: every
// call ends with its context or within its documented limit, and so do the calls that close everything afterwards, unless they enqueue. A hang of an
// operation that is enqueued, such as cuMemcpyHtoDAsync, means that it never completes.
//
// The calls that hang leave communicators and threads behind, so the table runs in a process of its own.
func TestDrill(t *testing.T) {
	if os.Getenv(drillVar) == "" {
		t.Parallel()
		self, err := os.Executable()
		require.NoError(t, err)
		cmd := exec.CommandContext(testgpu.Context(t), self, "-test.run=^TestDrill$", "-test.v")
		cmd.Env = append(os.Environ(), drillVar+"=1")
		out, _ := cmd.CombinedOutput() // it also reports what the hanging calls have left open
		require.Contains(t, string(out), "--- PASS: TestDrill", "%s", out)
		t.Log(regexp.MustCompile("cells by .*").FindString(string(out)))
		return
	}
	t.Setenv(env.DriverTimeout.Name, drillContext.String())
	used := map[string][]string{}
	(&drill{}).run(t, "", "", used)
	(&drill{closesOnly: true}).run(t, "", "", used)
	var cells sync.WaitGroup
	var mu sync.Mutex
	ends := map[string]int{}
	for _, s := range drillSteps {
		if len(used[s.name]) == 0 {
			t.Errorf("%s uses no function", s.name)
		}
		for _, fn := range used[s.name] {
			if s.enqueues && enqueuing[fn] {
				continue
			}
			cells.Go(func() {
				end := (&drill{closesOnly: s.closes}).run(t, s.name, fn, nil)
				mu.Lock()
				defer mu.Unlock()
				ends[end]++
			})
		}
	}
	cells.Wait()
	t.Logf("cells by the end of the call: %v", ends)
	require.Greater(t, ends["failed"], 20) // the watchdog may use the function first
}

// run calls the steps. In one of them, the next call of a function hangs. If used is given, run records the functions that each
// step uses.
func (d *drill) run(t *testing.T, in, hang string, used map[string][]string) (end string) {
	cfg := &device.SystemConfig{Backend: "virtual", VirtualDevices: 2}
	sys, err := device.NewSystem(cfg)
	for tries := 0; err != nil && strings.Contains(err.Error(), env.DriverTimeout.Name) && tries < 10; tries++ { // nothing hangs yet: this machine is busy
		sys, err = device.NewSystem(cfg)
	}
	if err != nil {
		t.Errorf("open the devices: %v", err)
		return "broken"
	}
	d.sys, end = sys, "returned nil"
	m := gpu.SystemOf(sys).Machine
	failed := false
	for _, s := range drillSteps {
		if failed && !s.closes || d.closesOnly && strings.HasSuffix(s.name, ".Shutdown") {
			continue
		}
		if s.name == in {
			m.HangNext(hang)
		}
		stop := m.CountCalls()
		err := d.step(t, s, in+" while "+hang+" hangs")
		count := stop()
		if err != nil && s.name == in {
			end = "failed"
		}
		failed = failed || err != nil
		if used != nil {
			if err != nil {
				t.Errorf("%s: %v", s.name, err)
			}
			for _, fn := range used[s.name] {
				count[fn]++
			}
			used[s.name] = slices.Sorted(maps.Keys(count))
		}
	}
	return end
}

// step makes a call, and reports if it does not end in time.
func (d *drill) step(t *testing.T, s drillStep, when string) error {
	limit := s.limit + drillSlack
	ctx, cancel := context.WithTimeout(t.Context(), drillContext)
	defer cancel()
	err, ended := poll.Within(limit, func() error { return s.call(ctx, d) })
	if !ended && (!s.enqueues || strings.HasPrefix(when, s.name)) {
		t.Errorf("%s: %s has not returned after %v", when, s.name, limit)
	}
	if !ended {
		return errors.New("not returned")
	}
	if err != nil && strings.Contains(err.Error(), "panic") {
		t.Errorf("%s: %s: %v", when, s.name, err)
	}
	return err
}

// NewSystem ends within CHORUS_DRIVER_TIMEOUT, whatever hangs.
func TestOpeningEndsWhenTheDriverHangs(t *testing.T) {
	t.Setenv(env.DriverTimeout.Name, drillContext.String())
	for _, fn := range []string{"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid", "cuDeviceGetAttribute", "cuDeviceTotalMem"} {
		err, ended := poll.Within(drillContext+drillSlack, func() error {
			sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2, Faults: fmt.Sprintf("hang@%s#1", fn)})
			if err != nil {
				return err
			}
			s, err := stream.New(sys.Devices()[0], nil)
			if err != nil {
				return err
			}
			return s.Close()
		})
		require.True(t, ended, fn)
		if fn == "cuInit" || fn == "cuDeviceGetCount" {
			var hang *gpu.HangError
			require.ErrorAs(t, err, &hang, fn)
			require.ErrorContains(t, err, "CHORUS_DRIVER_TIMEOUT")
		}
	}
}
