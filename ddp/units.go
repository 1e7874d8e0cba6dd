package ddp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// UnitsConfig are the options of NewUnits; nil means their defaults. They must be the same on
// all ranks.
type UnitsConfig struct {
	// Prefetch is the number of units that Use gathers ahead: the following ones in the forward
	// pass, and the preceding ones in the backward pass (set_modules_to_forward_prefetch,
	// set_modules_to_backward_prefetch). Default 1; new(0) gathers each unit when it is used.
	Prefetch *int
	// Keep are the units that stay gathered from the forward pass to the end of their backward
	// pass (reshard_after_forward=False): usually the last one. With all units, each unit is gathered
	// once in a step (SHARD_GRAD_OP). Default none.
	Keep []int
	// Op is the reduction of gradients. Default Avg.
	Op *comm.Op
	// Reduce is the type in which gradients are reduced (MixedPrecisionPolicy's reduce_dtype): that of
	// the gathered parameters, which is the default, or that of the master copy.
	Reduce memory.DType
	// Replicas are groups over which the reduced shards of gradients are reduced once more
	// (hybrid sharding, HSDP): one for each local rank, whose only local rank is on the same
	// device. All ranks of such a group have the same rank in the group of the Units. Default none.
	Replicas []*comm.Group
	// Autotune chooses the prefetch and the group by the times of the first passes. Default none.
	Autotune *Autotune
}

// Units keep a model whose parameters, gradients and optimiser state are sharded, unit by unit
// (torch's fully_shard of each layer, and MixedPrecisionPolicy). Each rank has a shard of the
// master copy of all parameters, of type M, which the optimiser updates. The parameters of a
// unit, of type P, exist on a rank only while it uses them. A step is
//
//	ps, err := u.Use(s, k)     // forward, for each unit: gathers unit k, unless it was prefetched, and prefetches
//	err = u.Done(s, k)         // frees the gathered memory behind the work on s
//	ps, err = u.Use(s, k)      // backward, for each unit from the last to the first
//	gs, err := u.Grads(s, k)   // memory for the gradients of the unit
//	err = u.Ready(s, k)        // reduce-scatters them meanwhile
//	err = u.Done(s, k)
//	err = u.Finish(s)          // s sees this rank's shards of the reduced gradients
//	err = opt.SetGradients(s, u.ShardGrads(0)...) // the optimiser, whose parameters are u.Pieces of u.Shard
//	err = opt.Step(s, nil)
//	err = u.Refresh(s)         // later gathers see the parameters that the work on s leaves; frees the gradients
//
// Gathered memory is allocated on the group's streams. Done orders them after the work on s, so
// that the next gather reuses the memory without a wait of the host. Parameters take the shards and
// at most 1+Prefetch units, and those of Keep. Gradients take the memory of two units, for one that is
// computed and one that is reduced, or of all units between Grads and Ready if they are more. It stays for the next
// pass, unless only unit 0 needs as much, such as embeddings. The shard of a unit's reduced gradients exists from Ready to Refresh, as
// torch's from the reduce-scatter to zero_grad; with Replicas all of them stay until Close.
//
// Ready adds to the shards of the gradients until Refresh, so that a program may accumulate
// gradients over several backward passes, each with a Finish (torch's default). Without a
// reduction (set_requires_gradient_sync(False)), the program calls Ready in the last pass only,
// and adds to the memory of Grads, which stays until then.
//
// All ranks use units in the same order, which is their numbers' in the forward pass and the
// reverse in the backward pass. A process with several local ranks goes from unit to unit on all
// of them: a unit is gathered again only when all of them have called Done.
//
// A graph can capture a step that ends with Refresh, after a first step that loads the kernels. Call
// Refresh between the launch of a graph and a step that is not in one.
//
// Units are used by one goroutine at a time.
type Units[M, P memory.Element] struct {
	owner    handle.Owner
	g        *comm.Group
	op       comm.Op
	prefetch int
	replicas []*comm.Group
	reduceAs func(k int, grads comm.Shards[P]) error
	queue    *queue
	units    []unit
	len      int // of a shard
	most     int // of the gathered units but the first, unless it is the only one
	locals   []localUnits[M, P]
}

