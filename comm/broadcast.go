package comm

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/tensor"
)

// BroadcastConfig are the options of Broadcast; nil means their zero values.
type BroadcastConfig struct {
	// Devices get the tensor; a device may occur several times. nil means the devices of
	// the group, by rank.
	Devices []*device.Device
	// Out are existing tensors to copy to, with the shape of the source. Out and Devices
	// exclude each other.
	Out []tensor.Tensor
}

// Broadcast enqueues copies of t, which is on a device of the group or on the
// host, to the devices (torch.cuda.comm.broadcast), and returns the copies, one
// for each device. The result for the device of t shares the memory of t, and
// the other results are contiguous. With Out, whose strides and types may
// differ, the results share the memory of the tensors of Out. Each result owns
// a reference to its memory: the caller closes all results, and closing a
// result closes neither t nor a tensor of Out.
//
// For one other device, Broadcast enqueues a copy. For more devices it launches one kernel,
// or NCCL's broadcast if each device of the group has one contiguous tensor of the same
// type. Broadcast converts between types, which torch leaves to NCCL to refuse.
func Broadcast(g *Group, t tensor.Tensor, cfg *BroadcastConfig) ([]tensor.Tensor, error) {
	c := *cmp.Or(cfg, new(BroadcastConfig))
	return locked(g, "broadcast", func() ([]tensor.Tensor, error) { return g.broadcastTo(t, &c) })
}

// broadcastTo is Broadcast while g is locked.
func (g *Group) broadcastTo(t tensor.Tensor, c *BroadcastConfig) ([]tensor.Tensor, error) {
	const op = "broadcast"
	if c.Devices != nil && c.Out != nil {
		return nil, badArgument(op, "exactly one of Devices and Out must be specified, but got %d devices and %d tensors", len(c.Devices), len(c.Out))
	}
	if err := g.checkSource(op, "tensor", only, t); err != nil {
		return nil, err
	}
	if c.Out != nil {
		if err := checkBroadcastOut(g, t, c.Out); err != nil {
			return nil, err
		}
		if err := g.copyToAll(t, c.Out); err != nil {
			return nil, err
		}
		return strided.RetainAll(c.Out), nil
	}
	devs, err := g.devices(op, c.Devices)
	if err != nil {
		return nil, err
	}
	return g.broadcast(t, devs)
}

