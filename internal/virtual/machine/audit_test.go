package machine

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

func (r *rig) markAllocated(p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return r.Drv.(cudadrv.Auditor).MemAllocated(p, n, s)
}

func (r *rig) markFreed(p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return r.Drv.(cudadrv.Auditor).MemFreed(p, n, s)
}

// segments are what an allocator divides: a block, and mappings side by side.
var segments = map[string]func(*rig) cudadrv.DevicePtr{
	"block": func(r *rig) cudadrv.DevicePtr { return r.Alloc(0, 4*unit) },
	"mappings": func(r *rig) cudadrv.DevicePtr {
		p := r.Reserve(0, 5)
		for i := range cudadrv.DevicePtr(4) {
			r.Map(0, p+i*unit, 1, 0)
		}
		return p
	},
}

// TestPiecesAreStrict touches memory of which bytes 0 to 4096 are allocated and bytes 4096
// to 8192 and 4 MiB more from the second unit on were.
func TestPiecesAreStrict(t *testing.T) {
	for kind, segment := range segments {
		for name, c := range map[string]struct {
			at, n uintptr
			want  string
		}{
			"allocated":       {at: 0, n: 4096},
			"part of it":      {at: 100, n: 5},
			"returned":        {at: 4096, n: 8, want: "which lies in 4096 bytes at 0x"},
			"over the end":    {at: 4090, n: 7, want: "that were freed by MemFreed on stream 0x"},
			"its last byte":   {at: 8191, n: 1, want: "which lies in 4096 bytes"},
			"never given out": {at: 8192, n: 8, want: "that the allocator has not allocated"},
			"over two chunks": {at: 2*unit - 8, n: 16, want: "which lies in 4194304 bytes"},
			"around it":       {at: 0, n: 3 * unit, want: "which lies in 4096 bytes"},
		} {
			t.Run(kind+"/"+name, func(t *testing.T) {
				r := newRig(t, Config{Devices: 1})
				s, p := r.Stream(0), segment(r)
				r.OK(r.markAllocated(p, 8192, s))
				r.OK(r.markAllocated(p+unit, 2*unit, s))
				r.OK(r.markFreed(p+4096, 4096, s))
				r.OK(r.markFreed(p+unit, unit/2, s))
				r.OK(r.markFreed(p+unit+unit/2, unit+unit/2, s))
				r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p+cudadrv.DevicePtr(c.at), 1, c.n, s) })
				res := r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
				if c.want == "" {
					require.Equal(t, cudadrv.Success, res, r.m.Explain(0))
					return
				}
				require.Equal(t, cudadrv.ErrorIllegalAddress, res)
				require.Contains(t, r.m.Explain(0), c.want)
				require.Equal(t, cudadrv.ErrorIllegalAddress, r.markAllocated(p, 1, s), "the error stays")
			})
		}
	}
}

// What is allocated again does not show what was there; what stays allocated does.
func TestAllocatedMemoryIsPoisoned(t *testing.T) {
	for kind, segment := range segments {
		t.Run(kind, func(t *testing.T) {
			r := newRig(t, Config{Devices: 1})
			s, p := r.Stream(0), segment(r)
			for _, piece := range []struct{ at, n uintptr }{{512, 512}, {unit - 512, 1024}, {0, 3 * unit}, {4096, 2*unit + 4096}} {
				r.OK(r.markAllocated(p, 512, s))
				r.OK(r.fill(0, s, p, 7, 512))
				at := p + 512 + cudadrv.DevicePtr(piece.at)
				for range 2 {
					r.OK(r.markAllocated(at, piece.n, s))
					number := func(x float32) bool { return x == x }
					require.False(t, slices.ContainsFunc(virtualtest.Download[float32](r.Rig, 0, s, at, int(piece.n/4)), number), "not a NaN")
					r.OK(r.fill(0, s, at, 0, piece.n))
					r.OK(r.markFreed(at, piece.n, s))
				}
				require.Equal(t, byte(7), virtualtest.Download[byte](r.Rig, 0, s, p+511, 1)[0])
				r.OK(r.markFreed(p, 512, s))
			}
		})
	}
}

