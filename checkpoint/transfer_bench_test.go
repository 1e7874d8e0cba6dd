package checkpoint

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// emptyPart allocates a part on a local rank.
func emptyPart(b *testing.B, g *comm.Group, local int, p Part, dt memory.DType, shape ...int) Part {
	var err error
	p.Data, err = tensor.Make(g.Stream(local), dt, shape...)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, p.Data.Close()) })
	return p
}

// BenchmarkTransfer measures a transfer of 2 GB from one device to another, in 40 tensors: of the same type, and to half of the bytes.
// Beside it are a broadcast of NCCL and a copy between the devices of as many bytes.
func BenchmarkTransfer(b *testing.B) {
	const tensors, rows, columns = 40, 6400, 4096
	ctx, g := b.Context(), localGroup(b, testgpu.CUDA(b, 2))
	bytes := int64(tensors * rows * columns * 2)
	measure := func(name string, bytes int64, run func() error) {
		b.Run(name, func(b *testing.B) {
			require.NoError(b, run())
			require.NoError(b, g.Wait(ctx))
			b.SetBytes(bytes)
			b.ResetTimer()
			for range b.N {
				require.NoError(b, run())
			}
			require.NoError(b, g.Wait(ctx))
		})
	}
	for _, has := range []memory.DType{memory.BFloat16, memory.Float32} {
		dst, src := make([][]Part, 2), make([][]Part, 2)
		for i := range tensors {
			p := Part{Name: string(rune('A' + i))}
			src[0] = append(src[0], emptyPart(b, g, 0, p, has, rows, columns))
			dst[1] = append(dst[1], emptyPart(b, g, 1, p, memory.BFloat16, rows, columns))
		}
		tr, err := NewTransfer(ctx, g, dst, src, nil)
		require.NoError(b, err)
		measure(has.String()+" to bfloat16", bytes, tr.Run)
		require.NoError(b, tr.Close())
	}
	x := comm.Shards[memory.BFloat16Bits]{}
	for i := range 2 {
		s, err := memory.Make[memory.BFloat16Bits](g.Stream(i), int(bytes/2))
		require.NoError(b, err)
		defer s.Close()
		x = append(x, s)
	}
	measure("broadcast", bytes, func() error { return comm.BroadcastFrom(g, 0, x...) })
	measure("copy", bytes, func() error { return memory.Copy(g.Stream(1), x[1], x[0]) })
}
