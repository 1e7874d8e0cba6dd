// Elementwise creates kernels from functions of single elements: one with two
// results, and an expression over slices of different types.
package main

import (
	"fmt"
	"log"
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func main() {
	log.SetFlags(0)
	log.SetPrefix("elementwise: ")
	if err := program(); err != nil {
		log.Fatal(err)
	}
}

// polar returns two results through parameters. polarGo is its stand-in on
// virtual devices.
const polar = `template <typename T> void polar(T x, T y, T& radius, T& angle) {
	radius = sqrt(x * x + y * y);
	angle = atan2(y, x);
}`

func polarGo(in, out []float64) { out[0], out[1] = math.Hypot(in[0], in[1]), math.Atan2(in[1], in[0]) }

// leaky is an expression with a parameter that has a default value.
const leaky = "x > 0 ? x : slope * x"

func leakyGo(in, out []float64) {
	if out[0] = in[0]; in[0] <= 0 {
		out[0] = in[1] * in[0]
	}
}

func program() error {
	sys, note, err := device.OrVirtual()
	if err != nil {
		return err
	}
	if note != "" {
		log.Print(note)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		return err
	}
	defer s.Close()
	if err := toPolar(s); err != nil {
		return err
	}
	return activate(s)
}

func toPolar(s *stream.Stream) error {
	e, err := kernel.NewElementwise(polar, &kernel.ElementwiseConfig{Floats: polarGo})
	if err != nil {
		return err
	}
	defer e.Close()
	x, err := memory.MakeFrom(s, []float32{3, 0, -2})
	if err != nil {
		return err
	}
	defer x.Close()
	y, err := memory.MakeFrom(s, []float32{4, 1, 0})
	if err != nil {
		return err
	}
	defer y.Close()
	// The results overwrite the inputs.
	if err := e.Launch(s, kernel.In(x), kernel.In(y), kernel.Out(x), kernel.Out(y)); err != nil {
		return err
	}
	radius, angle := make([]float32, 3), make([]float32, 3)
	if err := x.CopyTo(s, radius); err != nil {
		return err
	}
	if err := y.CopyTo(s, angle); err != nil {
		return err
	}
	fmt.Printf("on %s: radius %.3f, angle %.3f\n", s.Device(), radius, angle)
	return nil
}

func activate(s *stream.Stream) error {
	e, err := kernel.NewElementwise(leaky, &kernel.ElementwiseConfig{
		Inputs:   []string{"x"},
		Defaults: []kernel.Operand{kernel.Set("slope", 0.01)},
		Floats:   leakyGo,
	})
	if err != nil {
		return err
	}
	defer e.Close()
	x, err := memory.MakeFrom(s, []memory.BFloat16Bits{memory.BFloat16Of(-2), memory.BFloat16Of(0), memory.BFloat16Of(3)})
	if err != nil {
		return err
	}
	defer x.Close()
	y, err := memory.Make[float32](s, x.Len())
	if err != nil {
		return err
	}
	defer y.Close()
	// The same function with other types and another slope.
	if err := e.Launch(s, kernel.Out(y), kernel.In(x), kernel.Set("slope", 0.25)); err != nil {
		return err
	}
	out := make([]float32, 3)
	if err := y.CopyTo(s, out); err != nil {
		return err
	}
	fmt.Printf("leaky: %v\n", out)
	return nil
}
