package comm_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The cost on the host of an all-reduce of one rank. A wait every 256 operations keeps the
// stream from filling up, and is outside of the time.
func BenchmarkAllReduceOfOneRank(b *testing.B) {
	g, err := comm.Local(testgpu.Context(b), testgpu.CUDA(b, 1)...)
	require.NoError(b, err)
	defer g.Close()
	xs, err := comm.Make[float32](g, 1024)
	require.NoError(b, err)
	defer xs.Close()
	b.ReportAllocs()
	for i := range b.N {
		if i%256 == 0 {
			b.StopTimer()
			require.NoError(b, g.Wait(testgpu.Context(b)))
			b.StartTimer()
		}
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	require.NoError(b, g.Wait(testgpu.Context(b)))
}
