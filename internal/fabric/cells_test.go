package fabric_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
)

// What TwoShot has left of its data does not pass for packets of a later operation: here
// it is the number that the operation has since the group was opened.
func TestCellsAreNoPackets(t *testing.T) {
	each(t, []int{2, 4}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1})
		var xs, few []anySlice[uint32]
		for _, m := range group {
			x, y := makeOf[uint32](t, m.s, 64), makeOf[uint32](t, m.s, 16)
			require.NoError(t, x.CopyFrom(m.s, slices.Repeat([]uint32{3}, 64)))
			xs, few = append(xs, anySlice[uint32]{x, x}), append(few, anySlice[uint32]{y, y})
		}
		reduce := func(i int, xs []anySlice[uint32], a fabric.Algorithm) {
			m := group[i]
			require.NoError(t, fabric.AllReduce(m.Rank, m.s, xs[i].dst, xs[i].src, collective.Max, &fabric.AllReduceConfig{Algorithm: a}))
		}
		last := len(group) - 1
		for range 2 {
			for i := range group {
				reduce(i, xs, fabric.TwoShot)
			}
		}
		for i := range last {
			reduce(i, few, fabric.OneShot)
		}
		require.Never(t, func() bool {
			done, err := group[0].s.Query()
			return done || err != nil
		}, 100*time.Millisecond, 5*time.Millisecond, "the last rank has not come")
		reduce(last, few, fabric.OneShot)
		for i, m := range group {
			require.Equal(t, make([]uint32, 16), fetch(t, m, few[i].dst))
		}
	})
}
