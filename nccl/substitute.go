package nccl

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Substitute carries out collectives in NCCL's place, or lends NCCL other buffers for
// them. For Chorus's own packages.
type Substitute interface {
	// Takes says what it does for such a collective. The answer is the same on all
	// ranks: it does not depend on addresses. Whole is only for what is Together.
	Takes(x Collective) Service
	// Enqueue carries one out for which Takes has said Instead. Its arguments have been
	// checked.
	Enqueue(s *stream.Stream, x Collective) error
	// Lend returns the buffers that NCCL is to use for one for which Takes has said
	// Lending, when it has enqueued the copy of what the operation reads to them.
	Lend(s *stream.Stream, x Collective) (dst, src uint64, err error)
	// Return ends each Lend that had no error: if NCCL has taken the operation, it
	// enqueues the copy of what that writes to lent buffers to where it belongs.
	Return(s *stream.Stream, x Collective, taken bool) error
	// Together carries out those of all ranks, by rank, for which Takes has said Whole
	// on each: ss are their streams.
	Together(ss []*stream.Stream, xs []Collective) error
	// Abort ends what is in flight, and returns at once.
	Abort()
}

// A Service is what a Substitute does for a collective.
type Service uint8

// The services.
const (
	Nothing Service = iota // it is NCCL's
	Instead                // it carries the collective out
	Lending                // NCCL does, on buffers of the Substitute
	Whole                  // it carries out those of all ranks at once
)

// A Collective is an operation as a Substitute sees it.
type Collective struct {
	Kind     CollectiveKind
	DType    memory.DType
	Op       Op
	Root     int
	Count    int    // elements: of one rank's part, or of all where the ranks have no parts
	Dst, Src uint64 // 0 where the rank has none
	// Together is that one Group has such an operation of each rank of the communicator,
	// on the stream of its Substitute, and nothing else.
	Together bool
	Captured bool // into a graph
}

// A CollectiveKind is what a Collective does.
type CollectiveKind uint8

// The collectives that a Substitute may be asked for.
const (
	AllReduceKind CollectiveKind = iota + 1
	BroadcastKind
	AllGatherKind
	ReduceScatterKind
	AllToAllKind
)

var collectiveKinds = [numKinds]CollectiveKind{
	allReduce: AllReduceKind, broadcast: BroadcastKind, allGather: AllGatherKind, reduceScatter: ReduceScatterKind, allToAll: AllToAllKind,
}

// Substitute lets x carry out what it takes of the collectives that are enqueued on s
// from now on, by themselves or in a group that has no other collective of c. All ranks
// call it before the same operation.
func (c *Communicator) Substitute(s *stream.Stream, x Substitute) {
	c.rec.apart()
	c.substitute.Store(&substitution{s, x})
}

type substitution struct {
	stream *stream.Stream
	by     Substitute
}

// substituted asks what the communicator's Substitute does for the operation, which is
// its rank's only collective, and reports whether nothing is left for NCCL. The
// communicator is entered.
func (o *operation) substituted() bool {
	x := o.comm.substitute.Load()
	if x == nil || x.stream != o.stream || collectiveKinds[o.kind] == 0 {
		return false
	}
	o.service = x.by.Takes(o.collective())
	return o.service == Instead
}

// substituted asks for each operation of a group, and reports whether none is left for
// NCCL. Where a rank has several collectives, all are NCCL's, whose order on a stream is
// its own. What else it has in the group does not count: other ranks need not have that.
func (g *group) substituted() bool {
	all, together := true, g.together()
	for i := range g.ops {
		o := &g.ops[i]
		o.together = together
		if o.comm.substitute.Load() == nil || !together && g.several(i) || !o.substituted() {
			all = false
		}
	}
	return all
}

// together reports whether the group is one operation of each rank of a communicator, on
// the streams of their Substitutes.
func (g *group) together() bool {
	first := &g.ops[0]
	if first.comm.substitute.Load() == nil || len(g.ops) != first.comm.size || !g.single() {
		return false
	}
	for i := range g.ops {
		o := &g.ops[i]
		x := o.comm.substitute.Load()
		if x == nil || x.stream != o.stream || o.kind != first.kind || o.comm.clique != first.comm.clique {
			return false
		}
	}
	return true
}

// whole reports whether a Substitute carries out the group at once.
func (g *group) whole() bool {
	for i := range g.ops {
		if o := &g.ops[i]; !o.together || o.service != Whole {
			return false
		}
	}
	return true
}

// atOnce gives the group to a Substitute.
func (g *group) atOnce() error {
	ss, xs := make([]*stream.Stream, len(g.ops)), make([]Collective, len(g.ops))
	for i := range g.ops {
		o := &g.ops[i]
		ss[o.comm.rank], xs[o.comm.rank] = o.stream, o.collective()
	}
	g.fetches()
	err := g.ops[0].bySubstitute(func(by Substitute, _ Collective) error { return by.Together(ss, xs) })
	g.expect()
	for i := range g.errs {
		g.errs[i] = err
	}
	return g.outcome()
}

// several reports whether the rank of operation i has another collective in the group.
func (g *group) several(i int) bool {
	for j := range g.ops {
		if j != i && g.ops[j].comm == g.ops[i].comm && !kinds[g.ops[j].kind].peer {
			return true
		}
	}
	return false
}

func (o *operation) collective() Collective {
	return Collective{Kind: collectiveKinds[o.kind], DType: o.dtype, Op: o.op, Root: o.root, Count: o.n,
		Dst: uint64(o.dst.ptr), Src: uint64(o.src.ptr), Together: o.together, Captured: o.captured}
}

// give enqueues the operation, by NCCL or its Substitute. The communicator is entered.
func (o *operation) give() error {
	if o.service == Nothing {
		return o.native()
	}
	return o.giveSubstitute()
}

// giveSubstitute is give for what a Substitute has said that it takes.
func (o *operation) giveSubstitute() error {
	switch o.service {
	case Instead:
		return o.bySubstitute(func(by Substitute, x Collective) error { return by.Enqueue(o.stream, x) })
	case Lending:
		lent := *o
		err := o.bySubstitute(func(by Substitute, x Collective) error {
			dst, src, err := by.Lend(o.stream, x)
			lent.dst.ptr, lent.src.ptr = cudadrv.DevicePtr(dst), cudadrv.DevicePtr(src)
			return err
		})
		if err != nil {
			return err
		}
		o.lent = true
		return lent.native()
	}
	return o.native()
}

// settle ends what was lent for the operation, which NCCL has taken or not.
func (o *operation) settle(taken bool) error {
	if !o.lent {
		return nil
	}
	o.lent = false
	return o.bySubstitute(func(by Substitute, x Collective) error { return by.Return(o.stream, x, taken) })
}

// bySubstitute makes an error of NCCL's manner of the Substitute's.
func (o *operation) bySubstitute(do func(by Substitute, x Collective) error) error {
	c := o.comm
	err := do(c.substitute.Load().by, o.collective())
	if err == nil {
		return nil
	}
	return c.dev.Because(&Error{Op: o.kind.String(), Rank: c.rank, Size: c.size, Device: c.dev.String(), Err: ErrorInternal, Detail: err.Error(), substitute: true})
}

// abortSubstitute ends what the Substitute has in flight.
func (c *Communicator) abortSubstitute() {
	if x := c.substitute.Load(); x != nil {
		x.by.Abort()
	}
}