func checkBroadcastOut(g *Group, t tensor.Tensor, out []tensor.Tensor) error {
	const op = "broadcast"
	if err := g.checkOuts(op, out); err != nil {
		return err
	}
	for i, o := range out {
		if !strided.SameShape(o, t) {
			return badArgument(op, "expected all output tensors to have the shape of the source tensor %v, but output tensor at index %d has shape %v", t.Shape(), i, o.Shape())
		}
		if err := strided.CheckCopy(fmt.Sprintf("comm: %s: output tensor at index %d", op, i), o, t); err != nil {
			return asBadArgument(err)
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
		x, err := g.makeLikeOn(fresh, d, t)
		if err != nil {
			return results, err
		}
		results, fresh = append(results, x), append(fresh, x)
	}
	return results, g.copyToAll(t, fresh)
}

// makeLikeOn allocates one more contiguous tensor with the shape of t on a device.
func (g *Group) makeLikeOn(some []tensor.Tensor, d *device.Device, t tensor.Tensor) (tensor.Tensor, error) {
	s := g.members[g.rankOn(d)].stream
	if len(some) > 0 {
		return tensor.MakeLike(s, some[0], t.DType()) // shares the shape slice of some[0]
	}
	return tensor.Make(s, t.DType(), t.Shape()...)
}

// copyToAll copies t to tensors of its shape.
func (g *Group) copyToAll(t tensor.Tensor, to []tensor.Tensor) error {
	if len(to) == 0 || t.Len() == 0 {
		return nil
	}
	if err := g.recordStreams(t); err != nil {
		return err
	}
	if err := g.recordStreams(to...); err != nil {
		return err
	}
	from, same := g.streamOf(t), slices.Repeat([]tensor.Tensor{t}, len(to))
	switch alone, err := canCopyByKernel(from, to, same); {
	case err != nil:
		return err
	case alone:
		return copyByKernel(from, g.streamsOf(to), to, same)
	}
	if all := append([]tensor.Tensor{t}, to...); len(to) > 1 && g.onePerDevice(all...) {
		ranks, root := g.byRank(all...), g.rankOn(t.Device())
		call := &tensorCall{kind: collective.Broadcast, root: root}
		return g.enqueueAll(func(i int, m *member) error { return opsByType[t.DType()].issue(m, call, ranks[i], ranks[i]) })
	}
	for _, x := range to {
		if err := transfer(x, t, g.streamOf(x), from); err != nil {
			return err
		}
	}
	return nil
}

// bufferSize is the default size of a flat buffer, the same as in torch.
const bufferSize = 10 << 20

// BroadcastCoalescedConfig are the options of BroadcastCoalesced; nil means their
// zero values.
type BroadcastCoalescedConfig struct {
	// Devices get the tensors. All tensors are on the first device. nil means the devices
	// of the group, by rank.
	Devices []*device.Device
	// BufferSize is the number of bytes of one type that are sent together. The tensor
	// that reaches it is the last one of its buffer. Default 10 MiB.
	BufferSize int
}

// BroadcastCoalesced enqueues copies of tensors, which may be many and small,
// to the devices, with few transfers (torch.cuda.comm.broadcast_coalesced), and
// returns the tensors of each device in their order. For the first device the
// results are new references to the memory of the given tensors. The other
// results are contiguous. Those of one flat buffer share its memory, which is
// freed when all of them are closed. The caller closes all results. If one
// kernel copies contiguous tensors directly, they are not flattened first.
func BroadcastCoalesced(g *Group, ts []tensor.Tensor, cfg *BroadcastCoalescedConfig) ([][]tensor.Tensor, error) {
	const op = "broadcast-coalesced"
	c := *cmp.Or(cfg, new(BroadcastCoalescedConfig))
	return locked(g, op, func() ([][]tensor.Tensor, error) {
		devs, size, err := g.checkCoalesced(op, ts, &c)
		if err != nil {
			return nil, err
		}
		return g.broadcastBuckets(ts, devs, size)
	})
}

// checkCoalesced validates the arguments, and returns the devices and the size of a flat
// buffer.
func (g *Group) checkCoalesced(op string, ts []tensor.Tensor, c *BroadcastCoalescedConfig) ([]*device.Device, int, error) {
	devs, err := g.devices(op, c.Devices)
	if err != nil {
		return nil, 0, err
	}
	size, err := checkBuffer(op, c.BufferSize)
	if err != nil {
		return nil, 0, err
	}
	if len(devs) == 0 {
		return nil, 0, badArgument(op, "expected at least one device")
	}
	for i := range ts {
		t := &ts[i]
		if b := t.Buffer(); b != nil && inside.BufferOf(b).OpenOn(devs[0]) {
			continue
		}
		if err := g.checkSource(op, "tensor", i, *t); err != nil {
			return nil, 0, err
		}
		return nil, 0, badArgument(op, "all tensors must be on the first device %s, but tensor %d is %s", devs[0], i, *t)
	}
	return devs, size, nil
}

// broadcastBuckets copies tensors of the first device to all devices, in flat buffers of so
// many bytes.
func (g *Group) broadcastBuckets(ts []tensor.Tensor, devs []*device.Device, size int) (results [][]tensor.Tensor, err error) {
	results = make([][]tensor.Tensor, len(devs))
	for i := 1; i < len(results); i++ {
		results[i] = make([]tensor.Tensor, len(ts))
	}
	defer func() {
		if err != nil {
			for _, list := range results {
				closeAll(list)
			}
			results = nil
		}
	}()
	results[0] = strided.RetainAll(ts)
	for _, bucket := range (limit{bytes: size, reach: true}).buckets(ts) {
		if err := g.broadcastBucket(ts, bucket, devs[1:], results[1:]); err != nil {
			return results, err
		}
	}
	return results, nil
}

func checkBuffer(op string, size int) (int, error) {
	switch {
	case size < 0:
		return 0, badArgument(op, "a buffer of %d bytes: want a positive size", size)
	case size == 0:
		return bufferSize, nil
	}
	return size, nil
}

// broadcastBucket copies the tensors of a bucket to devices.
func (g *Group) broadcastBucket(ts []tensor.Tensor, bucket []int, devs []*device.Device, results [][]tensor.Tensor) (err error) {
	part := selectAt(ts, bucket)
	copies, err := g.broadcastFlat(part, devs)
	if err != nil {
		return err
	}
	defer closeAll(copies)
	views, err := strided.UnflattenEach(copies, part)
	for i, v := range views {
		results[i] = storeAt(results[i], bucket, v)
	}
	return err
}

// broadcastFlat returns, for each device, the elements of tensors of one type and device
// in one flat tensor.
func (g *Group) broadcastFlat(ts []tensor.Tensor, devs []*device.Device) (copies []tensor.Tensor, err error) {
	if copies, err = g.copyFlat(ts, devs); copies != nil || err != nil {
		return copies, err
	}
	flat, err := g.flatten(ts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, flat.Close()) }()
	return g.broadcast(flat, devs)
}

