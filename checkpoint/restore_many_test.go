package checkpoint

import (
	"flag"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

var manyTensors = flag.Int("restore.tensors", 1000, "`number` of tensors that BenchmarkRestoreMany restores")

// BenchmarkRestoreMany restores many tensors of 16 bytes on four ranks of one process.
func BenchmarkRestoreMany(b *testing.B) {
	g := localGroup(b, testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 4}))
	parts := make([][]Part, g.Locals())
	for i := range parts {
		for k := range *manyTensors {
			parts[i] = append(parts[i], Part{Name: fmt.Sprint("layer.", k), Data: makeTensor(b, g.Stream(i), make([]int32, 4), []int{4})})
		}
	}
	folder := b.TempDir()
	v, err := NewSaver(b.Context(), g, folder, parts, nil)
	require.NoError(b, err)
	require.NoError(b, v.Save(b.Context(), 1, groupStreams(g)))
	require.NoError(b, v.Close())
	s, _, err := Latest(b.Context(), g, folder)
	require.NoError(b, err)
	defer s.Close()
	for b.Loop() {
		_, err := s.Restore(b.Context(), g, parts, nil)
		require.NoError(b, err)
	}
	b.ReportMetric(b.Elapsed().Seconds()/float64(b.N*len(parts)*len(parts[0]))*1e6, "µs/part")
}
