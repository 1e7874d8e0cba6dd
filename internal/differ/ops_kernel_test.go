package differ

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var kernelKinds = map[string]*kind{
	"iota": {
		weight: 7,
		draw: func(g *generator, op *Op) bool {
			op.A, op.B = int64(g.rnd.Int32()), int64(g.rnd.Int32())
			return drawStream(g, op) && g.words(&op.X, op.S)
		},
		run: launches("iota", func(op *Op, x, _ memory.Slice[int32]) []kernel.Arg {
			return []kernel.Arg{kernel.Ptr(x), kernel.Scalar(uint32(op.A)), kernel.Scalar(uint32(op.B)), kernel.Scalar(int32(x.Len()))}
		}, false),
		model: onWords(false, func(op *Op, x, _ *mRef) work {
			return work{sig: "kernel iota", accesses: []access{writes(x)}, effect: func(*launch) {
				for i := range x.len() / 4 {
					x.put32(i, uint32(op.A)*uint32(i)+uint32(op.B), defined)
				}
			}}
		}),
		code: func(op *Op) string {
			return launchCode("iota", op, false, fmt.Sprintf("kernel.Scalar[uint32](%d), kernel.Scalar[uint32](%d), kernel.Scalar[int32](%d)", uint32(op.A), uint32(op.B), op.X.len()/4))
		},
	},
	"axpb": {
		weight: 9,
		draw: func(g *generator, op *Op) bool {
			op.A, op.B = int64(g.rnd.Int32()|1), int64(g.rnd.Int32())
			return g.twoWords(op)
		},
		run: launches("axpb", func(op *Op, x, y memory.Slice[int32]) []kernel.Arg {
			return []kernel.Arg{kernel.Ptr(x), kernel.Ptr(y), kernel.Scalar(uint32(op.A)), kernel.Scalar(uint32(op.B)), kernel.Scalar(int32(x.Len()))}
		}, true),
		model: onWords(true, func(op *Op, x, y *mRef) work {
			return work{sig: "kernel axpb", accesses: []access{reads(y), writes(x)}, effect: func(*launch) {
				for i := range x.len() / 4 {
					v, k := y.get32(i)
					x.put32(i, uint32(op.A)*v+uint32(op.B), exact(k))
				}
			}}
		}),
		code: func(op *Op) string {
			return launchCode("axpb", op, true, fmt.Sprintf("kernel.Scalar[uint32](%d), kernel.Scalar[uint32](%d), kernel.Scalar[int32](%d)", uint32(op.A), uint32(op.B), op.X.len()/4))
		},
	},
	"swap": {
		weight: 3,
		draw:   func(g *generator, op *Op) bool { return g.twoWords(op) },
		run: launches("swap2", func(op *Op, x, y memory.Slice[int32]) []kernel.Arg {
			return []kernel.Arg{kernel.Ptr(x), kernel.Ptr(y), kernel.Scalar(int32(x.Len()))}
		}, true),
		model: onWords(true, func(op *Op, x, y *mRef) work {
			return work{sig: "kernel swap2", accesses: []access{writes(x), writes(y)}, effect: func(*launch) {
				a, b := x.read(), y.read()
				x.set(b)
				y.set(a)
			}}
		}),
		code: func(op *Op) string {
			return launchCode("swap2", op, true, fmt.Sprintf("kernel.Scalar[int32](%d)", op.X.len()/4))
		},
	},
	"total": {
		weight: 2,
		draw: func(g *generator, op *Op) bool {
			if !g.twoWords(op) {
				return false
			}
			op.X.Hi = min(op.X.Hi, op.X.Lo+4)
			return op.X.len() == 4
		},
		run: launches("total", func(op *Op, x, y memory.Slice[int32]) []kernel.Arg {
			return []kernel.Arg{kernel.Ptr(x), kernel.Ptr(y), kernel.Scalar(int32(y.Len()))}
		}, true),
		model: onWords(true, func(op *Op, x, y *mRef) work {
			return work{sig: "kernel total", accesses: []access{reads(y), writes(x)}, effect: func(*launch) {
				sum, known := uint32(0), byte(defined)
				for i := range y.len() / 4 {
					v, k := y.get32(i)
					sum += v
					known = min(known, exact(k))
				}
				x.put32(0, sum, known)
			}}
		}),
		code: func(op *Op) string {
			return launchCode("total", op, true, fmt.Sprintf("kernel.Scalar[int32](%d)", op.Y.len()/4))
		},
	},
	"stride": {
		weight: 3,
		draw: func(g *generator, op *Op) bool {
			if !g.twoWords(op) {
				return false
			}
			op.N = 1 + g.rnd.IntN(4)
			n := (op.Y.len()/4 + op.N - 1) / op.N
			op.X.Hi = op.X.Lo + 4*min(n, op.X.len()/4)
			return true
		},
		run: launches("stride", func(op *Op, x, y memory.Slice[int32]) []kernel.Arg {
			return []kernel.Arg{kernel.Ptr(x), kernel.Ptr(y), kernel.Scalar(int32(op.N)), kernel.Scalar(int32(x.Len()))}
		}, true),
		model: onWords(true, func(op *Op, x, y *mRef) work {
			return work{sig: "kernel stride", accesses: []access{reads(y), writes(x)}, effect: func(*launch) {
				for i := range x.len() / 4 {
					v, k := y.get32(i * op.N)
					x.put32(i, v, exact(k))
				}
			}}
		}),
		code: func(op *Op) string {
			return launchCode("stride", op, true, fmt.Sprintf("kernel.Scalar[int32](%d), kernel.Scalar[int32](%d)", op.N, op.X.len()/4))
		},
	},
	"spin": { // makes what does not wait visible on a GPU
		weight: 3,
		draw:   func(g *generator, op *Op) bool { op.A = int64(1000 * (1 + g.rnd.IntN(30))); return drawStream(g, op) },
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			return r.b.kernels["spin"].Launch(s, one, kernel.Scalar(uint64(op.A)))
		},
		model: ofOpen(func(m *model, s *mStream) want { return m.submit(s, work{sig: "kernel spin"}) }),
		code: func(op *Op) string {
			return fmt.Sprintf("return k[\"spin\"].Launch(s%d, one, kernel.Scalar[uint64](%d))", op.S, op.A)
		},
	},
	"poke": { // writes to an address that nobody has, and waits: only in fatal programs
		draw: func(g *generator, op *Op) bool {
			op.A = []int64{1 << 40, -1 << 40, 1 << 44}[g.rnd.IntN(3)]
			return drawStream(g, op) && g.words(&op.X, op.S)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			x, err := typed[int32](r, op.X)
			if err != nil {
				return err
			}
			if err := r.b.kernels["poke"].Launch(s, one, kernel.Ptr(x), kernel.Scalar[int64](op.A)); err != nil {
				return err
			}
			return s.Sync(r.ctx)
		},
		model: func(m *model, op *Op) want {
			s, x, w := m.operands(op, op.X)
			switch {
			case x == nil || x.len() < 4 || x.lo%4 != 0 || s.cap != nil || len(m.open) > 0:
				m.conflict = &conflict{s: s, slot: -1}
				return w
			case m.races(s, s.now(), s.slot, []access{writes(x)}):
				return fine
			}
			m.lost = true
			return errs(cuIllegal)
		},
		code: func(op *Op) string {
			return fmt.Sprintf("x, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\nif err := k[\"poke\"].Launch(s%d, one, kernel.Ptr(x), kernel.Scalar[int64](%d)); err != nil {\nreturn err\n}\nreturn s%d.Sync(context.Background())",
				op.X.O, op.X.Lo, op.X.len()/4, op.S, op.A, op.S)
		},
	},
	"bad launch": { // an argument or a grid that is wrong
		weight: 3,
		draw: func(g *generator, op *Op) bool {
			op.A = int64(g.rnd.IntN(len(badLaunches)))
			return drawStream(g, op) && g.words(&op.X, op.S)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			x, err := typed[int32](r, op.X)
			if err != nil {
				return err
			}
			return badLaunches[op.A].run(r.b.kernels["iota"], s, x)
		},
		model: func(m *model, op *Op) want {
			_, x, w := m.operands(op, op.X)
			switch {
			case x == nil && m.conflict == nil && w.kinds[0] == kPanic:
				return errs(kArgument) // View does not panic
			case x == nil:
				if len(w.kinds) > 0 && w.kinds[0] == kClosed {
					return errs(kClosed, kArgument)
				}
				return w
			case op.X.Lo%4 != 0:
				return errs(kArgument)
			}
			w = badLaunches[op.A].want
			if c := m.stream(op.S).cap; c != nil && badLaunches[op.A].driver {
				if c.invalid {
					return errs(append(slices.Clone(w.kinds), cuInvalidated)...)
				}
				c.invalid = true
			}
			return w
		},
		code: func(op *Op) string { return badLaunches[op.A].code(op) },
	},
}

