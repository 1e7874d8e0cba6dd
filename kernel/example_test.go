package kernel_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"os/exec"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// onVirtual runs fn with a stream of a virtual device; a program would take
// device.Open(0).
func onVirtual(fn func(s *stream.Stream) error) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	if err != nil {
		log.Fatal(err)
	}
	s, err := stream.New(sys.Devices()[0], nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := errors.Join(fn(s), s.Close()); err != nil {
		log.Fatal(err)
	}
}

type scaleArgs struct {
	X  memory.Slice[float32]
	By float32
	N  int32
}

// scaling returns a source with one kernel, and the function that launches it.
func scaling() (*kernel.Source, *kernel.Func[scaleArgs]) {
	src := &kernel.Source{Name: "scale.cu", CUDA: `extern "C" __global__ void scale(float* x, float by, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) x[i] *= by;
}`}
	return src, kernel.Define(src, "scale", func(c *kernel.Call, a scaleArgs) {
		x := kernel.Data(c, a.X.Slice(0, int(a.N)))
		for i := range x {
			x[i] *= a.By
		}
	})
}

// A kernel with a Go function for virtual devices.
func ExampleDefine() {
	src, scale := scaling()
	onVirtual(func(s *stream.Stream) error {
		m, err := kernel.Compile(s.Device(), src)
		if err != nil {
			return err
		}
		defer m.Close()
		x, err := memory.MakeFrom(s, []float32{1, 2, 3})
		if err != nil {
			return err
		}
		defer x.Close()
		if err := scale.Launch(s, kernel.Cover(x.Len()), scaleArgs{x, 2, 3}); err != nil {
			return err
		}
		out := make([]float32, 3)
		err = x.CopyTo(s, out)
		fmt.Println(out)
		return err
	})
	// Output: [2 4 6]
}

// A test of the Go function, which needs no GPU.
func ExampleVerify() {
	src, _ := scaling()
	err := kernel.Verify(context.Background(), src, []kernel.Trial{{
		Kernel: "scale",
		Grid:   kernel.Cover(3),
		Args:   []any{[]float32{1, 2, 3}, float32(2), int32(3)},
	}}, &kernel.VerifyConfig{Host: true})
	if errors.Is(err, exec.ErrNotFound) {
		err = nil // there is no C++ compiler
	}
	fmt.Println(err)
	// Output: <nil>
}

// A function of single elements takes whatever types it is given: an int32 and a
// float16 meet in float16, as in torch.
func ExampleNewElementwise() {
	axpy, err := kernel.NewElementwise(`template <typename T> T axpy(T x, T y, T a) { return a * x + y; }`,
		&kernel.ElementwiseConfig{
			Defaults: []kernel.Operand{kernel.Set("a", 1)},
			Floats:   func(in, out []float64) { out[0] = in[2]*in[0] + in[1] }, // on virtual devices
		})
	if err != nil {
		log.Fatal(err)
	}
	defer axpy.Close()
	onVirtual(func(s *stream.Stream) error {
		x, err := memory.MakeFrom(s, []int32{1, 2, 3})
		if err != nil {
			return err
		}
		defer x.Close()
		y, err := memory.MakeFrom(s, []memory.Float16Bits{memory.Float16Of(0.5), memory.Float16Of(1), memory.Float16Of(1.5)})
		if err != nil {
			return err
		}
		defer y.Close()
		if err := axpy.Launch(s, kernel.Out(y), kernel.In(x), kernel.In(y), kernel.Set("a", 10)); err != nil {
			return err
		}
		out := make([]memory.Float16Bits, 3)
		err = y.CopyTo(s, out)
		fmt.Println(out)
		return err
	})
	// Output: [10.5 21 31.5]
}

// A function may have several results. They are parameters that are references, and may
// overwrite the inputs.
func ExampleElementwise_Launch() {
	polar, err := kernel.NewElementwise(`template <typename T> void polar(T x, T y, T& radius, T& angle) {
	radius = sqrt(x * x + y * y);
	angle = atan2(y, x);
}`, &kernel.ElementwiseConfig{
		Floats: func(in, out []float64) { out[0], out[1] = math.Hypot(in[0], in[1]), math.Atan2(in[1], in[0]) },
	})
	if err != nil {
		log.Fatal(err)
	}
	defer polar.Close()
	onVirtual(func(s *stream.Stream) error {
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
		radius, angle := make([]float32, 3), make([]float32, 3)
		err = errors.Join(
			polar.Launch(s, kernel.In(x), kernel.In(y), kernel.Out(x), kernel.Out(y)),
			x.CopyTo(s, radius), y.CopyTo(s, angle))
		fmt.Printf("radius %.3f, angle %.3f\n", radius, angle)
		return err
	})
	// Output: radius [5.000 1.000 2.000], angle [0.927 1.571 3.142]
}
