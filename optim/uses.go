package optim

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// watched tells the sanitizer, if there is one, which tensors a launch found in its table. It
// returns err, the error of the launch.
func watched(s *stream.Stream, name string, err error, list func() []cudadrv.Use) error {
	if err == nil {
		gpu.StreamOf(s).Uses(name, false, list)
	}
	return err
}

// useOf returns the use of a contiguous tensor.
func useOf(x *tensor.Tensor, write bool) cudadrv.Use {
	return cudadrv.Use{Ptr: cudadrv.DevicePtr(x.Ptr()), Bytes: uint64(x.Bytes()), Write: write}
}

// uses lists the memory that a step finds in its table.
func (o *Optimizer) uses() (uses []cudadrv.Use) {
	for i := range o.params {
		p := &o.params[i]
		uses = append(uses, useOf(&p.Value, true), useOf(&p.Grad, false), useOf(&p.Copy, true))
		for k := range p.states {
			uses = append(uses, useOf(&p.states[k], true))
		}
	}
	return uses
}

// reads lists the gradients as read.
func (g *Grads) reads() []cudadrv.Use { return g.uses(false) }

// writes lists the gradients as written.
func (g *Grads) writes() []cudadrv.Use { return g.uses(true) }

func (g *Grads) uses(write bool) (uses []cudadrv.Use) {
	for i := range g.list {
		uses = append(uses, useOf(&g.list[i], write))
	}
	return uses
}
