package kernel

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/element"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Launch enqueues the function for all elements on s and returns at once, except for the
// first launch with these types, which compiles the kernel. Inputs and outputs are given
// in the order of the function's parameters. All slices have the same length; inputs may
// also have a single element. The type of the computation is torch's promotion of the
// input types, with float for the 16-bit floats. Results are rounded to the promoted type
// and then to the type of the output, which must not be of a lower category. The launch
// allocates nothing.
func (e *Elementwise) Launch(s *stream.Stream, operands ...Operand) error {
	if e == nil {
		return errors.New("kernel: launch: no element-wise function given")
	}
	if err := e.launch(s, operands); err != nil {
		return fmt.Errorf("kernel: launch %s: %w", e.sig.name, err)
	}
	return nil
}

func (e *Elementwise) launch(s *stream.Stream, operands []Operand) error {
	if e.owner.Closed() {
		return device.ErrClosed
	}
	if err := gpu.CheckStream("kernel: launch", s, nil); err != nil {
		return err
	}
	l := job{v: variant{dev: s.Device()}}
	if err := e.prepare(&l, operands); err != nil {
		return err
	}
	if l.n == 0 {
		return nil
	}
	k, err := e.kernel(&l.v, l.common)
	if err != nil {
		return err
	}
	perBlock := elementwiseBlock * itemsOf(l.widest)
	blocks := (l.n-1)/perBlock + 1
	if blocks > int(maxBlocks[0]) {
		return fmt.Errorf("%d elements: at most %d", l.n, int(maxBlocks[0])*perBlock)
	}
	grid := Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{elementwiseBlock, 1, 1}}
	return k.Launch(s, grid, l.args[:e.arity()+2]...)
}

// A job is a launch during validation.
type job struct {
	v      variant
	common memory.DType // of the computation
	n      int          // elements
	widest int          // size of the widest element in bytes
	given  [maxArgs]int8
	args   [maxArgs]Arg
}

// prepare validates the operands and converts them to the kernel's arguments.
func (e *Elementwise) prepare(l *job, operands []Operand) error {
	if err := e.match(l, operands); err != nil {
		return err
	}
	if err := l.check(operands); err != nil {
		return err
	}
	if err := l.promote(operands); err != nil {
		return err
	}
	ones := uint32(0)
	l.widest = 1
	for i := range e.arity() {
		o := e.operand(l, operands, i)
		l.v.args[i].role, l.v.args[i].dtype = o.role, o.dtype
		if o.role == number || o.role == scalar {
			l.args[i+2] = o.arg()
			continue
		}
		l.args[i+2] = Arg{kind: Pointer, bits: o.raw, argDevice: kern.On(o.dev, o.n*o.dtype.Size())}
		l.widest = max(l.widest, o.dtype.Size())
		if o.role == input && o.n == 1 {
			ones |= 1 << i
		}
	}
	l.args[0], l.args[1] = Scalar(uint64(l.n)), Scalar(ones)
	return nil
}

// operand returns the operand given for a parameter of the kernel, or its default.
func (e *Elementwise) operand(l *job, operands []Operand, i int) *Operand {
	if at := l.given[i]; at > 0 {
		return &operands[at-1]
	}
	return &e.defaults[i]
}

// match finds the operand of each parameter.
func (e *Elementwise) match(l *job, operands []Operand) error {
	if len(operands) > maxArgs {
		return fmt.Errorf("%d operands: at most %d", len(operands), maxArgs)
	}
	in, out := 0, 0
	for i := range operands {
		switch o := &operands[i]; o.role {
		case scalar:
			at := e.named(o.name)
			if at < 0 {
				return fmt.Errorf("there is no parameter %q with a default: there are %q", o.name, e.sig.named(scalar))
			}
			if l.given[at] > 0 {
				return fmt.Errorf("the parameter %q is set twice", o.name)
			}
			l.given[at] = int8(i + 1)
		case output:
			e.place(l, i, output, out)
			out++
		default:
			e.place(l, i, input, in)
			in++
		}
	}
	switch {
	case in != len(e.inputs):
		return fmt.Errorf("%d inputs: want %d: %s", in, len(e.inputs), strings.Join(e.inputs, ", "))
	case out != e.outputs:
		return fmt.Errorf("%d outputs: want %d", out, e.outputs)
	}
	return nil
}

// named returns the index of a parameter with a default.
func (e *Elementwise) named(name string) int {
	for i, p := range e.sig.params {
		if p.role == scalar && p.name == name {
			return i
		}
	}
	return -1
}

// place assigns the nth input or output, which is operand at, to its parameter of the
// function.
func (e *Elementwise) place(l *job, at int, r role, n int) {
	for i := range e.arity() {
		if e.roleOf(i) != r {
			continue
		}
		if n == 0 {
			l.given[i] = int8(at + 1)
			return
		}
		n--
	}
}

// check validates the lengths and devices of the slices.
func (l *job) check(operands []Operand) error {
	l.n = -1
	for i := range operands {
		o := &operands[i]
		if o.role != input && o.role != output {
			continue
		}
		switch {
		case o.err != nil:
			return o.err
		case o.dev != nil && o.dev != l.v.dev:
			return fmt.Errorf("operand %d is memory of %s, the stream is of %s", i, o.dev, l.v.dev)
		case element.IsFloat8(o.dtype):
			return fmt.Errorf("operand %d is of %s, in which nothing is computed", i, o.dtype)
		case o.role == output && l.n >= 0 && o.n != l.n:
			return fmt.Errorf("operand %d has %d elements, the first output %d", i, o.n, l.n)
		case o.role == output:
			l.n = o.n
		}
	}
	for i := range operands {
		o := &operands[i]
		if o.role == input && o.n != l.n && o.n != 1 {
			return fmt.Errorf("operand %d has %d elements, the output %d: want as many, or 1", i, o.n, l.n)
		}
		for j := range operands {
			if p := &operands[j]; p.role == output && i != j && o.overlaps(p) {
				return fmt.Errorf("operand %d overlaps the output that is operand %d: want the same slice or another", i, j)
			}
		}
	}
	return nil
}

// overlaps reports whether writing p corrupts o: they share memory and are not an input
// and an output with the same elements.
func (o *Operand) overlaps(p *Operand) bool {
	if o.role != input && o.role != output || o.n == 0 || p.n == 0 {
		return false
	}
	size, other := uint64(o.n*o.dtype.Size()), uint64(p.n*p.dtype.Size())
	if o.raw+size <= p.raw || p.raw+other <= o.raw {
		return false
	}
	return o.role == output || o.raw != p.raw || o.dtype.Size() != p.dtype.Size() || o.n != p.n
}

// promote determines the type of the computation.
func (l *job) promote(operands []Operand) error {
	arrays, numbers := memory.Invalid, memory.Invalid
	var err error
	for i := range operands {
		o := &operands[i]
		switch o.role {
		case input:
			if arrays, err = Promote(arrays, o.dtype); err != nil {
				return err
			}
		case number:
			if numbers, err = Promote(numbers, o.dtype); err != nil {
				return err
			}
		}
	}
	if l.common, err = resultType(arrays, numbers); err != nil {
		return err
	}
	for i := range operands {
		if o := &operands[i]; o.role == output && !CanCast(l.common, o.dtype) {
			return fmt.Errorf("the result is of %s and cannot be cast to the %s of operand %d", l.common, o.dtype, i)
		}
	}
	return nil
}

// itemsOf returns how many elements a thread computes: enough loads in flight to saturate
// the memory.
func itemsOf(widest int) int { return max(4, 8/widest) }