// A unit is the layout of parameters that are gathered together, in elements.
type unit struct {
	lens, at []int
	off      int  // in the shard
	part     int  // of a rank
	keep     bool // in UnitsConfig.Keep
	reduced  bool // since Refresh: the shard has gradients, and the next ones are added
}

// localUnits are the shard of a local rank, and its memory of each unit.
type localUnits[M, P memory.Element] struct {
	params   memory.Slice[M]
	copies   memory.Slice[P] // params as P, which are gathered; params themselves if M is P
	units    []localUnit[M, P]
	retired  []gradMemory[P] // of gradients whose reduction is enqueued, the oldest first
	passes   int             // ended by Finish
	taken    int             // gradients between Grads and Ready
	keep     int             // gradients that stay after Finish: the most that were taken at a time in the pass, or 2
	finished *stream.Stream  // of the last Finish
	last     int             // the unit used last in this pass, or -1
	backward bool            // the order of uses is descending
}

// localUnit is a unit on a local rank.
type localUnit[M, P memory.Element] struct {
	whole    memory.Slice[P] // gathered, or without memory
	params   []memory.Slice[P]
	gathered *mark
	in       bool           // use without Done
	on       *stream.Stream // of the last Use
	grad     gradMemory[P]
	grads    []memory.Slice[P]
	wrote    bool            // Grads was called since Use: the use is of the backward pass
	shard    memory.Slice[M] // of the reduced gradients, or without memory
	capture  uint64          // in which shard was allocated, or 0
}

// gradMemory is memory for the gradients of any unit.
type gradMemory[P memory.Element] struct {
	whole   memory.Slice[P]
	made    uint64         // the capture in which it was allocated, or 0
	capture uint64         // in which it was allocated or used last, or 0
	on      *stream.Stream // of the last Grads
	reduced *mark          // the reduction of the gradients that were in it
	pass    int            // of that reduction
}

// NewUnits allocates a shard of the parameters on each local rank, on the group's streams, and fills
// it with zeros. units has the lengths of the parameters of each unit. M and P are floats, or the same type. If the group has several processes, they wait for
// each other and compare their arguments, and all processes return an error if the arguments differ.
//
// To begin, let a stream wait for the group's, write the initial values to Shard by Pieces, or
// restore a checkpoint, and call Refresh. Collective.
func NewUnits[M, P memory.Element](g *comm.Group, units [][]int, cfg *UnitsConfig) (*Units[M, P], error) {
	const op = "new units"
	if err := checkGroup(g, op); err != nil {
		return nil, err
	}
	c := *cmp.Or(cfg, new(UnitsConfig))
	c.Prefetch, c.Op = cmp.Or(c.Prefetch, new(1)), cmp.Or(c.Op, new(comm.Avg))
	c.Reduce = cmp.Or(c.Reduce, memory.DTypeOf[P]())
	err := checkUnits[M, P](op, g, units, &c)
	c.Autotune = c.Autotune.filled(0, *c.Prefetch)
	mine := c.describe(memory.DTypeOf[M](), memory.DTypeOf[P](), units)
	if err == nil {
		mine.Groups = c.Autotune.identities()
	}
	err = agree(context.Background(), g, op, mine, err)
	mine.Groups = nil              // the replicas reduce in groups of their own
	for _, r := range c.Replicas { // also after an error, which the other ranks wait for
		if r != nil && route.GroupOf(r).Check(op) == nil {
			err = agree(context.Background(), r, op, mine, err)
		}
	}
	if err != nil {
		return nil, err
	}
	u := &Units[M, P]{g: g, op: *c.Op, prefetch: *c.Prefetch, replicas: c.Replicas}
	u.reduceAs = func(k int, grads comm.Shards[P]) error { return reduceUnit[P](u, k, grads) }
	if c.Reduce != memory.DTypeOf[P]() {
		u.reduceAs = func(k int, grads comm.Shards[P]) error { return reduceUnit[M](u, k, grads) }
	}
	u.queue = newQueue(g, u, "unit", len(units))
	if a := c.Autotune; a != nil {
		u.queue.trial = newTrial(a, g, u.settings(a, len(units)), u.change)
	}
	handle.Init(u, &u.owner, handle.About{Kind: "units", On: g.Device(0)})
	if err := u.open(units, c.Keep); err != nil {
		return nil, errors.Join(fmt.Errorf("ddp: %s: %w", op, err), u.Close())
	}
	return u, nil
}

