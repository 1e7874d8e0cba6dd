package route

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// The number of measurements of an operation: rounds of launches of a graph with several
// operations, which together move about tuneBytes.
const (
	tuneRounds   = 5
	tuneLaunches = 3
	tuneOps      = 20
	tuneBytes    = 16 << 20
)

// Measure measures the choices of a plan in their order, except copy engines. It returns, for
// each local rank and choice, the times of the strategies in µs. All ranks must call it with
// the same plan, and the devices must not run other work.
func (rs Routers) Measure(ctx context.Context, plan []Choice) ([][]float64, error) {
	times := make([][]float64, len(rs))
	err := rs.each(ctx, func(ctx context.Context, i int) (err error) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		times[i], err = rs.measureRank(ctx, i, plan)
		return err
	})
	return times, err
}

// measureRank is Measure on local rank i.
func (rs Routers) measureRank(ctx context.Context, i int, plan []Choice) (times []float64, err error) {
	one, b := rs[i:i+1], rs.NewBatch()
	x := &meter{router: rs[i]}
	defer func() { err = errors.Join(err, x.close()) }()
	defer one.UseOnly(NCCLOnly)()
	list, err := parse(plan)
	if err != nil {
		return nil, err
	}
	if err := x.open(list); err != nil {
		return nil, err
	}
	for i := range list {
		c := &list[i]
		for _, s := range strategiesOf(c.Times) {
			if s == CopyEngines { // measured for all ranks together by measureEngines
				times = append(times, 0)
				continue
			}
			one.UseOnly(s)
			us, err := x.inGraph(ctx, c, []*stream.Stream{x.router.stream}, func() error { return x.issue(b, c) })
			if err != nil {
				return nil, fmt.Errorf("%s of %d bytes by %s on rank %d: %w", c.Operation, c.Bytes, s, x.router.comm.Rank(), err)
			}
			times = append(times, us)
		}
	}
	return times, nil
}

// Complete completes a Tuning with the times that Measure has returned on all ranks: it stores
// the times of the slowest ranks, measures copy engines, and sorts the strategies.
func (rs Routers) Complete(ctx context.Context, t *Tuning, all [][]float64) error {
	if err := t.fill(all); err != nil {
		return err
	}
	if err := rs.measureEngines(ctx, t); err != nil {
		return err
	}
	t.sort()
	return nil
}

// fill stores the times of the slowest ranks. It returns an error if a rank has sent other times than those of the plan.
func (t *Tuning) fill(all [][]float64) error {
	n := 0
	for i := range t.Choices {
		n += len(t.Choices[i].Times)
	}
	for rank, one := range all {
		if len(one) != n {
			return fmt.Errorf("rank %d has sent %d times: want %d: %w", rank, len(one), n, nccl.ErrorInvalidArgument)
		}
	}
	n = 0
	for i := range t.Choices {
		times := t.Choices[i].Times
		for j := range times {
			for _, one := range all {
				times[j].Micros = max(times[j].Micros, one[n])
			}
			n++
		}
	}
	return nil
}

// sort puts the fastest strategy first.
func (t *Tuning) sort() {
	for i := range t.Choices {
		slices.SortStableFunc(t.Choices[i].Times, func(a, b Timing) int { return cmp.Compare(a.Micros, b.Micros) })
	}
}

