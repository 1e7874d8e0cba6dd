package nccl

import (
	"runtime"
	"testing"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/crew"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// SetAbortPatience changes for a test how long an abort may take.
func SetAbortPatience(t *testing.T, d time.Duration) {
	old := abortNanos.Swap(int64(d))
	t.Cleanup(func() { abortNanos.Store(old) })
}

// WakeLaunchers lets groups of n ranks use launchers for the time of a test, which are
// awake when it returns.
func WakeLaunchers(t *testing.T, n int) {
	procs := runtime.GOMAXPROCS(2*n + 1)
	old := launchers
	launchers = &crew.Crew{Patience: time.Hour}
	t.Cleanup(func() {
		launchers.Sleep()
		launchers = old
		runtime.GOMAXPROCS(procs)
	})
	for !launchers.Try(n, idle{}) {
		runtime.Gosched()
	}
}

type idle struct{}

func (idle) Do(int) {}

// ReplaceNCCL lets a communicator that has done nothing yet call another NCCL, and returns
// the one that it had.
func (c *Communicator) ReplaceNCCL(api ncclapi.API) (old ncclapi.API) {
	old, c.api = c.api, api
	return old
}

// Closed reports whether the communicator has ended.
func (c *Communicator) Closed() bool { return c.over() }

// Relaxed runs fn as calls of NCCL in a capture are.
func Relaxed(dev *device.Device, fn func() error) error { return relaxed(dev, fn) }
