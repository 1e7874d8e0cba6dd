package differ

import (
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// elems are the element types that buffers are made of, by their width.
var elems = map[int]string{1: "uint8", 4: "int32", 8: "float64"}

var memoryKinds = map[string]*kind{
	"make": {
		weight: 9,
		draw: func(g *generator, op *Op) bool {
			op.R, op.B = g.number(), []int64{1, 4, 4, 4, 8}[g.rnd.IntN(5)]
			op.N = g.length()
			if g.chance(2) {
				op.N = []int{-1, 1 << 45, 1 << 62}[g.rnd.IntN(3)]
			}
			return g.count(isBuf) < 8 && drawStream(g, op)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			b, err := makeBuf(s, int(op.B), op.N)
			return r.put(op, b, err)
		},
		model: modelMake,
		code: func(op *Op) string {
			return fmt.Sprintf("x%d, err = makeBuf[%s](s%d, %d)\nreturn err", op.R, elems[int(op.B)], op.S, op.N)
		},
	},
	"close": {
		weight: 4,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isBuf) },
		run: func(r *runner, op *Op, _ *result) error {
			b, err := get[*buf](r, op.O)
			if err != nil {
				return err
			}
			return b.close()
		},
		model: func(m *model, op *Op) want {
			x := m.mem(op.O)
			if x == nil {
				return errs(kAbsent)
			}
			return m.closeMem(x)
		},
		code: func(op *Op) string { return fmt.Sprintf("return x%d.close()", op.O) },
	},
	"close view": {
		weight: 1,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isBuf) },
		run: func(r *runner, op *Op, _ *result) error {
			b, err := get[*buf](r, op.O)
			if err != nil {
				return err
			}
			return b.bytes.Slice(0, 0).Close()
		},
		model: func(m *model, op *Op) want {
			if m.mem(op.O) == nil {
				return errs(kAbsent)
			}
			return errs(kView)
		},
		code: func(op *Op) string { return fmt.Sprintf("return x%d.bytes.Slice(0, 0).Close()", op.O) },
	},
	"record stream": {
		weight: 3,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isBuf) && drawStream(g, op) },
		run: func(r *runner, op *Op, _ *result) error {
			b, s, err := two[*buf, *stream.Stream](r, op.O, op.S)
			if err != nil {
				return err
			}
			return b.bytes.RecordStream(s)
		},
		model: func(m *model, op *Op) want {
			x, s := m.mem(op.O), m.stream(op.S)
			switch {
			case x == nil || s == nil:
				return errs(kAbsent)
			case s.closed:
				return errs(kClosed)
			case x.doubt:
				m.conflict = &conflict{s: s, slot: -1}
				return fine
			case s == x.s:
				return fine
			case x.closed:
				return errs(kClosed)
			}
			if !slices.Contains(x.users, s) {
				x.users = append(x.users, s)
			}
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("return x%d.bytes.RecordStream(s%d)", op.O, op.S) },
	},
	"zero": {
		weight: 5,
		draw:   drawWrite,
		run: func(r *runner, op *Op, _ *result) error {
			return onPart(r, op, func(s *stream.Stream, x memory.Slice[byte]) error { return x.Zero(s) })
		},
		model: func(m *model, op *Op) want {
			s, x, w := m.operands(op, op.X)
			if x == nil {
				return w
			}
			if x.len() == 0 {
				return fine
			}
			return m.submit(s, work{sig: "memset", accesses: []access{writes(x)}, effect: func(*launch) { x.fill(func(int) byte { return 0 }) }})
		},
		code: func(op *Op) string { return fmt.Sprintf("return %s.Zero(s%d)", partCode(op.X), op.S) },
	},
	"copy from host": {
		weight: 9,
		draw:   func(g *generator, op *Op) bool { op.A = int64(g.rnd.IntN(256)); return drawWrite(g, op) },
		run: func(r *runner, op *Op, _ *result) error {
			return onPart(r, op, func(s *stream.Stream, x memory.Slice[byte]) error {
				host := pattern(op.A, x.Len())
				err := x.CopyFrom(s, host)
				clear(host) // which may be used again
				return err
			})
		},
		model: func(m *model, op *Op) want {
			s, x, w := m.operands(op, op.X)
			if x == nil {
				return w
			}
			if w, ok := m.hostCopy(s, x); !ok {
				return w
			}
			return m.submit(s, work{accesses: []access{writes(x)}, effect: func(*launch) {
				x.fill(func(i int) byte { return patternAt(op.A, i) })
			}})
		},
		code: func(op *Op) string {
			return fmt.Sprintf("return %s.CopyFrom(s%d, pattern(%d, %d))", partCode(op.X), op.S, op.A, op.X.len())
		},
	},
	"copy to host": {
		weight: 5,
		draw:   func(g *generator, op *Op) bool { return drawStream(g, op) && g.part(&op.X, op.S) },
		run: func(r *runner, op *Op, res *result) error {
			return onPart(r, op, func(s *stream.Stream, x memory.Slice[byte]) error {
				host := make([]byte, x.Len())
				err := x.CopyTo(s, host)
				if err == nil {
					res.Out = host
				}
				return err
			})
		},
		model: func(m *model, op *Op) want {
			s, x, w := m.operands(op, op.X)
			if x == nil {
				return w
			}
			w, ok := m.hostCopy(s, x)
			switch {
			case x.len() > 0 && m.forbidden(): // it waits
				return errs(append(w.kinds, kCapture)...)
			case !ok:
				return w
			}
			out := x.read()
			w = m.submit(s, work{accesses: []access{reads(x)}})
			if m.conflict == nil {
				m.await(s)
				w.out = out
			}
			return w
		},
		code: func(op *Op) string {
			return fmt.Sprintf("return show(%s, s%d)", partCode(op.X), op.S)
		},
	},
	"copy": {
		weight: 9,
		draw: func(g *generator, op *Op) bool {
			if !drawWrite(g, op) || !g.part(&op.Y, op.S) {
				return false
			}
			if !g.chance(3) {
				g.sameLength(&op.X, &op.Y)
			}
			return true
		},
		run: func(r *runner, op *Op, _ *result) error {
			return onPart(r, op, func(s *stream.Stream, x memory.Slice[byte]) error {
				y, err := r.part(op.Y)
				if err != nil {
					return err
				}
				return memory.Copy(s, x, y)
			})
		},
		model: func(m *model, op *Op) want {
			s, x, y, w := m.operands2(op)
			switch {
			case x == nil:
				return w
			case x.len() != y.len():
				return errs(kArgument)
			case x.len() == 0:
				return fine
			case reads(y).conflicts(writes(x)) && x.lo != y.lo:
				return errs(kArgument)
			case reads(y).conflicts(writes(x)): // CUDA does not define it
				m.conflict = &conflict{s: s, slot: -1}
				return fine
			}
			return m.submit(s, work{sig: "memcpy", accesses: []access{reads(y), writes(x)}, effect: func(*launch) { x.set(y.read()) }})
		},
		code: func(op *Op) string {
			return fmt.Sprintf("return memory.Copy(s%d, %s, %s)", op.S, partCode(op.X), partCode(op.Y))
		},
	},
	"empty cache": {
		weight: 1,
		draw:   func(g *generator, op *Op) bool { return len(g.m.open) == 0 || g.chance(20) },
		run:    func(r *runner, _ *Op, _ *result) error { return memory.EmptyCache(r.b.dev) },
		model:  func(m *model, _ *Op) want { return fine },
		code:   func(*Op) string { return "return memory.EmptyCache(dev)" },
	},
	"stats": {
		weight: 3,
		draw:   func(g *generator, op *Op) bool { return true },
		run: func(r *runner, _ *Op, res *result) error {
			st, err := memory.StatsOf(r.b.dev)
			res.Text = statsText(st, r.base)
			return err
		},
		model: func(m *model, _ *Op) want {
			if m.fuzzy {
				return want{text: anyText}
			}
			return want{text: fmt.Sprintf("%d blocks, %d bytes", m.stats.blocks, m.stats.bytes)}
		},
		code: func(*Op) string {
			return "st, err := memory.StatsOf(dev)\nfmt.Println(st.Allocation.All.Current, st.AllocatedBytes.All.Current)\nreturn err"
		},
	},
}

