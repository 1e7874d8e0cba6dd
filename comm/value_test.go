package comm_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// both runs f on two groups of one rank each, and returns their errors.
func both(t *testing.T, f func(ctx context.Context, rank int, g *comm.Group) error) (errs [2]error) {
	gs, failed := join(t, context.Background(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	require.NoError(t, errors.Join(failed...))
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() { errs[i] = f(testgpu.Context(t), i, g) })
	}
	wg.Wait()
	return errs
}

type choice struct {
	On    bool
	N     int
	Names map[string]int
}

// What was there before is replaced as a whole, also where codecs leave out zeros.
func TestBroadcastValueReplaces(t *testing.T) {
	for name, codec := range map[string]comm.Codec{"gob": nil, "JSON": comm.JSON} {
		t.Run(name, func(t *testing.T) {
			values := [2]choice{{Names: map[string]int{"new": 1}}, {On: true, N: 5, Names: map[string]int{"old": 1}}}
			errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
				return comm.BroadcastValue(ctx, g, 0, &values[rank], codec)
			})
			require.NoError(t, errors.Join(errs[:]...))
			require.Equal(t, choice{Names: map[string]int{"new": 1}}, values[1])
			require.Equal(t, values[1], values[0])
		})
	}
}

// An interface arrives with what is in it.
func TestBroadcastOfAny(t *testing.T) {
	values := [2]any{"text", 1}
	errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
		return comm.BroadcastValue(ctx, g, 0, &values[rank], nil)
	})
	require.NoError(t, errors.Join(errs[:]...))
	require.Equal(t, [2]any{"text", "text"}, values)
}

// A codec that panics, as gob does for a nil pointer, fails on all ranks, which go on.
func TestValueWhoseCodecPanics(t *testing.T) {
	one := 1
	errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
		_, err := comm.GatherValues(ctx, g, nil, []*int{&one, nil}[rank])
		all, next := comm.GatherValues(ctx, g, nil, rank)
		if next == nil && (all[0] != 0 || all[1] != 1) {
			next = errors.New("the next values are wrong")
		}
		if next != nil {
			return next
		}
		return err
	})
	for _, err := range errs {
		e, ok := errors.AsType[*comm.ValueError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, 1, e.Rank)
		require.True(t, strings.Contains(e.Reason, "panicked"), e.Reason)
	}
}
