package optim

import (
	"math"

	"github.com/gochorus/chorus/stream"
)

// SGDConfig are the options of NewSGD, with torch's names and defaults. nil means the
// defaults.
type SGDConfig struct {
	LR          float64 // learning rate; 0 means 1e-3
	Momentum    float64
	Dampening   float64
	WeightDecay float64
	Nesterov    bool // needs momentum, and no dampening
	Maximize    bool // ascend
}

// NewSGD returns torch.optim.SGD(fused=True) for the groups. With momentum, a state is
// allocated on s; the first step that is not skipped sets it. A graph cannot capture the call.
func NewSGD(s *stream.Stream, groups []Group, cfg *SGDConfig) (*Optimizer, error) {
	const op = "new SGD"
	var c SGDConfig
	if cfg != nil {
		c = *cfg
	}
	if c.LR == 0 {
		c.LR = 1e-3
	}
	if !(c.Momentum >= 0) || math.IsInf(c.Momentum, 0) {
		return nil, refuse(op, "momentum %v: want a finite number of 0 or more", c.Momentum)
	}
	if math.IsNaN(c.Dampening) || math.IsInf(c.Dampening, 0) {
		return nil, refuse(op, "dampening %v: want a finite number", c.Dampening)
	}
	o := &Optimizer{kernel: func(k *kernels) kernelOf { return k.sgd }}
	if c.Nesterov {
		if c.Momentum == 0 || c.Dampening != 0 {
			return nil, refuse(op, "Nesterov with momentum %v and dampening %v: want momentum above 0, and dampening 0", c.Momentum, c.Dampening)
		}
		o.flags |= flagNesterov
	}
	if c.Maximize {
		o.flags |= flagMaximize
	}
	if c.Momentum != 0 {
		o.slots = slotFirst
	}
	return o.open(s, op, groups, options{lr: c.LR, a: c.Momentum, b: c.Dampening, decay: c.WeightDecay})
}