func makeBuf(s *stream.Stream, width, n int) (*buf, error) {
	switch width {
	case 1:
		return bufOf[uint8](s, n)
	case 8:
		return bufOf[float64](s, n)
	}
	return bufOf[int32](s, n)
}

func bufOf[T memory.Element](s *stream.Stream, n int) (*buf, error) {
	x, err := memory.Make[T](s, n)
	if err != nil {
		return nil, err
	}
	return &buf{elem: x.DType().Size(), bytes: x.AsBytes(), close: x.Close, buffer: x.Buffer()}, nil
}

const mostBytes = 1 << 44 // more than any device has

func modelMake(m *model, op *Op) want {
	s := m.stream(op.S)
	switch {
	case s == nil:
		return errs(kAbsent)
	case op.N < 0 || op.N > math.MaxInt/int(op.B):
		return errs(kArgument)
	case s.closed:
		return errs(kClosed)
	case s.cap != nil && s.cap.vague:
		m.vague = true
		m.objs[op.R] = &mMem{doubt: true, s: s}
		return want{any: true}
	case op.N > 0 && s.cap == nil && m.poolOf(s) != nil && m.poolOf(s).closed:
		m.conflict = &conflict{s: s, slot: -1} // it depends on what the pool has cached
		return fine
	case op.N > 0 && s.cap != nil && s.cap.invalid:
		return errs(kCapture)
	case op.N > mostBytes/int(op.B):
		return errs(kOOM, kArgument)
	}
	n := op.N * int(op.B)
	x := &mMem{data: make([]byte, n), mask: make([]byte, n), s: s, elem: int(op.B), pool: m.poolOf(s)}
	x.size = roundSize(n, x.pool)
	if x.pool != nil {
		x.pool.bytes += x.size
	}
	if n > 0 {
		x.born, x.reused = s.cap, s.cap != nil && s.cap.freed
	}
	if n > 0 {
		m.stats.blocks++
		m.stats.bytes += x.size
	}
	if s.cap != nil {
		x.after = s.tail
	} else {
		// What the memory was before is known to have ended on this stream alone.
		s.seen.join(m.host)
		s.at++
		writes(&mRef{x, 0, n}).note(s.seen, s.slot, s.at)
	}
	m.objs[op.R] = x
	return fine
}

