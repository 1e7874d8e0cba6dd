package kernel

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Launch enqueues the function for all elements on s and returns at once, but
// for the first launch with these types, which compiles the kernel. Inputs and
// outputs are given in the order of the function's parameters. All slices have
// one length, or, for inputs, one element. The computation is in the type that
// torch promotes the inputs to, in float for the 16-bit floats; results are
// rounded to that type and then to the type of the output, which must not be of
// a lower category. The launch allocates nothing.
func (e *Elementwise) Launch(s *stream.Stream, operands ...Operand) error {
	if err := e.launch(s, operands); err != nil {
		return fmt.Errorf("kernel: launch %s: %w", e.sig.name, err)
	}
	return nil
}

func (e *Elementwise) launch(s *stream.Stream, operands []Operand) error {
	if e.owner.Closed() {
		return device.ErrClosed
	}
	if err := s.Check("kernel: launch", nil); err != nil {
		return err
	}
	l := job{dev: s.Device()}
	if err := e.match(&l, operands); err != nil {
		return err
	}
	if err := l.check(operands); err != nil {
		return err
	}
	common, err := l.common(operands)
	if err != nil {
		return err
	}
	v := variant{dev: l.dev}
	ones := uint32(0)
	args := [maxArgs]Arg{{kind: U64, bits: uint64(l.n)}}
	for i := range e.arity() {
		o := l.at[i]
		v.args[i].role, v.args[i].dtype = o.role, o.dtype
		if args[i+2] = o.arg(); o.role == input || o.role == output {
			args[i+2] = Arg{kind: Pointer, bits: o.raw, dev: o.dev}
		}
		if o.role == input && o.n == 1 {
			ones |= 1 << i
		}
	}
	args[1] = Uint32(ones)
	k, err := e.kernel(&v, common)
	if err != nil || l.n == 0 {
		return err
	}
	perBlock := elementwiseBlock * l.items()
	blocks := (l.n-1)/perBlock + 1
	if blocks > int(maxBlocks[0]) {
		return fmt.Errorf("%d elements: at most %d", l.n, int(maxBlocks[0])*perBlock)
	}
	grid := Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{elementwiseBlock, 1, 1}}
	return k.Launch(s, grid, args[:e.arity()+2]...)
}

// A job is one launch while it is checked.
type job struct {
	dev      *device.Device
	n        int
	at       [maxArgs]*Operand // for each parameter of the kernel
	defaults [maxArgs]Operand
}

// match gives each parameter its operand.
func (e *Elementwise) match(l *job, operands []Operand) error {
	in, out := 0, 0
	for i := range operands {
		o := &operands[i]
		switch o.role {
		case scalar:
			at := slices.IndexFunc(e.sig.params, func(p parameter) bool { return p.role == scalar && p.name == o.name })
			if at < 0 {
				return fmt.Errorf("there is no parameter %q with a default: there are %q", o.name, e.sig.named(scalar))
			}
			if l.at[at] != nil {
				return fmt.Errorf("the parameter %q is set twice", o.name)
			}
			l.at[at] = o
		case output:
			e.place(l, o, output, out)
			out++
		default:
			e.place(l, o, input, in)
			in++
		}
	}
	if want := e.sig.named(input); in != len(want) {
		return fmt.Errorf("%d inputs: want %d: %s", in, len(want), strings.Join(want, ", "))
	}
	if want := e.sig.outputs(); out != want {
		return fmt.Errorf("%d outputs: want %d", out, want)
	}
	for i, p := range e.sig.params {
		if p.role == scalar && l.at[i] == nil {
			d := e.defaults[p.name]
			l.defaults[i] = Operand{role: scalar, dtype: d.dtype, bits: d.bits}
			l.at[i] = &l.defaults[i]
		}
	}
	return nil
}

// place puts the nth input or output where the function has it.
func (e *Elementwise) place(l *job, o *Operand, r role, n int) {
	for i := range e.arity() {
		if e.roleOf(i) != r {
			continue
		}
		if n == 0 {
			l.at[i] = o
			return
		}
		n--
	}
}

// check compares the lengths and places of the slices.
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
		case o.dev != nil && o.dev != l.dev:
			return fmt.Errorf("operand %d is memory of %s, the stream is of %s", i, o.dev, l.dev)
		case isFloat8(o.dtype):
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

// overlaps reports whether writing p spoils o: they share memory and are not an
// input and an output of the same elements.
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

// common is the type of the computation.
func (l *job) common(operands []Operand) (memory.DType, error) {
	arrays, numbers := memory.Invalid, memory.Invalid
	var err error
	for i := range operands {
		o := &operands[i]
		switch o.role {
		case input:
			if arrays, err = promote(arrays, o.dtype); err != nil {
				return 0, err
			}
		case number:
			if numbers, err = promote(numbers, o.dtype); err != nil {
				return 0, err
			}
		}
	}
	common, err := resultType(arrays, numbers)
	if err != nil {
		return 0, err
	}
	for i := range operands {
		if o := &operands[i]; o.role == output && !canCast(common, o.dtype) {
			return 0, fmt.Errorf("the result is of %s and cannot be cast to the %s of operand %d", common, o.dtype, i)
		}
	}
	return common, nil
}

// items is how many elements a thread computes: enough bytes on their way to
// keep the memory busy.
func (l *job) items() int {
	widest := 1
	for _, o := range l.at {
		if o != nil && (o.role == input || o.role == output) {
			widest = max(widest, o.dtype.Size())
		}
	}
	return itemsOf(widest)
}

func itemsOf(widest int) int { return max(4, 8/widest) }
