package nccl

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// free is an NCCL that costs nothing, so that what is measured is the layer
// above it. Only the calls that the test makes are there.
type free struct {
	ncclapi.API
	reduced int
}

func (f *free) AllReduce(_, _ cudadrv.DevicePtr, _ uintptr, _ ncclapi.DType, _ ncclapi.RedOp, _ ncclapi.Comm, _ cudadrv.Stream) ncclapi.Result {
	f.reduced++
	return ncclapi.Success
}
func (f *free) GroupStart() ncclapi.Result            { return ncclapi.Success }
func (f *free) GroupEnd() ncclapi.Result              { return ncclapi.Success }
func (f *free) CommAbort(ncclapi.Comm) ncclapi.Result { return ncclapi.Success }

// Enqueueing a collective, alone or in a group, allocates nothing in Go.
func TestEnqueueAllocatesNothing(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	defer s.Close()
	x, err := memory.Make[float32](s, 256)
	require.NoError(t, err)
	defer x.Close()
	api := &free{}
	c := &Communicator{api: api, dev: devs[0], size: 1, h: new(ncclapi.Comm)}
	handle.Init(c, &c.owner, "nccl communicator")
	defer c.Close()
	require.NoError(t, s.Sync(testgpu.Context(t)))
	const runs = 100
	require.Zero(t, testing.AllocsPerRun(runs, func() {
		err := AllReduce(c, s, x, x, Sum)
		err = errors.Join(err, Group(c, func() error { return AllReduce(c, s, x, x, Sum) }))
		if err != nil {
			t.Error(err)
		}
	}))
	require.Equal(t, 2*(runs+1), api.reduced)
}