// Both calls take effect where the stream has come to them, and are uses of the
// bytes: nothing but an event orders them with another stream.
func TestAllocationIsStreamOrdered(t *testing.T) {
	for name, ordered := range map[string]bool{"ordered": true, "unordered": false} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 1})
			a, b, e := r.Stream(0), r.Stream(0), r.Event(0)
			p := r.Alloc(0, unit)
			gate := make(chan bool)
			f := r.function(0, Kernel{Name: "gate", Func: func(*KernelCall) { <-gate }})
			r.OK(r.markAllocated(p, 1024, a))
			r.Do(0, func() cudadrv.Result { // on a busy stream the calls are late
				return r.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, a, nil)
			})
			r.OK(r.fill(0, a, p, 1, 1024))
			r.OK(r.markFreed(p, 1024, a))
			r.OK(r.markAllocated(p, 512, a))
			r.OK(r.fill(0, a, p, 2, 512))
			r.OK(r.markFreed(p, 512, a))
			r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, a) })
			if ordered {
				r.Do(0, func() cudadrv.Result { return r.Drv.StreamWaitEvent(b, e, 0) })
			}
			close(gate)
			if !ordered {
				for r.m.running(e) { // the host looks, but not through the driver
				}
			}
			res := r.markAllocated(p, 256, b)
			if !ordered {
				require.Equal(t, cudadrv.ErrorLaunchFailed, res)
				require.Contains(t, r.m.Explain(0), "race: MemAllocated on stream")
				require.Contains(t, r.m.Explain(0), "which MemFreed on stream")
				return
			}
			r.OK(res)
			r.OK(r.fill(0, b, p, 3, 256))
			r.Do(0, r.Drv.CtxSynchronize)
			// The host has waited, which orders as well.
			r.OK(r.markFreed(p, 256, b))
			r.OK(r.markAllocated(p, 1024, a))
			r.Do(0, func() cudadrv.Result { return r.Drv.MemFree(p) })
			require.Empty(t, r.m.Reports())
		})
	}
}

// A stream that happens to be idle orders nothing: the host did not wait for it.
func TestAllocationByLuck(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	a, b, e := r.Stream(0), r.Stream(0), r.Event(0)
	p := r.Alloc(0, unit)
	r.OK(r.markAllocated(p, 512, a))
	r.OK(r.fill(0, a, p, 1, 512))
	r.Do(0, func() cudadrv.Result { return r.Drv.EventRecord(e, a) })
	for r.m.running(e) {
	}
	r.OK(r.markFreed(p, 512, a))
	require.Equal(t, cudadrv.ErrorLaunchFailed, r.markAllocated(p, 512, b))
	require.Contains(t, r.m.Explain(0), "race: MemAllocated")
}

// Who waited before a piece went back need not wait for that.
func TestUnmapAfterReturn(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Reserve(0, 1)
	for range 2 {
		r.Map(0, p, 1, 0)
		r.OK(r.markAllocated(p, unit, s))
		r.OK(r.fill(0, s, p, 1, unit))
		r.Sync(0, s)
		r.OK(r.markFreed(p, unit, s))
		r.Do(0, func() cudadrv.Result { return r.Drv.MemUnmap(p, unit) })
	}
	require.Empty(t, r.m.Reports())
	r.Map(0, p, 1, 0)
	r.OK(r.fill(0, s, p, 1, 1))
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "that the allocator has not allocated")
}

// TestAllocatorIsBlamed has what an allocator must not do.
func TestAllocatorIsBlamed(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(r *rig, p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result
		want string
	}{
		"allocate twice": {func(r *rig, p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result {
			return r.markAllocated(p+512, 1024, s)
		},
			"but the bytes at"},
		"return twice": {func(r *rig, p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result {
			r.OK(r.markFreed(p, 1024, s))
			return r.markFreed(p, 1024, s)
		}, "MemFreed on stream"},
		"free what was not allocated": {func(r *rig, p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result {
			return r.markFreed(p+4096, 512, s)
		}, "that the allocator has not allocated"},
		"allocate what is not mapped": {func(r *rig, p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result {
			return r.markAllocated(p+unit-512, 1024, s)
		}, "nothing is mapped from byte 512 on"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, Config{Devices: 1})
			s, p := r.Stream(0), r.Reserve(0, 2)
			r.Map(0, p, 1, 0)
			r.OK(r.markAllocated(p, 1024, s))
			require.Equal(t, cudadrv.ErrorIllegalAddress, c.do(r, p, s))
			require.Contains(t, r.m.Explain(0), c.want)
			require.Len(t, r.m.Reports(), 1)
		})
	}
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, 64)
	for _, res := range []cudadrv.Result{r.markAllocated(1, 8, s), r.markAllocated(p, 0, s), r.markFreed(p+60, 8, s), r.markFreed(p+64, 1, s)} {
		require.Equal(t, cudadrv.ErrorInvalidValue, res)
	}
	require.Equal(t, cudadrv.ErrorInvalidHandle, r.markAllocated(p, 8, 1))
}

// Memory that a graph was captured with is valid at each launch, whatever the
// allocator does with it in between.
func TestPiecesOfGraphs(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s, p := r.Stream(0), r.Alloc(0, unit)
	r.OK(r.markAllocated(p, 2048, s))
	r.OK(r.markFreed(p, 2048, s))
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) })
	r.OK(r.markAllocated(p, 1024, s))
	r.Do(0, func() cudadrv.Result { return r.Drv.MemsetD8Async(p, 5, 1024, s) })
	r.OK(r.markFreed(p, 1024, s))
	var g cudadrv.Graph
	var x cudadrv.GraphExec
	r.Do(0, func() (res cudadrv.Result) { g, res = r.Drv.StreamEndCapture(s); return res })
	r.Do(0, func() cudadrv.Result {
		n, res := r.Drv.GraphGetNodes(g)
		require.EqualValues(t, 1, n)
		return res
	})
	r.Do(0, func() (res cudadrv.Result) { x, res = r.Drv.GraphInstantiateWithFlags(g, 0); return res })
	for range 3 {
		r.OK(r.replay(x, s))
		require.Equal(t, byte(5), virtualtest.Download[byte](r.Rig, 0, s, p+1023, 1)[0])
		r.OK(r.markFreed(p, 1024, s))
		r.OK(r.markAllocated(p, 1024, s))
		require.Equal(t, byte(5), virtualtest.Download[byte](r.Rig, 0, s, p, 1)[0], "not poisoned")
		r.OK(r.markFreed(p, 1024, s))
	}
	r.OK(r.fill(0, s, p+1024, 1, 1))
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) }))
	require.Contains(t, r.m.Explain(0), "which lies in 1024 bytes")
}

