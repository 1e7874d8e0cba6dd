package comm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dims"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// GatherConfig are the options of Gather; nil means their zero values.
type GatherConfig struct {
	// Dim is the dimension along which the tensors are concatenated; a negative Dim counts
	// from the end.
	Dim int
	// Destination is the device of the result. nil means the device of rank 0.
	Destination *device.Device
	// Host places the result in host memory instead of on Destination.
	Host bool
	// Out is an existing tensor to copy to, on a device of the group or on the host. It
	// excludes Destination and Host.
	Out *tensor.Tensor
}

// Gather enqueues the concatenation of tensors, which are on devices of the group, on the
// destination (torch.cuda.comm.gather), and returns it; the caller closes it. The shapes
// must be the same except along Dim. The result has the type of the first tensor, and the
// other tensors are converted to it. The result is contiguous, or channels-last if all
// tensors are. With Out the result shares the memory of Out. The result owns a reference
// to its memory: closing it does not close Out. If one kernel of the destination cannot
// copy all tensors, Gather copies them one by one. Gather does not use NCCL.
//
// The host waits only if the result is in host memory.
func Gather(g *Group, ts []tensor.Tensor, cfg *GatherConfig) (tensor.Tensor, error) {
	c := orZero(cfg)
	return locked(g, "gather", func() (tensor.Tensor, error) { return g.gather(ts, &c) })
}

// gather is Gather while g is locked.
func (g *Group) gather(ts []tensor.Tensor, c *GatherConfig) (tensor.Tensor, error) {
	const op = "gather"
	if c.Out != nil && (c.Destination != nil || c.Host) {
		return tensor.Tensor{}, badArgument(op, "Destination and Host must not be specified when Out is specified")
	}
	if c.Host && c.Destination != nil {
		return tensor.Tensor{}, badArgument(op, "Destination must not be specified when Host is, but got %s", c.Destination)
	}
	to, err := g.destination(op, c.Destination)
	if err != nil {
		return tensor.Tensor{}, err
	}
	dim, shape, err := checkGather(g, ts, c.Dim)
	if err != nil {
		return tensor.Tensor{}, err
	}
	if c.Out != nil {
		parts, err := checkGatherOut(g, *c.Out, ts, dim, shape)
		if err != nil {
			return tensor.Tensor{}, err
		}
		if err := g.copyToParts(parts, ts); err != nil {
			return tensor.Tensor{}, err
		}
		return c.Out.Retain(), nil
	}
	var s *stream.Stream
	if !c.Host {
		s = g.members[g.rankOn(to)].stream
	}
	return g.gatherNew(s, ts, dim, shape)
}

// gatherNew gathers to a new tensor on the device of s, or on the host if s is nil.
func (g *Group) gatherNew(s *stream.Stream, ts []tensor.Tensor, dim int, shape []int) (tensor.Tensor, error) {
	out, err := makeGathered(s, ts, shape)
	if err != nil {
		return tensor.Tensor{}, err
	}
	parts, err := out.SplitSizes(lengthsAlong(ts, dim), dim)
	if err == nil {
		err = g.copyToParts(parts, ts)
	}
	if err != nil {
		_ = out.Close()
		return tensor.Tensor{}, err
	}
	return out, nil
}

// checkGather validates the tensors and returns the dimension and the shape of the result.
func checkGather(g *Group, ts []tensor.Tensor, dim int) (int, []int, error) {
	const op = "gather"
	if len(ts) == 0 {
		return 0, nil, badArgument(op, "expected at least one tensor to gather from")
	}
	for i, t := range ts {
		if err := g.checkSource(op, "tensor", i, t); err != nil {
			return 0, nil, err
		}
		if t.IsHost() {
			return 0, nil, badArgument(op, "expected all input tensors to be on devices, but tensor at index %d is on the host", i)
		}
	}
	first := ts[0]
	if first.Dims() == 0 {
		return 0, nil, badArgument(op, "the tensors have no dimension to gather along: Unsqueeze them")
	}
	d, err := dims.Wrap(dim, first.Dims())
	if err != nil {
		return 0, nil, badArgument(op, "%w", err)
	}
	shape := first.Shape()
	shape[d] = 0
	for i, t := range ts {
		if t.Dims() != first.Dims() {
			return 0, nil, badArgument(op, "expected all input tensors to have the same number of dimensions, but tensor at index %d has %d dimensions (expected %d)", i, t.Dims(), first.Dims())
		}
		if !sameBut(d, t, first) {
			want := first.Shape()
			want[d] = t.Size(d)
			return 0, nil, badArgument(op, "input tensor at index %d has invalid shape %v, but expected %v", i, t.Shape(), want)
		}
		shape[d] += t.Size(d)
	}
	return d, shape, nil
}

