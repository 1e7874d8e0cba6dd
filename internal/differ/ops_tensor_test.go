package differ

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var tensorKinds = map[string]*kind{
	"transpose": { // a copy between two layouts, to integers or to floats
		weight: 5,
		draw: func(g *generator, op *Op) bool {
			op.N, op.A = 1+g.rnd.IntN(9), int64(g.rnd.IntN(2))
			if !g.twoWords(op) {
				return false
			}
			n := max(op.X.len(), 0) / (4 * op.N) * (4 * op.N)
			op.X.Hi, op.Y.Hi = op.X.Lo+n, op.Y.Lo+n
			return true
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
			y, err := tensorOf[int32](r, op.Y, op.N, op.Y.len()/4/op.N)
			if err != nil {
				return err
			}
			x, err := tensorOf[int32](r, op.X, op.X.len()/4/op.N, op.N)
			if op.A == 1 {
				x, err = tensorOf[float32](r, op.X, op.X.len()/4/op.N, op.N)
			}
			if err != nil {
				return err
			}
			return tensor.Copy(s, x, y.T())
		},
		model: func(m *model, op *Op) want {
			return m.onTensors(op, func(x, y *mRef) work {
				return work{sig: "tensor", accesses: []access{reads(y), writes(x)}, effect: func(*launch) {
					cols := y.len() / 4 / op.N
					for i := range y.len() / 4 {
						v, k := y.get32(i)
						if op.A == 1 {
							v = math.Float32bits(float32(int32(v)))
						}
						x.put32(i%cols*op.N+i/cols, v, exact(k))
					}
				}}
			})
		},
		code: func(op *Op) string {
			elem := []string{"int32", "float32"}[op.A]
			return tensorCode("x", elem, op.X, op.X.len()/4/op.N, op.N) + tensorCode("y", "int32", op.Y, op.N, op.Y.len()/4/op.N) +
				fmt.Sprintf("return tensor.Copy(s%d, tx, ty.T())", op.S)
		},
	},
	"add": {
		weight: 3,
		draw:   func(g *generator, op *Op) bool { op.N = 1; return g.twoWords(op) },
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
			x, err := tensorOf[int32](r, op.X, op.X.len()/4)
			if err != nil {
				return err
			}
			y, err := tensorOf[int32](r, op.Y, op.Y.len()/4)
			if err != nil {
				return err
			}
			return tensor.Add(s, x, x, y)
		},
		model: func(m *model, op *Op) want {
			return m.onTensors(op, func(x, y *mRef) work {
				return work{sig: "tensor", accesses: []access{reads(y), writes(x)}, effect: func(*launch) {
					for i := range y.len() / 4 {
						v, k := x.get32(i)
						u, l := y.get32(i)
						x.put32(i, v+u, min(exact(k), exact(l)))
					}
				}}
			})
		},
		code: func(op *Op) string {
			return tensorCode("x", "int32", op.X, op.X.len()/4) + tensorCode("y", "int32", op.Y, op.Y.len()/4) +
				fmt.Sprintf("return tensor.Add(s%d, tx, tx, ty)", op.S)
		},
	},
	"elementwise": {
		weight: 3,
		draw: func(g *generator, op *Op) bool {
			op.A, op.N = int64(g.rnd.Int32()), 1
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
			return r.b.mask.Launch(s, kernel.Out(x), kernel.In(y), kernel.In(y), kernel.Set("a", int32(op.A)))
		},
		model: func(m *model, op *Op) want {
			return m.onTensors(op, func(x, y *mRef) work {
				return work{sig: "tensor", accesses: []access{reads(y), writes(x)}, effect: func(*launch) {
					for i := range x.len() / 4 {
						v, k := y.get32(min(i, y.len()/4-1)) // one element goes with all
						x.put32(i, v^uint32(op.A), exact(k))
					}
				}}
			})
		},
		code: func(op *Op) string {
			return fmt.Sprintf("x, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\ny, err := memory.View[int32](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\n",
				op.X.O, op.X.Lo, op.X.len()/4, op.Y.O, op.Y.Lo, op.Y.len()/4) +
				fmt.Sprintf("return mask.Launch(s%d, kernel.Out(x), kernel.In(y), kernel.In(y), kernel.Set(\"a\", int32(%d)))", op.S, op.A)
		},
	},
}

const maskCode = "template <typename T> T mask(T x, T y, T a) { return (x & y) ^ a; }"

var maskConfig = kernel.ElementwiseConfig{
	Defaults: []kernel.Operand{kernel.Set("a", int32(0))},
	Ints:     func(in, out []int64) { out[0] = in[0]&in[1] ^ in[2] },
}

func tensorOf[T memory.Element](r *runner, x Ref, shape ...int) (tensor.Tensor, error) {
	view, err := typed[T](r, x)
	if err != nil {
		return tensor.Tensor{}, err
	}
	return tensor.Of(view, shape...)
}

func tensorCode(name, elem string, x Ref, shape ...int) string {
	text := fmt.Sprintf("%s, err := memory.View[%s](x%d.buffer, %d, %d)\nif err != nil {\nreturn err\n}\nt%[1]s, err := tensor.Of(%[1]s", name, elem, x.O, x.Lo, x.len()/4)
	for _, n := range shape {
		text += fmt.Sprintf(", %d", n)
	}
	return text + ")\nif err != nil {\nreturn err\n}\n"
}

// onTensors is the model of an operation on two tensors of words, of as many elements.
func (m *model) onTensors(op *Op, does func(x, y *mRef) work) want {
	s, x, y, w := m.operands2(op)
	switch {
	case m.conflict != nil:
		return fine
	case x == nil && w.kinds[0] == kPanic:
		return errs(kArgument)
	case x == nil && w.kinds[0] == kClosed && op.K == "transpose" && op.X == op.Y:
		return errs("", kClosed, kArgument) // a copy to itself is no work
	case x == nil && w.kinds[0] == kClosed:
		return errs(kClosed, kArgument)
	case x == nil:
		return w
	case x.lo%4 != 0 || y.lo%4 != 0, x.len() != y.len() && !(op.K == "elementwise" && y.len()/4 == 1):
		return errs(kArgument)
	}
	if x, y = x.words(), y.words(); writes(x).conflicts(reads(y)) || x.len()%(4*op.N) != 0 || x.len() == 0 {
		m.conflict = &conflict{s: s, slot: -1} // what it does then is another matter
		return fine
	}
	if s.cap != nil && s.cap.invalid {
		m.conflict = &conflict{s: s, slot: -1} // a kernel may be loaded, or not
		return fine
	}
	return m.submit(s, does(x, y))
}
