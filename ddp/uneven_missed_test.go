package ddp_test

import (
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A rank that has missed an update does not own the model, although the Join that missed it
// returned the error of a later step.
func TestJoinRemembersMissedSteps(t *testing.T) {
	lasts := make([]int, 2)
	for _, err := range processes(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), func(g *comm.Group) error {
		last, err := joinAfter(g, 3-2*g.Rank())
		lasts[g.Rank()] = last
		return err
	}) {
		require.NoError(t, err)
	}
	require.Equal(t, []int{0, 0}, lasts)
}

// joinAfter runs some steps, of which the third has an infinite number, and joins.
func joinAfter(g *comm.Group, steps int) (int, error) {
	s := g.Stream(0)
	x, err := memory.MakeFrom(s, []float32{1, 2})
	if err != nil {
		return 0, err
	}
	defer x.Close()
	r, err := ddp.NewReducer(g, [][]memory.Slice[float32]{{x}}, &ddp.ReducerConfig{Uneven: true, Verify: true})
	if err != nil {
		return 0, err
	}
	defer r.Close()
	for i := range steps {
		value := float32(1)
		if i == 2 {
			value = float32(math.Inf(1))
		}
		if err := x.CopyFrom(s, []float32{value, 1}); err != nil {
			return 0, err
		}
		if err := r.Ready(s, 0); err != nil {
			return 0, err
		}
		if err := r.Finish(s); err != nil && i != 2 {
			return 0, err
		}
	}
	last, err := r.Join(context.Background(), s)
	if err != nil { // of the third step of the other rank
		last, err = r.Join(context.Background(), s)
	}
	return last, err
}
