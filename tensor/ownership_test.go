package tensor_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// allocated is how many bytes of a device are in use.
func allocated(t testing.TB, d *device.Device) int64 {
	t.Helper()
	s, err := memory.StatsOf(d)
	require.NoError(t, err)
	return s.AllocatedBytes.All.Current
}

// Memory goes back with the last share, however often and in whatever order the
// others are closed.
func TestOwnership(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		before := allocated(t, devs[0])
		x, err := tensor.Make(s, memory.Float32, 3, 1000)
		require.NoError(t, err)
		held := allocated(t, devs[0])
		require.Greater(t, held, before)
		view, err := x.Narrow(0, 1, 1)
		require.NoError(t, err)
		require.NoError(t, view.Close(), "a view borrows")
		require.NoError(t, view.Close())
		require.Equal(t, held, allocated(t, devs[0]))
		part := view.Retain()
		require.True(t, x.Owned())
		require.Equal(t, x.Ptr()+4000, part.Ptr())
		again := x
		require.NoError(t, x.Close())
		require.NoError(t, again.Close(), "a copy of the value has no share of its own")
		require.NoError(t, x.Close())
		require.Equal(t, held, allocated(t, devs[0]), "the retained part has the memory")
		require.NoError(t, tensor.Add(s, part, part, part))
		require.NoError(t, part.T().Close())
		require.NoError(t, part.Close())
		require.Equal(t, before, allocated(t, devs[0]))
		require.ErrorIs(t, tensor.Add(s, part, part, part), device.ErrClosed)
		late := part.Retain()
		require.False(t, late.Owned())
		require.NoError(t, late.Close())
		require.ErrorIs(t, late.RecordStream(newStream(t, devs[0])), device.ErrClosed)
		require.NoError(t, tensor.Tensor{}.Close())
		require.NoError(t, tensor.Tensor{}.Retain().Close())

		m, err := memory.Make[float32](s, 6)
		require.NoError(t, err)
		b, err := tensor.Of(m, 2, 3)
		require.NoError(t, err)
		require.NoError(t, b.Close())
		require.NoError(t, b.Retain().Close())
		require.False(t, b.Owned())
		require.NoError(t, tensor.Add(s, b, b, b), "the memory is the slice's")
		require.NoError(t, m.Close())
		require.ErrorIs(t, tensor.Add(s, b, b, b), device.ErrClosed)
	})
}

// Memory that a capture refuses to take back stays the tensor's.
func TestCloseInCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		x, err := tensor.Make(s, memory.Int8, 64)
		require.NoError(t, err)
		_, err = graph.Capture([]*stream.Stream{s}, func() error { return x.Close() }, nil)
		var refused *device.CaptureError
		require.ErrorAs(t, err, &refused)
		require.True(t, x.Owned())
		require.NoError(t, x.Close())
		require.False(t, x.Owned())
	})
}

// Work of another stream keeps the memory where it is told.
func TestRecordStream(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, o := newStream(t, devs[0]), newStream(t, devs[0])
		x, err := tensor.Make(s, memory.Int32, 1000)
		require.NoError(t, err)
		was := x.Ptr()
		gate := make(chan struct{})
		require.NoError(t, o.Callback(func() { <-gate }))
		require.NoError(t, x.RecordStream(o))
		require.NoError(t, x.Close())
		y, err := tensor.Make(s, memory.Int32, 1000)
		require.NoError(t, err)
		require.NotEqual(t, was, y.Ptr(), "the other stream may use it still")
		close(gate)
		require.NoError(t, y.Close())
	})
}

func TestTypedAccess(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		x, err := tensor.Make(s, memory.Float32, 2, 3)
		require.NoError(t, err)
		defer x.Close()
		m, err := tensor.Slice[float32](x)
		require.NoError(t, err)
		require.Equal(t, x.Ptr(), m.Ptr())
		require.Equal(t, 6, m.Len())
		_, err = tensor.Slice[int32](x)
		require.ErrorContains(t, err, "not of int32")
		_, err = tensor.Slice[float32](x.T())
		require.ErrorContains(t, err, "not contiguous")
		_, err = tensor.Data[float32](x)
		require.ErrorContains(t, err, "want host memory")
		h, err := tensor.MakeHost(memory.Float32, 2)
		require.NoError(t, err)
		_, err = tensor.Slice[float32](h)
		require.ErrorContains(t, err, "want memory of a device")
		require.Nil(t, h.Device())
		require.True(t, h.IsHost())
		require.ErrorContains(t, tensor.MatMul(s, x, x, x, nil), "do not fit")
		_, err = tensor.Of(memory.Slice[float32]{}, 0)
		require.ErrorContains(t, err, "has no memory")
		like, err := tensor.MakeLike(s, x.T(), memory.Int8)
		require.NoError(t, err)
		require.Equal(t, x.T().Strides(), like.Strides())
		require.NoError(t, like.Close())
	})
}
