package fabric_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
)

// What a rank has that gave up gets to no other one, neither of that operation nor of
// those behind it: the others wait, or have the right sum.
func TestGivenUpIsNotSent(t *testing.T) {
	const n = 96
	each(t, []int{3}, func(t *testing.T, devs []*device.Device) {
		if len(devs) < 3 {
			t.Skipf("needs 3 GPUs, there are %d", len(devs))
		}
		for _, a := range fabric.Algorithms {
			group := open(t, devs, &fabric.Config{Bytes: 1 << 16})
			xs := make([]anySlice[float32], len(group))
			for i, m := range group {
				x := makeOf[float32](t, m.s, n)
				require.NoError(t, x.CopyFrom(m.s, slices.Repeat([]float32{1}, n)))
				xs[i] = anySlice[float32]{x, x}
			}
			enqueue := func(i int) error {
				return fabric.AllReduce(group[i].Rank, group[i].s, xs[i].dst, xs[i].src, collective.Sum, &fabric.AllReduceConfig{Algorithm: a})
			}
			for range 2 {
				require.NoError(t, errors.Join(enqueue(0), enqueue(1)))
			}
			group[0].Abort()
			require.NoError(t, group[0].s.Sync(testgpu.Context(t)))
			for range 2 {
				require.NoError(t, enqueue(2))
			}
			// Who is done by some time has the right sum of two operations; before, it
			// was done within milliseconds with a wrong one.
			deadline := time.Now().Add(100 * time.Millisecond)
			for i := 1; i < 3; i++ {
				done := false
				for !done && time.Now().Before(deadline) {
					var err error
					done, err = group[i].s.Query()
					require.NoError(t, err)
				}
				if done {
					require.Equal(t, slices.Repeat([]float32{9}, n), fetch(t, group[i], xs[i].dst), "%s, rank %d", a, i)
				}
				group[i].Abort()
			}
		}
	})
}
