package optim

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// An Optimizer updates parameters by their gradients.
type Optimizer struct {
	owner  handle.Owner
	graphs gpu.Graphs // that have captured operations
	dev    *device.Device
	kernel func(*kernels) kernelOf
	flags  uint32
	slots  slots
	groups []Group
	params []held // of all groups, in order
	table  table[entry]
	rates  memory.Slice[float64] // the options of the groups, as the kernel reads them
	steps  memory.Slice[float32] // by group
	done   memory.Slice[uint32]  // counts blocks

	written   spans    // values and copies, sorted
	followers []*Grads // whose gradients SetGradients sets
}

type kernelOf = *kernel.Kernel

// The flags of the kernels.
const (
	flagMaximize = 1 << iota
	flagDecoupled
	flagNesterov
)

// slots says which states an optimiser has.
type slots uint8

const (
	slotFirst slots = 1 << iota // exp_avg, or momentum_buffer
	slotSecond
	slotMost
)

// held is a parameter with its state.
type held struct {
	Param
	group  int
	states [3]tensor.Tensor // by slot
}

// options are the options of a group, as the Group of optim.cu.
type options struct {
	lr, a, b, eps, decay float64
	_                    [3]float64
}

const optionWords = 8

// StepConfig are device numbers that change a step, each a slice of one element. The zero
// Slice means none.
type StepConfig struct {
	// GradScale divides the gradients (torch's grad_scale). The gradients in memory stay
	// as they are.
	GradScale memory.Slice[float32]
	// Clip multiplies the gradients, after the division, such as Grads.Coef returns it. The
	// gradients in memory stay as they are.
	Clip memory.Slice[float32]
	// If FoundInf is not 0, the step changes nothing and does not count (torch's found_inf).
	FoundInf memory.Slice[float32]
}

// open checks the groups and allocates the state.
func (o *Optimizer) open(s *stream.Stream, op string, groups []Group, with options) (*Optimizer, error) {
	if s == nil {
		return nil, refuse(op, "no stream given")
	}
	o.dev = s.Device()
	all, err := o.check(op, groups, with)
	if err != nil {
		return nil, err
	}
	if _, err := kernelsOf(o.dev); err != nil {
		return nil, refuse(op, "%w", err)
	}
	handle.Init(o, &o.owner, handle.About{Kind: "optimiser", On: o.dev})
	if err := o.allocate(s, all); err != nil {
		return nil, errors.Join(refuse(op, "%w", err), o.Close())
	}
	return o, nil
}

// check returns the options of each group.
func (o *Optimizer) check(op string, groups []Group, with options) (all []options, err error) {
	seen := map[uint64]bool{}
	for g, group := range groups {
		one := with
		if group.LR != 0 {
			one.lr = group.LR
		}
		if group.WeightDecay != nil {
			one.decay = *group.WeightDecay
		}
		if !(one.lr >= 0) || math.IsInf(one.lr, 0) || !(one.decay >= 0) || math.IsInf(one.decay, 0) {
			return nil, refuse(op, "group %d: learning rate %v and weight decay %v: want finite numbers, 0 or more", g, one.lr, one.decay)
		}
		all = append(all, one)
		for i := range group.Params {
			p := &group.Params[i]
			if err := p.check(op, g, i, o.dev); err != nil {
				return nil, err
			}
			if at := p.Value.Ptr(); p.Value.Len() > 0 {
				if seen[at] {
					return nil, refuse(op, "parameter %d of group %d occurs twice", i, g)
				}
				seen[at] = true
			}
			o.params = append(o.params, held{Param: *p, group: g})
		}
	}
	if len(groups) == 0 {
		return nil, refuse(op, "no groups given: want at least one, which may have no parameters")
	}
	o.groups = slices.Clone(groups)
	return all, o.apart(op)
}

// apart returns an error if a step would overwrite memory that it also reads or writes as
// something else: values and copies share no memory with each other or with a gradient.
// Gradients may share memory, because a step only reads them.
func (o *Optimizer) apart(op string) error {
	var grads spans
	written := &o.written
	for i := range o.params {
		p := &o.params[i]
		written.add(&p.Value, fmt.Sprintf("the value of parameter %d", i))
		written.add(&p.Copy, fmt.Sprintf("the copy of parameter %d", i))
		grads.add(&p.Grad, fmt.Sprintf("the gradient of parameter %d", i))
	}
	if err := written.apart(op); err != nil {
		return err
	}
	for i := range grads {
		if err := written.apartFrom(op, grads[i]); err != nil {
			return err
		}
	}
	return nil
}

