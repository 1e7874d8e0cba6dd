package differ

import (
	"encoding/hex"
	"fmt"
	"math"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// An mGen is a generator of random numbers.
type mGen struct{ seed, offset uint64 }

var rngKinds = map[string]*kind{
	"generator new": {
		weight: 2,
		draw: func(g *generator, op *Op) bool {
			op.R, op.A = g.number(), int64(g.rnd.Uint64())
			return g.count(isGen) < 2
		},
		run: func(r *runner, op *Op, _ *result) error { return r.put(op, rng.New(r.b.dev, uint64(op.A)), nil) },
		model: func(m *model, op *Op) want {
			m.objs[op.R] = &mGen{seed: uint64(op.A)}
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("g%d = rng.New(dev, %d)\nreturn nil", op.R, uint64(op.A)) },
	},
	"generator state": {
		weight: 2,
		draw:   drawGen,
		run: onGen(func(g *rng.Generator, op *Op, res *result) error {
			state := g.State()
			res.Text = hex.EncodeToString(state[:]) + fmt.Sprint(" ", g.InitialSeed(), g.Offset())
			return nil
		}),
		model: ofGen(func(m *model, g *mGen, op *Op) want {
			if len(m.open) > 0 {
				return want{text: anyText}
			}
			state := make([]byte, 16)
			for i := range 8 {
				state[i], state[8+i] = byte(g.seed>>(8*i)), byte(g.offset>>(8*i))
			}
			return want{text: hex.EncodeToString(state) + fmt.Sprint(" ", g.seed, g.offset)}
		}),
		code: func(op *Op) string { return fmt.Sprintf("fmt.Println(g%d.State())\nreturn nil", op.O) },
	},
	"generator seed": {
		weight: 1,
		draw: func(g *generator, op *Op) bool {
			op.A = int64(g.rnd.Uint64())
			return len(g.m.open) == 0 && drawGen(g, op)
		},
		run: onGen(func(g *rng.Generator, op *Op, _ *result) error { g.ManualSeed(uint64(op.A)); return nil }),
		model: ofGen(func(m *model, g *mGen, op *Op) want {
			g.seed, g.offset = uint64(op.A), 0
			return fine
		}),
		code: func(op *Op) string { return fmt.Sprintf("g%d.ManualSeed(%d)\nreturn nil", op.O, uint64(op.A)) },
	},
	"generator offset": {
		weight: 1,
		draw: func(g *generator, op *Op) bool {
			op.N = g.rnd.IntN(1000)
			if !g.chance(20) {
				op.N *= 4
			}
			return len(g.m.open) == 0 && drawGen(g, op)
		},
		run: onGen(func(g *rng.Generator, op *Op, _ *result) error { return g.SetOffset(uint64(op.N)) }),
		model: ofGen(func(m *model, g *mGen, op *Op) want {
			if op.N%4 != 0 {
				return errs(kArgument)
			}
			g.offset = uint64(op.N)
			return fine
		}),
		code: func(op *Op) string { return fmt.Sprintf("return g%d.SetOffset(%d)", op.O, op.N) },
	},
	"uniform": fillKind(4, "Uniform", "float32", "0, 1", func(g *rng.Generator, s *stream.Stream, x memory.Slice[int32], y memory.Slice[float32], op *Op) error {
		return rng.Uniform(g, s, y, 0, 1)
	}, func(op *Op, w uint32) (uint32, byte) {
		u := unit(w)
		if u == 1 {
			u = 0
		}
		return math.Float32bits(u), defined
	}),
	"bernoulli": fillKind(2, "Bernoulli", "int32", "0.25", func(g *rng.Generator, s *stream.Stream, x memory.Slice[int32], y memory.Slice[float32], op *Op) error {
		return rng.Bernoulli(g, s, x, 0.25)
	}, func(op *Op, w uint32) (uint32, byte) {
		if unit(w) < 0.25 {
			return 1, defined
		}
		return 0, defined
	}),
	"random integers": fillKind(3, "RandomFromTo", "int32", "-5, 1000", func(g *rng.Generator, s *stream.Stream, x memory.Slice[int32], y memory.Slice[float32], op *Op) error {
		return rng.RandomFromTo(g, s, x, -5, 1000)
	}, func(op *Op, w uint32) (uint32, byte) { return w%1005 - 5, defined }),
	"normal": fillKind(2, "Normal", "float32", "0, 1", func(g *rng.Generator, s *stream.Stream, x memory.Slice[int32], y memory.Slice[float32], op *Op) error {
		return rng.Normal(g, s, y, 0, 1)
	}, func(op *Op, w uint32) (uint32, byte) { return 0, approx }),
	"bad fill": {
		weight: 1,
		draw:   drawFill,
		run: onFill(func(g *rng.Generator, s *stream.Stream, x memory.Slice[int32], y memory.Slice[float32], op *Op) error {
			return rng.Normal(g, s, y, 0, -1)
		}),
		model: func(m *model, op *Op) want {
			if m.stream(op.S) == nil || m.mem(op.X.O) == nil || object[mGen](m, op.O) == nil {
				return errs(kAbsent)
			}
			return errs(kArgument)
		},
		code: func(op *Op) string { return fillCode("Normal", "float32", "0, -1", op) },
	},
}

// fillKind is the kind of a fill with random numbers. value makes an element of the
// first word that its thread draws.
func fillKind(weight int, name, elem, args string, fill fillFunc, value func(op *Op, w uint32) (uint32, byte)) *kind {
	return &kind{
		weight: weight,
		draw:   drawFill,
		run:    onFill(fill),
		model: func(m *model, op *Op) want {
			s, x, w := m.operands(op, op.X)
			g := object[mGen](m, op.O)
			switch {
			case m.conflict != nil:
				return fine
			case g == nil:
				return errs(kAbsent)
			case x == nil && w.kinds[0] == kPanic || x != nil && x.lo%4 != 0:
				return errs(kArgument)
			case x == nil && w.kinds[0] == kClosed:
				return errs(kClosed, kArgument)
			case x == nil:
				return w
			}
			if x = x.words(); x.len() == 0 {
				return fine
			}
			return m.fillRandom(s, x, g, func(w uint32) (uint32, byte) { return value(op, w) })
		},
		code: func(op *Op) string { return fillCode(name, elem, args, op) },
	}
}

// fillRandom enqueues a fill that draws four words for each thread.
func (m *model) fillRandom(s *mStream, x *mRef, g *mGen, value func(uint32) (uint32, byte)) want {
	draw := func(at place) {
		for i := range x.len() / 4 {
			v, known := value(philox(at.seed, at.offset/4, uint32(i)))
			x.put32(i, v, known)
		}
	}
	w := work{sig: "kernel fill", accesses: []access{writes(x)}}
	if s.cap == nil {
		w.effect = func(*launch) {
			draw(place{g.seed, g.offset})
			g.offset += 4
		}
		return m.submit(s, w)
	}
	d := s.cap.drawOf(g)
	fresh := d == nil
	if fresh {
		d = &mDraw{gen: g}
	}
	skip := d.total
	w.effect = func(l *launch) { draw(place{l.base[d].seed, l.base[d].offset + skip}) }
	c := s.cap
	res := m.submit(s, w)
	if m.conflict != nil || res.any || len(res.kinds) > 0 {
		return res
	}
	if d.total += 4; fresh {
		c.draws = append(c.draws, d)
		m.stats.blocks++
		m.stats.bytes += roundSize(16, nil)
	}
	return res
}

func (c *mCapture) drawOf(g *mGen) *mDraw {
	for _, d := range c.draws {
		if d.gen == g {
			return d
		}
	}
	return nil
}

// unit is curand_uniform.
func unit(w uint32) float32 { return float32(float64(float32(w))/(1<<32) + 1.0/(1<<33)) }

// philox is the first word of Philox4x32-10.
func philox(seed, n uint64, thread uint32) uint32 {
	c := [4]uint32{uint32(n), uint32(n >> 32), thread, 0}
	k := [2]uint32{uint32(seed), uint32(seed >> 32)}
	for range 10 {
		a, b := uint64(c[0])*0xD2511F53, uint64(c[2])*0xCD9E8D57
		c = [4]uint32{uint32(b>>32) ^ c[1] ^ k[0], uint32(b), uint32(a>>32) ^ c[3] ^ k[1], uint32(a)}
		k[0], k[1] = k[0]+0x9E3779B9, k[1]+0xBB67AE85
	}
	return c[0]
}

func drawGen(g *generator, op *Op) bool { return g.any(&op.O, isGen) }

func drawFill(g *generator, op *Op) bool {
	return drawGen(g, op) && drawStream(g, op) && g.words(&op.X, op.S) && op.X.len() <= 1<<19
}

func onGen(fn func(*rng.Generator, *Op, *result) error) func(*runner, *Op, *result) error {
	return func(r *runner, op *Op, res *result) error {
		g, err := get[*rng.Generator](r, op.O)
		if err != nil {
			return err
		}
		return fn(g, op, res)
	}
}

func ofGen(fn func(*model, *mGen, *Op) want) func(*model, *Op) want {
	return func(m *model, op *Op) want {
		g := object[mGen](m, op.O)
		if g == nil {
			return errs(kAbsent)
		}
		return fn(m, g, op)
	}
}

type fillFunc func(g *rng.Generator, s *stream.Stream, x memory.Slice[int32], y memory.Slice[float32], op *Op) error

func onFill(fill fillFunc) func(*runner, *Op, *result) error {
	return func(r *runner, op *Op, _ *result) error {
		g, s, err := two[*rng.Generator, *stream.Stream](r, op.O, op.S)
		if err != nil {
			return err
		}
		x, err := typed[int32](r, op.X)
		if err != nil {
			return err
		}
		y, err := typed[float32](r, op.X)
		if err != nil {
			return err
		}
		return fill(g, s, x, y, op)
	}
}

func fillCode(name, elem, args string, op *Op) string {
	return fmt.Sprintf("x, err := memory.View[%s](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\nreturn rng.%s(g%d, s%d, x, %s)",
		elem, op.X.O, op.X.Lo, op.X.len()/4, name, op.O, op.S, args)
}
