package nccl_test

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A collective uses its buffers on its stream: another stream needs an event. On virtual
// devices NCCL runs late, so the sanitizer reports before they do.
func TestSanitizerSeesCollectives(t *testing.T) {
	for _, backend := range []string{"virtual", "cuda"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "cuda" {
				testgpu.CUDA(t, 1)
			}
			before := slog.Default()
			slog.SetDefault(slog.New(slog.DiscardHandler)) // of the expected report
			t.Cleanup(func() { slog.SetDefault(before) })
			t.Setenv("CHORUS_SANITIZER", "1")
			sys, err := device.NewSystem(&device.SystemConfig{Backend: backend, VirtualDevices: 1})
			require.NoError(t, err)
			defer sys.Close()
			d := sys.Devices()[0]
			var s [2]*stream.Stream
			for i := range s {
				s[i], err = stream.New(d, nil)
				require.NoError(t, err)
				defer s[i].Close()
			}
			cs, err := nccl.NewCommunicators(testgpu.Context(t), []*device.Device{d}, nil)
			require.NoError(t, err)
			defer cs[0].Close()
			x, err := memory.Make[float32](s[0], 64)
			require.NoError(t, err)
			defer x.Close()
			require.NoError(t, x.Zero(s[0]))
			require.NoError(t, s[1].WaitStream(s[0]))
			require.NoError(t, nccl.AllReduce(cs[0], s[1], x, x, nccl.Sum))
			require.Empty(t, sys.Reports(), "the stream has waited")
			_ = x.Zero(s[0]) // on virtual devices the device may be lost
			report := strings.Join(sys.Reports(), "\n")
			require.Contains(t, report, "ncclAllReduce on stream")
			require.Contains(t, report, "sanitizer_test.go:")
		})
	}
}

// The default streams of two devices have the same handle, and no context is bound between calls.
func TestSanitizerKnowsDefaultStreams(t *testing.T) {
	for _, backend := range []string{"virtual", "cuda"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "cuda" {
				testgpu.CUDA(t, 2)
			}
			t.Setenv("CHORUS_SANITIZER", "1")
			sys, err := device.NewSystem(&device.SystemConfig{Backend: backend, VirtualDevices: 2})
			require.NoError(t, err)
			defer sys.Close()
			devs := sys.Devices()[:2]
			cs, err := nccl.NewCommunicators(testgpu.Context(t), devs, nil)
			require.NoError(t, err)
			var xs [2]memory.Slice[float32]
			for i, d := range devs {
				defer cs[i].Close()
				s := stream.Default(d)
				x, err := tensor.Make(s, memory.Float32, 8, 8)
				require.NoError(t, err)
				defer x.Close()
				y, err := tensor.MakeLike(s, x, memory.Float32)
				require.NoError(t, err)
				xs[i], err = tensor.Slice[float32](x)
				require.NoError(t, err)
				require.NoError(t, xs[i].Zero(s))
				require.NoError(t, tensor.Copy(s, y, x.T())) // a kernel whose memory the library reports
				require.NoError(t, y.Close())
				z, err := tensor.MakeLike(s, x, memory.Float32) // in the same memory
				require.NoError(t, err)
				defer z.Close()
				require.NoError(t, tensor.Add(s, z, x, x))
				require.NoError(t, tensor.Copy(s, x, z.T()))
			}
			for range 2 {
				require.NoError(t, nccl.Group(func(b *nccl.Batch) (err error) {
					for i, c := range cs {
						err = errors.Join(err, nccl.AllReduce(b.On(c), stream.Default(devs[i]), xs[i], xs[i], nccl.Sum))
					}
					return err
				}))
				for i, x := range xs {
					require.NoError(t, x.Zero(stream.Default(devs[i])))
				}
			}
			for _, d := range devs {
				require.NoError(t, stream.Default(d).Sync(testgpu.Context(t)))
			}
			require.Empty(t, sys.Reports())
		})
	}
}

// The event of a launch orders the work before the collective, and not the collective.
func TestSanitizerSeesLaunchEvents(t *testing.T) {
	before := slog.Default()
	slog.SetDefault(slog.New(slog.DiscardHandler)) // of the expected report
	t.Cleanup(func() { slog.SetDefault(before) })
	t.Setenv("CHORUS_SANITIZER", "1")
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2, VirtualNCCL: newest})
	require.NoError(t, err)
	defer sys.Close()
	devs := sys.Devices()
	cs, err := nccl.NewCommunicators(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	s, side := make([]*stream.Stream, 2), make([]*stream.Stream, 2)
	xs, ys := make([]memory.Slice[float32], 2), make([]memory.Slice[float32], 2)
	events := make([]*stream.Event, 2)
	for i, d := range devs {
		defer cs[i].Close()
		for _, to := range []*[]*stream.Stream{&s, &side} {
			(*to)[i], err = stream.New(d, nil)
			require.NoError(t, err)
			defer (*to)[i].Close()
		}
		for _, to := range []*[]memory.Slice[float32]{&xs, &ys} {
			(*to)[i], err = memory.Make[float32](s[i], 64)
			require.NoError(t, err)
			defer (*to)[i].Close()
			require.NoError(t, (*to)[i].Zero(s[i]))
		}
		events[i], err = stream.NewEvent(d, nil)
		require.NoError(t, err)
		defer events[i].Close()
	}
	require.NoError(t, nccl.Group(func(b *nccl.Batch) (err error) { // connects the ranks
		for i, c := range cs {
			err = errors.Join(err, nccl.AllReduce(b.On(c), s[i], xs[i], xs[i], nccl.Sum))
		}
		return err
	}))
	for i, c := range cs {
		on, err := nccl.With(c, &nccl.CallConfig{LaunchEvent: events[i]})
		require.NoError(t, err)
		require.NoError(t, nccl.AllReduce(on, s[i], xs[i], xs[i], nccl.Sum))
		require.NoError(t, side[i].Wait(events[i]))
	}
	require.NoError(t, ys[0].Zero(side[0]))
	require.Empty(t, sys.Reports(), "the stream waits for the work before the collective")
	_ = xs[0].Zero(side[0]) // the device may be lost
	require.Contains(t, strings.Join(sys.Reports(), "\n"), "ncclAllReduceConfig on stream")
}
