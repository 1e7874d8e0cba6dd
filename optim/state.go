package optim

import (
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A State is the state of one parameter, with torch's names. Tensors that the optimiser
// does not have are zero Tensors. They borrow the optimiser's memory.
type State struct {
	Step           memory.Slice[float32] // one element; the parameters of a group share it
	ExpAvg         tensor.Tensor         // of Adam and AdamW
	ExpAvgSq       tensor.Tensor
	MaxExpAvgSq    tensor.Tensor // with AMSGrad
	MomentumBuffer tensor.Tensor // of SGD with momentum
}

// State returns the state of all parameters, group by group, for checkpoints.
func (o *Optimizer) State() []State {
	if o == nil || o.owner.Closed() {
		return nil
	}
	all := make([]State, len(o.params))
	for i := range o.params {
		p := &o.params[i]
		all[i] = State{Step: o.steps.Slice(p.group, p.group+1), ExpAvgSq: p.states[1], MaxExpAvgSq: p.states[2]}
		if o.slots&slotSecond != 0 {
			all[i].ExpAvg = p.states[0]
		} else {
			all[i].MomentumBuffer = p.states[0]
		}
	}
	return all
}

// SetStep enqueues on s the change of a group's step counter, which a loaded state needs.
func (o *Optimizer) SetStep(s *stream.Stream, group int, step float32) error {
	const op = "set step"
	k, err := o.enter(op, s)
	if err != nil {
		return err
	}
	if group < 0 || group >= len(o.groups) || !(step >= 0) || math.IsInf(float64(step), 0) {
		return refuse(op, "%v of group %d: want a finite number of 0 or more, and a group below %d", step, group, len(o.groups))
	}
	return k.put32.Launch(s, one, kernel.Ptr(o.steps.Slice(group, group+1)), kernel.Scalar[float32](step))
}

// LoadState enqueues on s copies of the states of all parameters from tensors of the same
// shapes, or of one dimension with as many elements, of any type, on the device or in host
// memory. LoadState ignores Step, which the parameters of a group share: call SetStep for each
// group. If a state is missing, was closed, has another shape or shares memory with another state
// of the optimiser, LoadState returns an error and copies nothing.
func (o *Optimizer) LoadState(s *stream.Stream, from []State) error {
	const op = "load state"
	if _, err := o.enter(op, s); err != nil {
		return err
	}
	if len(from) != len(o.params) {
		return refuse(op, "states of %d parameters: the optimiser has %d", len(from), len(o.params))
	}
	var to, of []tensor.Tensor
	for i, mine := range o.State() {
		theirs := from[i]
		for _, pair := range [...]statePair{
			{"exp_avg", mine.ExpAvg, theirs.ExpAvg}, {"exp_avg_sq", mine.ExpAvgSq, theirs.ExpAvgSq},
			{"max_exp_avg_sq", mine.MaxExpAvgSq, theirs.MaxExpAvgSq}, {"momentum_buffer", mine.MomentumBuffer, theirs.MomentumBuffer},
		} {
			view, err := pair.check(op, i)
			if err != nil {
				return err
			}
			if pair.to.DType() != memory.Invalid {
				to, of = append(to, pair.to), append(of, view)
			}
		}
	}
	if err := separate(op, to, of); err != nil {
		return err
	}
	for i := range to {
		if err := tensor.Copy(s, to[i], of[i]); err != nil {
			return refuse(op, "%w", err)
		}
	}
	return nil
}

// separate returns an error if a copy would overwrite the source of another
// copy, but permits loading a state from itself.
func separate(op string, to, of []tensor.Tensor) error {
	states := map[*memory.Buffer]int{}
	for i := range to {
		states[to[i].Buffer()] = i
	}
	for i := range of {
		if k, ok := states[of[i].Buffer()]; ok && k != i && of[i].Len() > 0 && !of[i].IsHost() {
			return refuse(op, "a state to load is another state of this optimiser, which the call overwrites: load from a copy")
		}
	}
	return nil
}

// A statePair is a state of a parameter, and the tensor to load it from.
type statePair struct {
	name     string
	to, from tensor.Tensor
}

// check returns the tensor to load from with the shape of the state, or an error.
func (x *statePair) check(op string, param int) (tensor.Tensor, error) {
	if has, given := x.to.DType() != memory.Invalid, x.from.DType() != memory.Invalid; has != given {
		return x.from, refuse(op, "%s of parameter %d: the optimiser has it: %t, the state has it: %t", x.name, param, has, given)
	} else if !has {
		return x.from, nil
	}
	if x.to.Len() != x.from.Len() {
		return x.from, refuse(op, "%s of parameter %d has %d elements: want %d", x.name, param, x.from.Len(), x.to.Len())
	}
	if x.to.Dims() > 1 && x.from.Dims() > 1 && !slices.Equal(x.to.Shape(), x.from.Shape()) {
		return x.from, refuse(op, "%s of parameter %d has shape %v: want %v, or one dimension", x.name, param, x.from.Shape(), x.to.Shape())
	}
	view := x.from
	if !slices.Equal(x.to.Shape(), x.from.Shape()) {
		var err error
		if view, err = x.from.View(x.to.Shape()...); err != nil {
			return view, refuse(op, "%s of parameter %d: %w", x.name, param, err)
		}
	}
	if err := strided.CheckCopy(fmt.Sprintf("%s of parameter %d", x.name, param), x.to, view); err != nil {
		return view, refuse(op, "%w", err)
	}
	return view, nil
}