// copyFlat is broadcastFlat by one kernel, which does not flatten the tensors first. It returns
// nil if the kernel cannot copy these tensors or is not faster.
func (g *Group) copyFlat(ts []tensor.Tensor, devs []*device.Device) (copies []tensor.Tensor, err error) {
	n, s := lengthOf(ts), g.streamOf(ts[0])
	if ts[0].DType().Size()*n*len(devs) > directBytes || slices.Contains(devs, s.Device()) {
		return nil, nil
	}
	if near, err := inside.Reach(s.Device(), devs...); err != nil || !near {
		return nil, err
	}
	if slices.ContainsFunc(ts, func(t tensor.Tensor) bool { return !t.Contiguous() }) {
		return nil, nil
	}
	if err := g.recordStreams(ts...); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			closeAll(copies)
			copies = nil
		}
	}()
	copies = []tensor.Tensor{}
	for _, d := range devs {
		c, err := tensor.Make(g.members[g.rankOn(d)].stream, ts[0].DType(), n)
		if err != nil {
			return copies, err
		}
		copies = append(copies, c)
	}
	return copies, runOn(s, g.streamsOf(copies), [][]tensor.Tensor{ts, copies}, func() error { return strided.Flatten(s, copies, ts) })
}

// ReduceAddCoalescedConfig are the options of ReduceAddCoalesced; nil means their zero
// values.
type ReduceAddCoalescedConfig struct {
	ReduceAddConfig
	// BufferSize is the maximum number of bytes of one type that are added together; a
	// larger tensor is added alone. Default 10 MiB.
	BufferSize int
}

// ReduceAddCoalesced enqueues, for each k, the sum of tss[i][k] over all lists i, with few
// transfers (torch.cuda.comm.reduce_add_coalesced). The tensors of each list are on one
// device. It returns the sums, contiguous and on the destination, one for each k; lists
// that are longer than the shortest list are truncated. Sums of one flat buffer share its
// memory, which is freed when all these sums are closed. If there is only one list, the sum
// of a contiguous tensor that fills a buffer alone is a new reference to its memory. The
// caller closes all results.
//
// The tensors of a buffer are added as in ReduceAdd. If one kernel adds them,
// it does so without flattening them first.
func ReduceAddCoalesced(g *Group, tss [][]tensor.Tensor, cfg *ReduceAddCoalescedConfig) ([]tensor.Tensor, error) {
	const op = "reduce-add-coalesced"
	c := *cmp.Or(cfg, new(ReduceAddCoalescedConfig))
	return locked(g, op, func() ([]tensor.Tensor, error) { return g.addBuckets(op, tss, &c) })
}

// addBuckets is ReduceAddCoalesced while g is locked.
func (g *Group) addBuckets(op string, tss [][]tensor.Tensor, c *ReduceAddCoalescedConfig) (results []tensor.Tensor, err error) {
	size, err := checkBuffer(op, c.BufferSize)
	if err != nil {
		return nil, err
	}
	tss, err = checkLists(g, op, tss, &c.ReduceAddConfig)
	if err != nil {
		return nil, err
	}
	results = make([]tensor.Tensor, len(tss[0]))
	for _, bucket := range (limit{bytes: size}).buckets(tss[0]) {
		if results, err = g.addBucket(op, tss, bucket, &c.ReduceAddConfig, results); err != nil {
			closeAll(results)
			return nil, err
		}
	}
	return results, nil
}

// checkLists validates lists of tensors and returns them truncated to one length.
func checkLists(g *Group, op string, tss [][]tensor.Tensor, c *ReduceAddConfig) ([][]tensor.Tensor, error) {
	if len(tss) == 0 {
		return nil, badArgument(op, "expected at least one list of tensors to add")
	}
	shortest := len(tss[0])
	for _, ts := range tss {
		shortest = min(shortest, len(ts))
	}
	to, err := g.destination(op, c.Destination)
	if err != nil {
		return nil, err
	}
	tss = slices.Clone(tss)
	found := shortest == 0
	for i := range tss {
		tss[i] = tss[i][:shortest]
		for k := range tss[i] {
			t, model := &tss[i][k], &tss[0][k]
			if b := t.Buffer(); k > 0 && b != nil && inside.BufferOf(b).OpenOn(tss[i][0].Device()) && t.DType() == model.DType() && strided.SameShape(*t, *model) {
				continue
			}
			if err := checkListed(g, op, tss, i, k); err != nil {
				return nil, err
			}
		}
		found = found || tss[i][0].Device() == to // the tensors of a list are on one device
	}
	if !found {
		return nil, badArgument(op, "expects the destination %s to be the device of one of the lists", to)
	}
	return tss, nil
}

