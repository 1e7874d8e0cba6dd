package strided

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Copy enqueues the copy of src to dst on s, a stream of either's device, between any two
// layouts, types, devices and the host; see tensor.Copy.
//
// If both arrays are contiguous in the same order, Copy is one copy of the driver, and so
// are long rows of an array on another device that become contiguous. All other copies use
// one kernel.
func Copy(s *stream.Stream, dst, src Array) error {
	const op = "tensor: copy"
	if err := checkCopy(op, &dst, &src); err != nil {
		return err
	}
	src, _ = src.as(dst.Shape) // cannot fail: checkCopy has tried it
	switch {
	case same(&dst, &src):
		return nil
	case dst.IsHost() && src.IsHost():
		copyHost(dst, src)
		return nil
	}
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if s.Device() != dst.Device() && s.Device() != src.Device() {
		return fmt.Errorf("%s: %s to %s: %s is of neither device", op, src, dst, s)
	}
	if dst.Len() == 0 {
		return nil
	}
	switch {
	case dst.IsHost():
		return download(s, dst, src)
	case src.IsHost():
		return upload(s, dst, src)
	}
	return onDevices(s, dst, src)
}

// checkCopy returns the error that Copy returns for its arrays before it enqueues
// anything.
func checkCopy(op string, dst, src *Array) error {
	if err := dst.Check(op, nil); err != nil {
		return err
	}
	if err := src.Check(op, nil); err != nil {
		return err
	}
	wide, err := src.as(dst.Shape)
	if err != nil {
		return fmt.Errorf("%s: %s to %s: the shapes do not fit: %w", op, *src, *dst, err)
	}
	if dst.Repeats() {
		return fmt.Errorf("%s: %s to %s with strides %v: several elements of the destination have one place", op, *src, *dst, dst.Strides)
	}
	if !same(dst, &wide) && overlaps(dst, src) {
		return fmt.Errorf("%s: %s to %s: they share some memory: copy to other memory first", op, *src, *dst)
	}
	if a, b := dst.Device(), src.Device(); a != nil && b != nil && a.System() != b.System() {
		return fmt.Errorf("%s: %s to %s: the devices are of two systems", op, *src, *dst)
	}
	return nil
}

// as is Expand without its cost if the shape is the same.
func (t Array) as(shape []int) (Array, error) {
	if slices.Equal(t.Shape, shape) {
		return t, nil
	}
	return t.Expand(shape)
}

// move copies between two tensors that are contiguous in the same order.
func move(s *stream.Stream, dst, src Array) error {
	to, err := dst.run()
	if err != nil {
		return err
	}
	from, err := src.run()
	if err != nil {
		return err
	}
	return memory.Copy(s, to, from)
}

// run returns the bytes of a dense tensor on a device.
func (t Array) run() (memory.Slice[uint8], error) {
	return memory.View[uint8](t.mem.buf, t.Offset, t.Bytes())
}

// onDevices copies within a device, or from one device to another.
func onDevices(s *stream.Stream, dst, src Array) error {
	loops, empty := loopsOf(dst.Shape, dst.Strides, src.Strides)
	switch {
	case empty:
		return nil
	case dst.DType == src.DType && flat(loops):
		return move(s, dst, src)
	case dst.Device() == src.Device():
		return launch(s, dst, src, loops)
	}
	reach, err := inside.Reach(dst.Device(), src.Device())
	if err != nil {
		return err
	}
	if !reach {
		return packedAcross(s, dst, src)
	}
	if p, ok := engineRows(dst, src); ok {
		return copyRows(s, dst, src, p)
	}
	return launch(s, dst, src, loops)
}

// packedAcross copies between devices whose memory kernels cannot access: it sends dense
// data in the type of the destination.
func packedAcross(s *stream.Stream, dst, src Array) (err error) {
	wire := src
	if !dense(src.Shape, src.Strides) || dst.DType != src.DType {
		err := on(s, src.Device(), func(o *stream.Stream) (err error) {
			if wire, err = Make(o, dst.DType, src.Shape, LikeStrides(src.Shape, src.Strides)); err != nil {
				return err
			}
			return errors.Join(wire.RecordStream(s), onDevices(o, wire, src))
		}, src)
		defer func() { err = errors.Join(err, wire.Close()) }()
		if err != nil {
			return err
		}
	}
	if loops, _ := loopsOf(dst.Shape, dst.Strides, wire.Strides); flat(loops) {
		return move(s, dst, wire)
	}
	var landed Array
	err = on(s, dst.Device(), func(o *stream.Stream) (err error) {
		landed, err = Make(o, dst.DType, wire.Shape, wire.Strides)
		return errors.Join(err, landed.RecordStream(s))
	})
	defer func() { err = errors.Join(err, landed.Close()) }()
	if err != nil {
		return err
	}
	if err := move(s, landed, wire); err != nil {
		return err
	}
	return on(s, dst.Device(), func(o *stream.Stream) error {
		return errors.Join(landed.RecordStream(o), onDevices(o, dst, landed))
	}, dst)
}

