package nccl_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
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