func checkUnits[M, P memory.Element](op string, g *comm.Group, units [][]int, c *UnitsConfig) error {
	all := slices.Concat(units...)
	if err := cmp.Or(checkLengths[M](op, all, g.Size()), checkLengths[P](op, all, g.Size())); err != nil {
		return err
	}
	m, p := memory.DTypeOf[M](), memory.DTypeOf[P]()
	if k := slices.IndexFunc(units, func(lens []int) bool { return len(lens) == 0 }); k >= 0 {
		return refuse(op, "unit %d has no parameters: want one or more in each", k)
	}
	if m != p && !(isFloat(m) && isFloat(p)) {
		return refuse(op, "a master copy of %s and parameters of %s: want floats of 16 bits or more, or the same type", m, p)
	}
	if *c.Prefetch < 0 {
		return refuse(op, "a prefetch of %d units: want 0 or more", *c.Prefetch)
	}
	if k := slices.IndexFunc(c.Keep, func(k int) bool { return k < 0 || k >= len(units) }); k >= 0 {
		return refuse(op, "unit %d is to be kept, and there are %d units", c.Keep[k], len(units))
	}
	if c.Autotune != nil && len(c.Autotune.BucketBytes) > 0 {
		return refuse(op, "Autotune tries buckets of %v bytes: a unit is one bucket", c.Autotune.BucketBytes)
	}
	if err := c.Autotune.check(op, g); err != nil {
		return err
	}
	if c.Reduce != m && c.Reduce != p {
		return refuse(op, "gradients reduced in %s: want %s or %s, the types of the gathered parameters and of the master copy", c.Reduce, p, m)
	}
	if len(c.Replicas) == 0 {
		return nil
	}
	if *c.Op > comm.Avg {
		return refuse(op, "a factor as the reduction over replicas: a factor belongs to one communicator: want sum, avg, max, min or prod")
	}
	if len(c.Replicas) != g.Locals() {
		return refuse(op, "%d groups of replicas: want one for each of the %d local ranks", len(c.Replicas), g.Locals())
	}
	for i, r := range c.Replicas {
		if err := checkGroup(r, op); err != nil {
			return err
		}
		if r.Locals() != 1 || r.Device(0) != g.Device(i) {
			return refuse(op, "the replicas of rank %d are a group with %d local ranks, the first on %s: want one local rank on %s",
				g.Communicator(i).Rank(), r.Locals(), r.Device(0), g.Device(i))
		}
	}
	return nil
}

// describe describes the arguments of NewUnits, for agree.
func (c *UnitsConfig) describe(m, p memory.DType, units [][]int) arguments {
	counts := make([]int, len(units))
	for k, lens := range units {
		counts[k] = len(lens)
	}
	all := slices.Concat(units...)
	x := describe("parameter", all, slices.Repeat([]memory.DType{m}, len(all)), 0, 0, *c.Op)
	x.Given = fmt.Sprintf("units of %v parameters, gathered as %s and reduced in %s by %v, with a prefetch of %d, keeping %v, with %d groups of replicas%s",
		counts, p, c.Reduce, *c.Op, *c.Prefetch, c.Keep, min(len(c.Replicas), 1), c.Autotune.describe(true))
	return x
}

