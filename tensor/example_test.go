package tensor_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A product of two matrices, the second one transposed without a copy.
func Example() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	x, errX := memory.MakeFrom(s, []float32{1, 2, 3, 4, 5, 6}) // 2 rows of 3
	y, errY := memory.MakeFrom(s, []float32{1, 0, 0, 0, 1, 1}) // 2 rows of 3
	z, errZ := memory.Make[float32](s, 4)
	if err := errors.Join(errX, errY, errZ); err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	defer y.Close()
	defer z.Close()
	a, errX := tensor.Of(x, 2, 3)
	b, errY := tensor.Of(y, 2, 3)
	c, errZ := tensor.Of(z, 2, 2)
	if err := errors.Join(errX, errY, errZ); err != nil {
		log.Fatal(err)
	}
	if err := tensor.MatMul(s, c, a, b.T(), nil); err != nil {
		log.Fatal(err)
	}
	out := make([]float32, 4)
	if err := z.CopyTo(s, out); err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output: [1 5 4 11]
}

// The columns of a matrix are packed and rounded on the device.
func ExampleCopy() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	x, errX := tensor.Make(s, memory.Float32, 2, 3)
	y, errY := tensor.Make(s, memory.Int32, 2, 2)
	in, errIn := tensor.OfHost([]float32{0.5, 1.5, 2.5, 3.5, 4.5, 5.5}, 2, 3)
	out := make([]int32, 4)
	to, errOut := tensor.OfHost(out, 2, 2)
	if err := errors.Join(errX, errY, errIn, errOut); err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	defer y.Close()
	last, err := x.Narrow(1, 1, 2) // the last two columns
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(tensor.Copy(s, x, in), tensor.Copy(s, y, last), tensor.Copy(s, to, y)); err != nil {
		log.Fatal(err)
	}
	fmt.Println(out)
	// Output: [1 2 4 5]
}

// The two greatest scores of each token choose its experts.
func ExampleTopK() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer s.Close()
	scores, errX := memory.MakeFrom(s, []float32{1, 4, 3, 2, 0, 9}) // of 3 experts for 2 tokens
	best, errY := memory.Make[float32](s, 4)
	experts, errZ := memory.Make[int32](s, 4)
	if err := errors.Join(errX, errY, errZ); err != nil {
		log.Fatal(err)
	}
	defer scores.Close()
	defer best.Close()
	defer experts.Close()
	x, errX := tensor.Of(scores, 2, 3)
	values, errY := tensor.Of(best, 2, 2)
	indexes, errZ := tensor.Of(experts, 2, 2)
	if err := errors.Join(errX, errY, errZ); err != nil {
		log.Fatal(err)
	}
	if err := tensor.TopK(s, values, indexes, x); err != nil {
		log.Fatal(err)
	}
	chosen := make([]int32, 4)
	if err := experts.CopyTo(s, chosen); err != nil {
		log.Fatal(err)
	}
	fmt.Println(chosen)
	// Output: [1 2 2 0]
}
