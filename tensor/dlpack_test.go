package tensor_test

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
	"github.com/stretchr/testify/require"
)

// deleted has, by the address of a struct, a channel that its deleter closes.
var deleted sync.Map

// deleter is a C function, as another library has one.
var deleter = sync.OnceValue(func() uintptr {
	return dl.Callback(func(managed uintptr) {
		if c, ok := deleted.LoadAndDelete(managed); ok {
			close(c.(chan struct{}))
		}
	})
})

func TestFromDLPack(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		p, err := memory.Driver.Alloc(s, 4096)
		require.NoError(t, err)
		defer func() { require.NoError(t, memory.Driver.Free(s, p, 4096)) }()
		for _, unversioned := range []bool{false, true} {
			in := make([]int32, 24)
			for i := range in {
				in[i] = int32(i)
			}
			bytes, err := memory.Adopt[int32](s, p+8, len(in), nil)
			require.NoError(t, err)
			require.NoError(t, bytes.CopyFrom(s, in))
			require.NoError(t, bytes.Close())
			// A 3 × 4 view with gaps, two elements behind data by byte_offset.
			m, pack := tensor.NewManaged(unversioned, p, 0, 0, 32, []int64{3, 4}, []int64{8, 2}, deleter(),
				func(_, _ *int32, _ *uint16, offset *uint64, _ *uint32) { *offset = 8 })
			ended := make(chan struct{})
			deleted.Store(uintptr(pack.Managed), ended)
			x, err := tensor.FromDLPack(s, pack)
			require.NoError(t, err)
			require.Equal(t, memory.Int32, x.DType())
			require.Equal(t, []int{3, 4}, x.Shape())
			require.Equal(t, []int{8, 2}, x.Strides())
			require.Equal(t, p+8, x.Ptr(), "no copy")
			host, err := tensor.MakeHost(memory.Int32, 3, 4)
			require.NoError(t, err)
			require.NoError(t, tensor.Copy(s, host, x))
			got, err := tensor.Data[int32](host)
			require.NoError(t, err)
			require.Equal(t, []int32{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22}, got)

			gate := make(chan struct{})
			require.NoError(t, s.Callback(func() { <-gate }))
			require.NoError(t, x.Close())
			select {
			case <-ended:
				t.Fatal("the deleter was called while work is pending")
			default:
			}
			close(gate)
			<-ended
			require.ErrorIs(t, tensor.Copy(s, host, x), device.ErrClosed)
			runtime.KeepAlive(m)
		}
		// No strides means row-major, and one without a deleter needs none.
		m, pack := tensor.NewManaged(false, p, 0, 2, 32, []int64{2, 3}, nil, 0, nil)
		x, err := tensor.FromDLPack(s, pack)
		require.NoError(t, err)
		require.Equal(t, []int{3, 1}, x.Strides())
		require.NoError(t, x.Close())
		runtime.KeepAlive(m)
	})
}

