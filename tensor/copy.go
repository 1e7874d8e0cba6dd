package tensor

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Copy enqueues the copy of src to dst on s, a stream of either's device, between
// any two layouts, types, devices and the host (torch.Tensor.copy_ with
// non_blocking). src is expanded to the shape of dst. Numbers are converted as in
// torch: to floats by rounding to nearest, to integers by cutting towards zero, to
// bool by whether they are 0; what the type cannot hold is undefined.
//
// What lies in both as one run of neighbours is one copy of the driver's, and so are
// long rows of a tensor of another device that become one run; all else is one kernel,
// which reads or writes the other device directly where the hardware can. Where it
// cannot, what is no run is packed for the way. As with memory.Copy, work on the
// other device must be ordered with s, and memory of other streams be recorded.
//
// The host waits where dst is in host memory, as for Slice.CopyTo, and does not
// where src is pinned; other host memory may change when Copy returns. Strided or
// converted host memory is packed first.
//
// dst has each element once, and shares no memory with src unless they are the same
// elements, which is no work.
func Copy(s *stream.Stream, dst, src Tensor) error {
	const op = "tensor: copy"
	if err := CheckCopy(op, dst, src); err != nil {
		return err
	}
	src, _ = src.as(dst.shape) // which was tried
	switch {
	case same(dst, src):
		return nil
	case dst.IsHost() && src.IsHost():
		copyHost(dst, src)
		return nil
	}
	if err := s.Check(op, nil); err != nil {
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
	case dst.Device() == src.Device():
		return local(s, dst, src)
	}
	return across(s, dst, src)
}

// CheckCopy returns the error that Copy would find in its tensors before it enqueues
// anything. For Chorus's own packages, which check several copies first.
func CheckCopy(op string, dst, src Tensor) error {
	if err := dst.Check(op, nil); err != nil {
		return err
	}
	if err := src.Check(op, nil); err != nil {
		return err
	}
	wide, err := src.as(dst.shape)
	if err != nil {
		return fmt.Errorf("%s: %s to %s: the shapes do not fit: %w", op, src, dst, err)
	}
	if dst.repeats() {
		return fmt.Errorf("%s: %s to %s with strides %v: several elements of the destination have one place", op, src, dst, dst.strides)
	}
	if !same(dst, wide) && Overlaps(dst, src) {
		return fmt.Errorf("%s: %s to %s: they share some memory: copy to other memory first", op, src, dst)
	}
	if a, b := dst.Device(), src.Device(); a != nil && b != nil && a.System() != b.System() {
		return fmt.Errorf("%s: %s to %s: the devices are of two systems", op, src, dst)
	}
	return nil
}

// as is Expand, which costs nothing where the shape is that.
func (t Tensor) as(shape []int) (Tensor, error) {
	if slices.Equal(t.shape, shape) {
		return t, nil
	}
	return t.Expand(shape...)
}

// local copies within a device.
func local(s *stream.Stream, dst, src Tensor) error {
	loops, empty := loopsOf(dst.shape, dst.strides, src.strides)
	switch {
	case empty:
		return nil
	case dst.dtype == src.dtype && flat(loops):
		return move(s, dst, src)
	}
	return launch(s, dst, src, loops)
}

// move copies what is one run in both.
func move(s *stream.Stream, dst, src Tensor) error {
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
func (t Tensor) run() (memory.Slice[uint8], error) {
	return memory.View[uint8](t.mem.buf, t.off, t.Bytes())
}

// across copies from one device to another.
func across(s *stream.Stream, dst, src Tensor) error {
	loops, empty := loopsOf(dst.shape, dst.strides, src.strides)
	switch {
	case empty:
		return nil
	case dst.dtype == src.dtype && flat(loops):
		return move(s, dst, src)
	}
	reach, err := memory.Reach(dst.Device(), src.Device())
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

// packedAcross copies from one device to another that kernels do not reach: dense on
// the way, in the type of the destination.
func packedAcross(s *stream.Stream, dst, src Tensor) (err error) {
	wire := src
	if !dense(src.shape, src.strides) || dst.dtype != src.dtype {
		err := on(s, src.Device(), func(o *stream.Stream) (err error) {
			if wire, err = makeStrided(o, dst.dtype, src.shape, likeStrides(src.shape, src.strides)); err != nil {
				return err
			}
			return errors.Join(wire.RecordStream(s), local(o, wire, src))
		}, src)
		defer func() { err = errors.Join(err, wire.Close()) }()
		if err != nil {
			return err
		}
	}
	if loops, _ := loopsOf(dst.shape, dst.strides, wire.strides); flat(loops) {
		return move(s, dst, wire)
	}
	var landed Tensor
	err = on(s, dst.Device(), func(o *stream.Stream) (err error) {
		landed, err = makeStrided(o, dst.dtype, wire.shape, wire.strides)
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
		return errors.Join(landed.RecordStream(o), local(o, dst, landed))
	}, dst)
}

// on runs fn with a stream of dev that is in the order of s: s itself, or another
// one that waits for s and that s waits for. used are the caller's tensors that fn
// uses there.
func on(s *stream.Stream, dev *device.Device, fn func(o *stream.Stream) error, used ...Tensor) error {
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
		// Nothing orders fn's work with the end of the memory any more.
		err = errors.Join(err, e)
		for _, t := range used {
			err = errors.Join(err, t.RecordStream(o))
		}
	}
	return err
}

// upload copies from the host. What is no run in both is packed in the order of the
// destination.
func upload(s *stream.Stream, dst, src Tensor) (err error) {
	wire := src
	loops, _ := loopsOf(dst.shape, dst.strides, src.strides)
	if dst.dtype != src.dtype || !flat(loops) {
		if err := s.RefuseCapture("tensor: copy from the host", "strided or converted host memory is packed now and not in a launch: pack it before the capture"); err != nil {
			return err
		}
		if wire, err = hostStrided(dst.dtype, dst.shape, likeStrides(dst.shape, dst.strides)); err != nil {
			return err
		}
		copyHost(wire, src)
	}
	if dense(dst.shape, dst.strides) {
		return wire.mem.host.upload(s, dst.mem.buf, dst.off, wire.off, wire.Bytes())
	}
	landed, err := makeStrided(s, dst.dtype, wire.shape, wire.strides)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, landed.Close()) }()
	if err := wire.mem.host.upload(s, landed.mem.buf, 0, wire.off, wire.Bytes()); err != nil {
		return err
	}
	return local(s, dst, landed)
}

// download copies to the host. What is strided or of another type is packed on the
// device.
func download(s *stream.Stream, dst, src Tensor) (err error) {
	if err := s.RefuseCapture("tensor: copy to the host", "the host would wait: copy after the launch"); err != nil {
		return err
	}
	wire := src
	if !dense(src.shape, src.strides) || dst.dtype != src.dtype {
		if wire, err = makeStrided(s, dst.dtype, src.shape, likeStrides(src.shape, src.strides)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, wire.Close()) }()
		if err := local(s, wire, src); err != nil {
			return err
		}
	}
	from, err := wire.run()
	if err != nil {
		return err
	}
	if loops, _ := loopsOf(dst.shape, dst.strides, wire.strides); flat(loops) {
		return from.CopyTo(s, dst.all()[:from.Len()])
	}
	landed, err := hostStrided(dst.dtype, wire.shape, wire.strides)
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
func hostStrided(t memory.DType, shape, strides []int) (Tensor, error) {
	x, err := MakeHost(t, shape...)
	x.strides = strides
	return x, err
}
