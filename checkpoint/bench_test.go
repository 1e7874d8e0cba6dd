package checkpoint

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
)

var benchBytes = flag.Int64("bytes", 0, "how large the files of the benchmarks are; 0 is 8 GiB with a GPU and 256 MiB without")

// BenchmarkLoad loads a checkpoint in memory to all devices by several plans, in rounds
// of several sizes.
func BenchmarkLoad(b *testing.B) {
	devs := streamtest.BenchDevices(b)
	path := benchCheckpoint(b, streamtest.BenchBytes(devs[0], *benchBytes))
	g := localGroup(b, devs)
	for _, p := range []struct {
		name string
		plan Plan
	}{
		{"own", func(t Info) Placement { return Own(int(t.Name[0]) % len(devs)) }},
		{"shard:0", func(Info) Placement { return Shard(0) }},
		{"shard:1", func(Info) Placement { return Shard(1) }},
		{"replicate", nil},
	} {
		for mib := 32; mib <= 256; mib *= 2 {
			b.Run(fmt.Sprintf("plan=%s/round=%dMiB", p.name, mib), func(b *testing.B) {
				benchLoad(b, g, path, &LoadConfig{Plan: p.plan, RoundBytes: mib << 20})
			})
		}
	}
}

// benchCheckpoint writes a checkpoint of tensors of 32 MiB. The names' first letters are
// in turn.
func benchCheckpoint(b *testing.B, bytes int64) string {
	var infos []safetensors.Tensor
	for i := range int(bytes >> 25) {
		infos = append(infos, safetensors.Tensor{Name: fmt.Sprintf("%c.%d", 'a'+i%16, i), DType: safetensors.BF16, Shape: []int{4096, 4096}})
	}
	h, start, err := safetensors.NewHeader(infos, nil)
	require.NoError(b, err)
	path := streamtest.BenchFile(b, "/dev/shm", h.Size)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(b, err)
	_, err = f.WriteAt(start, 0)
	require.NoError(b, errors.Join(err, f.Close()))
	return path
}

func benchLoad(b *testing.B, g *comm.Group, path string, cfg *LoadConfig) {
	c, err := Open([]string{path}, nil)
	require.NoError(b, err)
	defer c.Close()
	load := func() []*Weights {
		all, err := c.Load(context.Background(), g, cfg)
		require.NoError(b, err)
		return all
	}
	require.NoError(b, closeAll(load())) // memory is pinned
	b.SetBytes(c.Bytes())
	for b.Loop() {
		all := load()
		b.StopTimer()
		require.NoError(b, closeAll(all))
		b.StartTimer()
	}
	all := load()
	for i, w := range all {
		names := w.Names()
		for _, name := range []string{names[0], names[len(names)/2], names[len(names)-1]} {
			require.NoError(b, c.verify(context.Background(), w, g.Stream(i), name))
		}
	}
	require.NoError(b, closeAll(all))
}
