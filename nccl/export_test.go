package nccl

import (
	"runtime"
	"testing"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/internal/status"
)

// SetAbortTimeout changes for a test how long an abort may take.
func SetAbortTimeout(t *testing.T, d time.Duration) {
	old := abortTimeoutNanos.Swap(int64(d))
	t.Cleanup(func() { abortTimeoutNanos.Store(old) })
}

// WakeLaunchers lets groups of n ranks use launchers for the time of a test, which are
// awake when it returns.
func WakeLaunchers(t *testing.T, n int) {
	procs := runtime.GOMAXPROCS(2*n + 1)
	old := osthread.Launchers
	osthread.Launchers = &osthread.Pool{PollTime: time.Hour}
	t.Cleanup(func() {
		osthread.Launchers.Close()
		osthread.Launchers = old
		runtime.GOMAXPROCS(procs)
	})
	for !osthread.Launchers.Try(n, idle{}) {
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

// LeaveLocalRanks makes the other ranks of c behave as if c were in another process.
func (c *Communicator) LeaveLocalRanks() { c.leaveLocalRanks() }

// MostInFlight is the bound on the operations of processes that share GPUs.
const (
	MostInFlight = roomOfSharers
	RoomParts    = roomParts
	RoomTimeout  = roomTimeout
)

// Closed reports whether the communicator has ended.
func (c *Communicator) Closed() bool { return c.isClosed() }

// Relaxed runs fn as calls of NCCL in a capture are.
func Relaxed(dev *device.Device, fn func() error) error { return relaxed(dev, fn) }

// GroupOf returns what the status of the process says about c.
func GroupOf(c *Communicator) status.Group { return groupOf(c.rec) }
