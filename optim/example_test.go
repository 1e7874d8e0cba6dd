package optim_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// onVirtual runs an example on a virtual device, so that the examples run anywhere, with a
// parameter of two elements and its gradient.
func onVirtual(example func(s *stream.Stream, value, grad memory.Slice[float32]) error) {
	if err := withParam(example); err != nil {
		log.Fatal(err)
	}
}

func withParam(example func(s *stream.Stream, value, grad memory.Slice[float32]) error) error {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		return err
	}
	s := stream.Default(sys.Devices()[0])
	value, err := memory.MakeFrom(s, []float32{1, 2})
	if err != nil {
		return err
	}
	defer value.Close()
	grad, err := memory.MakeFrom(s, []float32{3, 4})
	if err != nil {
		return err
	}
	defer grad.Close()
	return example(s, value, grad)
}

// print waits for s and prints numbers of the device.
func print(s *stream.Stream, x memory.Slice[float32]) error {
	out := make([]float32, x.Len())
	err := x.CopyTo(s, out)
	fmt.Println(out)
	return err
}

func ExampleNewSGD() {
	onVirtual(func(s *stream.Stream, value, grad memory.Slice[float32]) error {
		groups := []optim.Group{{Params: []optim.Param{optim.Of(value, grad)}}}
		opt, err := optim.NewSGD(s, groups, &optim.SGDConfig{LR: 0.5})
		if err != nil {
			return err
		}
		defer opt.Close()
		if err := opt.Step(s, nil); err != nil {
			return err
		}
		return print(s, value)
	})
	// Output: [-0.5 0]
}

// Biases and weights have different options.
func ExampleNewAdamW() {
	onVirtual(func(s *stream.Stream, value, grad memory.Slice[float32]) error {
		weight := optim.Of(value.Slice(0, 1), grad.Slice(0, 1))
		bias := optim.Of(value.Slice(1, 2), grad.Slice(1, 2))
		opt, err := optim.NewAdamW(s, []optim.Group{
			{Params: []optim.Param{weight}},
			{Params: []optim.Param{bias}, WeightDecay: new(0.0)},
		}, &optim.AdamConfig{LR: 0.5, WeightDecay: new(0.1)})
		if err != nil {
			return err
		}
		defer opt.Close()
		if err := opt.Step(s, nil); err != nil {
			return err
		}
		out := make([]float32, 2)
		err = value.CopyTo(s, out)
		fmt.Printf("%.2f\n", out)
		return err
	})
	// Output: [0.45 1.50]
}

// The norm of the gradients is 5. The optimiser reads them multiplied by 1/5, and the host does
// not wait for the norm.
func ExampleNewGrads() {
	onVirtual(func(s *stream.Stream, value, grad memory.Slice[float32]) error {
		p := optim.Of(value, grad)
		opt, err := optim.NewSGD(s, []optim.Group{{Params: []optim.Param{p}}}, &optim.SGDConfig{LR: 1})
		if err != nil {
			return err
		}
		defer opt.Close()
		grads, err := optim.NewGrads(s, opt.Gradients()...)
		if err != nil {
			return err
		}
		defer grads.Close()
		if _, err := grads.Powers(s, 2); err != nil {
			return err
		}
		norm, factor, err := grads.Coef(s, 1)
		if err != nil {
			return err
		}
		if err := opt.Step(s, &optim.StepConfig{Clip: factor}); err != nil {
			return err
		}
		out := make([]float32, 2)
		err = errors.Join(print(s, norm), value.CopyTo(s, out))
		fmt.Printf("%.2f\n", out)
		return err
	})
	// Output:
	// [5]
	// [0.40 1.20]
}

func ExampleGrads_ClipNorm() {
	onVirtual(func(s *stream.Stream, value, grad memory.Slice[float32]) error {
		p := optim.Of(value, grad)
		grads, err := optim.NewGrads(s, p.Grad)
		if err != nil {
			return err
		}
		defer grads.Close()
		norm, err := grads.ClipNorm(s, 1, 2)
		if err != nil {
			return err
		}
		out := make([]float32, 2)
		err = errors.Join(print(s, norm), grad.CopyTo(s, out))
		fmt.Printf("%.2f\n", out)
		return err
	})
	// Output:
	// [5]
	// [0.60 0.80]
}

// A schedule changes the learning rate of a group between two steps.
func ExampleOptimizer_SetLR() {
	onVirtual(func(s *stream.Stream, value, grad memory.Slice[float32]) error {
		groups := []optim.Group{{Params: []optim.Param{optim.Of(value, grad)}}}
		opt, err := optim.NewSGD(s, groups, nil)
		if err != nil {
			return err
		}
		defer opt.Close()
		for _, lr := range []float64{0.5, 0.25} {
			if err := errors.Join(opt.SetLR(s, 0, lr), opt.Step(s, nil), print(s, value)); err != nil {
				return err
			}
		}
		return nil
	})
	// Output:
	// [-0.5 0]
	// [-1.25 -1]
}

// The state of an optimiser has torch's names, for checkpoints.
func ExampleOptimizer_State() {
	onVirtual(func(s *stream.Stream, value, grad memory.Slice[float32]) error {
		groups := []optim.Group{{Params: []optim.Param{optim.Of(value, grad)}}}
		opt, err := optim.NewAdamW(s, groups, nil)
		if err != nil {
			return err
		}
		defer opt.Close()
		for name, t := range opt.State()[0].All() {
			fmt.Println(name, t.Shape())
		}
		return nil
	})
	// Output:
	// step []
	// exp_avg [2]
	// exp_avg_sq [2]
}