// open lays the units out and allocates the shards.
func (u *Units[M, P]) open(units [][]int, keep []int) error {
	// Each parameter, and each rank's part, begins at a multiple of wireAlign bytes in both types.
	size := min(memory.DTypeOf[M]().Size(), memory.DTypeOf[P]().Size())
	align := wireAlign / size
	buckets := make([]bucket, len(units))
	for k, lens := range units {
		x := unit{lens: slices.Clone(lens), off: u.len, keep: slices.Contains(keep, k)}
		total := 0
		for _, n := range lens {
			x.at = append(x.at, total)
			total += roundUp(n, align)
		}
		x.part = roundUp(max(total, 1), align*u.g.Size()) / u.g.Size()
		u.len += x.part
		if k > 0 || len(units) == 1 {
			u.most = max(u.most, x.part*u.g.Size())
		}
		u.units = append(u.units, x)
		buckets[len(units)-1-k] = bucket{grads: []int{k}} // the backward pass is downwards
	}
	u.locals = make([]localUnits[M, P], u.g.Locals())
	for i := range u.locals {
		if err := u.locals[i].open(u.g.Stream(i), len(units), u.len); err != nil {
			return err
		}
		for k := range u.units {
			if u.replicas == nil {
				break
			}
			x := &u.locals[i].units[k]
			if err := x.allocate(u.g.Stream(i), u.units[k].part); err != nil {
				return err
			}
			if err := x.shard.RecordStream(u.replicas[i].Stream(0)); err != nil {
				return err
			}
		}
	}
	return u.queue.fill(buckets)
}

func (l *localUnits[M, P]) open(s *stream.Stream, units, n int) (err error) {
	l.last, l.keep, l.units = -1, 2, make([]localUnit[M, P], units)
	if l.params, err = zeroed[M](s, n); err != nil {
		return err
	}
	if same, ok := any(l.params).(memory.Slice[P]); ok {
		l.copies = same
	} else if l.copies, err = zeroed[P](s, n); err != nil {
		return err
	} else if err := l.load(s); err != nil {
		return err
	}
	for k := range l.units {
		if l.units[k].gathered, err = newMark(s); err != nil {
			return err
		}
	}
	return nil
}

// load loads the kernels of both conversions. The driver may wait for all work of the device meanwhile, and in
// a pass that may be a collective that waits for other ranks.
func (l *localUnits[M, P]) load(s *stream.Stream) error {
	x, err := memory.Make[M](s, 1)
	if err != nil {
		return err
	}
	return errors.Join(l.convert(s), divide(s, x, l.copies.Slice(0, 1), 1), x.Close())
}

// Len returns the elements of a shard, with its padding, the same number on all
// ranks.
func (u *Units[M, P]) Len() int { return u.len }

// Shard returns the shard of a local rank: the master copy of its parameters,
// and padding, which is zeros. Write to it behind Finish, or when the stream
// has waited for the group's.
func (u *Units[M, P]) Shard(local int) memory.Slice[M] { return u.locals[local].params.Slice(0, u.len) }

// ShardGrads returns the reduced gradients of the parameters in the shard of a local rank, one tensor
// for each of Pieces (the gradients of torch's sharded parameters). They are valid from Finish to
// Refresh, on the streams that were given to Finish, and have other addresses in each step: give them to
// optim.Optimizer.SetGradients and optim.Grads.Set. Another stream waits for one of Finish, and Refresh's
// stream for it. ShardGrads returns nil if the gradients of a unit were not reduced since Refresh.
func (u *Units[M, P]) ShardGrads(local int) []tensor.Tensor {
	var all []tensor.Tensor
	for _, p := range u.Pieces(local) {
		shard, at := u.locals[local].units[p.Unit].shard, p.At-u.units[p.Unit].off
		if !u.units[p.Unit].reduced {
			return nil
		}
		x, err := tensor.Of(shard.Slice(at, at+p.Len), p.Len)
		if err != nil { // the units are closed
			return nil
		}
		all = append(all, x)
	}
	return all
}