// checkGatherOut returns the part of out for each tensor.
func checkGatherOut(g *Group, out tensor.Tensor, ts []tensor.Tensor, dim int, shape []int) ([]tensor.Tensor, error) {
	const op = "gather"
	if err := g.checkSource(op, "output tensor", only, out); err != nil {
		return nil, err
	}
	if !slices.Equal(out.Shape(), shape) {
		return nil, badArgument(op, "expected the output tensor to have shape %v, but got %v", shape, out.Shape())
	}
	parts, err := out.SplitSizes(lengthsAlong(ts, dim), dim)
	if err != nil {
		return nil, badArgument(op, "%w", err)
	}
	for i, t := range ts {
		what := fmt.Sprintf("comm: %s: tensor at index %d", op, i)
		if err := strided.CheckCopy(what, parts[i], t); err != nil {
			return nil, asBadArgument(err)
		}
		if strided.Overlaps(out, t) {
			return nil, badArgument(op, "tensor at index %d shares some memory with the output tensor", i)
		}
	}
	return parts, nil
}

func lengthsAlong(ts []tensor.Tensor, dim int) []int {
	n := make([]int, len(ts))
	for i, t := range ts {
		n[i] = t.Size(dim)
	}
	return n
}

// makeGathered allocates a result, in host memory if s is nil.
func makeGathered(s *stream.Stream, ts []tensor.Tensor, shape []int) (tensor.Tensor, error) {
	allocate := func(t memory.DType, shape ...int) (tensor.Tensor, error) {
		if s == nil {
			return tensor.MakeHost(t, shape...)
		}
		return tensor.Make(s, t, shape...)
	}
	t := ts[0].DType()
	if slices.ContainsFunc(ts, func(t tensor.Tensor) bool { return !t.ChannelsLast() }) {
		return allocate(t, shape...)
	}
	// channels-last: dimension 1, the channels, becomes the innermost one.
	n := len(shape)
	order := []int{0, n - 1}
	for d := 1; d < n-1; d++ {
		order = append(order, d)
	}
	x, err := allocate(t, append(append([]int{shape[0]}, shape[2:]...), shape[1])...)
	if err != nil {
		return x, err
	}
	v, err := x.Permute(order...)
	if err != nil {
		return v, err
	}
	v = v.Retain()
	return v, x.Close()
}

// copyToParts copies the tensors to their parts of the result.
func (g *Group) copyToParts(parts, ts []tensor.Tensor) error {
	if err := g.recordStreams(ts...); err != nil {
		return err
	}
	if err := g.recordStreams(parts[0]); err != nil {
		return err
	}
	to := g.streamOf(parts[0])
	switch alone, err := canCopyByKernel(to, parts, ts); {
	case err != nil:
		return err
	case alone:
		return copyByKernel(to, g.streamsOf(ts), parts, ts)
	}
	return g.copyFromSources(parts, ts, to)
}

// copyFromSources copies the tensors to their parts of the result, whose use is ordered by to. All
// other devices copy at the same time, and the result's device copies its own tensors
// meanwhile.
func (g *Group) copyFromSources(parts, ts []tensor.Tensor, to *stream.Stream) error {
	var sources []*stream.Stream
	for i, t := range ts {
		if g.sourceCopies(parts[i], t, to) {
			sources = withStream(sources, g.streamOf(t))
		}
	}
	if err := gpu.Fork(to, sources); err != nil {
		return err
	}
	err := g.copyParts(parts, ts, to)
	if e := gpu.Join(to, sources); e != nil {
		// The stream to does not wait for the copies, so the sources must keep the memory.
		err = errors.Join(err, e)
		for _, s := range sources {
			err = errors.Join(err, parts[0].RecordStream(s))
		}
	}
	return err
}

// sourceCopies reports whether the stream of src, on another device, copies it to dst.
func (g *Group) sourceCopies(dst, src tensor.Tensor, to *stream.Stream) bool {
	from := g.streamOf(src)
	return to != nil && from != nil && from != to && atSource(dst, src)
}

// copyParts enqueues the copies of push.
func (g *Group) copyParts(parts, ts []tensor.Tensor, to *stream.Stream) (err error) {
	for i, t := range ts {
		if from := g.streamOf(t); g.sourceCopies(parts[i], t, to) {
			err = tensor.Copy(from, parts[i], t)
		} else {
			err = transfer(parts[i], t, to, from)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
