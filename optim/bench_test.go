package optim_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// lengths are 135 million parameters in 208 tensors, as testdata/torch_optim.py has them; a
// virtual device gets a thousandth.
func lengths(virtual bool) (all []int) {
	all = []int{50304 * 768}
	for range 104 {
		all = append(all, 926_016)
	}
	for range 103 {
		all = append(all, 768)
	}
	for i := range all {
		if virtual {
			all[i] /= 1000
		}
	}
	return all
}

// Benchmark has the time on the device of: a step of AdamW (adamw), a step with the gradient
// clipped to a norm of 1 (clipped), and a copy of the memory that a step moves (copy).
func Benchmark(b *testing.B) {
	b.Run("cuda", func(b *testing.B) { run(b, testgpu.CUDA(b, 1)[0], false) })
	b.Run("virtual", func(b *testing.B) {
		run(b, testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 1})[0], true)
	})
}

func run(b *testing.B, dev *device.Device, virtual bool) {
	s, err := stream.New(dev, nil)
	require.NoError(b, err)
	defer s.Close()
	var params []optim.Param
	bytes := 0
	for _, n := range lengths(virtual) {
		x, err := memory.Make[float32](s, n)
		require.NoError(b, err)
		defer x.Close()
		g, err := memory.Make[float32](s, n)
		require.NoError(b, err)
		defer g.Close()
		values := make([]float32, n)
		for i := range values {
			values[i] = float32(i%1001)/1000 - 0.5
		}
		require.NoError(b, x.CopyFrom(s, values))
		require.NoError(b, g.CopyFrom(s, values))
		params, bytes = append(params, optim.Of(x, g)), bytes+28*n
	}
	o, err := optim.NewAdamW(s, []optim.Group{{Params: params}}, nil)
	require.NoError(b, err)
	defer o.Close()
	grads, err := optim.NewGrads(s, o.Gradients()...)
	require.NoError(b, err)
	defer grads.Close()
	from, err := memory.Make[uint8](s, bytes/2)
	require.NoError(b, err)
	defer from.Close()
	to, err := memory.Make[uint8](s, bytes/2)
	require.NoError(b, err)
	defer to.Close()
	clipped := func() error {
		if _, err := grads.Powers(s, 2); err != nil {
			return err
		}
		_, factor, err := grads.Coef(s, 1)
		if err != nil {
			return err
		}
		return o.Step(s, &optim.StepConfig{Clip: factor})
	}
	for _, c := range []struct {
		name string
		do   func() error
	}{{"adamw", func() error { return o.Step(s, nil) }}, {"clipped", clipped}, {"copy", func() error { return memory.Copy(s, to, from) }}} {
		b.Run(c.name, func(b *testing.B) {
			require.NoError(b, c.do())
			require.NoError(b, s.Sync(testgpu.Context(b)))
			start := time.Now()
			for b.Loop() {
				require.NoError(b, c.do())
			}
			require.NoError(b, s.Sync(testgpu.Context(b)))
			b.ReportMetric(float64(time.Since(start).Nanoseconds())/float64(b.N)/1e3, "device-µs/op")
			b.ReportMetric(float64(bytes)*float64(b.N)/float64(time.Since(start).Nanoseconds()), "GB/s")
		})
	}
}