var one = kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}

// A badLaunch is a launch that returns an error, or launches nothing.
type badLaunch struct {
	want   want
	driver bool // it is found by the driver
	run    func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error
	text   string
}

func (b *badLaunch) code(op *Op) string {
	return fmt.Sprintf("x, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\ns := s%d\nreturn %s",
		op.X.O, op.X.Lo, op.X.len()/4, op.S, b.text)
}

var badLaunches = []badLaunch{
	{errs(kArgument), false, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		f, err := memory.View[float32](x.Buffer(), x.Offset(), x.Len())
		if err != nil {
			return err
		}
		return k.Launch(s, one, kernel.Ptr(f), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))
	}, `k["iota"].Launch(s, one, kernel.Ptr(memory.Slice[float32]{}), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0), kernel.Ptr(x))`},
	{errs(kArgument), false, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		return k.Launch(s, one, kernel.Ptr(x))
	}, `k["iota"].Launch(s, one, kernel.Ptr(x))`},
	{errs(kArgument), false, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		return k.Launch(s, one, kernel.Ptr(x), kernel.Scalar[float32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))
	}, `k["iota"].Launch(s, one, kernel.Ptr(x), kernel.Scalar[float32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))`},
	{errs(kArgument), false, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		return k.Launch(s, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1025, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))
	}, `k["iota"].Launch(s, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1025, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))`},
	{errs(kArgument), false, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		return k.Launch(s, kernel.Grid{Blocks: [3]uint32{1, 65536, 1}, Threads: [3]uint32{1, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))
	}, `k["iota"].Launch(s, kernel.Grid{Blocks: [3]uint32{1, 65536, 1}, Threads: [3]uint32{1, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))`},
	{errs(kArgument), false, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		return k.Launch(s, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}, SharedBytes: 1 << 20}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))
	}, `k["iota"].Launch(s, kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}, SharedBytes: 1 << 20}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))`},
	{errs("cuda:COOPERATIVE_LAUNCH_TOO_LARGE"), true, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		return k.LaunchCooperative(s, kernel.Grid{Blocks: [3]uint32{1 << 20, 1, 1}, Threads: [3]uint32{256, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))
	}, `k["iota"].LaunchCooperative(s, kernel.Grid{Blocks: [3]uint32{1 << 20, 1, 1}, Threads: [3]uint32{256, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))`},
	{fine, false, func(k *kernel.Kernel, s *stream.Stream, x memory.Slice[int32]) error {
		return k.Launch(s, kernel.Grid{Threads: [3]uint32{1, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))
	}, `k["iota"].Launch(s, kernel.Grid{Threads: [3]uint32{1, 1, 1}}, kernel.Ptr(x), kernel.Scalar[uint32](1), kernel.Scalar[uint32](1), kernel.Scalar[int32](0))`},
}

