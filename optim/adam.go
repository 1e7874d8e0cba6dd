package optim

import (
	"cmp"
	"math"

	"github.com/gochorus/chorus/stream"
)

// AdamConfig are the options of NewAdam and NewAdamW, with torch's names and defaults. nil
// means the defaults.
type AdamConfig struct {
	LR          float64    // learning rate; 0 means 1e-3
	Betas       [2]float64 // zero means 0.9 and 0.999
	Eps         float64    // 0 means 1e-8
	WeightDecay *float64   // nil means 0.01 for AdamW and 0 for Adam
	AMSGrad     bool       // divide by the largest second moment so far
	Maximize    bool       // ascend
}

// NewAdamW returns torch.optim.AdamW(fused=True) for the groups: weight decay
// is subtracted from the parameters. The state, which is zero, is allocated on
// s. A graph cannot capture the call.
func NewAdamW(s *stream.Stream, groups []Group, cfg *AdamConfig) (*Optimizer, error) {
	return newAdam(s, "new AdamW", groups, cfg, flagDecoupled, 0.01)
}

// NewAdam returns torch.optim.Adam(fused=True) for the groups: weight decay is
// added to the gradients. The state, which is zero, is allocated on s. A graph
// cannot capture the call.
func NewAdam(s *stream.Stream, groups []Group, cfg *AdamConfig) (*Optimizer, error) {
	return newAdam(s, "new Adam", groups, cfg, 0, 0)
}

func newAdam(s *stream.Stream, op string, groups []Group, cfg *AdamConfig, flags uint32, decay float64) (*Optimizer, error) {
	c := *cmp.Or(cfg, new(AdamConfig))
	if c.LR == 0 {
		c.LR = 1e-3
	}
	if c.Betas == [2]float64{} {
		c.Betas = [2]float64{0.9, 0.999}
	}
	if c.Eps == 0 {
		c.Eps = 1e-8
	}
	if c.WeightDecay != nil {
		decay = *c.WeightDecay
	}
	for _, b := range c.Betas {
		if !(b >= 0 && b < 1) {
			return nil, refuse(op, "betas %v: want numbers from 0 up to, and without, 1", c.Betas)
		}
	}
	if !(c.Eps >= 0) || math.IsInf(c.Eps, 0) {
		return nil, refuse(op, "eps %v: want a finite number of 0 or more", c.Eps)
	}
	if c.Maximize {
		flags |= flagMaximize
	}
	o := &Optimizer{flags: flags, slots: slotFirst | slotSecond, kernel: func(k *kernels) kernelOf { return k.adam }}
	if c.AMSGrad {
		o.slots |= slotMost
	}
	return o.open(s, op, groups, options{lr: c.LR, a: c.Betas[0], b: c.Betas[1], eps: c.Eps, decay: decay})
}

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
	c := *cmp.Or(cfg, new(SGDConfig))
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