// Pieces returns the elements of parameters that the shard of a local rank has,
// by At, as Sharder.Pieces does, where Param counts within the unit. A
// checkpoint that stores the pieces as checkpoint.Part with Flat can be loaded
// by any number of ranks.
func (u *Units[M, P]) Pieces(local int) []Piece {
	var all []Piece
	rank := u.queue.rank(local)
	for k := range u.units {
		x := &u.units[k]
		for j, at := range x.at {
			from, to := max(at, rank*x.part), min(at+x.lens[j], (rank+1)*x.part)
			if from < to {
				all = append(all, Piece{Unit: k, Param: j, Start: from - at, Len: to - from, At: x.off + from - rank*x.part})
			}
		}
	}
	return all
}

// Use returns the parameters of unit k on the local rank that is on the device
// of s. Work that is enqueued on s after Use sees them, until Done. If they are
// not gathered, Use enqueues the all-gather on the group's streams. It also
// enqueues the all-gathers of the next Prefetch units in the direction of the
// pass: upwards, or downwards if k is below the unit used before or is the last
// one for the second time. The host does not wait. The parameters are read
// only, because the program writes to Shard.
//
// After an error, such as a lack of memory, other processes may wait for an all-gather that
// this one has not enqueued: close the group. Collective.
func (u *Units[M, P]) Use(s *stream.Stream, k int) ([]memory.Slice[P], error) {
	const op = "ddp: use a unit"
	i, l, err := u.at(op, s, k)
	if err != nil {
		return nil, err
	}
	if l.in {
		return nil, fmt.Errorf("%s: unit %d on rank %d is in use already: call Done between two uses", op, k, u.queue.rank(i))
	}
	capture, err := gpu.StreamOf(s).CaptureID()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	if l.whole.Buffer() != nil && l.gathered.capture != capture {
		return nil, fmt.Errorf("%s: unit %d on rank %d was gathered outside of the capture of %s, or in another one: call Refresh before a capture, and at its end",
			op, k, u.queue.rank(i), s)
	}
	if err := u.gather(op, i, s, k); err != nil {
		return nil, err
	}
	if err := l.gathered.wait(s); err != nil {
		return nil, fmt.Errorf("%s: unit %d on rank %d: %w", op, k, u.queue.rank(i), err)
	}
	l.in, l.on, l.wrote = true, s, false
	step := u.locals[i].direct(k, len(u.units))
	for j := k + step; j != k+step*(u.prefetch+1) && j >= 0 && j < len(u.units); j += step {
		if err := u.gather(op, i, s, j); err != nil {
			return nil, fmt.Errorf("%w (prefetch for unit %d)", err, k)
		}
	}
	return l.params, nil
}

// direct notes the use of unit k of n and returns the direction of the pass.
func (l *localUnits[M, P]) direct(k, n int) int {
	switch {
	case k > l.last, k == 0 && l.last != 1:
		l.backward = false
	case k < l.last, k == n-1:
		l.backward = true
	}
	if l.last = k; l.backward {
		return -1
	}
	return 1
}