// closeMem closes device memory.
func (m *model) closeMem(x *mMem) want {
	switch {
	case x.doubt:
		m.vague = true
		return want{any: true}
	case x.closed:
		return fine
	}
	if x.born == nil {
		for _, s := range append([]*mStream{x.s}, x.users...) {
			if s.cap != nil && len(x.data) > 0 {
				return errs(kCapture)
			}
		}
	} else if !x.born.ended {
		for i, n := range x.born.nodes {
			if x.s.tail&(1<<i) == 0 && slices.ContainsFunc(n.accesses, func(a access) bool { return a.m == x }) {
				m.conflict = &conflict{s: x.s, slot: -1}
				return fine
			}
		}
	}
	if len(x.data) > 0 && !m.sealed(x) {
		return fine
	}
	x.closed = true
	if x.born != nil && len(x.data) > 0 {
		x.born.freed = true
	}
	for _, s := range x.users {
		s.at++ // the allocator may record an event
	}
	if len(x.data) > 0 {
		m.stats.blocks--
		m.stats.bytes -= x.size
	}
	if x.pool != nil {
		x.pool.bytes -= x.size
	}
	return fine
}

// pattern is what copies from the host bring.
func pattern(seed int64, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = patternAt(seed, i)
	}
	return p
}

func patternAt(seed int64, i int) byte { return byte(seed + int64(i)*7 + int64(i>>8)*13) }

// drawWrite draws a stream and memory to write to.
func drawWrite(g *generator, op *Op) bool { return drawStream(g, op) && g.part(&op.X, op.S) }

func onPart(r *runner, op *Op, fn func(*stream.Stream, memory.Slice[byte]) error) error {
	s, err := get[*stream.Stream](r, op.S)
	if err != nil {
		return err
	}
	x, err := r.part(op.X)
	if err != nil {
		return err
	}
	return fn(s, x)
}

// operands returns the stream and the memory of an operation. If the memory is nil, the
// want is the result of the operation.
func (m *model) operands(op *Op, x Ref) (*mStream, *mRef, want) {
	s, mem := m.stream(op.S), m.mem(x.O)
	if s == nil || mem == nil || mem.pinned {
		return nil, nil, errs(kAbsent)
	}
	if mem.doubt {
		m.conflict = &conflict{s: s, slot: -1}
		return nil, nil, fine
	}
	r := m.ref(x)
	switch {
	case r == nil:
		return nil, nil, errs(kPanic)
	case mem.closed || s.closed:
		return nil, nil, errs(kClosed)
	}
	return s, r, fine
}

func (m *model) operands2(op *Op) (*mStream, *mRef, *mRef, want) {
	s, x, w := m.operands(op, op.X)
	_, y, v := m.operands(op, op.Y)
	switch {
	case x != nil && y != nil:
		return s, x, y, fine
	case m.conflict != nil:
		return nil, nil, nil, fine
	}
	for _, k := range []string{kAbsent, kPanic} {
		if slices.Contains(w.kinds, k) || slices.Contains(v.kinds, k) {
			return nil, nil, nil, errs(k)
		}
	}
	return nil, nil, nil, errs(kClosed)
}

func (r *mRef) len() int { return r.hi - r.lo }

// hostCopy predicts the error of a copy between device memory and ordinary host memory,
// and reports whether the copy is made.
func (m *model) hostCopy(s *mStream, x *mRef) (want, bool) {
	switch {
	case x.len() == 0:
		return fine, false
	case s.cap != nil:
		return errs(kCapture), false
	case m.debug:
		return errs(kWaits), false
	}
	return fine, true
}

func partCode(x Ref) string { return fmt.Sprintf("x%d.bytes.Slice(%d, %d)", x.O, x.Lo, x.Hi) }
