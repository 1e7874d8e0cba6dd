package stream

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kept"
)

var defaultKey kept.Key

// Default returns the device's legacy default stream, the same one on every call
// (torch.cuda.default_stream, CUstream 0). It is for code that shares the device
// with other users of CUDA, such as PyTorch in the same process, whose work is
// on that stream.
//
// CUDA lets the default stream wait for all blocking streams of the process, and
// them for it; streams of Chorus are all non-blocking, so that only events order
// them with it. It cannot be closed or captured; a graph may be launched on it.
func Default(dev *device.Device) *Stream {
	if dev == nil {
		return nil // methods and functions say that there is none
	}
	return dev.Local(&defaultKey, func() any {
		s := &Stream{dev: dev, kind: legacy}
		s.refs.Store(1)
		handle.InitForever(&s.owner)
		return s
	}).(*Stream)
}

// What cuda.h defines in place of a CUstream.
const (
	handleLegacy    = 1
	handlePerThread = 2
)

// External wraps a CUstream that other code has made on dev, such as one of
// PyTorch in the same process (torch.cuda.ExternalStream). Close gives the
// wrapper up and never the CUstream, which must live until then and until the
// work on it has completed. Handle unwraps. 0 is Default.
//
// The stream must be of the device's primary context, which is checked, as all
// of the CUDA runtime's and of PyTorch's are. CUDA cannot check that cuStream is
// one at all: the process may crash if it is not.
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
	own, err := dev.Context()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	s := &Stream{dev: dev, h: cudadrv.Stream(cuStream), kind: external}
	var of cudadrv.Context
	err = dev.Do("cuStreamGetCtx", func(drv cudadrv.Driver) (r cudadrv.Result) {
		of, r = drv.StreamGetCtx(s.h)
		return r
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %#x: %w", op, cuStream, err)
	}
	if of != own {
		return nil, fmt.Errorf("%s: %#x belongs to another context than the primary one of %s: is it a stream of another device? %w",
			op, cuStream, dev, device.ErrorInvalidContext)
	}
	s.refs.Store(1)
	handle.Init(s, &s.owner, handle.About{Kind: "external stream", On: dev})
	return s, nil
}
