package strided

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// maxPitch is the largest distance of two rows in bytes for a copy engine.
const maxPitch = cudadrv.MaxPitch

// pitched is memory with rows. A row starts every pitch bytes.
type pitched struct {
	memory.Slice[uint8]
	pitch int // at most maxPitch
}

// copyPitched enqueues on s, a stream of either's device, the copy of a number of rows of
// width bytes by a copy engine (cuMemcpy2DAsync). The devices reach each other (mem.Reach).
// The caller orders work on the other device with s.
func copyPitched(s *stream.Stream, dst, src pitched, width, rows int) error {
	const op = "tensor: copy rows"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if rows == 0 || width == 0 {
		return nil
	}
	for _, x := range []pitched{dst, src} {
		if err := mem.Check(op, x.Buffer(), x.Len(), nil); err != nil {
			return err
		}
		if x.pitch < width || x.pitch > maxPitch || x.Len() < (rows-1)*x.pitch+width {
			return fmt.Errorf("%s: %d of %d bytes, %d apart: there are %d bytes, and the pitch is at least the width and at most %d",
				op, rows, width, x.pitch, x.Len(), maxPitch)
		}
	}
	if s.Device() != src.Device() && s.Device() != dst.Device() {
		return fmt.Errorf("%s from %s to %s: %s is of neither device", op, src.Device(), dst.Device(), s)
	}
	c := cudadrv.Memcpy2D{Dst: cudadrv.DevicePtr(dst.Ptr()), Src: cudadrv.DevicePtr(src.Ptr()),
		DstPitch: uintptr(dst.pitch), SrcPitch: uintptr(src.pitch), WidthInBytes: uintptr(width), Height: uintptr(rows)}
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.Memcpy2DAsync(c, gpu.StreamOf(s).Raw()) })
}
