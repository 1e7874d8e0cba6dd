package comm

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// ScatterConfig are the options of Scatter; nil means their zero values.
type ScatterConfig struct {
	// Devices are those that get a chunk each, some perhaps several. nil means the
	// group's, by rank.
	Devices []*device.Device
	// ChunkSizes are the lengths of the chunks, one for each device. nil divides
	// equally: each gets the nth part, rounded up, as long as there is some left,
	// so that there may be fewer chunks than devices.
	ChunkSizes []int
	// Dim is the dimension to divide; a negative one counts from the end.
	Dim int
	// Streams are those in whose order the chunks are written and ready, each a stream of
	// the chunk's device. What Scatter allocates belongs to them. Copies of a tensor of the
	// host, and to an Out with strides of a tensor without, run on them; others on the
	// group's stream of the tensor's device. Where one is missing or nil it is the one
	// before, if that is of the same device, and otherwise the group's. A chunk that needs
	// no copy needs none.
	Streams []*stream.Stream
	// Out are tensors to copy the chunks to instead, whose lengths along Dim divide
	// the source: not with Devices or ChunkSizes.
	Out []tensor.Tensor
}

// Scatter enqueues copies of the chunks of t, which is on a device of the group or on
// the host, on the devices (torch.cuda.comm.scatter), and returns them in their order.
// A chunk for the device of t is a view of t. Others have the strides that torch gives
// copies. With Out, whose strides and types may be any, the results have the memory of
// the tensors of Out. Each result owns a reference to its memory: the caller closes all
// results, and closing a result closes neither t nor a tensor of Out.
//
// If one kernel of the device of t cannot copy all chunks, Scatter copies them one by
// one. NCCL takes no part.
func Scatter(g *Group, t tensor.Tensor, cfg *ScatterConfig) ([]tensor.Tensor, error) {
	const op = "scatter"
	var c ScatterConfig
	if cfg != nil {
		c = *cfg
	}
	if err := g.checkWhole(op); err != nil {
		return nil, err
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	if err := g.source(op, "tensor", only, t); err != nil {
		return nil, err
	}
	x := &scattering{g: g, t: t, streams: c.Streams, out: c.Out}
	check := x.checkDevices
	if c.Out != nil {
		check = x.checkOut
	}
	if err := check(&c); err != nil {
		return nil, err
	}
	if err := x.checkStreams(); err != nil {
		return nil, err
	}
	return x.enqueue()
}

// A scattering is a Scatter while it is checked and enqueued.
type scattering struct {
	g       *Group
	t       tensor.Tensor
	chunks  []tensor.Tensor  // views of t
	devs    []*device.Device // for each
	streams []*stream.Stream // as given, and then for each chunk, nil where it is not copied
	out     []tensor.Tensor  // nil where there are none
}

func (x *scattering) checkDevices(c *ScatterConfig) error {
	const op = "scatter"
	devs, err := x.g.devices(op, c.Devices)
	if err != nil {
		return err
	}
	if len(devs) == 0 {
		return refuse(op, "expected at least one device to scatter to")
	}
	if c.ChunkSizes != nil && len(c.ChunkSizes) != len(devs) {
		return refuse(op, "expected Devices and ChunkSizes to be of same length, but got %d devices and %d sizes", len(devs), len(c.ChunkSizes))
	}
	if c.ChunkSizes != nil {
		x.chunks, err = x.t.SplitSizes(c.ChunkSizes, c.Dim)
	} else {
		x.chunks, err = x.t.Chunk(len(devs), c.Dim)
	}
	if err != nil {
		return refuse(op, "%w", err)
	}
	x.devs = devs[:len(x.chunks)]
	return nil
}

func (x *scattering) checkOut(c *ScatterConfig) error {
	const op = "scatter"
	switch {
	case c.Devices != nil:
		return refuse(op, "Devices must not be specified when Out is specified, but got %d", len(c.Devices))
	case c.ChunkSizes != nil:
		return refuse(op, "ChunkSizes must not be specified when Out is specified, but got %v", c.ChunkSizes)
	case len(c.Out) == 0:
		return refuse(op, "expected at least one output tensor to scatter to")
	}
	if err := x.g.outs(op, c.Out); err != nil {
		return err
	}
	dim, err := tensor.WrapDim(c.Dim, x.t.Dims())
	if err != nil {
		return refuse(op, "%w", err)
	}
	var sizes []int
	total := 0
	for i, o := range c.Out {
		if !sameBut(dim, o, x.t) {
			return refuse(op, "output tensor at index %d has incorrect shape: %v: expected same shape except for scatter dimension %d as the source tensor: %v", i, o.Shape(), dim, x.t.Shape())
		}
		sizes = append(sizes, o.Size(dim))
		total += o.Size(dim)
	}
	if total != x.t.Size(dim) {
		return refuse(op, "total size for output tensors along scatter dimension %d does not match the source tensor's: expected %d, but got %d", dim, x.t.Size(dim), total)
	}
	if x.chunks, err = x.t.SplitSizes(sizes, dim); err != nil {
		return refuse(op, "%w", err)
	}
	for i, o := range c.Out {
		if err := tensor.CheckCopy(fmt.Sprintf("comm: %s: output tensor at index %d", op, i), o, x.chunks[i]); err != nil {
			return unfit(err)
		}
		for j, chunk := range x.chunks {
			if j != i && tensor.Overlaps(o, chunk) {
				return refuse(op, "output tensor at index %d shares some memory with the chunk of the source tensor at index %d", i, j)
			}
		}
		x.devs = append(x.devs, o.Device())
	}
	return nil
}

// sameBut reports whether two tensors have the same shape but for one dimension.
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

// checkStreams finds the stream of each copy.
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
			if err := last.Check(fmt.Sprintf("comm: %s: stream at index %d", op, i), nil); err != nil {
				return unfit(err)
			}
			if last.Device() != d {
				return refuse(op, "expected the device of the stream at index %d (was %s) to match the device at that index (expected %s)", i, last.Device(), d)
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
	if err := x.g.record(x.t); err != nil {
		return nil, err
	}
	if x.out != nil {
		results = tensor.RetainAll(x.out)
	} else if results, err = x.allocate(); err != nil {
		return nil, err
	}
	if err := x.copy(results); err != nil {
		closeAll(results)
		return nil, err
	}
	return results, nil
}

// allocate makes the results, of which those that need no copy are done.
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
	switch alone, err := direct(from, dst, src); {
	case err != nil:
		return err
	case alone:
		return copyAlone(from, others, dst, src)
	}
	for i := range dst {
		if err := transfer(dst[i], src[i], on[i], from); err != nil {
			return err
		}
	}
	return nil
}