// measureEngines measures copy engines, if the group has them, with and without graphs of all
// ranks.
func (rs Routers) measureEngines(ctx context.Context, t *Tuning) (err error) {
	if len(rs) == 0 || !rs[0].engines {
		return nil
	}
	plan, err := parse(t.Choices)
	if err != nil {
		return err
	}
	var xs []*meter
	defer func() {
		for _, x := range xs {
			err = errors.Join(err, x.close())
		}
	}()
	var streams []*stream.Stream
	for i, r := range rs {
		xs, streams = append(xs, &meter{router: r}), append(streams, r.stream)
		if err := xs[i].open(plan); err != nil {
			return err
		}
		if err := streams[0].WaitStream(r.stream); err != nil { // the copies will run on that stream
			return err
		}
	}
	defer rs.UseOnly(CopyEngines)()
	b := rs.NewBatch()
	for i := range plan {
		c := &plan[i]
		j := slices.IndexFunc(c.Times, func(x Timing) bool { return x.Strategy == CopyEngines.Name() })
		if j < 0 {
			continue
		}
		all := func() error { return issueAll(b, xs, c) }
		if c.Times[j].Micros, err = xs[0].inGraph(ctx, c, streams, all); err == nil {
			c.Times[j].Eager, err = xs[0].median(ctx, c, xs[0].repeat(c, all))
		}
		if err != nil {
			return fmt.Errorf("%s of %d bytes by %s: %w", c.Operation, c.Bytes, CopyEngines, err)
		}
	}
	return nil
}

// A meter measures operations of one rank.
type meter struct {
	router   *Router
	dst, src *memory.Buffer
	from, to *stream.Event
}

// open allocates the operands of the largest operation.
func (x *meter) open(plan []parsed) (err error) {
	most := 0
	for i := range plan {
		c := &plan[i]
		if most = max(most, c.Bytes); c.what.kind != collective.AllReduce && c.what.kind != collective.Broadcast {
			most = max(most, c.Bytes*x.router.comm.Size())
		}
	}
	s := x.router.stream
	for _, b := range []**memory.Buffer{&x.dst, &x.src} {
		mem, err := memory.Make[uint8](s, most)
		if err != nil {
			return err
		}
		*b = mem.Buffer()
		if err := mem.Zero(s); err != nil {
			return err
		}
	}
	timing := &stream.EventConfig{Timing: true}
	if x.from, err = stream.NewEvent(s.Device(), timing); err == nil {
		x.to, err = stream.NewEvent(s.Device(), timing)
	}
	return err
}

func (x *meter) close() error {
	return errors.Join(x.from.Close(), x.to.Close(), x.dst.Close(), x.src.Close())
}

// inGraph returns the duration of an operation in a graph of the streams, in µs.
func (x *meter) inGraph(ctx context.Context, c *parsed, streams []*stream.Stream, issue func() error) (us float64, err error) {
	if err := issue(); err != nil { // connects the ranks
		return 0, err
	}
	exec, err := graph.Capture(streams, x.repeat(c, issue), nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, exec.Close()) }()
	return x.median(ctx, c, func() error { return exec.Launch(x.router.stream) })
}

// repeat returns a function that issues as many operations of a choice as are measured at
// once.
func (x *meter) repeat(c *parsed, issue func() error) func() error {
	return func() error {
		for range x.operations(c) {
			if err := issue(); err != nil {
				return err
			}
		}
		return nil
	}
}

func (x *meter) operations(c *parsed) int {
	if x.router.virtual() {
		return 1
	}
	return min(max(tuneBytes/c.Bytes, 1), tuneOps)
}

