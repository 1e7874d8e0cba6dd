package differ

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var pinnedKinds = map[string]*kind{
	"pinned new": {
		weight: 3,
		draw: func(g *generator, op *Op) bool {
			op.R, op.N = g.number(), g.length()
			return g.count(isPinned) < 3
		},
		run: func(r *runner, op *Op, _ *result) error {
			h, err := memory.MakePinned[byte](r.b.dev, op.N)
			return r.put(op, h, err)
		},
		model: func(m *model, op *Op) want {
			m.objs[op.R] = &mMem{data: make([]byte, op.N), mask: make([]byte, op.N), pinned: true, elem: 1}
			return fine
		},
		code: func(op *Op) string {
			return fmt.Sprintf("h%d, err = memory.MakePinned[byte](dev, %d)\nreturn err", op.R, op.N)
		},
	},
	"pinned close": {
		weight: 1,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isPinned) },
		run: func(r *runner, op *Op, _ *result) error {
			h, err := get[*memory.Pinned[byte]](r, op.O)
			if err != nil {
				return err
			}
			return h.Close()
		},
		model: func(m *model, op *Op) want {
			h := m.mem(op.O)
			if h == nil || !h.pinned {
				return errs(kAbsent)
			}
			h.closed = true
			for _, s := range m.slots[1:] {
				s.at++ // the allocator may record an event
			}
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("return h%d.Close()", op.O) },
	},
	"pinned write": { // by the host
		weight: 4,
		draw: func(g *generator, op *Op) bool {
			op.A = int64(g.rnd.IntN(256))
			return g.host(&op.X)
		},
		run: func(r *runner, op *Op, _ *result) error {
			h, err := pinnedPart(r, op.X)
			if err != nil {
				return err
			}
			copy(h.Data(), pattern(op.A, op.X.len()))
			return nil
		},
		model: func(m *model, op *Op) want {
			h, w := m.hostRef(op.X)
			if h != nil && !h.m.closed && m.onHost(writes(h)) {
				h.fill(func(i int) byte { return patternAt(op.A, i) })
			}
			return w
		},
		code: func(op *Op) string {
			return fmt.Sprintf("copy(%s.Data(), pattern(%d, %d))\nreturn nil", hostCode(op.X), op.A, op.X.len())
		},
	},
	"pinned read": { // by the host
		weight: 3,
		draw:   func(g *generator, op *Op) bool { return g.host(&op.X) },
		run: func(r *runner, op *Op, res *result) error {
			h, err := pinnedPart(r, op.X)
			if err != nil {
				return err
			}
			res.Out = append([]byte(nil), h.Data()...)
			return nil
		},
		model: func(m *model, op *Op) want {
			h, w := m.hostRef(op.X)
			if h != nil && !h.m.closed && m.onHost(reads(h)) {
				w.out = h.read()
			}
			return w
		},
		code: func(op *Op) string { return fmt.Sprintf("fmt.Println(%s.Data())\nreturn nil", hostCode(op.X)) },
	},
	"copy from pinned": {
		weight: 4,
		draw: func(g *generator, op *Op) bool {
			if !drawWrite(g, op) || !g.host(&op.Y) {
				return false
			}
			g.sameLength(&op.X, &op.Y)
			return true
		},
		run: func(r *runner, op *Op, _ *result) error {
			return onPinned(r, op, op.X, op.Y, func(s *stream.Stream, x memory.Slice[byte], h *memory.Pinned[byte]) error {
				return x.CopyFromPinned(s, h)
			})
		},
		model: func(m *model, op *Op) want {
			return m.pinnedCopy(op, op.X, op.Y, func(x, h *mRef) work {
				return work{sig: "memcpy from host", accesses: []access{reads(h), writes(x)}, effect: func(*launch) { x.set(h.read()) }}
			})
		},
		code: func(op *Op) string {
			return fmt.Sprintf("return %s.CopyFromPinned(s%d, %s)", partCode(op.X), op.S, hostCode(op.Y))
		},
	},
	"copy to pinned": {
		weight: 4,
		draw: func(g *generator, op *Op) bool {
			if !drawStream(g, op) || !g.part(&op.Y, op.S) || !g.host(&op.X) {
				return false
			}
			g.sameLength(&op.X, &op.Y)
			return true
		},
		run: func(r *runner, op *Op, _ *result) error {
			return onPinned(r, op, op.Y, op.X, func(s *stream.Stream, x memory.Slice[byte], h *memory.Pinned[byte]) error {
				return x.CopyToPinned(s, h)
			})
		},
		model: func(m *model, op *Op) want {
			return m.pinnedCopy(op, op.Y, op.X, func(x, h *mRef) work {
				return work{sig: "memcpy to host", accesses: []access{reads(x), writes(h)}, effect: func(*launch) { h.set(x.read()) }}
			})
		},
		code: func(op *Op) string {
			return fmt.Sprintf("return %s.CopyToPinned(s%d, %s)", partCode(op.Y), op.S, hostCode(op.X))
		},
	},
}

// pinnedPart returns the pinned memory that a Ref names. It panics where the bounds
// are wrong.
func pinnedPart(r *runner, x Ref) (*memory.Pinned[byte], error) {
	h, err := get[*memory.Pinned[byte]](r, x.O)
	if err != nil {
		return nil, err
	}
	return h.Slice(x.Lo, x.Hi), nil
}

func onPinned(r *runner, op *Op, x, h Ref, fn func(*stream.Stream, memory.Slice[byte], *memory.Pinned[byte]) error) error {
	s, err := get[*stream.Stream](r, op.S)
	if err != nil {
		return err
	}
	dev, err := r.part(x)
	if err != nil {
		return err
	}
	host, err := pinnedPart(r, h)
	if err != nil {
		return err
	}
	return fn(s, dev, host)
}

// hostRef returns the pinned memory that a Ref names, open or not, or the error of
// using it.
func (m *model) hostRef(x Ref) (*mRef, want) {
	h := m.mem(x.O)
	if h == nil || !h.pinned {
		return nil, errs(kAbsent)
	}
	r := m.ref(x)
	if r == nil {
		return nil, errs(kPanic)
	}
	return r, fine
}

func (m *model) pinnedCopy(op *Op, x, h Ref, copied func(x, h *mRef) work) want {
	s, dev, w := m.operands(op, x)
	host, v := m.hostRef(h)
	switch {
	case m.conflict != nil:
		return fine
	case dev == nil && (w.kinds[0] == kAbsent || host == nil && v.kinds[0] == kAbsent):
		return errs(kAbsent)
	case dev == nil && w.kinds[0] == kPanic:
		return errs(kPanic)
	case host == nil:
		return v
	case dev == nil || host.m.closed:
		return errs(kClosed)
	case dev.len() != host.len():
		return errs(kArgument)
	case dev.len() == 0:
		return fine
	}
	return m.submit(s, copied(dev, host))
}

func hostCode(x Ref) string { return fmt.Sprintf("h%d.Slice(%d, %d)", x.O, x.Lo, x.Hi) }
