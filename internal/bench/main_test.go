package main

import (
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The test binary is the program when this is set.
const asRank = "BENCH_TEST_RANK"

func TestMain(m *testing.M) {
	if os.Getenv(asRank) != "" {
		main()
		return
	}
	testgpu.AllowStalls()
	testgpu.Main(m)
}

// Each figure does its work and gives everything back.
func TestFigures(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		b := &bench{rounds: 3, launches: 5, replays: 2, elements: 1000, pairs: 80, s: s}
		traced, err := traceFigures("../memtrace/testdata/trace_train.json.gz")
		require.NoError(t, err)
		for _, f := range slices.Concat(figures, allocations(), traced) {
			us, err := b.median(testgpu.Context(t), f)
			require.NoError(t, err, f.name)
			require.Positive(t, us, f.name)
		}
	})
}

// What is timed is work: a fill that did nothing would be fast.
func TestFillsFill(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		x, err := memory.MakeFrom(s, []float32{7, 7, 7, 7})
		require.NoError(t, err)
		defer x.Close()
		b := &bench{s: s}
		for _, fill := range []func(*bench, memory.Slice[float32]) error{uniform, normal} {
			require.NoError(t, fill(b, x))
			out := make([]float32, 4)
			require.NoError(t, x.CopyTo(s, out))
			require.NotContains(t, out, float32(7))
		}
	})
}
