package nccl_test

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A waitingNCCL is one whose all-reduces wait for another rank until they are aborted.
type waitingNCCL struct {
	ncclapi.API
	inside, aborted chan struct{}
	abort           sync.Once
}

func (w *waitingNCCL) Collective(ncclapi.Call) ncclapi.Result {
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
			cs, err := nccl.NewCommunicators(testgpu.Context(t), devs, &nccl.Config{Timeout: timeout})
			require.NoError(t, err)
			c := cs[0]
			w := &waitingNCCL{inside: make(chan struct{}), aborted: make(chan struct{})}
			w.API = c.ReplaceNCCL(w)
			s := streamtest.NewStream(t, devs[0])
			x := room[float32](t, s, 8)
			ended := make(chan error, 1)
			go func() {
				_, err := graph.Capture([]*stream.Stream{s}, func() error { return nccl.AllReduce(c, s, x, x, nccl.Sum) }, nil)
				ended <- err
			}()
			select {
			case <-w.inside:
			case err := <-ended: // on a busy machine the deadline may be over before NCCL is called
				require.Positive(t, timeout, "%v", err)
				ended <- err
			}
			if timeout < 0 {
				require.NoError(t, c.Abort())
			}
			select {
			case err = <-ended:
			case <-time.After(time.Minute):
				require.Fail(t, "the operation goes on")
			}
			if late, ok := errors.AsType[*nccl.TimeoutError](err); timeout > 0 {
				require.True(t, ok, "%v", err)
				require.True(t, late.Operation.Captured)
			} else {
				require.ErrorIs(t, err, nccl.ErrorInternal)
				require.NoError(t, c.Err(), "it was aborted, and did not fail")
			}
			require.NoError(t, c.Close())
			require.False(t, gpu.AnyCapture())
		})
	}
}

// A slowNCCL is in an all-reduce for as long as an abort takes to begin.
type slowNCCL struct {
	ncclapi.API
	inside, leave chan struct{}
}

func (w *slowNCCL) Collective(c ncclapi.Call) ncclapi.Result {
	r := w.API.Collective(c)
	close(w.inside)
	<-w.leave
	return r
}

// An abort in the middle of a capture waits for its end, and there is no graph: not even
// where an operation was in NCCL just then.
func TestAbortInACapture(t *testing.T) {
	for _, inside := range []bool{false, true} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
		cs, err := nccl.NewCommunicators(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		c := cs[0]
		s := streamtest.NewStream(t, devs[0])
		x := room[float32](t, s, 8)
		aborted := make(chan error, 1)
		w := &slowNCCL{inside: make(chan struct{}), leave: make(chan struct{})}
		if inside {
			w.API = c.ReplaceNCCL(w)
			go func() {
				<-w.inside
				go close(w.leave)
				aborted <- c.Abort()
			}()
		}
		_, err = graph.Capture([]*stream.Stream{s}, func() error {
			if err := nccl.AllReduce(c, s, x, x, nccl.Sum); err != nil || !inside {
				aborted <- c.Abort()
				return err
			}
			err := <-aborted
			aborted <- nil
			return err
		}, nil)
		require.ErrorContains(t, err, "a communicator with operations in it was aborted meanwhile")
		require.NoError(t, <-aborted)
		require.True(t, c.Closed())
		require.NoError(t, c.Close())
	}
}

// The thread is in the mode that it was in when the call has returned.
func TestRelaxedIsForTheCall(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var within cudadrv.CaptureMode
	require.NoError(t, nccl.Relaxed(devs[0], func() (err error) {
		within, err = exchanged(devs[0], cudadrv.CaptureRelaxed)
		return err
	}))
	require.Equal(t, cudadrv.CaptureRelaxed, within)
	mode, err := exchanged(devs[0], cudadrv.CaptureGlobal)
	require.NoError(t, err)
	require.Equal(t, cudadrv.CaptureGlobal, mode)
}

func exchanged(dev *device.Device, mode cudadrv.CaptureMode) (old cudadrv.CaptureMode, err error) {
	old, r := gpu.DeviceOf(dev).Driver().ThreadExchangeStreamCaptureMode(mode)
	if r != cudadrv.Success {
		err = r
	}
	return old, err
}
