package strided_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A strided copy uses its elements and no others: another stream may write the elements
// between them, and virtual devices report a race on the elements themselves.
func TestStridedCopiesUseOnlyTheirElements(t *testing.T) {
	for _, kind := range []memory.DType{memory.Float32, memory.BFloat16} {
		for _, same := range []bool{false, true} {
			sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
			d := sys.Devices()[0]
			s, other := newStream(t, d), newStream(t, d)
			x, y := allocate(t, s, memory.Float32, []int{64, 64}), allocate(t, s, kind, []int{64})
			require.NoError(t, s.Sync(testgpu.Context(t)))
			mine, err := x.Select(1, 3)
			require.NoError(t, err)
			theirs, err := x.Select(1, 4)
			require.NoError(t, err)
			if same {
				theirs = mine
			}
			from := allocate(t, other, memory.Float32, []int{64})
			require.NoError(t, tensor.Copy(s, y, mine)) // the first copies load modules, which waits for held streams
			require.NoError(t, s.Sync(testgpu.Context(t)))
			require.NoError(t, tensor.Copy(other, theirs, from))
			require.NoError(t, other.Sync(testgpu.Context(t)))
			hold := streamtest.Hold(t, s)
			require.NoError(t, tensor.Copy(s, y, mine))
			require.NoError(t, tensor.Copy(other, theirs, from))
			hold()
			err = s.Sync(testgpu.Context(t))
			if err == nil {
				err = other.Sync(testgpu.Context(t))
			}
			if same {
				require.Error(t, err)
				require.Contains(t, sys.Reports()[0], "race")
				continue
			}
			require.NoError(t, err)
			require.Empty(t, sys.Reports())
		}
	}
}

// BenchmarkTransposed compares a transposed conversion with a dense one on virtual devices.
func BenchmarkTransposed(b *testing.B) {
	d := testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 1})[0]
	for _, name := range []string{"dense", "transposed"} {
		b.Run(name, func(b *testing.B) {
			s := newStream(b, d)
			x, y := allocate(b, s, memory.Float32, []int{1024, 1024}), allocate(b, s, memory.BFloat16, []int{1024, 1024})
			if name == "transposed" {
				x = x.T()
			}
			for b.Loop() {
				require.NoError(b, tensor.Copy(s, y, x))
				require.NoError(b, s.Sync(testgpu.Context(b)))
			}
		})
	}
}
