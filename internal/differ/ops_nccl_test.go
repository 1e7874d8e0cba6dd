package differ

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// An mGroup is an nccl.Group whose function runs.
type mGroup struct {
	works []pending
	err   want // of the first operation that was refused
}

type pending struct {
	s *mStream
	work
	memory [2]*mMem
}

// issuer is where collectives go: those of the first thread into the group that is open.
func (r *runner) issuer() nccl.Issuer {
	if r.batch == nil || r.inner {
		return r.b.comm
	}
	return r.batch.On(r.b.comm)
}

// refuse notes what an operation of the group returns. Those of the second thread do not
// belong to the group.
func (m *model) refuse(w want) want {
	if m.group != nil && m.thread == 0 && len(m.group.err.kinds) == 0 {
		m.group.err.kinds = w.kinds
	}
	return w
}

// collective submits an operation of NCCL, or adds it to the group, at whose end it
// comes. On one rank it is a copy; NCCL captures nothing for no elements or in place.
func (m *model) collective(s *mStream, x, y *mRef) want {
	w := work{sig: "memcpy of nccl", accesses: []access{reads(y), writes(x)}, effect: func(*launch) { x.set(y.read()) }}
	if x.len() == 0 || s.cap != nil && *x == *y {
		w = work{}
	}
	if m.group == nil || m.thread == 1 {
		return m.submit(s, w)
	}
	seen := s.seen.clone()
	seen.join(m.host)
	switch {
	case s.cap != nil, m.pends(w.accesses): // a group in a capture is another matter
		m.conflict = &conflict{s: s, slot: -1}
	case !m.races(s, seen, s.slot, w.accesses):
		m.group.works = append(m.group.works, pending{s, w, [2]*mMem{x.m, y.m}})
	}
	return fine
}

// pends reports whether operations of the open group use the same memory: they come
// later than they were issued.
func (m *model) pends(list []access) bool {
	if m.group == nil {
		return false
	}
	for _, p := range m.group.works {
		for _, a := range p.accesses {
			if slices.ContainsFunc(list, a.conflicts) {
				return true
			}
		}
	}
	return false
}

// The collectives run on a communicator of one rank, which all programs of a
// process share.
var ncclKinds = map[string]*kind{
	"nccl group": {
		weight: 2,
		draw: func(g *generator, op *Op) bool {
			op.Fail = g.chance(10)
			return g.m.group == nil && len(g.m.open) == 0 && g.depth < 2 && g.m.thread == 0
		},
		run: func(r *runner, op *Op, _ *result) error {
			return nccl.Group(func(b *nccl.Batch) error {
				r.batch = b
				defer func() { r.batch = nil }()
				return r.body(op)()
			})
		},
		enter: func(m *model, op *Op) (want, bool) {
			if m.group != nil || len(m.open) > 0 || m.thread == 1 {
				m.conflict = &conflict{slot: -1}
				return fine, false
			}
			m.group = &mGroup{}
			return fine, true
		},
		leave: func(m *model, op *Op) want {
			g := m.group
			m.group = nil
			switch {
			case op.Fail:
				return errs(append([]string{kBody}, g.err.kinds...)...)
			case len(g.err.kinds) > 0:
				return g.err
			}
			for _, p := range g.works {
				if p.s.closed || p.memory[0].closed || p.memory[1].closed {
					return errs(kClosed)
				}
			}
			for _, p := range g.works {
				m.submit(p.s, p.work)
			}
			return fine
		},
		code: func(op *Op) string {
			return "return nccl.Group(func(b *nccl.Batch) error {\non := b.On(c)\n_ = on\nreturn BODY()\n})"
		},
	},
	"collective": {
		weight: 6,
		draw: func(g *generator, op *Op) bool {
			op.A, op.B = int64(g.rnd.IntN(len(collectives))), int64(g.rnd.IntN(5))
			if g.chance(4) {
				op.N = []int{1, -1}[g.rnd.IntN(2)]
			}
			return g.twoWords(op)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			for _, o := range []int{op.X.O, op.Y.O} {
				if _, err := get[*buf](r, o); err != nil {
					return err
				}
			}
			x, err := typed[int32](r, op.X)
			if err != nil {
				return err
			}
			y, err := typed[int32](r, op.Y)
			if err != nil {
				return err
			}
			return collectives[op.A].run(r.issuer(), s, x, y, reductions[op.B], op.N)
		},
		model: func(m *model, op *Op) want {
			s, x, y, w := m.operands2(op)
			var spoiled []string // what may come before the errors of the arguments
			if s := m.stream(op.S); s != nil && s.cap != nil && s.cap.invalid {
				spoiled = []string{cuInvalidated}
			}
			switch {
			case m.conflict != nil:
				return fine
			case x == nil && w.kinds[0] == kPanic:
				return errs(kArgument) // View does not panic
			case x == nil && w.kinds[0] == kAbsent:
				return w
			case op.X.Lo%4 != 0 || op.Y.Lo%4 != 0:
				return errs(kArgument)
			case x == nil:
				return m.refuse(errs(append(spoiled, kClosed, kArgument)...))
			case op.N != 0 && collectives[op.A].rooted, x.len()/4 != y.len()/4:
				return m.refuse(errs(append(spoiled, kArgument)...))
			}
			x, y = x.words(), y.words()
			if writes(x).conflicts(reads(y)) && *x != *y { // CUDA does not define it
				m.conflict = &conflict{s: s, slot: -1}
				return fine
			}
			return m.collective(s, x, y)
		},
		code: func(op *Op) string {
			return fmt.Sprintf("x, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\ny, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\nreturn %s",
				op.X.O, op.X.Lo, op.X.len()/4, op.Y.O, op.Y.Lo, op.Y.len()/4, collectives[op.A].code(op))
		},
	},
}

var reductions = []nccl.Op{nccl.Sum, nccl.Prod, nccl.Max, nccl.Min, nccl.Avg}

var reductionNames = []string{"Sum", "Prod", "Max", "Min", "Avg"}

type collective struct {
	rooted bool
	run    func(c nccl.Issuer, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, root int) error
	text   string // with places for the stream, the reduction and the root
}

func (c *collective) code(op *Op) string {
	return fmt.Sprintf(c.text, op.S, "nccl."+reductionNames[op.B], op.N)
}

var collectives = []collective{
	{false, func(c nccl.Issuer, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, _ int) error {
		return nccl.AllReduce(c, s, x, y, by)
	}, "nccl.AllReduce(on, s%[1]d, x, y, %[2]s)"},
	{false, func(c nccl.Issuer, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, _ int) error {
		return nccl.AllGather(c, s, x, y)
	}, "nccl.AllGather(on, s%[1]d, x, y)"},
	{false, func(c nccl.Issuer, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, _ int) error {
		return nccl.ReduceScatter(c, s, x, y, by)
	}, "nccl.ReduceScatter(on, s%[1]d, x, y, %[2]s)"},
	{true, func(c nccl.Issuer, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, root int) error {
		return nccl.Broadcast(c, s, x, y, root)
	}, "nccl.Broadcast(on, s%[1]d, x, y, %[3]d)"},
	{true, func(c nccl.Issuer, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, root int) error {
		return nccl.Reduce(c, s, x, y, by, root)
	}, "nccl.Reduce(on, s%[1]d, x, y, %[2]s, %[3]d)"},
}
