package checkpoint

import (
	"bytes"
	"flag"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

var (
	waitLoads = flag.Int("waitloads", 10, "how many loads TestLoadsOfGroupsThatEnd begins")
	loadSeed  = flag.Uint64("waitloadsseed", 0, "the seed of TestLoadsOfGroupsThatEnd; 0 is a random one")
)

// A load that returns nil has all tensors right on all ranks, also if the group is closed, or a
// rank of it is aborted, while the ranks exchange what they have read.
func TestLoadsOfGroupsThatEnd(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		seed := *loadSeed
		if seed == 0 {
			seed = rand.Uint64()
		}
		folder, list := bigCheckpoint(t)
		loaded := 0
		for n := range *waitLoads {
			rng := rand.New(rand.NewPCG(seed, uint64(n)))
			g := localGroup(t, devs)
			c := openCheckpoint(t, folder)
			streams := g.Streams()
			end, pause := rng.IntN(3), rng.IntN(30_000)
			var beside sync.WaitGroup
			beside.Go(func() {
				for range pause {
					runtime.Gosched()
				}
				switch end {
				case 1:
					_ = g.Close()
				case 2:
					_ = g.Communicator(1).Abort()
				}
			})
			all, err := c.Load(testgpu.Context(t), g, &LoadConfig{RoundBytes: []int{0, 200_000, 1 << 20}[rng.IntN(3)]})
			beside.Wait()
			if end == 0 {
				require.NoError(t, err, "-waitloadsseed %d", seed)
			}
			if err == nil {
				loaded++
			}
			for i, w := range all {
				eye := newStream(t, streams[i].Device())
				for _, m := range list {
					x, err := w.Tensor(m.info.Name)
					require.NoError(t, err)
					flat, err := memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
					require.NoError(t, err)
					have := make([]byte, len(m.data))
					require.NoError(t, flat.CopyTo(eye, have))
					require.True(t, bytes.Equal(m.data, have), "-waitloadsseed %d: load %d: %s on rank %d", seed, n, m.info.Name, i)
				}
				require.NoError(t, w.Close())
			}
			_ = g.Close()
		}
		t.Logf("seed %d: %d of %d loads completed", seed, loaded, *waitLoads)
	})
}