// on runs fn with a stream of dev that is ordered with s: s itself, or another stream that
// waits for s and that s waits for. used are the caller's tensors that fn uses on that
// stream.
func on(s *stream.Stream, dev *device.Device, fn func(o *stream.Stream) error, used ...Array) error {
	if s.Device() == dev {
		return fn(s)
	}
	o, err := stream.FromPool(dev, 0)
	if err != nil {
		return err
	}
	if err := o.WaitStream(s); err != nil {
		return err
	}
	err = fn(o)
	if e := s.WaitStream(o); e != nil {
		// The stream s does not wait for fn's work, so that stream must keep the memory.
		err = errors.Join(err, e)
		for _, t := range used {
			err = errors.Join(err, t.RecordStream(o))
		}
	}
	return err
}

// upload copies from the host, and packs src like the destination unless the
// tensors are contiguous in the same order.
func upload(s *stream.Stream, dst, src Array) (err error) {
	wire := src
	loops, _ := loopsOf(dst.Shape, dst.Strides, src.Strides)
	if dst.DType != src.DType || !flat(loops) {
		if err := gpu.StreamOf(s).RefuseCapture("tensor: copy from the host", "strided or converted host memory is packed now and not in a launch: pack it before the capture"); err != nil {
			return err
		}
		if wire, err = hostStrided(dst.DType, dst.Shape, LikeStrides(dst.Shape, dst.Strides)); err != nil {
			return err
		}
		copyHost(wire, src)
	}
	if dense(dst.Shape, dst.Strides) {
		return wire.mem.host.upload(s, dst.mem.buf, dst.Offset, wire.Offset, wire.Bytes())
	}
	landed, err := Make(s, dst.DType, wire.Shape, wire.Strides)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, landed.Close()) }()
	if err := wire.mem.host.upload(s, landed.mem.buf, 0, wire.Offset, wire.Bytes()); err != nil {
		return err
	}
	return onDevices(s, dst, landed)
}

// download copies to the host, after it has packed a strided or converted
// tensor on the device.
func download(s *stream.Stream, dst, src Array) (err error) {
	if err := gpu.StreamOf(s).RefuseCapture("tensor: copy to the host", "the host would wait: copy after the launch"); err != nil {
		return err
	}
	wire := src
	if !dense(src.Shape, src.Strides) || dst.DType != src.DType {
		if wire, err = Make(s, dst.DType, src.Shape, LikeStrides(src.Shape, src.Strides)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, wire.Close()) }()
		if err := onDevices(s, wire, src); err != nil {
			return err
		}
	}
	from, err := wire.run()
	if err != nil {
		return err
	}
	if loops, _ := loopsOf(dst.Shape, dst.Strides, wire.Strides); flat(loops) {
		return from.CopyTo(s, dst.all()[:from.Len()])
	}
	landed, err := hostStrided(dst.DType, wire.Shape, wire.Strides)
	if err != nil {
		return err
	}
	if err := from.CopyTo(s, landed.all()[:from.Len()]); err != nil {
		return err
	}
	copyHost(dst, landed)
	return nil
}

// hostStrided is MakeHost with other dense strides.
func hostStrided(t memory.DType, shape, strides []int) (Array, error) {
	x, err := MakeHost(t, shape)
	x.Strides = strides
	return x, err
}

// smallPiece is the maximum size of a contiguous copy in a kernel for many copies. For larger
// copies, driver calls are faster.
const smallPiece = 1 << 20

// CopyAll enqueues the copy of each tensor of src to the corresponding tensor of dst; see
// tensor.CopyAll. One kernel makes up to 120 copies of arrays that need no conversion and
// are small and contiguous, or consist of contiguous rows.
func CopyAll[T Tensor](s *stream.Stream, dst, src []T) error {
	return copyAll(s, arrays(dst), arrays(src), smallPiece)
}

