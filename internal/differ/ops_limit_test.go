package differ

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An mRaw is memory without a buffer.
type mRaw struct {
	freed bool
	size  int
	pool  *mPool
}

var limitKinds = map[string]*kind{
	"out of memory": { // by a limit that leaves room for all other operations
		weight: 1,
		draw:   drawStream,
		run: onStream(func(r *runner, s *stream.Stream, _ *result) error {
			dev := r.b.dev
			_, total, err := dev.MemoryInfo()
			if err != nil {
				return err
			}
			reserved, err := memory.Reserved(dev)
			if err != nil {
				return err
			}
			if err := memory.SetFraction(dev, float64(reserved+256<<20)/float64(total)); err != nil {
				return err
			}
			defer memory.SetFraction(dev, 1)
			x, err := memory.Make[byte](s, 2<<30)
			if err == nil {
				_ = x.Close()
			}
			return err
		}),
		model: ofOpen(func(m *model, s *mStream) want {
			switch p := m.poolOf(s); {
			case s.cap != nil && s.cap.invalid:
				return errs(kCapture)
			case p != nil && p.closed:
				return errs(kOOM, kClosed)
			}
			return errs(kOOM)
		}),
		code: func(op *Op) string {
			return fmt.Sprintf("if err := memory.SetFraction(dev, 0.01); err != nil {\nreturn err\n}\ndefer memory.SetFraction(dev, 1)\n_, err = memory.Make[byte](s%d, 2<<30)\nreturn err", op.S)
		},
	},
	"raw alloc": {
		weight: 1,
		draw: func(g *generator, op *Op) bool {
			op.R, op.N = g.number(), 1+g.length()
			return drawStream(g, op)
		},
		run: func(r *runner, op *Op, _ *result) error {
			s, err := get[*stream.Stream](r, op.S)
			if err != nil {
				return err
			}
			ptr, err := memory.AllocRaw(s, op.N)
			return r.put(op, &raw{r.b.dev, ptr, false}, err)
		},
		model: func(m *model, op *Op) want {
			s := m.stream(op.S)
			switch {
			case s == nil:
				return errs(kAbsent)
			case s.closed:
				return errs(kClosed)
			case s.cap != nil || m.poolOf(s) != nil && m.poolOf(s).closed:
				m.conflict = &conflict{s: s, slot: -1}
				return fine
			}
			x := &mRaw{pool: m.poolOf(s)}
			x.size = roundSize(op.N, x.pool)
			m.count(1, x.size, x.pool)
			m.objs[op.R] = x
			return fine
		},
		code: func(op *Op) string {
			return fmt.Sprintf("a%d, err = memory.AllocRaw(s%d, %d)\nreturn err", op.R, op.S, op.N)
		},
	},
	"raw free": {
		weight: 1,
		draw:   func(g *generator, op *Op) bool { return g.any(&op.O, isRaw) },
		run: func(r *runner, op *Op, _ *result) error {
			x, err := get[*raw](r, op.O)
			if err != nil {
				return err
			}
			return x.Close()
		},
		model: func(m *model, op *Op) want {
			x := object[mRaw](m, op.O)
			switch {
			case x == nil:
				return errs(kAbsent)
			case x.freed: // somebody else may have the address now
				m.conflict = &conflict{s: nil, slot: -1}
				return fine
			}
			x.freed = true
			m.count(-1, -x.size, x.pool)
			return fine
		},
		code: func(op *Op) string { return fmt.Sprintf("return memory.FreeRaw(dev, a%d)", op.O) },
	},
	"bad free": { // of an address within a block, or of nobody's
		weight: 1,
		draw:   func(g *generator, op *Op) bool { op.N = g.rnd.IntN(2); return g.any(&op.O, isBuf) },
		run: func(r *runner, op *Op, _ *result) error {
			b, err := get[*buf](r, op.O)
			if err != nil {
				return err
			}
			if op.N == 0 {
				return memory.FreeRaw(r.b.dev, 12345)
			}
			return memory.FreeRaw(r.b.dev, b.bytes.Ptr()+64)
		},
		model: func(m *model, op *Op) want {
			if m.mem(op.O) == nil {
				return errs(kAbsent)
			}
			return errs(kPointer)
		},
		code: func(op *Op) string {
			if op.N == 0 {
				return "return memory.FreeRaw(dev, 12345)"
			}
			return fmt.Sprintf("return memory.FreeRaw(dev, x%d.bytes.Ptr()+64)", op.O)
		},
	},
}

// count adds to the statistics.
func (m *model) count(blocks, bytes int, p *mPool) {
	m.stats.blocks += blocks
	m.stats.bytes += bytes
	if p != nil {
		p.bytes += bytes
	}
}

// raw is memory that AllocRaw has given out.
type raw struct {
	dev   *device.Device
	ptr   uint64
	freed bool
}

func (x *raw) Close() error {
	if x.freed {
		return nil
	}
	x.freed = true
	return memory.FreeRaw(x.dev, x.ptr)
}

func isRaw(o any) (ok, closed bool) { x, ok := o.(*mRaw); return ok && !x.freed, false }
