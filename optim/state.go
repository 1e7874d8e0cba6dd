package optim

import (
	"math"

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

// State returns the state of all parameters, in the order of the groups, for checkpoints.
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
// lengths, of any type, on the device or in host memory. The steps are set by SetStep. If a
// state is missing or has another length, LoadState returns an error and copies nothing.
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
		for _, pair := range [...]struct {
			name     string
			to, from tensor.Tensor
		}{
			{"exp_avg", mine.ExpAvg, theirs.ExpAvg}, {"exp_avg_sq", mine.ExpAvgSq, theirs.ExpAvgSq},
			{"max_exp_avg_sq", mine.MaxExpAvgSq, theirs.MaxExpAvgSq}, {"momentum_buffer", mine.MomentumBuffer, theirs.MomentumBuffer},
		} {
			switch has, given := pair.to.DType() != memory.Invalid, pair.from.DType() != memory.Invalid; {
			case has != given:
				return refuse(op, "%s of parameter %d: the optimiser has it: %t, the state has it: %t", pair.name, i, has, given)
			case !has:
				continue
			case pair.to.Len() != pair.from.Len():
				return refuse(op, "%s of parameter %d has %d elements: want %d", pair.name, i, pair.from.Len(), pair.to.Len())
			}
			view, err := pair.from.View(pair.to.Shape()...)
			if err != nil {
				return refuse(op, "%s of parameter %d: %w", pair.name, i, err)
			}
			to, of = append(to, pair.to), append(of, view)
		}
	}
	for i := range to {
		if err := tensor.Copy(s, to[i], of[i]); err != nil {
			return refuse(op, "%w", err)
		}
	}
	return nil
}