// gather enqueues the all-gather of unit k, unless local rank i has it. In a
// capture, it lets the group's streams join s.
func (u *Units[M, P]) gather(op string, i int, s *stream.Stream, k int) error {
	if u.locals[i].units[k].whole.Buffer() != nil {
		return nil
	}
	for j := range u.locals {
		if u.locals[j].units[k].whole.Buffer() != nil {
			return fmt.Errorf("%s: unit %d must be gathered again for rank %d, and rank %d has not called Done: let all local ranks pass a unit before one of them returns to it",
				op, k, u.queue.rank(i), u.queue.rank(j))
		}
	}
	if err := u.join(s); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	x := &u.units[k]
	wholes, err := comm.Make[P](u.g, x.part*u.g.Size())
	if err != nil {
		return fmt.Errorf("%s: memory for unit %d of %d elements: %w", op, k, x.part*u.g.Size(), err)
	}
	mine := make(comm.Shards[P], len(u.locals))
	for j := range mine {
		mine[j] = u.locals[j].copies.Slice(x.off, x.off+x.part)
	}
	if err := comm.AllGather(u.g, wholes, mine); err != nil {
		return errors.Join(fmt.Errorf("%s: gather unit %d on rank %d: %w", op, k, u.g.Rank(), err), wholes.Close())
	}
	for j, whole := range wholes {
		l := &u.locals[j].units[k]
		l.whole, l.params = whole, cut(x, l.params, whole)
		if err := l.gathered.set(u.g.Stream(j)); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	return nil
}

// join lets the group's streams take part in the capture of s, if there is one.
func (u *Units[M, P]) join(s *stream.Stream) error {
	capture, err := gpu.StreamOf(s).CaptureID()
	if err != nil || capture == 0 {
		return err
	}
	for i := range u.locals {
		on := u.g.Stream(i)
		id, err := gpu.StreamOf(on).CaptureID()
		if err == nil && id != capture {
			err = on.WaitStream(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// cut returns the parameters of a unit in whole.
func cut[P memory.Element](x *unit, to []memory.Slice[P], whole memory.Slice[P]) []memory.Slice[P] {
	to = to[:0]
	for j, at := range x.at {
		to = append(to, whole.Slice(at, at+x.lens[j]))
	}
	return to
}

// Done ends the use of unit k on the local rank that is on the device of s (reshard). The group's
// stream waits for the work that is now on s, and then frees the memory. The host does not wait.
// A unit of UnitsConfig.Keep stays, unless Grads was called since Use. A program that uses the
// parameters on other streams lets s wait for them before Done.
func (u *Units[M, P]) Done(s *stream.Stream, k int) error {
	const op = "ddp: done with a unit"
	i, l, err := u.at(op, s, k)
	if err != nil {
		return err
	}
	if !l.in {
		return fmt.Errorf("%s: unit %d on rank %d is not in use: call Use before", op, k, u.queue.rank(i))
	}
	if l.in = false; u.units[k].keep && !l.wrote {
		return nil
	}
	return u.release(op, i, s, k)
}

// release frees the gathered memory of unit k on local rank i behind the work on s.
func (u *Units[M, P]) release(op string, i int, s *stream.Stream, k int) error {
	l := &u.locals[i].units[k]
	if l.whole.Buffer() == nil {
		return nil
	}
	err := u.g.Stream(i).WaitStream(s)
	if err != nil { // the memory must not be reused before the work on s
		err = errors.Join(err, l.whole.RecordStream(s))
	}
	err = errors.Join(err, l.whole.Close())
	if l.whole = (memory.Slice[P]{}); err != nil {
		return fmt.Errorf("%s: unit %d on rank %d: %w", op, k, u.queue.rank(i), err)
	}
	return nil
}

// Refresh lets later gathers see the shards of the parameters as the work that is now on the
// streams leaves them, and converts them to P; give one stream for each local rank. Units that
// are gathered and not in use, such as those of UnitsConfig.Keep, are freed, and so are the shards of
// the reduced gradients, behind that work (zero_grad). The host does not wait.
func (u *Units[M, P]) Refresh(streams ...*stream.Stream) error {
	const op = "ddp: refresh parameters"
	by, err := u.sorted(op, streams)
	if err != nil {
		return err
	}
	if lack := u.used(); lack != "" {
		return fmt.Errorf("%s: %s in use: call Done before the parameters change", op, lack)
	}
	err = u.g.Between(by, func() error {
		for i := range u.locals {
			l := &u.locals[i]
			for k := range l.units {
				if err := errors.Join(u.release(op, i, by[i], k), u.forget(i, k)); err != nil {
					return err
				}
			}
			if err := errors.Join(l.params.RecordStream(by[i]), l.convert(u.g.Stream(i))); err != nil {
				return err
			}
			l.last = -1
		}
		return nil
	})
	if err == nil {
		err = u.queue.trial.follow(u.g)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	for k := range u.units {
		u.units[k].reduced = false
	}
	return nil
}

// convert enqueues the conversion of the shard to P.
func (l *localUnits[M, P]) convert(s *stream.Stream) error {
	if any(l.params) == any(l.copies) {
		return nil
	}
	return divide(s, l.copies, l.params, 1)
}

// used names the units that are in use on the local ranks.
func (u *Units[M, P]) used() string {
	for i := range u.locals {
		for k := range u.units {
			if u.locals[i].units[k].in {
				return fmt.Sprintf("unit %d of %d on rank %d is", k, len(u.units), u.queue.rank(i))
			}
		}
	}
	return ""
}

// at checks the arguments of a call for unit k, and returns the local rank on the device of s.
func (u *Units[M, P]) at(op string, s *stream.Stream, k int) (int, *localUnit[M, P], error) {
	if err := u.check(op); err != nil {
		return 0, nil, err
	}
	i, err := u.queue.local(op, s)
	if err != nil {
		return 0, nil, err
	}
	if k < 0 || k >= len(u.units) {
		return 0, nil, fmt.Errorf("%s: unit %d of %d does not exist", op, k, len(u.units))
	}
	return i, &u.locals[i].units[k], nil
}

func (u *Units[M, P]) sorted(op string, streams []*stream.Stream) ([]*stream.Stream, error) {
	if err := u.check(op); err != nil {
		return nil, err
	}
	return u.queue.sorted(op, streams)
}

func (u *Units[M, P]) check(op string) error {
	if u == nil || u.owner.Closed() {
		return fmt.Errorf("%s: the units: %w", op, device.ErrClosed)
	}
	return nil
}

// Close frees the shards and the memory of all units once pending work on the streams that use
// them has finished. Work that is enqueued on the group's streams after Close follows the gathers and reductions, also if
// Autotune has used another group. While a graph that has captured calls of the Units is open, Close fails and they stay open. It is idempotent
// and safe on nil.
func (u *Units[M, P]) Close() error {
	if u == nil || u.owner.Closed() {
		return nil
	}
	if err := u.queue.graphs.Refuse("ddp: close the units on " + u.g.Device(0).String()); err != nil {
		return err
	}
	if !u.owner.Close() {
		return nil
	}
	errs := []error{u.queue.trial.followClosing(u.g), u.queue.close()}
	for i := range u.locals {
		l, on := &u.locals[i], u.g.Stream(i)
		for k := range l.units {
			x := &l.units[k]
			errs = append(errs, freeBehind(x.whole, x.on), freeBehind(x.grad.whole, x.grad.on, on),
				freeBehind(x.shard, l.finished, on), x.gathered.close())
		}
		for _, x := range l.retired {
			errs = append(errs, freeBehind(x.whole, on))
		}
		if any(l.params) != any(l.copies) {
			errs = append(errs, l.copies.Close())
		}
		errs = append(errs, l.params.Close())
	}
	return errors.Join(errs...)
}

// freeBehind frees x, if it has memory, behind the work on those of the streams that are not nil.
func freeBehind[T memory.Element](x memory.Slice[T], streams ...*stream.Stream) error {
	if x.Buffer() == nil {
		return nil
	}
	var errs []error
	for _, s := range streams {
		if s == nil {
			continue
		}
		if err := x.RecordStream(s); !errors.Is(err, device.ErrClosed) { // a closed stream has no pending use
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, x.Close())...)
}
