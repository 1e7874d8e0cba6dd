package differ

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// The collectives run on a communicator of one rank, which all programs of a
// process share.
var ncclKinds = map[string]*kind{
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
			return collectives[op.A].run(r.b.comm, s, x, y, reductions[op.B], op.N)
		},
		model: func(m *model, op *Op) want {
			s, x, y, w := m.operands2(op)
			switch {
			case m.conflict != nil:
				return fine
			case x == nil && w.kinds[0] == kPanic:
				return errs(kArgument) // View does not panic
			case x == nil:
				return errs(w.kinds[0], kArgument)
			case x.lo%4 != 0 || y.lo%4 != 0:
				return errs(kArgument)
			case op.N != 0 && collectives[op.A].rooted:
				return errs(kArgument)
			case x.len()/4 != y.len()/4:
				return errs(kArgument)
			}
			x, y = x.words(), y.words()
			if writes(x).conflicts(reads(y)) && *x != *y || s.cap != nil && (s.cap.invalid || x.len() == 0 || *x == *y) {
				// An error of NCCL would be the end of the communicator for all programs, and
				// what it captures for no elements or in place is its own business.
				m.conflict = &conflict{s: s, slot: -1}
				return fine
			}
			if x.len() == 0 {
				s.at++ // it may have enqueued something
				return fine
			}
			return m.submit(s, work{sig: "nccl", accesses: []access{reads(y), writes(x)}, effect: func(*launch) { x.set(y.read()) }})
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
	run    func(c *nccl.Communicator, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, root int) error
	text   string // with places for the stream, the reduction and the root
}

func (c *collective) code(op *Op) string {
	return fmt.Sprintf(c.text, op.S, "nccl."+reductionNames[op.B], op.N)
}

var collectives = []collective{
	{false, func(c *nccl.Communicator, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, _ int) error {
		return nccl.AllReduce(c, s, x, y, by)
	}, "nccl.AllReduce(c, s%[1]d, x, y, %[2]s)"},
	{false, func(c *nccl.Communicator, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, _ int) error {
		return nccl.AllGather(c, s, x, y)
	}, "nccl.AllGather(c, s%[1]d, x, y)"},
	{false, func(c *nccl.Communicator, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, _ int) error {
		return nccl.ReduceScatter(c, s, x, y, by)
	}, "nccl.ReduceScatter(c, s%[1]d, x, y, %[2]s)"},
	{true, func(c *nccl.Communicator, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, root int) error {
		return nccl.Broadcast(c, s, x, y, root)
	}, "nccl.Broadcast(c, s%[1]d, x, y, %[3]d)"},
	{true, func(c *nccl.Communicator, s *stream.Stream, x, y memory.Slice[int32], by nccl.Op, root int) error {
		return nccl.Reduce(c, s, x, y, by, root)
	}, "nccl.Reduce(c, s%[1]d, x, y, %[2]s, %[3]d)"},
}