func TestFromDLPackRefuses(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		p, err := memory.Driver.Alloc(s, 4096)
		require.NoError(t, err)
		defer func() { require.NoError(t, memory.Driver.Free(s, p, 4096)) }()
		type edit = func(kind, dims *int32, lanes *uint16, offset *uint64, major *uint32)
		var none edit
		for _, c := range []struct {
			want       string
			id         int32
			code, bits uint8
			shape      []int64
			strides    []int64
			change     edit
		}{
			{"on a device of DLPack's type 1: want type 2", 0, 2, 32, []int64{4}, nil, func(kind, _ *int32, _ *uint16, _ *uint64, _ *uint32) { *kind = 1 }},
			{"on CUDA device 7, the stream on ", 7, 2, 32, []int64{4}, nil, none},
			{"type code 5 with 64 bits and 1 lanes", 0, 5, 64, []int64{4}, nil, none},
			{"type code 2 with 32 bits and 4 lanes", 0, 2, 32, []int64{4}, nil, func(_, _ *int32, lanes *uint16, _ *uint64, _ *uint32) { *lanes = 4 }},
			{"strides [-1] are negative", 0, 2, 32, []int64{4}, []int64{-1}, none},
			{"shape [-4] has a negative dimension", 0, 2, 32, []int64{-4}, nil, none},
			{"the tensor has -1 dimensions", 0, 2, 32, []int64{4}, nil, func(_, dims *int32, _ *uint16, _ *uint64, _ *uint32) { *dims = -1 }},
			{"misaligned: want a multiple of 4", 0, 2, 32, []int64{4}, nil, func(_, _ *int32, _ *uint16, offset *uint64, _ *uint32) { *offset = 2 }},
			{"larger than any memory", 0, 2, 32, []int64{1 << 40, 1 << 40}, nil, none},
			{"larger than any memory", 0, 2, 32, []int64{3, 3}, []int64{1 << 61, 1 << 61}, none},
			{"the memory ends after", 0, 2, 32, []int64{1 << 30}, nil, none},
			{"version 2.0: want version 1", 0, 2, 32, []int64{4}, nil, func(_, _ *int32, _ *uint16, _ *uint64, major *uint32) { *major = 2 }},
		} {
			m, pack := tensor.NewManaged(false, p, c.id, c.code, c.bits, c.shape, c.strides, deleter(), c.change)
			ended := make(chan struct{})
			deleted.Store(uintptr(pack.Managed), ended)
			_, err := tensor.FromDLPack(s, pack)
			require.ErrorContains(t, err, c.want)
			select {
			case <-ended:
				t.Fatalf("%s: the deleter of a tensor that was not taken over was called", c.want)
			default:
			}
			deleted.Delete(uintptr(pack.Managed))
			runtime.KeepAlive(m)
		}
		_, err = tensor.FromDLPack(s, tensor.DLPack{})
		require.ErrorContains(t, err, "no tensor given")
	})
}

// What ToDLPack exports comes back at the same address, and its memory is freed once.
func TestToDLPack(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		before := tensor.Exported()
		s, consumer := newStream(t, devs[0]), newStream(t, devs[0])
		for n, d := range dtype.All() {
			base, err := memory.Allocated(devs[0])
			require.NoError(t, err)
			x, err := tensor.Make(s, memory.DType(n), 2, 3)
			require.NoError(t, err)
			for _, unversioned := range []bool{false, true} {
				view := x.T()
				pack, err := view.ToDLPack(consumer, unversioned)
				require.NoError(t, err, d.Name)
				y, err := tensor.FromDLPack(consumer, pack)
				require.NoError(t, err, d.Name)
				require.Equal(t, x.Ptr(), y.Ptr())
				require.Equal(t, view.Shape(), y.Shape())
				require.Equal(t, view.Strides(), y.Strides())
				require.Equal(t, x.DType(), y.DType())
				require.Equal(t, before+1, tensor.Exported())
				require.NoError(t, y.Close())
				require.Eventually(t, func() bool { return tensor.Exported() == before }, time.Minute, time.Millisecond)
			}
			require.NoError(t, x.Close())
			require.Eventually(t, func() bool { // the references are closed on other goroutines
				after, err := memory.Allocated(devs[0])
				return err == nil && after == base && tensor.Exported() == before
			}, time.Minute, time.Millisecond)
		}
		// The consumer waits for the producer's stream.
		x, err := tensor.Make(s, memory.Float32, 4)
		require.NoError(t, err)
		gate := make(chan struct{})
		var passed atomic.Bool
		require.NoError(t, s.Callback(func() { <-gate; passed.Store(true) }))
		pack, err := x.ToDLPack(consumer, false)
		require.NoError(t, err)
		var order atomic.Bool
		require.NoError(t, consumer.Callback(func() { order.Store(passed.Load()) }))
		close(gate)
		require.NoError(t, consumer.Sync(t.Context()))
		require.True(t, order.Load())
		pack.Delete()
		pack, err = x.ToDLPack(nil, true)
		require.NoError(t, err)
		pack.Delete()
		require.NoError(t, x.Close())
		host, err := tensor.MakeHost(memory.Float32, 2)
		require.NoError(t, err)
		_, err = host.ToDLPack(nil, false)
		require.ErrorContains(t, err, "host memory")
		_, err = tensor.Tensor{}.ToDLPack(nil, false)
		require.Error(t, err)
		mine, err := memory.Make[float32](s, 4)
		require.NoError(t, err)
		of, err := tensor.Of(mine, 4)
		require.NoError(t, err)
		_, err = of.ToDLPack(nil, false)
		require.ErrorContains(t, err, "borrows the memory of a slice")
		require.NoError(t, mine.Close())
	})
}
