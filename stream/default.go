package stream

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kept"
)

var defaultKey kept.Key

// Default returns the device's legacy default stream, the same one on every call
// (torch.cuda.default_stream, CUstream 0). It is for code that shares the device
// with other users of CUDA, such as PyTorch in the same process, whose work is
// on that stream.
//
// In CUDA the default stream and the blocking streams of the process wait for each other.
// Streams of Chorus are non-blocking, so only events order them with it. It cannot be
// closed or captured; a graph may be launched on it.
func Default(dev *device.Device) *Stream {
	if dev == nil {
		return nil // methods and functions report that no stream was given
	}
	return gpu.DeviceOf(dev).Local(&defaultKey, func() any {
		s := &Stream{dev: dev}
		gpu.StreamOf(s).Adopt(gpu.DeviceOf(dev), gpu.DefaultStream, 0)
		handle.InitForever(&gpu.StreamOf(s).Owner)
		return s
	}).(*Stream)
}

// The special values that cuda.h defines for a CUstream.
const (
	handleLegacy    = 1
	handlePerThread = 2
)

// External wraps a CUstream that other code has made on dev, such as a stream of PyTorch
// in the same process (torch.cuda.ExternalStream). Close closes only the wrapper. The
// CUstream must live until then and until the work on it has completed. Handle returns it.
// 0 is Default.
//
// The stream must belong to the device's primary context, as all streams of the CUDA
// runtime and of PyTorch do; External checks that. CUDA cannot check that cuStream is a
// stream at all: if it is not, the process may crash.
func External(dev *device.Device, cuStream uintptr) (*Stream, error) {
	const op = "stream: external"
	switch {
	case dev == nil:
		return nil, fmt.Errorf("%s: no device given", op)
	case cuStream == 0 || cuStream == handleLegacy:
		return Default(dev), nil
	case cuStream == handlePerThread:
		return nil, fmt.Errorf("%s: CU_STREAM_PER_THREAD is another stream on each OS thread, and goroutines change theirs: make a stream: %w",
			op, device.ErrorInvalidHandle)
	}
	own, err := gpu.DeviceOf(dev).Context()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	var of cudadrv.Context
	err = gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		of, r = drv.StreamGetCtx(cudadrv.Stream(cuStream))
		return r
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %#x: %w", op, cuStream, err)
	}
	if of != own {
		return nil, fmt.Errorf("%s: %#x belongs to another context than the primary one of %s: is it a stream of another device? %w",
			op, cuStream, dev, device.ErrorInvalidContext)
	}
	s := &Stream{dev: dev}
	gpu.StreamOf(s).Adopt(gpu.DeviceOf(dev), gpu.ExternalStream, cudadrv.Stream(cuStream))
	handle.Init(s, &gpu.StreamOf(s).Owner, handle.About{Kind: "external stream", On: dev})
	return s, nil
}
