package comm

import (
	"errors"
	"slices"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// directBytes is up to how many bytes one kernel of one device moves between the devices
// in an operation of torch.cuda.comm's: to issue that is one call, where copies and NCCL
// take one or more for each device. It reaches all other devices itself, as fast as its
// links are, which NCCL's ring beats only with more bytes than these. Less than 0 is
// never.
var directBytes = 16 << 20

// directRow is from how many bytes on the rows of a strided copy, of any size, fill a link
// when a kernel copies them, unless copy engines take them.
const directRow = 512

// pairBytes is from how many bytes on copy engines, or NCCL, take over where only one other
// device takes part: they then have as few calls, and do not wait for the other device's
// stream before and behind every operation.
var pairBytes = 1 << 20

// direct reports whether a kernel in the order of s is to copy src to dst.
func direct(s *stream.Stream, dst, src []tensor.Tensor) (bool, error) {
	if directBytes < 0 || s == nil {
		return false, nil
	}
	far, links := 0, 0 // what goes to or comes from other devices, and in how many copies
	for i := range dst {
		if dst[i].IsHost() || src[i].IsHost() {
			return false, nil
		}
		to, from := dst[i].Device(), src[i].Device()
		if to != from {
			far += dst[i].Bytes()
			links++
		}
		if near, err := memory.Reach(s.Device(), to, from); err != nil || !near {
			return false, err
		}
	}
	if links == 1 && (len(dst) == 1 || far >= pairBytes) && byEngines(dst, src) {
		return false, nil
	}
	if far <= directBytes {
		return true, nil
	}
	for i := range dst {
		if tensor.ByEngine(dst[i], src[i]) || tensor.RowBytes(dst[i], src[i]) < directRow {
			return false, nil
		}
	}
	return true, nil
}

// byEngines reports whether copy engines take all copies as they are.
func byEngines(dst, src []tensor.Tensor) bool {
	for i := range dst {
		if !tensor.ByEngine(dst[i], src[i]) {
			return false
		}
	}
	return true
}

// alone enqueues work on s that uses tensors of the other streams, which may be all of the
// operation's: s waits for them before, and they for s behind it.
func alone(s *stream.Stream, others []*stream.Stream, used [][]tensor.Tensor, work func() error) error {
	if err := stream.Join(s, others); err != nil {
		return err
	}
	err := work()
	if e := stream.Fork(s, others); e != nil {
		// Nothing orders the work with the end of the memory any more.
		err = errors.Join(err, e)
		for _, t := range slices.Concat(used...) {
			err = errors.Join(err, t.RecordStream(s))
		}
	}
	return err
}

// copyAlone has a kernel in the order of s copy src to dst, which are used in the order of
// the others.
func copyAlone(s *stream.Stream, others []*stream.Stream, dst, src []tensor.Tensor) error {
	return alone(s, others, [][]tensor.Tensor{dst, src}, func() error { return tensor.CopyByKernel(s, dst, src) })
}

// directSum reports whether a kernel in the order of s is to add lists of tensors, each of
// one device, to dst.
func directSum(s *stream.Stream, dst tensor.Tensor, lists [][]tensor.Tensor) (bool, error) {
	far := 0
	for _, list := range lists {
		if len(list) > 0 && list[0].Device() != s.Device() {
			far += dst.Bytes()
		}
	}
	if directBytes < 0 || far > directBytes {
		return false, nil
	}
	return tensor.CanAddAll(s, dst, lists)
}

// addAlone has a kernel in the order of s add lists of tensors, each of one device, one
// after the other to dst.
func (g *Group) addAlone(s *stream.Stream, dst tensor.Tensor, lists [][]tensor.Tensor) error {
	var others []*stream.Stream
	for _, list := range lists {
		if len(list) > 0 {
			others = withStream(others, g.streamOf(list[0]))
		}
	}
	return alone(s, others, lists, func() error { return tensor.AddAll(s, dst, lists) })
}

// streamsOf returns the group's streams that order the use of tensors, each once.
func (g *Group) streamsOf(ts []tensor.Tensor) []*stream.Stream {
	list := make([]*stream.Stream, 0, len(g.members))
	for i := range ts {
		list = withStream(list, g.streamOf(ts[i]))
	}
	return list
}

// withStream adds a stream that is not there yet.
func withStream(list []*stream.Stream, s *stream.Stream) []*stream.Stream {
	if slices.Contains(list, s) {
		return list
	}
	return append(list, s)
}