// CopyByKernel is CopyAll without copies by the driver, if a kernel can make them.
func CopyByKernel[T Tensor](s *stream.Stream, dst, src []T) error {
	return copyAll(s, arrays(dst), arrays(src), math.MaxInt)
}

// copyAll uses one driver call for each contiguous copy of more than most bytes.
func copyAll(s *stream.Stream, dst, src []Array, most int) error {
	const op = "tensor: copy all"
	if len(dst) != len(src) {
		return fmt.Errorf("%s: %d tensors to %d: want as many", op, len(src), len(dst))
	}
	for i := range src {
		if err := checkCopy(op, &dst[i], &src[i]); err != nil {
			return fmt.Errorf("%w (tensor %d of %d)", err, i, len(src))
		}
	}
	x := sorterOn(s)
	defer x.done()
	for i := range src {
		taken, err := x.take(dst[i], src[i], most)
		if err == nil && !taken {
			err = Copy(s, dst[i], src[i])
		}
		if err != nil {
			return err
		}
	}
	return x.flush()
}

// take adds a copy to a launch for many, if possible.
func (x *sorter) take(dst, src Array, most int) (bool, error) {
	if (x.s == nil || !gpu.StreamOf(x.s).Open()) || dst.Len() == 0 || dst.IsHost() || src.IsHost() || same(&dst, &src) {
		return false, nil
	}
	on, a, b := x.s.Device(), dst.Device(), src.Device()
	if on != a && on != b {
		return false, nil // Copy returns the error
	}
	src, err := src.as(dst.Shape)
	if err != nil {
		return false, err
	}
	p, ok := pieceOf(dst, src)
	if !ok || p.rows == 1 && p.row > most {
		return false, nil
	}
	if near, err := inside.Reach(on, a, b); err != nil || !near {
		return false, err
	}
	return x.add(p)
}

// The minimum sizes, of a row and in total, for a copy of rows between devices by a copy
// engine. The rows must be contiguous in the destination: a copy engine reads strided rows
// faster than a kernel, but does not write them faster. Between devices the driver accepts
// any pitch (the tests use 68 bytes on H200s); it needs the pitch of cuMemAllocPitch only
// within one device.
var (
	engineRow   = 256
	engineBytes = 1 << 20
)

// engineRows returns the copy of src to dst as a piece, and reports whether a copy engine
// can copy its rows. The tensors have one shape and are on different devices.
func engineRows(dst, src Array) (piece, bool) {
	p, ok := pieceOf(dst, src)
	return p, ok && p.rows > 1 && p.row >= engineRow && p.bytes() >= engineBytes &&
		p.toStep == p.row && p.fromStep >= p.row && p.fromStep <= maxPitch
}

// ByEngine reports whether Copy uses a copy engine for a copy between two
// devices that can access each other: of contiguous memory, or of long rows
// that become contiguous. The tensors must have the same shape.
func ByEngine[T Tensor](dst, src T) bool {
	to, from := dst.array(), src.array()
	if p, ok := pieceOf(to, from); ok && p.rows == 1 {
		return true
	}
	_, ok := engineRows(to, from)
	return ok
}

// copyRows copies a piece, which is src to dst.
func copyRows(s *stream.Stream, dst, src Array, p piece) error {
	to, err := dst.rows(p.toStep, p)
	if err != nil {
		return err
	}
	from, err := src.rows(p.fromStep, p)
	if err != nil {
		return err
	}
	return copyPitched(s, to, from, p.row, p.rows)
}

// rows returns the memory that the rows of a piece occupy.
func (t *Array) rows(pitch int, p piece) (pitched, error) {
	x, err := memory.View[uint8](t.mem.buf, t.Offset, (p.rows-1)*pitch+p.row)
	return pitched{x, pitch}, err
}

// maxPitch is the largest distance of two rows in bytes for a copy engine.
const maxPitch = cudadrv.MaxPitch

// pitched is memory with rows. A row starts every pitch bytes.
type pitched struct {
	memory.Slice[uint8]
	pitch int // at most maxPitch
}

// copyPitched enqueues on s, a stream of either's device, the copy of a number
// of rows of width bytes by a copy engine (cuMemcpy2DAsync). The caller has
// made sure that the devices reach each other (inside.Reach), and orders work
// on the other device with s.
func copyPitched(s *stream.Stream, dst, src pitched, width, rows int) error {
	const op = "tensor: copy rows"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if rows == 0 || width == 0 {
		return nil
	}
	for _, x := range []pitched{dst, src} {
		if err := inside.CheckBuffer(op, x.Buffer(), x.Len(), nil); err != nil {
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
