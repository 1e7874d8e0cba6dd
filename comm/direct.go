package comm

import (
	"errors"
	"slices"

	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/mem"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// directBytes is the maximum size of an operation of torch.cuda.comm that one kernel on one
// device executes for all devices. The kernel needs one call, but copies and NCCL need one or
// more for each device. It accesses all other devices at the speed of its links;
// NCCL's ring is faster only for more bytes. A negative value disables the kernel.
var directBytes = 16 << 20

// directRow is the minimum length in bytes of the rows of a strided copy that a kernel copies
// at the full speed of a link. It does not matter if copy engines can copy the rows.
const directRow = 512

// pairBytes is the minimum size for copy engines or NCCL if the operation uses only one other
// device. They then need as few calls as a kernel, and do not wait for the other device's
// stream before and after every operation.
var pairBytes = 1 << 20

// canCopyByKernel reports whether a kernel on s copies src to dst.
func canCopyByKernel(s *stream.Stream, dst, src []tensor.Tensor) (bool, error) {
	if directBytes < 0 || s == nil {
		return false, nil
	}
	far, links := 0, 0 // bytes copied between devices, and the number of these copies
	for i := range dst {
		if dst[i].IsHost() || src[i].IsHost() {
			return false, nil
		}
		to, from := dst[i].Device(), src[i].Device()
		if to != from {
			far += dst[i].Bytes()
			links++
		}
		if near, err := mem.Reach(s.Device(), to, from); err != nil || !near {
			return false, err
		}
	}
	if links == 1 && (len(dst) == 1 || far >= pairBytes) && canCopyByEngines(dst, src) {
		return false, nil
	}
	if far <= directBytes {
		return true, nil
	}
	for i := range dst {
		if strided.ByEngine(dst[i], src[i]) || strided.RowBytes(dst[i], src[i]) < directRow {
			return false, nil
		}
	}
	return true, nil
}

// canCopyByEngines reports whether copy engines can copy all tensors with their strides.
func canCopyByEngines(dst, src []tensor.Tensor) bool {
	for i := range dst {
		if !strided.ByEngine(dst[i], src[i]) {
			return false
		}
	}
	return true
}

// runOn runs work on s with tensors of the other streams, which may be all streams of the
// operation. s waits for the other streams before, and they wait for s after it.
func runOn(s *stream.Stream, others []*stream.Stream, used [][]tensor.Tensor, work func() error) error {
	if err := gpu.Join(s, others); err != nil {
		return err
	}
	err := work()
	if e := gpu.Fork(s, others); e != nil {
		// The other streams do not wait for the work, so s must keep the memory.
		err = errors.Join(err, e)
		for _, t := range slices.Concat(used...) {
			err = errors.Join(err, t.RecordStream(s))
		}
	}
	return err
}

// copyByKernel lets a kernel on s copy src to dst, whose use is ordered by the other streams.
func copyByKernel(s *stream.Stream, others []*stream.Stream, dst, src []tensor.Tensor) error {
	return runOn(s, others, [][]tensor.Tensor{dst, src}, func() error { return strided.CopyByKernel(s, dst, src) })
}

// canAddByKernel reports whether a kernel on s adds lists of tensors, each list on one device,
// to dst.
func canAddByKernel(s *stream.Stream, dst tensor.Tensor, lists [][]tensor.Tensor) (bool, error) {
	far := 0
	for _, list := range lists {
		if len(list) > 0 && list[0].Device() != s.Device() {
			far += dst.Bytes()
		}
	}
	if directBytes < 0 || far > directBytes {
		return false, nil
	}
	return strided.CanAddAll(s, dst, lists)
}

// addByKernel lets a kernel on s add lists of tensors, each list on one device, to dst one
// after the other.
func (g *Group) addByKernel(s *stream.Stream, dst tensor.Tensor, lists [][]tensor.Tensor) error {
	var others []*stream.Stream
	for _, list := range lists {
		if len(list) > 0 {
			others = withStream(others, g.streamOf(list[0]))
		}
	}
	return runOn(s, others, lists, func() error { return strided.AddAll(s, dst, lists) })
}

// streamsOf returns the group's streams that order the use of tensors, without duplicates.
func (g *Group) streamsOf(ts []tensor.Tensor) []*stream.Stream {
	list := make([]*stream.Stream, 0, len(g.members))
	for i := range ts {
		list = withStream(list, g.streamOf(ts[i]))
	}
	return list
}

// withStream adds a stream unless the list has it.
func withStream(list []*stream.Stream, s *stream.Stream) []*stream.Stream {
	if slices.Contains(list, s) {
		return list
	}
	return append(list, s)
}
