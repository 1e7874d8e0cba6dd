// Package virtualtime runs tests on virtual devices in the virtual time of testing/synctest.
//
// A wait ends as soon as nothing else happens, however long it is, so a test of a time limit takes no time, and a busy
// machine does not disturb it.
package virtualtime

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/virtual/nccl"
)

// Each is testgpu.Each whose virtual devices run in virtual time. On GPUs the time is real.
func Each(t *testing.T, n int, fn func(t *testing.T, devs []*device.Device)) {
	t.Helper()
	t.Run("virtual", func(t *testing.T) { Run(t, &device.SystemConfig{VirtualDevices: n}, fn) })
	t.Run("cuda", func(t *testing.T) { fn(t, testgpu.CUDA(t, n)) })
}

// Run runs fn with virtual devices in a bubble of testing/synctest. All ranks of fn must be in this process, and the test
// and its parents must not be parallel. What hangs by the fault plan ends after fn and its cleanups.
func Run(t *testing.T, cfg *device.SystemConfig, fn func(t *testing.T, devs []*device.Device)) {
	t.Helper()
	t.Setenv(env.VirtualNetwork.Name, nccl.InProcess)
	defer flight.FollowTime()()
	defer withoutLaunchers()()
	synctest.Test(t, func(t *testing.T) {
		var devs []*device.Device
		t.Cleanup(func() { // the last one: all goroutines must end in the bubble, also those that are only delayed
			gpu.SystemOf(devs[0].System()).Machine.EndHangs()
			time.Sleep(time.Hour)
		})
		devs = testgpu.Virtual(t, cfg)
		fn(t, devs)
	})
}

// withoutLaunchers lets one thread enqueue the operations of all ranks, until the result is called. A
// thread that polls for work, as those of a machine with four processors or more do, would keep virtual time from passing.
func withoutLaunchers() (again func()) {
	old := osthread.Launchers
	osthread.Launchers = new(osthread.Pool)
	osthread.Launchers.Close()
	return func() { osthread.Launchers = old }
}