// launches returns what carries a launch of a kernel over words out.
func launches(name string, args func(op *Op, x, y memory.Slice[int32]) []kernel.Arg, both bool) func(*runner, *Op, *result) error {
	return func(r *runner, op *Op, _ *result) error {
		s, err := get[*stream.Stream](r, op.S)
		if err != nil {
			return err
		}
		for _, x := range []int{op.X.O, op.Y.O} {
			if _, err := get[*buf](r, x); err != nil && (x == op.X.O || both) {
				return err
			}
		}
		x, err := typed[int32](r, op.X)
		if err != nil {
			return err
		}
		var y memory.Slice[int32]
		if both {
			if y, err = typed[int32](r, op.Y); err != nil {
				return err
			}
		}
		return r.b.kernels[name].Launch(s, kernel.Cover(x.Len()), args(op, x, y)...)
	}
}

// onWords returns the model of such a launch.
func onWords(both bool, does func(op *Op, x, y *mRef) work) func(*model, *Op) want {
	return func(m *model, op *Op) want {
		s, x, w := m.operands(op, op.X)
		var y *mRef
		if both {
			s, x, y, w = m.operands2(op)
		}
		switch {
		case m.conflict != nil:
			return fine
		case x == nil && w.kinds[0] == kPanic:
			return errs(kArgument) // View does not panic
		case x == nil && w.kinds[0] == kClosed:
			return errs(kClosed, kArgument)
		case x == nil:
			return w
		case x.lo%4 != 0 || both && y.lo%4 != 0:
			return errs(kArgument)
		}
		x = x.words()
		if both {
			y = y.words()
			if writes(x).conflicts(reads(y)) && (op.K != "axpb" || *x != *y) || y.len() < needs(op, x.len()) {
				// The threads of the kernel would race, or read what is not theirs.
				m.conflict = &conflict{s: s, slot: -1}
				return fine
			}
		}
		if x.len() == 0 {
			return fine // a grid without blocks
		}
		return m.submit(s, does(op, x, y))
	}
}