// allocate allocates the state and the tables.
func (o *Optimizer) allocate(s *stream.Stream, groups []options) (err error) {
	elements := 0
	for i := range o.params {
		elements += o.params[i].Value.Len()
	}
	chunk, err := chunkOf(o.dev, elements)
	if err != nil {
		return err
	}
	for i := range o.params {
		p := &o.params[i]
		for k := range p.states {
			if o.slots&(1<<k) == 0 {
				continue
			}
			if p.states[k], err = tensor.Make(s, p.Value.DType(), p.Value.Shape()...); err == nil {
				err = p.states[k].Zero(s)
			}
			if err != nil {
				return err
			}
		}
		if err := p.setCopy(s); err != nil {
			return err
		}
		o.table.add(p.entry(), p.Value.Len(), chunk)
	}
	if len(o.params) == 0 { // a launch needs a block
		o.table.add(entry{types: uint32(memory.Float32) | uint32(memory.Float32)<<8}, 0, chunk)
	}
	words := make([]float64, 0, optionWords*len(groups))
	for _, g := range groups {
		words = append(words, g.lr, g.a, g.b, g.eps, g.decay, 0, 0, 0)
	}
	if o.rates, err = memory.MakeFrom(s, words); err != nil {
		return err
	}
	if o.steps, err = memory.MakeFrom(s, make([]float32, len(groups))); err != nil {
		return err
	}
	if o.done, err = memory.MakeFrom(s, []uint32{0}); err != nil {
		return err
	}
	return o.table.upload(s)
}

// setCopy sets the copy to the rounded value.
func (p *held) setCopy(s *stream.Stream) error {
	if p.Copy.DType() == memory.Invalid {
		return nil
	}
	to, err := p.Copy.View(p.Value.Shape()...)
	if err != nil {
		return err
	}
	return tensor.Copy(s, to, p.Value)
}

// RefreshCopies enqueues on s the rounding of all values to their copies, after something other
// than the optimiser has changed the values. Parameters without a copy stay as they are.
func (o *Optimizer) RefreshCopies(s *stream.Stream) error {
	const op = "refresh copies"
	if _, err := o.enter(op, s); err != nil {
		return err
	}
	for i := range o.params {
		if err := o.params[i].setCopy(s); err != nil {
			return refuse(op, "parameter %d: %w", i, err)
		}
	}
	return nil
}

func (p *held) entry() entry {
	return entry{
		value: p.Value.Ptr(), grad: p.Grad.Ptr(), copied: p.Copy.Ptr(), n: uint64(p.Value.Len()), group: uint32(p.group),
		first: p.states[0].Ptr(), second: p.states[1].Ptr(), most: p.states[2].Ptr(),
		types: uint32(p.Value.DType()) | uint32(p.gradType())<<8 | uint32(p.Copy.DType())<<16,
	}
}

// usable returns an error if memory of the parameter was closed, or if it has no gradient.
func (p *held) usable() error {
	if p.Grad.DType() == memory.Invalid {
		return errors.New("it has no gradient: call SetGradients before")
	}
	for _, x := range [...]*tensor.Tensor{&p.Value, &p.Grad, &p.Copy} {
		if x.DType() == memory.Invalid {
			continue
		}
		if err := inside.CheckBuffer("optim", x.Buffer(), x.Len(), nil); err != nil {
			return err
		}
	}
	return nil
}

// Gradients returns the gradients of all groups, in order, such as NewGrads takes them; see also Grads.
func (o *Optimizer) Gradients() []tensor.Tensor {
	if o == nil {
		return nil
	}
	gs := make([]tensor.Tensor, len(o.params))
	for i := range o.params {
		gs[i] = o.params[i].Grad
	}
	return gs
}