// checkListed validates tensor k of list i; the tensors before it are valid.
func checkListed(g *Group, op string, tss [][]tensor.Tensor, i, k int) error {
	t, first, model := &tss[i][k], &tss[i][0], &tss[0][k]
	if err := g.checkSource(op, "tensor", k, *t); err != nil {
		return fmt.Errorf("%w (list %d)", err, i)
	}
	switch {
	case t.IsHost():
		return badArgument(op, "expects all tensors to be on devices, but tensor %d of list %d is on the host", k, i)
	case t.Device() != first.Device():
		return badArgument(op, "expects the tensors of a list to be on one device, but of list %d tensor 0 is on %s and tensor %d on %s", i, first.Device(), k, t.Device())
	case !strided.SameShape(*t, *model):
		return badArgument(op, "tensor %d of list %d has invalid size: got %s, but expected %s", k, i, times(t.Shape()), times(model.Shape()))
	case t.DType() != model.DType():
		return badArgument(op, "tensor %d of list %d is of %s, and that of list 0 of %s", k, i, t.DType(), model.DType())
	}
	return nil
}

// addBucket adds the tensors of one bucket over all lists.
func (g *Group) addBucket(op string, tss [][]tensor.Tensor, bucket []int, c *ReduceAddConfig, results []tensor.Tensor) ([]tensor.Tensor, error) {
	parts := make([][]tensor.Tensor, len(tss))
	for i, ts := range tss {
		parts[i] = selectAt(ts, bucket)
	}
	flat, err := g.addFlat(op, parts, c)
	if err != nil {
		return results, err
	}
	views, err := strided.UnflattenEach([]tensor.Tensor{flat}, parts[0])
	if err == nil {
		results = storeAt(results, bucket, views[0])
	}
	return results, errors.Join(err, flat.Close())
}

// addFlat returns the sums over lists of tensors of one type in one flat tensor.
func (g *Group) addFlat(op string, lists [][]tensor.Tensor, c *ReduceAddConfig) (sum tensor.Tensor, err error) {
	sum, done, err := g.addInPlace(op, lists, c)
	if done || err != nil {
		return sum, err
	}
	flats := make([]tensor.Tensor, len(lists))
	defer func() {
		for _, f := range flats {
			err = errors.Join(err, f.Close())
		}
	}()
	for i, ts := range lists {
		if flats[i], err = g.flatten(ts); err != nil {
			return sum, err
		}
	}
	x, err := newSum(g, op, flats, c)
	if err != nil {
		return sum, err
	}
	return x.enqueue()
}

// addInPlace is addFlat by a kernel that reads the tensors at their places. done is false
// if the kernel cannot add these tensors or is not faster.
func (g *Group) addInPlace(op string, lists [][]tensor.Tensor, c *ReduceAddConfig) (sum tensor.Tensor, done bool, err error) {
	if len(lists) < 2 {
		return sum, false, nil
	}
	to, err := g.destination(op, c.Destination)
	if err != nil {
		return sum, false, err
	}
	s, n := g.members[g.rankOn(to)].stream, lengthOf(lists[0])
	if (len(lists)-1)*n*lists[0][0].DType().Size() > directBytes {
		return sum, false, nil
	}
	if sum, err = tensor.Make(s, lists[0][0].DType(), n); err != nil {
		return sum, false, err
	}
	defer func() {
		if !done || err != nil {
			err = errors.Join(err, sum.Close())
			sum = tensor.Tensor{}
		}
	}()
	lists = rootFirst(lists, to)
	if done, err = canAddByKernel(s, sum, lists); err != nil || !done || n == 0 {
		return sum, done, err
	}
	for _, ts := range lists {
		if err := g.recordStreams(ts...); err != nil {
			return sum, true, err
		}
	}
	return sum, true, g.addByKernel(s, sum, lists)
}

// rootFirst moves the last of the lists that are on a device to the front, the order in
// which ReduceAdd adds.
func rootFirst(lists [][]tensor.Tensor, to *device.Device) [][]tensor.Tensor {
	for i := len(lists) - 1; i >= 0; i-- {
		if lists[i][0].Device() == to {
			return slices.Concat(lists[i:i+1], lists[:i], lists[i+1:])
		}
	}
	return lists
}
