package comm

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/tensor"
)

// BroadcastConfig are the options of Broadcast; nil means their zero values.
type BroadcastConfig struct {
	// Devices are those that get the tensor, some perhaps several times. nil means
	// the group's, by rank.
	Devices []*device.Device
	// Out are tensors to copy to instead, of the shape of the source: not with
	// Devices.
	Out []tensor.Tensor
}

// Broadcast enqueues copies of t, which is on a device of the group or on the host,
// on the devices (torch.cuda.comm.broadcast), and returns them in their order. The
// result for the device of t has the memory of t. The others are contiguous. With Out,
// whose strides and types may be any, the results have the memory of the tensors of Out.
// Each result owns a reference to its memory: the caller closes all results, and
// closing a result closes neither t nor a tensor of Out.
//
// For one other device, Broadcast enqueues a copy. For more devices it launches one kernel,
// or NCCL's broadcast if each device of the group has one contiguous tensor of the same
// type. Broadcast converts between types, which torch leaves to NCCL to refuse.
func Broadcast(g *Group, t tensor.Tensor, cfg *BroadcastConfig) ([]tensor.Tensor, error) {
	const op = "broadcast"
	var c BroadcastConfig
	if cfg != nil {
		c = *cfg
	}
	if err := g.checkWhole(op); err != nil {
		return nil, err
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	if c.Devices != nil && c.Out != nil {
		return nil, refuse(op, "exactly one of Devices and Out must be specified, but got %d devices and %d tensors", len(c.Devices), len(c.Out))
	}
	if err := g.source(op, "tensor", only, t); err != nil {
		return nil, err
	}
	if c.Out != nil {
		if err := checkBroadcastOut(g, t, c.Out); err != nil {
			return nil, err
		}
		if err := g.spread(t, c.Out); err != nil {
			return nil, err
		}
		return tensor.RetainAll(c.Out), nil
	}
	devs, err := g.devices(op, c.Devices)
	if err != nil {
		return nil, err
	}
	return g.broadcast(t, devs)
}

func checkBroadcastOut(g *Group, t tensor.Tensor, out []tensor.Tensor) error {
	const op = "broadcast"
	if err := g.outs(op, out); err != nil {
		return err
	}
	for i, o := range out {
		if !tensor.SameShape(o, t) {
			return refuse(op, "expected all output tensors to have the shape of the source tensor %v, but output tensor at index %d has shape %v", t.Shape(), i, o.Shape())
		}
		if err := tensor.CheckCopy(fmt.Sprintf("comm: %s: output tensor at index %d", op, i), o, t); err != nil {
			return unfit(err)
		}
	}
	return nil
}

// broadcast is Broadcast to devices.
func (g *Group) broadcast(t tensor.Tensor, devs []*device.Device) (results []tensor.Tensor, err error) {
	defer func() {
		if err != nil {
			closeAll(results)
			results = nil
		}
	}()
	results = make([]tensor.Tensor, 0, len(devs))
	fresh := make([]tensor.Tensor, 0, len(devs))
	for _, d := range devs {
		if d == t.Device() {
			results = append(results, t.Retain())
			continue
		}
		x, err := g.another(fresh, d, t)
		if err != nil {
			return results, err
		}
		results, fresh = append(results, x), append(fresh, x)
	}
	return results, g.spread(t, fresh)
}

// another makes one more contiguous tensor of the shape of t, on a device, beside some.
func (g *Group) another(some []tensor.Tensor, d *device.Device, t tensor.Tensor) (tensor.Tensor, error) {
	s := g.members[g.rankOn(d)].stream
	if len(some) > 0 {
		return tensor.MakeLike(s, some[0], t.DType()) // which shares the shape
	}
	return tensor.Make(s, t.DType(), t.Shape()...)
}

// spread copies t to tensors of its shape.
func (g *Group) spread(t tensor.Tensor, to []tensor.Tensor) error {
	if len(to) == 0 || t.Len() == 0 {
		return nil
	}
	if err := g.record(t); err != nil {
		return err
	}
	if err := g.record(to...); err != nil {
		return err
	}
	from, same := g.streamOf(t), slices.Repeat([]tensor.Tensor{t}, len(to))
	switch alone, err := direct(from, to, same); {
	case err != nil:
		return err
	case alone:
		return copyAlone(from, g.streamsOf(to), to, same)
	}
	if all := append([]tensor.Tensor{t}, to...); len(to) > 1 && g.apart(all...) {
		ranks, root := g.byRank(all...), g.rankOn(t.Device())
		return g.inTurn(func(i int, m *member) error { return wires[t.DType()].broadcast(m, ranks[i], root) })
	}
	for _, x := range to {
		if err := transfer(x, t, g.streamOf(x), from); err != nil {
			return err
		}
	}
	return nil
}