// A copy to page-locked memory must not run after the memory has another owner, and another piece has none.
func TestHostMemoryOfAnotherOwner(t *testing.T) {
	for _, another := range []bool{false, true} {
		r := newRig(t, Config{Devices: 1})
		s, p := r.Stream(0), r.Alloc(0, 64)
		r.set(s, p)
		var h unsafe.Pointer
		r.Do(0, func() (res cudadrv.Result) { h, res = r.Drv.MemHostAlloc(8192, 0); return res })
		r.Drv.(cudadrv.Auditor).HostAllocated(h, 4096)
		gate := make(chan struct{})
		r.Do(0, func() cudadrv.Result { return r.Drv.LaunchHostFunc(s, dl.OnceClosure(func() { <-gate })) })
		r.Do(0, func() cudadrv.Result { return r.Drv.MemcpyDtoHAsync(h, p, 64, s) })
		if another {
			r.Drv.(cudadrv.Auditor).HostAllocated(h, 4096)
		} else {
			r.Drv.(cudadrv.Auditor).HostAllocated(unsafe.Add(h, 4096), 4096)
		}
		close(gate)
		res := r.On(0, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
		if !another {
			require.Equal(t, cudadrv.Success, res, r.m.Explain(0))
			continue
		}
		require.Equal(t, cudadrv.ErrorIllegalAddress, res)
		require.Contains(t, r.m.Explain(0), "cuMemcpyDtoHAsync on stream 0x")
		require.Contains(t, r.m.Explain(0), "have another owner since the operation was enqueued")
	}
}

// No plan counts the calls, and they want no context.
func TestAuditIsNoDriverCall(t *testing.T) {
	_, err := New(&Config{Devices: 1, Faults: "MemAllocated#1=CUDA_ERROR_UNKNOWN"})
	require.Error(t, err)
	r := newRig(t, Config{Devices: 1, Blocking: true, Faults: "cuMemAlloc#2=CUDA_ERROR_OUT_OF_MEMORY"})
	s, p := r.Stream(0), r.Alloc(0, unit)
	r.OK(r.markAllocated(p, 512, 0))
	r.OK(r.fill(0, 0, p, 1, 512))
	r.OK(r.markFreed(p, 512, 0))
	r.Do(0, func() cudadrv.Result { return r.Drv.StreamQuery(s) })
	require.Equal(t, cudadrv.ErrorIllegalAddress, r.fill(0, 0, p, 1, 512), "a driver that blocks says so at once")
}

func BenchmarkMemAllocated(b *testing.B) {
	m, err := New(&Config{Devices: 1})
	if err != nil {
		b.Fatal(err)
	}
	drv := m.Driver()
	drv.Init()
	ctx, _ := drv.DevicePrimaryCtxRetain(0)
	drv.CtxSetCurrent(ctx)
	s, _ := drv.StreamCreateWithPriority(1, 0)
	drv.CtxSetCurrent(ctx)
	p, _ := drv.MemAlloc(20 << 20)
	a := drv.(cudadrv.Auditor)
	for i := range cudadrv.DevicePtr(20 << 20 / 1024) { // every other piece stays out
		a.MemAllocated(p+i*1024, 512, s)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		q := p + cudadrv.DevicePtr(i%20000)*1024 + 512
		a.MemAllocated(q, 512, s)
		a.MemFreed(q, 512, s)
	}
}