// median returns the duration of one of the operations that run enqueues, in µs: the
// median of the rounds.
func (x *meter) median(ctx context.Context, c *parsed, run func() error) (us float64, err error) {
	launches, rounds := tuneLaunches, tuneRounds
	if x.router.virtual() {
		launches, rounds = 1, 1
	}
	var all []float64
	for range rounds {
		d, err := x.round(ctx, run, launches)
		if err != nil {
			return 0, err
		}
		all = append(all, d/float64(x.operations(c)*launches))
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

// round calls run once to synchronize the ranks, and then measures further calls. It
// returns the duration of their operations in µs.
func (x *meter) round(ctx context.Context, run func() error, launches int) (float64, error) {
	s := x.router.stream
	if err := run(); err != nil {
		return 0, err
	}
	if err := x.from.Record(s); err != nil {
		return 0, err
	}
	for range launches {
		if err := run(); err != nil {
			return 0, err
		}
	}
	if err := x.to.Record(s); err != nil {
		return 0, err
	}
	if err := x.router.comm.Wait(ctx, s); err != nil {
		return 0, err
	}
	d, err := x.to.Elapsed(x.from)
	return float64(d.Nanoseconds()) / 1e3, err
}

// issue enqueues one operation of the choice.
func (x *meter) issue(b *Batch, c *parsed) error { return issueAll(b, []*meter{x}, c) }

// issueAll enqueues one operation of the choice on each of the ranks, as one batch.
func issueAll(b *Batch, xs []*meter, c *parsed) error {
	for _, x := range xs {
		if err := adders[c.what.measuredType()](x, b, c); err != nil {
			b.Reset()
			return err
		}
	}
	return b.Enqueue()
}

// adders add an operation to a batch, by element type.
var adders = map[memory.DType]func(*meter, *Batch, *parsed) error{
	memory.Int8: addOf[int8], memory.Uint8: addOf[uint8], memory.Int16: addOf[int16], memory.Uint16: addOf[uint16],
	memory.Int32: addOf[int32], memory.Uint32: addOf[uint32], memory.Int64: addOf[int64], memory.Uint64: addOf[uint64],
	memory.Float16: addOf[memory.Float16Bits], memory.BFloat16: addOf[memory.BFloat16Bits],
	memory.Float32: addOf[float32], memory.Float64: addOf[float64],
	memory.Float8E4M3: addOf[memory.Float8E4M3Bits], memory.Float8E5M2: addOf[memory.Float8E5M2Bits],
}

func addOf[T memory.Element](x *meter, b *Batch, c *parsed) error {
	part := c.Bytes / c.what.measuredType().Size()
	all := part * x.router.comm.Size()
	count := map[collective.Kind][2]int{
		collective.AllReduce: {part, part}, collective.Broadcast: {part, part}, collective.AllGather: {all, part},
		collective.ReduceScatter: {part, all}, collective.AllToAll: {all, all},
	}[c.what.kind]
	dst, err := memory.View[T](x.dst, 0, count[0])
	if err != nil {
		return err
	}
	src, err := memory.View[T](x.src, 0, count[1])
	if err != nil {
		return err
	}
	on, s := b.On(x.router.comm), x.router.stream
	switch c.what.kind {
	case collective.AllReduce:
		return nccl.AllReduce(on, s, dst, src, nccl.Op(c.what.op))
	case collective.Broadcast:
		return nccl.Broadcast(on, s, dst, src, 0)
	case collective.AllGather:
		return nccl.AllGather(on, s, dst, src)
	case collective.ReduceScatter:
		return nccl.ReduceScatter(on, s, dst, src, nccl.Op(c.what.op))
	}
	return nccl.AllToAll(on, s, dst, src)
}

// A PlanConfig has the options of a plan. Zero values mean the defaults.
type PlanConfig struct {
	MaxBytes int // the largest size, of an all-reduce or of one rank's part
	Types    []memory.DType
	Ops      []collective.Reduction
}

// wholeBytes is the default of the largest measured size, unless the device's memory is
// less than 64 times as much, or the device is virtual.
const (
	wholeBytes        = 1 << 30
	wholeBytesVirtual = 256
)

// oddBytes is the maximum of the measured sizes that are not multiples of 16 bytes.
const oddBytes = 4 << 20

// engineBytes is the minimum size for measuring copy engines: smaller copies take equally
// long.
const engineBytes = 256 << 10

// chunkedBytes is the minimum size for measuring pipelined kernels: of less, they make one or two chunks, as the others do.
const chunkedBytes = 1 << 20

// Plan returns the measurements of a tuning: the possible strategies for each operation,
// without times. It returns none if NCCL is the only possibility.
func (rs Routers) Plan(c PlanConfig) ([]Choice, error) {
	if c.Types == nil {
		c.Types = []memory.DType{memory.Float32, memory.BFloat16}
	}
	if c.Ops == nil {
		c.Ops = []collective.Reduction{collective.Sum, collective.Max}
	}
	if c.MaxBytes != 0 && c.MaxBytes < 16 {
		return nil, fmt.Errorf("MaxBytes is %d: want 16 or more", c.MaxBytes)
	}
	for _, t := range c.Types {
		if t.Size() == 0 || t == memory.Bool {
			return nil, fmt.Errorf("type %s: want numbers", t)
		}
	}
	for _, op := range c.Ops {
		if !slices.Contains(tunedOps, op) {
			return nil, fmt.Errorf("there is no reduction %s", op)
		}
	}
	if len(rs) == 0 {
		return nil, nil
	}
	all, part := c.MaxBytes, c.MaxBytes
	if c.MaxBytes == 0 {
		var err error
		if all, err = rs[0].wholeBytes(); err != nil {
			return nil, err
		}
		part = max(all/rs[0].comm.Size(), 16)
	}
	return c.choices(rs[0], all, part), nil
}

// wholeBytes returns the default of the largest measured size.
func (k *Router) wholeBytes() (int, error) {
	if k.virtual() {
		return wholeBytesVirtual, nil
	}
	_, total, err := k.comm.Device().MemoryInfo()
	return int(min(wholeBytes, total/64)), err
}

// virtual reports whether times are meaningless because the devices are virtual.
func (k *Router) virtual() bool { return gpu.DeviceOf(k.comm.Device()).System().Machine != nil }

// choices returns all operations, up to all bytes of an all-reduce or a broadcast and up to
// part bytes of one rank's part.
func (c *PlanConfig) choices(k *Router, all, part int) (list []Choice) {
	for _, kind := range tunedKinds {
		most := part
		if kind == collective.AllReduce || kind == collective.Broadcast {
			most = all
		}
		if !reduces(kind) {
			list = operation{kind: kind}.sizes(list, k, most)
			continue
		}
		for _, t := range c.Types {
			for _, op := range c.Ops {
				list = operation{kind, t, op}.sizes(list, k, most)
			}
		}
	}
	return list
}

// sizes appends the sizes of an operation: powers of two from 16 bytes on, and the same
// sizes minus one element.
func (o operation) sizes(list []Choice, k *Router, most int) []Choice {
	size := max(o.dtype.Size(), 1)
	for bytes := 16; bytes > 0 && bytes <= most; bytes *= 2 {
		if bytes <= oddBytes {
			list = append(list, o.choice(k, bytes-size))
		}
		list = append(list, o.choice(k, bytes))
	}
	return list
}

// choice returns the possible strategies for an operation of a size.
func (o operation) choice(k *Router, bytes int) Choice {
	c := Choice{Operation: o.kind.Plain(), Bytes: bytes, Times: []Timing{{Strategy: NCCLOnly.Name()}}}
	if reduces(o.kind) {
		c.Type, c.Reduction = o.dtype.String(), o.op.String()
	}
	x := o.sized(bytes)
	for s := NCCLOnly + 1; s < Tuned; s++ {
		// OwnKernels without a choice of algorithm is one of the strategies with one.
		if s == OwnKernels && o.kind == collective.AllReduce || s.Algorithm() && s != Pipelined && o.kind != collective.AllReduce {
			continue
		}
		if s == Pipelined && bytes < chunkedBytes || s == CopyEngines && bytes < engineBytes {
			continue
		}
		if k.supports(s, &x, MostBytes) {
			c.Times = append(c.Times, Timing{Strategy: s.Name()})
		}
	}
	return c
}

// measuredType returns the element type that an operation is measured with.
func (o operation) measuredType() memory.DType {
	if o.dtype == memory.Invalid {
		return memory.Uint8
	}
	return o.dtype
}

// sized returns an operation of a size.
func (o operation) sized(bytes int) collective.Op {
	t := o.measuredType()
	return collective.Op{Call: collective.Call{Request: collective.Request{Kind: o.kind, DType: t, Reduction: o.op, N: bytes / t.Size()}}, Together: true}
}