// needs is how many bytes a kernel reads for n bytes of its result.
func needs(op *Op, n int) int {
	switch {
	case op.K == "total" || n == 0:
		return 0
	case op.K == "stride":
		return ((n/4-1)*op.N + 1) * 4
	}
	return n
}

func launchCode(name string, op *Op, both bool, rest string) string {
	text := fmt.Sprintf("x, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\n", op.X.O, op.X.Lo, op.X.len()/4)
	ptrs := "kernel.Ptr(x)"
	if both {
		text += fmt.Sprintf("y, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\n", op.Y.O, op.Y.Lo, op.Y.len()/4)
		ptrs += ", kernel.Ptr(y)"
	}
	return text + fmt.Sprintf("return k[%q].Launch(s%d, kernel.Cover(%d), %s, %s)", name, op.S, op.X.len()/4, ptrs, rest)
}

// words returns the whole words of a part of memory.
func (r *mRef) words() *mRef { return &mRef{r.m, r.lo, r.lo + r.len()/4*4} }

func (r *mRef) get32(i int) (v uint32, known byte) {
	at := r.lo + 4*i
	known = defined
	for _, k := range r.m.mask[at : at+4] {
		switch {
		case k == undefined || known == undefined:
			known = undefined
		case k == approx:
			known = approx
		}
	}
	return binary.LittleEndian.Uint32(r.m.data[at:]), known
}

func (r *mRef) put32(i int, v uint32, known byte) {
	at := r.lo + 4*i
	binary.LittleEndian.PutUint32(r.m.data[at:], v)
	for j := range 4 {
		r.m.mask[at+j] = known
	}
}

// exact is the mask of what was calculated from bytes with the mask k.
func exact(k byte) byte {
	if k == defined {
		return defined
	}
	return undefined
}

// ofOpen is ofStream for operations that a closed stream refuses.
func ofOpen(fn func(*model, *mStream) want) func(*model, *Op) want {
	return ofStream(func(m *model, s *mStream) want {
		if s.closed {
			return errs(kClosed)
		}
		return fn(m, s)
	})
}
