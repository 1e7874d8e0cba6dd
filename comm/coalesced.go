package comm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// bufferSize is how many bytes are coalesced, as in torch.
const bufferSize = 10 << 20

// BroadcastCoalescedConfig are the options of BroadcastCoalesced; nil means their
// zero values.
type BroadcastCoalescedConfig struct {
	// Devices are those that get the tensors, which are all on the first of them. nil
	// means the group's, by rank.
	Devices []*device.Device
	// BufferSize is how many bytes of one type are sent together: a tensor that reaches
	// it is the last one of its buffer. Default 10 MiB.
	BufferSize int
}

// BroadcastCoalesced enqueues copies of tensors, which may be many and small, on the
// devices, few transfers in all (torch.cuda.comm.broadcast_coalesced), and returns the
// tensors of each device, in their order. Those of the first device are the given
// ones: the same memory, with shares of their own. Others are contiguous, and those of
// one buffer share its memory, which goes back when all of them are closed. The caller
// closes all. What is contiguous and goes to other devices by one kernel is not put
// together before.
func BroadcastCoalesced(g *Group, ts []tensor.Tensor, cfg *BroadcastCoalescedConfig) (results [][]tensor.Tensor, err error) {
	const op = "broadcast-coalesced"
	var c BroadcastCoalescedConfig
	if cfg != nil {
		c = *cfg
	}
	if err := g.checkWhole(op); err != nil {
		return nil, err
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	devs, err := g.devices(op, c.Devices)
	if err != nil {
		return nil, err
	}
	size, err := checkBuffer(op, c.BufferSize)
	if err != nil {
		return nil, err
	}
	if len(devs) == 0 {
		return nil, refuse(op, "expected at least one device")
	}
	for i := range ts {
		t := &ts[i]
		if t.OpenOn(devs[0]) {
			continue
		}
		if err := g.source(op, "tensor", i, *t); err != nil {
			return nil, err
		}
		return nil, refuse(op, "all tensors must be on the first device %s, but tensor %d is %s", devs[0], i, *t)
	}
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
	results[0] = tensor.RetainAll(ts)
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
		return 0, refuse(op, "a buffer of %d bytes: want a positive size", size)
	case size == 0:
		return bufferSize, nil
	}
	return size, nil
}

// broadcastBucket copies the tensors of a bucket to devices.
func (g *Group) broadcastBucket(ts []tensor.Tensor, bucket []int, devs []*device.Device, results [][]tensor.Tensor) (err error) {
	part := pick(ts, bucket)
	copies, err := g.broadcastFlat(part, devs)
	if err != nil {
		return err
	}
	defer closeAll(copies)
	views, err := tensor.UnflattenEach(copies, part)
	for i, v := range views {
		results[i] = putBack(results[i], bucket, v)
	}
	return err
}

// broadcastFlat returns copies of the elements of tensors of one type and device, one
// after the other, on devices.
func (g *Group) broadcastFlat(ts []tensor.Tensor, devs []*device.Device) (copies []tensor.Tensor, err error) {
	if copies, err = g.fan(ts, devs); copies != nil || err != nil {
		return copies, err
	}
	flat, err := g.flatten(ts)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, flat.Close()) }()
	return g.broadcast(flat, devs)
}

