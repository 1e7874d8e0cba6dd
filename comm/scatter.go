package comm

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// ScatterConfig are the options of Scatter; nil means their zero values.
type ScatterConfig struct {
	// Devices get one chunk each; a device may occur several times. nil means the devices
	// of the group, by rank.
	Devices []*device.Device
	// ChunkSizes are the lengths of the chunks, one for each device. nil divides equally:
	// with n devices each chunk has an nth of the length, rounded up, so that there may be
	// fewer chunks than devices.
	ChunkSizes []int
	// Dim is the dimension to divide; a negative one counts from the end.
	Dim int
	// Streams are the streams that write the chunks, each on the chunk's device. Memory that Scatter allocates belongs to them. Copies of a host
	// tensor, and copies of a contiguous tensor to an Out with strides, run on them; other
	// copies run on the group's stream of the tensor's device. If a stream is missing or
	// nil, Scatter uses the previous stream if that is on the same device, and the group's
	// stream otherwise. A chunk that is not copied needs no stream.
	Streams []*stream.Stream
	// Out are existing tensors to copy the chunks to; their lengths along Dim divide the
	// source. Out excludes Devices and ChunkSizes.
	Out []tensor.Tensor
}

// Scatter enqueues copies of the chunks of t, which is on a device of the group
// or on the host, to the devices (torch.cuda.comm.scatter), and returns them in
// their order. The chunk for the device of t is a view of t, and the other
// chunks have the strides that torch gives to copies. With Out, whose strides
// and types may differ, the results share the memory of the tensors of Out.
// Each result owns a reference to its memory: the caller closes all results,
// and closing a result closes neither t nor a tensor of Out.
//
// If one kernel of the device of t cannot copy all chunks, Scatter copies them
// one by one. It does not use NCCL.
func Scatter(g *Group, t tensor.Tensor, cfg *ScatterConfig) ([]tensor.Tensor, error) {
	c := *cmp.Or(cfg, new(ScatterConfig))
	x := &scattering{g: g, t: t, streams: c.Streams, out: c.Out}
	return locked(g, "scatter", func() ([]tensor.Tensor, error) {
		if err := x.check(&c); err != nil {
			return nil, err
		}
		return x.enqueue()
	})
}

// A scattering is the state of a call of Scatter.
type scattering struct {
	g       *Group
	t       tensor.Tensor
	chunks  []tensor.Tensor  // views of t
	devs    []*device.Device // for each chunk
	streams []*stream.Stream // as given, and then for each chunk; nil if it is not copied
	out     []tensor.Tensor  // nil without Out
}

// check validates the arguments, and determines the chunks, their devices and streams.
func (x *scattering) check(c *ScatterConfig) error {
	if err := x.g.checkSource("scatter", "tensor", only, x.t); err != nil {
		return err
	}
	checkTargets := x.checkDevices
	if c.Out != nil {
		checkTargets = x.checkOut
	}
	if err := checkTargets(c); err != nil {
		return err
	}
	return x.checkStreams()
}

func (x *scattering) checkDevices(c *ScatterConfig) error {
	const op = "scatter"
	devs, err := x.g.devices(op, c.Devices)
	if err != nil {
		return err
	}
	if len(devs) == 0 {
		return badArgument(op, "expected at least one device to scatter to")
	}
	if c.ChunkSizes != nil && len(c.ChunkSizes) != len(devs) {
		return badArgument(op, "expected Devices and ChunkSizes to be of same length, but got %d devices and %d sizes", len(devs), len(c.ChunkSizes))
	}
	if c.ChunkSizes != nil {
		x.chunks, err = x.t.SplitSizes(c.ChunkSizes, c.Dim)
	} else {
		x.chunks, err = x.t.Chunk(len(devs), c.Dim)
	}
	if err != nil {
		return badArgument(op, "%w", err)
	}
	x.devs = devs[:len(x.chunks)]
	return nil
}

func (x *scattering) checkOut(c *ScatterConfig) error {
	const op = "scatter"
	switch {
	case c.Devices != nil:
		return badArgument(op, "Devices must not be specified when Out is specified, but got %d", len(c.Devices))
	case c.ChunkSizes != nil:
		return badArgument(op, "ChunkSizes must not be specified when Out is specified, but got %v", c.ChunkSizes)
	case len(c.Out) == 0:
		return badArgument(op, "expected at least one output tensor to scatter to")
	}
	if err := x.g.checkOuts(op, c.Out); err != nil {
		return err
	}
	if err := x.splitLike(c.Out, c.Dim); err != nil {
		return err
	}
	for i, o := range c.Out {
		if err := strided.CheckCopy(fmt.Sprintf("comm: %s: output tensor at index %d", op, i), o, x.chunks[i]); err != nil {
			return asBadArgument(err)
		}
		for j, chunk := range x.chunks {
			if j != i && strided.Overlaps(o, chunk) {
				return badArgument(op, "output tensor at index %d shares some memory with the chunk of the source tensor at index %d", i, j)
			}
		}
		x.devs = append(x.devs, o.Device())
	}
	return nil
}

