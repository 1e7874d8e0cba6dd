package fabric_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
)

// Ranks that have different operations in the same place wait for each other until they
// are aborted: nobody takes what another one has sent for something else.
func TestRanksThatDisagree(t *testing.T) {
	all := func(a fabric.Algorithm, op collective.Reduction, n int) call {
		return call{name: "all-reduce", algorithm: a, op: op, n: n}
	}
	type calls struct{ one, other call }
	cases := map[string]calls{
		"kind":            {call{name: "all-gather", n: 64}, call{name: "all-to-all", n: 64}},
		"root":            {call{name: "broadcast", n: 64}, call{name: "broadcast", n: 64, root: 1}},
		"length":          {call{name: "all-gather", n: 63}, call{name: "all-gather", n: 64}},
		"scatter":         {call{name: "reduce-scatter", n: 64}, call{name: "reduce-scatter", n: 64, op: collective.Prod}},
		"packets or not":  {all(fabric.TwoShotPackets, collective.Sum, 64), all(fabric.TwoShot, collective.Sum, 64)},
		"one or two ways": {all(fabric.OneShot, collective.Sum, 64), all(fabric.TwoShotPackets, collective.Sum, 64)},
	}
	for _, a := range fabric.Algorithms {
		cases["length, "+a.String()] = calls{all(a, collective.Sum, 63), all(a, collective.Sum, 64)}
		cases["reduction, "+a.String()] = calls{all(a, collective.Sum, 64), all(a, collective.Max, 64)}
	}
	each(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		for name, c := range cases {
			t.Run(name, func(t *testing.T) {
				group := open(t, devs[:2], &fabric.Config{Bytes: 1})
				carryOut(t, group, floats(func(x float32) float32 { return x }), all(fabric.OneShot, collective.Sum, 10))
				disagree(t, group, func(i int) error {
					mine := []call{c.one, c.other}[i]
					dst, src := typedStep[float32]{call: mine}.elements(2)
					x := anySlice[float32]{makeOf[float32](t, group[i].s, dst), makeOf[float32](t, group[i].s, src)}
					return x.enqueue(mine, group[i])
				})
			})
		}
		t.Run("type", func(t *testing.T) {
			group := open(t, devs[:2], &fabric.Config{Bytes: 1})
			x, y := makeOf[float32](t, group[0].s, 64), makeOf[int32](t, group[1].s, 64)
			disagree(t, group, func(i int) error {
				if i == 0 {
					return fabric.AllReduce(group[0].Rank, group[0].s, x, x, collective.Sum, nil)
				}
				return fabric.AllReduce(group[1].Rank, group[1].s, y, y, collective.Sum, nil)
			})
		})
	})
}

// disagree enqueues one operation for each of two ranks, which is not done.
func disagree(t *testing.T, group []member, enqueue func(i int) error) {
	for i := range group {
		require.NoError(t, enqueue(i))
	}
	deadline := time.Now().Add(30 * time.Millisecond)
	for time.Now().Before(deadline) {
		for _, m := range group {
			done, err := m.s.Query()
			require.NoError(t, err)
			require.False(t, done, "rank %d took it for done", m.Rank.Rank())
		}
	}
	for _, m := range group {
		m.Abort()
	}
	for _, m := range group {
		require.NoError(t, m.s.Sync(testgpu.Context(t)))
		require.ErrorIs(t, m.Err(), fabric.ErrAborted)
		if !m.Pushes() {
			require.ErrorContains(t, m.Err(), "given up")
		}
	}
}
