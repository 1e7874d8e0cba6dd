package amp_test

import (
	"errors"
	"fmt"
	"log"
	"math"

	"github.com/gochorus/chorus/amp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// A step with an infinite gradient is skipped on the device, and the scale is halved.
func ExampleNewScaler() {
	if err := scale(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// scale 1024, parameter [0.5]
	// scale 512, parameter [0.5]
}

func scale() error {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		return err
	}
	s := stream.Default(sys.Devices()[0])
	flat, parts, err := memory.MakeFlat[float32](s, 1, 1)
	if err != nil {
		return err
	}
	defer flat.Close()
	value, grad := parts[0], parts[1]
	if err := value.CopyFrom(s, []float32{1}); err != nil {
		return err
	}
	groups := []optim.Group{{Params: []optim.Param{optim.Of(value, grad)}}}
	opt, err := optim.NewSGD(s, groups, &optim.SGDConfig{LR: 0.5})
	if err != nil {
		return err
	}
	defer opt.Close()
	scaler, err := amp.NewScaler(s, &amp.ScalerConfig{InitScale: 1024})
	if err != nil {
		return err
	}
	defer scaler.Close()
	for _, g := range []float32{1024, float32(math.Inf(1))} { // of a loss that is multiplied by the scale
		err := errors.Join(grad.CopyFrom(s, []float32{g}), scaler.Step(s, opt, nil), scaler.Update(s))
		if err != nil {
			return err
		}
		state, err := scaler.State(s)
		if err != nil {
			return err
		}
		out := make([]float32, 1)
		if err := value.CopyTo(s, out); err != nil {
			return err
		}
		fmt.Printf("scale %g, parameter %v\n", state.Scale, out)
	}
	return nil
}

// The type of an operation, as torch.autocast chooses it.
func ExampleAutocast_Type() {
	policy := amp.Autocast{Lower: memory.BFloat16}
	for _, operation := range []string{"matmul", "softmax", "relu"} {
		t, err := policy.Type(operation, memory.Float32)
		fmt.Println(operation, t, err)
	}
	// Output:
	// matmul bfloat16 <nil>
	// softmax float32 <nil>
	// relu invalid <nil>
}

func ExampleClassOf() {
	fmt.Println(amp.ClassOf("matmul"), amp.ClassOf("exp"), amp.ClassOf("addcmul"))
	// Output: lower float32 widest
}