// splitLike divides the source into chunks of the sizes of tensors.
func (x *scattering) splitLike(outs []tensor.Tensor, along int) error {
	const op = "scatter"
	dim, err := strided.WrapDim(along, x.t.Dims())
	if err != nil {
		return badArgument(op, "%w", err)
	}
	var sizes []int
	total := 0
	for i, o := range outs {
		if !sameBut(dim, o, x.t) {
			return badArgument(op, "output tensor at index %d has incorrect shape: %v: expected same shape except for scatter dimension %d as the source tensor: %v", i, o.Shape(), dim, x.t.Shape())
		}
		sizes = append(sizes, o.Size(dim))
		total += o.Size(dim)
	}
	if total != x.t.Size(dim) {
		return badArgument(op, "total size for output tensors along scatter dimension %d does not match the source tensor's: expected %d, but got %d", dim, x.t.Size(dim), total)
	}
	if x.chunks, err = x.t.SplitSizes(sizes, dim); err != nil {
		return badArgument(op, "%w", err)
	}
	return nil
}

// sameBut reports whether two tensors have the same shape except for one dimension.
func sameBut(dim int, a, b tensor.Tensor) bool {
	if a.Dims() != b.Dims() || a.Dims() == 0 {
		return false
	}
	for i := range a.Dims() {
		if i != dim && a.Size(i) != b.Size(i) {
			return false
		}
	}
	return true
}

// checkStreams determines the stream of each copy.
func (x *scattering) checkStreams() error {
	const op = "scatter"
	given := x.streams
	x.streams = make([]*stream.Stream, len(x.chunks))
	var last *stream.Stream
	for i, d := range x.devs {
		if x.out == nil && d == x.t.Device() {
			continue
		}
		if i < len(given) && given[i] != nil {
			last = given[i]
			if err := gpu.CheckStream(fmt.Sprintf("comm: %s: stream at index %d", op, i), last, nil); err != nil {
				return asBadArgument(err)
			}
			if last.Device() != d {
				return badArgument(op, "expected the device of the stream at index %d (was %s) to match the device at that index (expected %s)", i, last.Device(), d)
			}
		}
		x.streams[i] = x.g.members[x.g.rankOn(d)].stream
		if last != nil && last.Device() == d {
			x.streams[i] = last
		}
	}
	return nil
}

func (x *scattering) enqueue() (results []tensor.Tensor, err error) {
	if err := x.g.recordStreams(x.t); err != nil {
		return nil, err
	}
	if x.out != nil {
		results = strided.RetainAll(x.out)
	} else if results, err = x.allocate(); err != nil {
		return nil, err
	}
	if err := x.copy(results); err != nil {
		closeAll(results)
		return nil, err
	}
	return results, nil
}

// allocate allocates the results; chunks that need no copy are then complete.
func (x *scattering) allocate() (results []tensor.Tensor, err error) {
	results = make([]tensor.Tensor, 0, len(x.chunks))
	for i, c := range x.chunks {
		if x.streams[i] == nil {
			results = append(results, c.Retain())
			continue
		}
		r, err := tensor.MakeLike(x.streams[i], c, c.DType())
		if err != nil {
			closeAll(results)
			return nil, err
		}
		results = append(results, r)
	}
	return results, nil
}

// copy enqueues the copies of the chunks.
func (x *scattering) copy(results []tensor.Tensor) error {
	n := len(results)
	dst, src := make([]tensor.Tensor, 0, n), make([]tensor.Tensor, 0, n)
	on, others := make([]*stream.Stream, 0, n), make([]*stream.Stream, 0, n)
	for i, s := range x.streams {
		if s == nil {
			continue
		}
		if err := results[i].RecordStream(s); err != nil {
			return err
		}
		dst, src, on, others = append(dst, results[i]), append(src, x.chunks[i]), append(on, s), withStream(others, s)
	}
	from := x.g.streamOf(x.t)
	switch alone, err := canCopyByKernel(from, dst, src); {
	case err != nil:
		return err
	case alone:
		return copyByKernel(from, others, dst, src)
	}
	for i := range dst {
		if err := transfer(dst[i], src[i], on[i], from); err != nil {
			return err
		}
	}
	return nil
}

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

// Gather enqueues the concatenation of tensors, which are on devices of the
// group, on the destination (torch.cuda.comm.gather), and returns it; the
// caller closes it. The shapes must be the same except along Dim. The result
// has the type of the first tensor, and the other tensors are converted to it.
// The result is contiguous, or channels-last if all tensors are. With Out the
// result shares the memory of Out, but owns a reference to it: closing the
// result does not close Out. If one kernel of the destination cannot copy all
// tensors, Gather copies them one by one. Gather does not use NCCL.
//
// The host waits only if the result is in host memory.
func Gather(g *Group, ts []tensor.Tensor, cfg *GatherConfig) (tensor.Tensor, error) {
	c := *cmp.Or(cfg, new(GatherConfig))
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
	d, err := strided.WrapDim(dim, first.Dims())
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
