package amp

import (
	_ "embed"
	"fmt"
	"math"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// times multiplies all elements by a number in device memory.
var times = sync.OnceValues(func() (*kernel.Elementwise, error) {
	return kernel.NewElementwise("x * scale", &kernel.ElementwiseConfig{
		Inputs: []string{"x", "scale"},
		Floats: func(in, out []float64) { out[0] = in[0] * in[1] },
	})
})

// Scale enqueues on s the product of the tensors with the scale, in place. (torch's scale
// returns the product.) The tensors are contiguous, of floating-point types, on the
// scaler's device, and share no memory with each other. After an error nothing is scaled, unless
// the device has failed.
func (sc *Scaler) Scale(s *stream.Stream, xs ...tensor.Tensor) error {
	const op = "scale"
	if _, err := sc.enter(op, s); err != nil || sc.cfg.Disabled {
		return err
	}
	e, err := times()
	if err != nil {
		return refuse(op, "%w", err)
	}
	calls := make([]func() error, len(xs))
	for i := range xs {
		for k := range i {
			if xs[i].Len() > 0 && xs[k].Len() > 0 && xs[i].Ptr() < end(xs[k]) && xs[k].Ptr() < end(xs[i]) {
				return refuse(op, "tensors %d and %d share memory: it would be scaled twice", k, i)
			}
		}
		if calls[i], err = sc.scaling(s, e, xs[i]); err != nil {
			return refuse(op, "tensor %d: %w", i, err)
		}
	}
	for i, call := range calls {
		if err := call(); err != nil {
			return refuse(op, "tensor %d: %w", i, err)
		}
	}
	return nil
}

// end returns the address after a contiguous tensor.
func end(x tensor.Tensor) uint64 { return x.Ptr() + uint64(x.Bytes()) }

// scaling returns the launch that scales a tensor.
func (sc *Scaler) scaling(s *stream.Stream, e *kernel.Elementwise, x tensor.Tensor) (func() error, error) {
	switch x.DType() {
	case memory.Float16:
		return scalingOf[memory.Float16Bits](sc, s, e, x)
	case memory.BFloat16:
		return scalingOf[memory.BFloat16Bits](sc, s, e, x)
	case memory.Float32:
		return scalingOf[float32](sc, s, e, x)
	case memory.Float64:
		return scalingOf[float64](sc, s, e, x)
	}
	return nil, fmt.Errorf("%s: want float16, bfloat16, float32 or float64", x)
}

func scalingOf[T memory.Element](sc *Scaler, s *stream.Stream, e *kernel.Elementwise, x tensor.Tensor) (func() error, error) {
	m, err := tensor.Slice[T](x)
	if err != nil {
		return nil, err
	}
	if err := inside.CheckBuffer("scale", m.Buffer(), m.Len(), s.Device()); err != nil {
		return nil, err
	}
	return func() error {
		if m.Len() == 0 {
			return nil
		}
		return e.Launch(s, kernel.In(m), kernel.In(sc.scale), kernel.Out(m))
	}, nil
}

// A State is torch's state_dict of a scaler, also as JSON.
type State struct {
	Scale          float64 `json:"scale"`
	GrowthFactor   float64 `json:"growth_factor"`
	BackoffFactor  float64 `json:"backoff_factor"`
	GrowthInterval int     `json:"growth_interval"`
	GrowthTracker  int     `json:"_growth_tracker"` // updates without infinities in a row
}

// State waits for the operations that are enqueued on s and returns the state. The state of a
// disabled scaler is the zero State.
func (sc *Scaler) State(s *stream.Stream) (State, error) {
	if _, err := sc.enter("state", s); err != nil || sc.cfg.Disabled {
		return State{}, err
	}
	scale, tracker := make([]float32, 1), make([]int32, 1)
	if err := sc.scale.CopyTo(s, scale); err != nil {
		return State{}, err
	}
	if err := sc.tracker.CopyTo(s, tracker); err != nil {
		return State{}, err
	}
	c := &sc.cfg
	return State{float64(scale[0]), c.GrowthFactor, c.BackoffFactor, c.GrowthInterval, int(tracker[0])}, nil
}

// LoadState enqueues on s the state of another scaler. A disabled scaler ignores it. The zero
// State, which a disabled scaler has saved, is an error.
func (sc *Scaler) LoadState(s *stream.Stream, from State) error {
	const op = "load state"
	if _, err := sc.enter(op, s); err != nil || sc.cfg.Disabled {
		return err
	}
	if from == (State{}) {
		return refuse(op, "the state is empty: a disabled scaler may have saved it")
	}
	c := ScalerConfig{InitScale: max(from.Scale, math.SmallestNonzeroFloat32), GrowthFactor: from.GrowthFactor, BackoffFactor: from.BackoffFactor, GrowthInterval: from.GrowthInterval}
	if err := c.check(op); err != nil {
		return err
	}
	if from.GrowthTracker < 0 || from.GrowthTracker > math.MaxInt32 {
		return refuse(op, "growth tracker %d: want 0 or more", from.GrowthTracker)
	}
	if err := sc.put(op, s, from.Scale, int32(from.GrowthTracker)); err != nil {
		return err
	}
	sc.cfg = c
	return nil
}

//go:embed amp.cu
var source string

// kernels are the kernels of a device.
type kernels struct{ update, put *kernel.Kernel }

var loaded inside.PerDevice[kernels]

// kernelsOf returns the kernels of a device. The first call compiles and loads them.
func kernelsOf(dev *device.Device) (*kernels, error) { return loaded.Of(dev, (*kernels).load) }

func (k *kernels) load(dev *device.Device) error {
	p, f, i := kernel.Pointer, kernel.F32, kernel.I32
	src := &kernel.Source{Name: "amp.cu", CUDA: source, Kernels: []kernel.Def{
		{Name: "update", Params: []kernel.Param{p, p, p, p, i, f, f, i}, Go: standInUpdate},
		{Name: "put", Params: []kernel.Param{p, p, p, f, i}, Go: standInPut},
	}}
	inside.MakeResident(src)
	m, err := kernel.Compile(dev, src)
	if err == nil {
		k.update, err = m.Kernel("update")
	}
	if err == nil {
		k.put, err = m.Kernel("put")
	}
	if err != nil {
		return fmt.Errorf("amp: %w", err)
	}
	return nil
}

var one = kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}

