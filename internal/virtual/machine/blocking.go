package machine

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// blocking is the driver with CUDA_LAUNCH_BLOCKING: the host waits for each
// kernel, copy and fill, so that the call that caused an error returns it. During
// a capture nothing runs, so it does not wait.
type blocking struct{ driver }

var _ cudadrv.Auditor = blocking{}

// after runs call and waits for the operation that it enqueued on the stream.
func (d blocking) after(h cudadrv.Stream, call func() cudadrv.Result) cudadrv.Result {
	m := d.m
	bound := m.threads.current()
	if r := call(); r != cudadrv.Success {
		return r
	}
	m.mu.Lock()
	dev := m.deviceOf(bound)
	s, r := m.Stream(dev, h)
	if r != cudadrv.Success || s.capture != nil {
		m.mu.Unlock()
		return cudadrv.Success
	}
	k := s.Mark()
	m.mu.Unlock()
	return m.Await(s.dev, k)
}

func (d blocking) LaunchKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.LaunchKernel(f, grid, block, shared, s, params) })
}

func (d blocking) LaunchCooperativeKernel(f cudadrv.Function, grid, block [3]uint32, shared uint32, s cudadrv.Stream, params unsafe.Pointer) cudadrv.Result {
	return d.after(s, func() cudadrv.Result {
		return d.driver.LaunchCooperativeKernel(f, grid, block, shared, s, params)
	})
}

func (d blocking) MemcpyHtoDAsync(dst cudadrv.DevicePtr, src unsafe.Pointer, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyHtoDAsync(dst, src, bytes, s) })
}

func (d blocking) MemcpyDtoHAsync(dst unsafe.Pointer, src cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyDtoHAsync(dst, src, bytes, s) })
}

func (d blocking) MemcpyDtoDAsync(dst, src cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyDtoDAsync(dst, src, bytes, s) })
}

func (d blocking) MemcpyPeerAsync(dst cudadrv.DevicePtr, dstCtx cudadrv.Context, src cudadrv.DevicePtr, srcCtx cudadrv.Context, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemcpyPeerAsync(dst, dstCtx, src, srcCtx, bytes, s) })
}

func (d blocking) Memcpy2DAsync(c cudadrv.Memcpy2D, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.Memcpy2DAsync(c, s) })
}

func (d blocking) MemsetD8Async(dst cudadrv.DevicePtr, value uint8, count uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.after(s, func() cudadrv.Result { return d.driver.MemsetD8Async(dst, value, count, s) })
}