// Step enqueues one step on s: a kernel that reads the gradients and updates all parameters
// and states, and counts the step. A graph can capture it if the device has the kernels: make a
// step before the capture. The optimiser must then stay open as long as the graph is launched.
// Step returns an error, and changes nothing, if a parameter or a gradient was closed, or if a
// parameter has no gradient.
func (o *Optimizer) Step(s *stream.Stream, cfg *StepConfig) error {
	const op = "step"
	k, err := o.enter(op, s)
	if err != nil {
		return err
	}
	for i := range o.params {
		if err := o.params[i].usable(); err != nil {
			return refuse(op, "parameter %d: %w", i, err)
		}
	}
	c := *cmp.Or(cfg, new(StepConfig))
	var args [3]kernel.Arg
	for i, x := range [...]memory.Slice[float32]{c.GradScale, c.FoundInf, c.Clip} {
		if args[i], err = number(op, x); err != nil {
			return err
		}
	}
	rows, blocks := o.table.parts()
	err = o.kernel(k).Launch(s, grid(len(o.table.blocks)), kernel.Ptr(rows), kernel.Ptr(blocks), kernel.Ptr(o.rates), kernel.Ptr(o.steps),
		kernel.Ptr(o.done), args[0], args[1], args[2], kernel.Scalar[uint32](uint32(len(o.groups))), kernel.Scalar[uint32](o.flags))
	return watched(s, "kernel of an optimiser's step", err, o.uses)
}

// number returns the argument of a device number, which may be missing.
func number(op string, x memory.Slice[float32]) (kernel.Arg, error) {
	switch {
	case x.Buffer() == nil && x.Len() == 0:
		return kernel.Address(0), nil
	case x.Len() != 1:
		return kernel.Arg{}, refuse(op, "a device number of %d elements: want 1", x.Len())
	}
	return kernel.Ptr(x), nil
}

// enter returns the kernels for an operation on s.
func (o *Optimizer) enter(op string, s *stream.Stream) (*kernels, error) {
	switch {
	case o == nil || o.owner.Closed():
		return nil, refuse(op, "the optimiser: %w", device.ErrClosed)
	case s == nil:
		return nil, refuse(op, "no stream given")
	case s.Device() != o.dev:
		return nil, refuse(op, "a stream on %s: the optimiser is on %s", s.Device(), o.dev)
	}
	if err := o.graphs.Add(gpu.StreamOf(s)); err != nil {
		return nil, refuse(op, "%w", err)
	}
	return kernelsOf(o.dev)
}

// LR returns the learning rate of a group in device memory, one element that a kernel or a
// graph may change. It returns the zero Slice if there is no such group or the optimiser is
// closed.
func (o *Optimizer) LR(group int) memory.Slice[float64] {
	if o == nil || o.owner.Closed() || group < 0 || group >= len(o.groups) {
		return memory.Slice[float64]{}
	}
	return o.rates.Slice(group*optionWords, group*optionWords+1)
}

// SetLR enqueues on s the change of a group's learning rate, which steps
// enqueued later use.
func (o *Optimizer) SetLR(s *stream.Stream, group int, lr float64) error {
	const op = "set learning rate"
	k, err := o.enter(op, s)
	if err != nil {
		return err
	}
	if group < 0 || group >= len(o.groups) || !(lr >= 0) || math.IsInf(lr, 0) {
		return refuse(op, "%v of group %d: want a finite number of 0 or more, and a group below %d", lr, group, len(o.groups))
	}
	return k.put64.Launch(s, one, kernel.Ptr(o.LR(group)), kernel.Scalar[float64](lr))
}

// Close frees the state, but not the parameters, once pending work on its
// stream has finished. While a graph that has captured operations of the
// optimiser is open, Close fails and the optimiser stays open. Close does
// nothing if the optimiser is nil or closed.
func (o *Optimizer) Close() error {
	if o == nil || o.owner.Closed() {
		return nil
	}
	if err := o.graphs.Refuse("optim: close the optimiser on " + o.dev.String()); err != nil {
		return err
	}
	if !o.owner.Close() {
		return nil
	}
	errs := []error{o.table.close(), o.rates.Close(), o.steps.Close(), o.done.Close()}
	for i := range o.params {
		errs = append(errs, closeAll(o.params[i].states[:]))
	}
	return errors.Join(errs...)
}

// A Param is a parameter and its gradient: contiguous tensors of the same length on one
// device. No other tensor of the optimiser shares memory with a value or a copy. The gradient
// has the type of the value, or is float16 or bfloat16 beside a float32 value. The zero Tensor as
// gradient means that SetGradients gives one of the value's type before each step.
type Param struct {
	Value, Grad tensor.Tensor
	// Copy is a float16 or bfloat16 tensor of the same length for models that compute with it:
	// the constructor of the optimiser and every step set it to the rounded value. The zero
	// Tensor means none.
	Copy tensor.Tensor

	err error // of Of
}

