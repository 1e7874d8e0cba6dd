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

// withMatrices runs an example on a virtual device with two matrices and memory for a result, all
// of shape [2 2].
func withMatrices(example func(s *stream.Stream, a, b, c tensor.Tensor) error) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s := stream.Default(sys.Devices()[0])
	flat, parts, err := memory.MakeFlat[float32](s, 4, 4, 4)
	if err != nil {
		log.Fatal(err)
	}
	var t [3]tensor.Tensor
	for i, numbers := range [][]float32{{1, 2, 3, 4}, {1, 1, 0, 1}, {0, 0, 0, 0}} {
		if err := parts[i].CopyFrom(s, numbers); err != nil {
			log.Fatal(err)
		}
		if t[i], err = tensor.Of(parts[i], 2, 2); err != nil {
			log.Fatal(err)
		}
	}
	if err := errors.Join(example(s, t[0], t[1], t[2]), flat.Close()); err != nil {
		log.Fatal(err)
	}
}

// print prints a tensor of the device in row-major order.
func print(s *stream.Stream, t tensor.Tensor) error {
	out := make([]float32, t.Len())
	host, err := tensor.OfHost(out, t.Shape()...)
	if err != nil {
		return err
	}
	err = tensor.Copy(s, host, t)
	fmt.Println(t.Shape(), out)
	return err
}

func ExampleMatMul() {
	withMatrices(func(s *stream.Stream, a, b, c tensor.Tensor) error {
		if err := tensor.MatMul(s, c, a, b, nil); err != nil {
			return err
		}
		return print(s, c)
	})
	// Output: [2 2] [1 3 3 7]
}

// A linear layer with a bias and ReLU is one kernel. The weights are transposed by a view.
func ExampleMatMul_epilogue() {
	withMatrices(func(s *stream.Stream, a, b, c tensor.Tensor) error {
		bias, err := memory.MakeFrom(s, []float32{-4, 0})
		if err != nil {
			return err
		}
		defer bias.Close()
		t, err := tensor.Of(bias, 2)
		if err != nil {
			return err
		}
		cfg := &tensor.MatMulConfig{Bias: t, Epilogue: tensor.ReLU}
		if err := tensor.MatMul(s, c, a, b.T(), cfg); err != nil {
			return err
		}
		return print(s, c)
	})
	// Output: [2 2] [0 2 3 4]
}

// The first row is multiplied by one matrix and the second by another one, as tokens are by the weights of their experts. The
// device reads where each group ends.
func ExampleGroupedMatMulAt() {
	withMatrices(func(s *stream.Stream, a, _, c tensor.Tensor) (err error) {
		weights, err := tensor.MakeFrom(s, []float32{1, 0, 0, 1, 10, 0, 0, 10}, 2, 2, 2)
		if err != nil {
			return err
		}
		defer weights.Close()
		ends, err := tensor.MakeFrom(s, []int32{1, 2}, 2)
		if err != nil {
			return err
		}
		defer ends.Close()
		if err := tensor.GroupedMatMulAt(s, c, a, weights, ends, nil); err != nil {
			return err
		}
		return print(s, c)
	})
	// Output: [2 2] [1 2 30 40]
}

func ExampleAdd() {
	withMatrices(func(s *stream.Stream, a, b, c tensor.Tensor) error {
		if err := tensor.Add(s, c, a, b); err != nil {
			return err
		}
		return print(s, c)
	})
	// Output: [2 2] [2 3 3 5]
}

// Views share the memory of their tensor.
func ExampleTensor_Narrow() {
	withMatrices(func(s *stream.Stream, a, _, _ tensor.Tensor) error {
		column, err := a.Narrow(1, 1, 1)
		if err != nil {
			return err
		}
		return errors.Join(print(s, column), print(s, a.T()))
	})
	// Output:
	// [2 1] [2 4]
	// [2 2] [1 3 2 4]
}

// A copy converts between types.
func ExampleMakeLike() {
	withMatrices(func(s *stream.Stream, a, _, _ tensor.Tensor) error {
		half, err := tensor.MakeLike(s, a, memory.Float16)
		if err != nil {
			return err
		}
		defer half.Close()
		if err := tensor.Copy(s, half, a); err != nil {
			return err
		}
		fmt.Println(half.DType(), half.Shape(), half.Bytes())
		return nil
	})
	// Output: float16 [2 2] 8
}