// fan is broadcastFlat by one kernel, which needs nothing put together before: nil where
// that is not for it.
func (g *Group) fan(ts []tensor.Tensor, devs []*device.Device) (copies []tensor.Tensor, err error) {
	n, s := lengthOf(ts), g.streamOf(ts[0])
	if ts[0].DType().Size()*n*len(devs) > directBytes || slices.Contains(devs, s.Device()) {
		return nil, nil
	}
	if near, err := memory.Reach(s.Device(), devs...); err != nil || !near {
		return nil, err
	}
	if slices.ContainsFunc(ts, func(t tensor.Tensor) bool { return !t.Contiguous() }) {
		return nil, nil
	}
	if err := g.record(ts...); err != nil {
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
	return copies, alone(s, g.streamsOf(copies), [][]tensor.Tensor{ts, copies}, func() error { return tensor.Flatten(s, copies, ts) })
}

// ReduceAddCoalescedConfig are the options of ReduceAddCoalesced; nil means their zero
// values.
type ReduceAddCoalescedConfig struct {
	ReduceAddConfig
	// BufferSize is how many bytes of one type are added together at most; a larger
	// tensor is by itself. Default 10 MiB.
	BufferSize int
}

// ReduceAddCoalesced enqueues, for each k, the sum of tss[i][k] over all lists, of
// which each has tensors of one device: few transfers in all
// (torch.cuda.comm.reduce_add_coalesced). It returns the sums, contiguous and on the
// destination, in the order of k; lists that are longer than the shortest are cut off.
// Sums of one buffer share its memory, which goes back when all of them are closed;
// where there is one list, a contiguous tensor that is by itself is its own sum, with a
// share of its own. The caller closes all.
//
// How a buffer is added is as in ReduceAdd; what one kernel adds is not put together
// before.
func ReduceAddCoalesced(g *Group, tss [][]tensor.Tensor, cfg *ReduceAddCoalescedConfig) (results []tensor.Tensor, err error) {
	const op = "reduce-add-coalesced"
	var c ReduceAddCoalescedConfig
	if cfg != nil {
		c = *cfg
	}
	if err := g.checkWhole(op); err != nil {
		return nil, err
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
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

// checkLists checks lists of tensors, which it returns of one length.
func checkLists(g *Group, op string, tss [][]tensor.Tensor, c *ReduceAddConfig) ([][]tensor.Tensor, error) {
	if len(tss) == 0 {
		return nil, refuse(op, "expected at least one list of tensors to add")
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
			if k > 0 && t.OpenOn(tss[i][0].Device()) && t.DType() == model.DType() && tensor.SameShape(*t, *model) {
				continue
			}
			if err := checkListed(g, op, tss, i, k); err != nil {
				return nil, err
			}
		}
		found = found || tss[i][0].Device() == to // they are all there
	}
	if !found {
		return nil, refuse(op, "expects the destination %s to be the device of one of the lists", to)
	}
	return tss, nil
}

// checkListed checks tensor k of list i, behind those before it.
func checkListed(g *Group, op string, tss [][]tensor.Tensor, i, k int) error {
	t, first, model := &tss[i][k], &tss[i][0], &tss[0][k]
	if err := g.source(op, "tensor", k, *t); err != nil {
		return fmt.Errorf("%w (list %d)", err, i)
	}
	switch {
	case t.IsHost():
		return refuse(op, "expects all tensors to be on devices, but tensor %d of list %d is on the host", k, i)
	case t.Device() != first.Device():
		return refuse(op, "expects the tensors of a list to be on one device, but of list %d tensor 0 is on %s and tensor %d on %s", i, first.Device(), k, t.Device())
	case !tensor.SameShape(*t, *model):
		return refuse(op, "tensor %d of list %d has invalid size: got %s, but expected %s", k, i, times(t.Shape()), times(model.Shape()))
	case t.DType() != model.DType():
		return refuse(op, "tensor %d of list %d is of %s, and that of list 0 of %s", k, i, t.DType(), model.DType())
	}
	return nil
}

// addBucket adds the tensors of a bucket over all lists.
func (g *Group) addBucket(op string, tss [][]tensor.Tensor, bucket []int, c *ReduceAddConfig, results []tensor.Tensor) ([]tensor.Tensor, error) {
	parts := make([][]tensor.Tensor, len(tss))
	for i, ts := range tss {
		parts[i] = pick(ts, bucket)
	}
	flat, err := g.addFlat(op, parts, c)
	if err != nil {
		return results, err
	}
	views, err := tensor.UnflattenEach([]tensor.Tensor{flat}, parts[0])
	if err == nil {
		results = putBack(results, bucket, views[0])
	}
	return results, errors.Join(err, flat.Close())
}

// addFlat returns the sums over lists of tensors of one type, one after the other.
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

// addInPlace is addFlat by a kernel that takes the tensors from where they are, if that is
// for it.
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
	if done, err = directSum(s, sum, lists); err != nil || !done || n == 0 {
		return sum, done, err
	}
	for _, ts := range lists {
		if err := g.record(ts...); err != nil {
			return sum, true, err
		}
	}
	return sum, true, g.addAlone(s, sum, lists)
}

// rootFirst puts the last of the lists that are on a device first, as ReduceAdd adds.
func rootFirst(lists [][]tensor.Tensor, to *device.Device) [][]tensor.Tensor {
	for i := len(lists) - 1; i >= 0; i-- {
		if lists[i][0].Device() == to {
			return slices.Concat(lists[i:i+1], lists[:i], lists[i+1:])
		}
	}
	return lists
}
