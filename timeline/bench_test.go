package timeline_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/timeline"
)

// BenchmarkTimelineOfGraphs compares steps with and without a timeline. A step is a step of
// examples/gpt: a copy of a batch to each device, and a launch of a graph on all devices. On a GPU,
// 75 kernels take about 0.3 ms. An iteration of the benchmark is a block of steps without a timeline
// and a block with it. The metrics are medians over the blocks:
//
//   - us/step and us/step-recorded are the elapsed times, and ratio is their quotient;
//   - host-us and host-us-recorded are the times that the host needs to enqueue a step.
func BenchmarkTimelineOfGraphs(b *testing.B) {
	for _, kernels := range []int{1, 75} {
		for n := 1; n <= 2; n++ {
			b.Run(fmt.Sprintf("kernels=%d/devices=%d/virtual", kernels, n), func(b *testing.B) {
				benchmarkSteps(b, testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: n}), kernels, 1<<10, 20)
			})
			b.Run(fmt.Sprintf("kernels=%d/devices=%d/cuda", kernels, n), func(b *testing.B) {
				benchmarkSteps(b, testgpu.CUDA(b, n), kernels, 1<<20, 1000)
			})
		}
	}
}

func benchmarkSteps(b *testing.B, devs []*device.Device, kernels, elements, steps int) {
	x := newStepper(b, devs, kernels, elements)
	var plain, recorded samples
	for b.Loop() {
		plain.add(x.block(steps))
		r, err := timeline.Start(b.TempDir())
		require.NoError(b, err)
		recorded.add(x.block(steps))
		require.NoError(b, r.Close())
	}
	const micro = float64(time.Microsecond)
	without, with := median(plain.elapsed), median(recorded.elapsed)
	b.ReportMetric(without/micro, "us/step")
	b.ReportMetric(with/micro, "us/step-recorded")
	b.ReportMetric(with/without, "ratio")
	b.ReportMetric(median(plain.host)/micro, "host-us")
	b.ReportMetric(median(recorded.host)/micro, "host-us-recorded")
}

// samples are the times of a step, one for each block.
type samples struct{ elapsed, host []float64 }

func (s *samples) add(elapsed, host float64) {
	s.elapsed, s.host = append(s.elapsed, elapsed), append(s.host, host)
}

func median(x []float64) float64 {
	slices.Sort(x)
	return x[len(x)/2]
}

// A stepper does steps on some devices.
type stepper struct {
	b       *testing.B
	streams []*stream.Stream
	batches []memory.Slice[int32]
	pinned  []*memory.Pinned[int32]
	passed  []*stream.Event // the host is at most so many steps ahead of the devices
	exec    *graph.Exec
}

func newStepper(b *testing.B, devs []*device.Device, kernels, elements int) *stepper {
	x := &stepper{b: b, passed: make([]*stream.Event, 4)}
	const batch = 1024
	var data []memory.Slice[float32]
	for _, d := range devs {
		s, err := stream.New(d, nil)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, s.Close()) })
		list, err := memory.Make[float32](s, elements)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, list.Close()) })
		tokens, err := memory.Make[int32](s, batch)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, tokens.Close()) })
		host, err := memory.MakePinned[int32](d, batch)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, host.Close()) })
		x.streams, data = append(x.streams, s), append(data, list)
		x.batches, x.pinned = append(x.batches, tokens), append(x.pinned, host)
	}
	for i := range x.passed {
		e, err := stream.NewEvent(devs[0], nil)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, e.Close()) })
		x.passed[i] = e
	}
	x.capture(data, kernels)
	return x
}

// capture captures kernels on each device.
func (x *stepper) capture(data []memory.Slice[float32], kernels int) {
	half, err := kernel.NewElementwise("0.5f * x", &kernel.ElementwiseConfig{Inputs: []string{"x"},
		Floats: func(in, out []float64) { out[0] = 0.5 * in[0] }})
	require.NoError(x.b, err)
	x.b.Cleanup(func() { require.NoError(x.b, half.Close()) })
	launch := func() error {
		for range kernels {
			for i, s := range x.streams {
				if err := half.Launch(s, kernel.Out(data[i]), kernel.In(data[i])); err != nil {
					return err
				}
			}
		}
		return nil
	}
	require.NoError(x.b, launch()) // compiles the kernel
	x.exec, err = graph.Capture(x.streams, launch, nil)
	require.NoError(x.b, err)
	x.b.Cleanup(func() { require.NoError(x.b, x.exec.Close()) })
}

// block does some steps, and returns the nanoseconds of a step: those that passed, and those that the
// host needed to enqueue it.
func (x *stepper) block(steps int) (elapsed, host float64) {
	ctx := testgpu.Context(x.b)
	for i := range 64 { // makes the events of the timeline
		x.step(i)
	}
	require.NoError(x.b, x.streams[0].Sync(ctx))
	var enqueuing time.Duration
	begun := time.Now()
	for i := range steps {
		require.NoError(x.b, x.passed[i%len(x.passed)].Sync(ctx))
		t := time.Now()
		x.step(i)
		enqueuing += time.Since(t)
	}
	require.NoError(x.b, x.streams[0].Sync(ctx))
	n := float64(steps)
	return float64(time.Since(begun)) / n, float64(enqueuing) / n
}

// step enqueues a step.
func (x *stepper) step(i int) {
	begin, others := x.streams[0], x.streams[1:]
	for i, s := range x.streams {
		require.NoError(x.b, x.batches[i].CopyFromPinned(s, x.pinned[i]))
	}
	for _, s := range others {
		require.NoError(x.b, begin.WaitStream(s))
	}
	require.NoError(x.b, x.exec.Launch(begin))
	for _, s := range others {
		require.NoError(x.b, s.WaitStream(begin))
	}
	require.NoError(x.b, x.passed[i%len(x.passed)].Record(begin))
}
