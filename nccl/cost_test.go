package nccl

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An idleNCCL takes operations and does nothing, so that what Chorus adds to them
// can be measured.
type idleNCCL struct {
	ncclapi.API
	calls int
}

func (l *idleNCCL) GroupStart() ncclapi.Result { return ncclapi.Success }
func (l *idleNCCL) GroupEnd() ncclapi.Result   { return ncclapi.Success }

func (l *idleNCCL) AllReduce(_, _ cudadrv.DevicePtr, _ uintptr, _ ncclapi.DType, _ ncclapi.RedOp, _ ncclapi.Comm, _ cudadrv.Stream) ncclapi.Result {
	l.calls++
	return ncclapi.Success
}

func (l *idleNCCL) Send(_ cudadrv.DevicePtr, _ uintptr, _ ncclapi.DType, _ int32, _ ncclapi.Comm, _ cudadrv.Stream) ncclapi.Result {
	return ncclapi.Success
}

func (l *idleNCCL) Recv(_ cudadrv.DevicePtr, _ uintptr, _ ncclapi.DType, _ int32, _ ncclapi.Comm, _ cudadrv.Stream) ncclapi.Result {
	return ncclapi.Success
}

// An idleRank is a communicator that enqueues nothing.
type idleRank struct {
	c    *Communicator
	s    *stream.Stream
	x, y memory.Slice[float32]
}

func newIdleRank(t testing.TB) *idleRank {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	id, err := NewUniqueID(dev)
	require.NoError(t, err)
	r := &idleRank{}
	r.c, err = NewCommunicator(testgpu.Context(t), dev, id, 0, 1, nil)
	require.NoError(t, err)
	r.s, err = stream.New(dev, nil)
	require.NoError(t, err)
	for _, x := range []*memory.Slice[float32]{&r.x, &r.y} {
		*x, err = memory.Make[float32](r.s, 64)
		require.NoError(t, err)
	}
	real := r.c.api
	r.c.api = &idleNCCL{API: real}
	t.Cleanup(func() {
		r.c.api = real
		require.NoError(t, r.x.Close())
		require.NoError(t, r.y.Close())
		require.NoError(t, r.c.Close())
		require.NoError(t, r.s.Close())
	})
	return r
}

// ways are the forms in which operations are issued.
func (r *idleRank) ways() map[string]func() error {
	counts := []int{64}
	inGroup := func() error {
		for range 8 {
			if err := AllReduce(r.c, r.s, r.y, r.x, Sum); err != nil {
				return err
			}
		}
		return nil
	}
	return map[string]func() error{
		"one":       func() error { return AllReduce(r.c, r.s, r.y, r.x, Sum) },
		"group":     func() error { return Group(r.c, inGroup) },
		"uneven":    func() error { return AllToAllV(r.c, r.s, r.y, counts, r.x, counts) },
		"in groups": func() error { return Group(r.c, func() error { return AllToAllV(r.c, r.s, r.y, counts, r.x, counts) }) },
	}
}

func TestOperationsDoNotAllocate(t *testing.T) {
	r := newIdleRank(t)
	for name, issue := range r.ways() {
		require.NoError(t, issue(), name)
		require.Zero(t, testing.AllocsPerRun(500, func() { _ = issue() }), name)
	}
	require.Positive(t, r.c.api.(*idleNCCL).calls)
}

func BenchmarkOperation(b *testing.B) {
	r := newIdleRank(b)
	for _, name := range []string{"one", "group"} {
		issue := r.ways()[name]
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := issue(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