// numbers are the scale, its inverse and the tracker of a launch on a virtual device.
func numbers(c *kernel.Call) (scale, inverse *float32, tracker *int32) {
	return &kernel.Update[float32](c, 0, 1)[0], &kernel.Update[float32](c, 1, 1)[0], &kernel.Update[int32](c, 2, 1)[0]
}

func standInUpdate(c *kernel.Call) {
	scale, inverse, tracker := numbers(c)
	bad := false
	for _, x := range kernel.Read[float32](c, 3, int(kernel.Get[int32](c, 4))) {
		bad = bad || x != 0
	}
	switch more := *scale * kernel.Get[float32](c, 5); {
	case bad:
		*scale *= kernel.Get[float32](c, 6)
		*tracker = 0
	case *tracker+1 != kernel.Get[int32](c, 7):
		*tracker++
	default:
		*tracker = 0
		if !math.IsInf(float64(more), 0) && more == more {
			*scale = more
		}
	}
	*inverse = float32(1 / float64(*scale))
}

func standInPut(c *kernel.Call) {
	scale, inverse, tracker := numbers(c)
	*scale = kernel.Get[float32](c, 3)
	*inverse = float32(1 / float64(*scale))
	if n := kernel.Get[int32](c, 4); n >= 0 {
		*tracker = n
	}
}

// refuse returns the error of an operation that changed nothing.
func refuse(op, format string, args ...any) error {
	return fmt.Errorf("amp: %s: %w", op, fmt.Errorf(format, args...))
}