// Of returns the parameter of two slices; the zero Slice as grad means none. If their lengths differ
// or a slice is closed, the constructor of the optimiser returns the error.
func Of[T memory.Element](value, grad memory.Slice[T]) Param {
	v, errV := tensor.Of(value, value.Len())
	if errV != nil {
		errV = fmt.Errorf("value: %w", errV)
	}
	if grad == (memory.Slice[T]{}) {
		return Param{Value: v, err: errV}
	}
	g, errG := tensor.Of(grad, grad.Len())
	if errG != nil {
		errG = fmt.Errorf("gradient: %w", errG)
	}
	return Param{Value: v, Grad: g, err: errors.Join(errV, errG)}
}

// A Group is parameters with the same options (torch's param_groups). It may have no parameters, such as on a rank whose shard of
// ddp.Units has no piece. An optimiser needs at least one group; without any parameters its steps change nothing.
type Group struct {
	Params      []Param
	LR          float64  // 0 means the configuration's
	WeightDecay *float64 // nil means the configuration's
}

// check returns an error if the parameter cannot be updated on dev.
func (p *Param) check(op string, group, i int, dev *device.Device) error {
	fail := func(format string, args ...any) error {
		return refuse(op, "parameter %d of group %d: "+format, append([]any{i, group}, args...)...)
	}
	if p.err != nil {
		return fail("%w", p.err)
	}
	if err := checkTensor(p.Value, dev); err != nil {
		return fail("value: %w", err)
	}
	n, v, g := p.Value.Len(), p.Value.DType(), p.Grad.DType()
	if g != memory.Invalid {
		if err := checkTensor(p.Grad, dev); err != nil {
			return fail("gradient: %w", err)
		}
	}
	switch {
	case g == memory.Invalid:
	case p.Grad.Len() != n:
		return fail("%d elements with a gradient of %d: want as many", n, p.Grad.Len())
	case g != v && (v != memory.Float32 || g != memory.Float16 && g != memory.BFloat16):
		return fail("%s with a gradient of %s: want the same type, or float16 or bfloat16 beside float32", v, g)
	}
	if p.Copy.DType() == memory.Invalid {
		return nil
	}
	if err := checkTensor(p.Copy, dev); err != nil {
		return fail("copy: %w", err)
	}
	if c := p.Copy.DType(); c != memory.Float16 && c != memory.BFloat16 || p.Copy.Len() != n {
		return fail("a copy of %d %s elements beside %d: want as many of float16 or bfloat16", p.Copy.Len(), c, n)
	}
	return nil
}

// checkTensor returns an error if kernels on dev cannot work on x.
func checkTensor(x tensor.Tensor, dev *device.Device) error {
	switch {
	case x.DType() == memory.Invalid:
		return fmt.Errorf("there is no tensor")
	case x.IsHost():
		return fmt.Errorf("%s: want memory of a device", x)
	case !x.Contiguous():
		return fmt.Errorf("%s has gaps between its elements: want contiguous memory", x)
	}
	switch x.DType() {
	case memory.Float16, memory.BFloat16, memory.Float32, memory.Float64:
		return inside.CheckBuffer("optim", x.Buffer(), x.Len(), dev)
	}
	return fmt.Errorf("%s: want float16, bfloat16, float32 or float64", x)
}

// All returns the tensors that the state has with torch's names: step (a tensor without
// dimensions), exp_avg, exp_avg_sq, max_exp_avg_sq and momentum_buffer. A checkpoint that
// restores all of them, and the parameters, restores the optimiser; see
// [Optimizer.RefreshCopies]. The order is the same on all ranks.
func (x State) All() iter.Seq2[string, tensor.Tensor] {
	return func(yield func(string, tensor.Tensor) bool) {
		if x.Step.Len() == 1 {
			if step, err := tensor.Of(x.Step); err == nil && !yield("step", step) {
				return
			}
		}
		for _, t := range [...]struct {
			name string
			of   tensor.Tensor
		}{
			{"exp_avg", x.ExpAvg}, {"exp_avg_sq", x.ExpAvgSq}, {"max_exp_avg_sq", x.MaxExpAvgSq}, {"momentum_buffer", x.MomentumBuffer},
		} {
			if t.of.DType() != memory.Invalid && !yield(t.name, t.of) {
				return
			}
		}
	}
}

// refuse returns the error of an operation that changed nothing.
func refuse(op, format string, args ...any) error {
	return fmt.Errorf("optim: %s: %w", op, fmt.Errorf(format, args...))
}
