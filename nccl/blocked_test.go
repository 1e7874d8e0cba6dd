package nccl

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A waitingNCCL is one whose all-reduces wait for another rank until they are aborted.
type waitingNCCL struct {
	ncclapi.API
	inside, aborted chan struct{}
	abort           sync.Once
}

func (w *waitingNCCL) AllReduce(_, _ cudadrv.DevicePtr, _ uintptr, _ ncclapi.DType, _ ncclapi.RedOp, _ ncclapi.Comm, _ cudadrv.Stream) ncclapi.Result {
	close(w.inside)
	<-w.aborted
	return ncclapi.InternalError
}

func (w *waitingNCCL) CommAbort(c ncclapi.Comm) ncclapi.Result {
	w.abort.Do(func() { close(w.aborted) })
	return w.API.CommAbort(c)
}

// An operation that NCCL does not return from while a graph is captured, since another rank
// does not come, ends at the deadline or by an abort, and the capture with it.
func TestAnOperationBlockedInACapture(t *testing.T) {
	for name, timeout := range map[string]time.Duration{"deadline": 50 * time.Millisecond, "abort": -1} {
		t.Run(name, func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
			cs, err := NewCommunicators(testgpu.Context(t), devs, &Config{Timeout: timeout})
			require.NoError(t, err)
			c := cs[0]
			w := &waitingNCCL{API: c.api, inside: make(chan struct{}), aborted: make(chan struct{})}
			c.api = w
			s, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			x, err := memory.Make[float32](s, 8)
			require.NoError(t, err)
			ended := make(chan error, 1)
			go func() {
				_, err := graph.Capture([]*stream.Stream{s}, func() error { return AllReduce(c, s, x, x, Sum) })
				ended <- err
			}()
			<-w.inside
			if timeout < 0 {
				require.NoError(t, c.Abort())
			}
			err = <-ended
			if late, ok := errors.AsType[*TimeoutError](err); timeout > 0 {
				require.True(t, ok, "%v", err)
				require.True(t, late.Operation.Captured)
			} else {
				require.ErrorIs(t, err, ErrorInternal)
			}
			require.NoError(t, c.Close())
			require.False(t, stream.AnyCapture())
			require.NoError(t, x.Close())
			require.NoError(t, s.Close())
		})
	}
}
