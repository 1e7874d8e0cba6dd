package memory

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/stream"
)

// MaxPitch is how many bytes apart rows can begin for CopyRows.
const MaxPitch = cudadrv.MaxPitch

// Rows are bytes of which each Pitch some belong to a row, from the first on.
type Rows struct {
	Slice[uint8]
	Pitch int // at most MaxPitch
}

// CopyRows enqueues on s, a stream of either's device, the copy of a number of rows of
// width bytes by a copy engine (cuMemcpy2DAsync), between devices of which Reach has said
// that they reach each other. As with Copy, work on the other device must be ordered with
// s. For Chorus's own packages.
func CopyRows(s *stream.Stream, dst, src Rows, width, rows int) error {
	const op = "memory: copy rows"
	if err := s.Check(op, nil); err != nil {
		return err
	}
	if rows == 0 || width == 0 {
		return nil
	}
	for _, x := range []Rows{dst, src} {
		if err := x.Check(op, nil); err != nil {
			return err
		}
		if x.Pitch < width || x.Pitch > MaxPitch || x.n < (rows-1)*x.Pitch+width {
			return fmt.Errorf("%s: %d of %d bytes, %d apart: there are %d bytes, and the pitch is at least the width and at most %d",
				op, rows, width, x.Pitch, x.n, MaxPitch)
		}
	}
	if s.Device() != src.Device() && s.Device() != dst.Device() {
		return fmt.Errorf("%s from %s to %s: %s is of neither device", op, src.Device(), dst.Device(), s)
	}
	c := cudadrv.Memcpy2D{Dst: dst.Raw(), Src: src.Raw(), DstPitch: uintptr(dst.Pitch), SrcPitch: uintptr(src.Pitch),
		WidthInBytes: uintptr(width), Height: uintptr(rows)}
	return s.Device().Do("cuMemcpy2DAsync", func(drv cudadrv.Driver) cudadrv.Result { return drv.Memcpy2DAsync(c, s.Raw()) })
}
