package comm_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// both runs f on two groups of one rank each, and returns their errors.
func both(t *testing.T, f func(ctx context.Context, rank int, g *comm.Group) error) (errs [2]error) {
	gs := joined(t, context.Background(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	return [2]error(atOnce(2, func(i int) error { return f(testgpu.Context(t), i, gs[i]) }))
}

// requireValueError requires that the value of a rank is to blame, for a reason with a text.
func requireValueError(t *testing.T, err error, rank int, text string) {
	t.Helper()
	e, ok := errors.AsType[*comm.ValueError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, rank, e.Rank)
	require.Contains(t, e.Reason, text)
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
		requireValueError(t, err, 1, "panicked")
	}
}

// A value, an empty one and one that cannot be encoded go from rank 0 to rank 1.
func TestSendValue(t *testing.T) {
	got := choice{On: true, N: 5}
	want := choice{N: 7, Names: map[string]int{"a": 1}}
	var empty struct{}
	errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
		if rank == 0 {
			err := comm.SendValue(ctx, g, 1, any(make(chan int)), nil)
			return errors.Join(comm.SendValue(ctx, g, 1, want, nil), comm.SendValue(ctx, g, 1, empty, comm.JSON), err)
		}
		var x any
		err := comm.RecvValue(ctx, g, 0, &x, nil)
		return errors.Join(comm.RecvValue(ctx, g, 0, &got, nil), comm.RecvValue(ctx, g, 0, &empty, comm.JSON), err)
	})
	for _, err := range errs {
		requireValueError(t, err, 0, "")
		require.Equal(t, 1, strings.Count(err.Error(), "comm:"), "only the first value fails: %v", err)
	}
	require.Equal(t, want, got)
}

// Arguments are refused before anything is sent.
func TestSendValueArguments(t *testing.T) {
	errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
		for _, err := range []error{
			comm.SendValue(ctx, g, 2, 1, nil), comm.SendValue(ctx, g, -1, 1, nil), comm.SendValue(ctx, g, rank, 1, nil),
			comm.RecvValue(ctx, g, rank, new(int), nil), comm.RecvValue(ctx, g, 7, new(int), nil),
		} {
			if !errors.Is(err, comm.ErrMismatch) {
				return errors.Join(errors.New("a wrong peer is not refused"), err)
			}
		}
		if err := comm.RecvValue[int](ctx, g, 1-rank, nil, nil); err == nil || !strings.Contains(err.Error(), "v is nil") {
			return errors.New("nil is not refused")
		}
		return g.Err()
	})
	require.NoError(t, errors.Join(errs[:]...))
}

// A peer that announces more than MaxValueBytes breaks the group, so that neither rank waits.
func TestRecvOfAHostileSize(t *testing.T) {
	for _, size := range []int64{-1, comm.MaxValueBytes + 1, 1 << 62} {
		got := 5
		errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
			if rank == 1 {
				return comm.RecvValue(ctx, g, 0, &got, nil)
			}
			x, err := memory.MakeFrom(g.Stream(0), []int64{size, 0})
			if err != nil {
				return err
			}
			defer x.Close()
			return errors.Join(comm.Send(g, 1, x), g.Wait(ctx))
		})
		if errs[0] != nil {
			require.ErrorIs(t, errs[0], comm.ErrBroken) // it has noticed the end of rank 1
		}
		require.ErrorIs(t, errs[1], comm.ErrBroken)
		require.ErrorContains(t, errs[1], "its size is")
		require.Equal(t, 5, got)
	}
}

// Data of another type is an error of the receiver only, and does not change its variable.
func TestRecvOfAnotherType(t *testing.T) {
	got := 5
	errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
		if rank == 0 {
			return comm.SendValue(ctx, g, 1, "text", nil)
		}
		return comm.RecvValue(ctx, g, 0, &got, nil)
	})
	require.NoError(t, errs[0])
	require.ErrorContains(t, errs[1], "decode the value of rank 0")
	require.Equal(t, 5, got)
}

// Each rank gets its value, in one process and in two.
func TestScatterValues(t *testing.T) {
	values := []choice{{N: 1, Names: map[string]int{"zero": 0}}, {On: true}}
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		for root := range 2 {
			got, err := comm.ScatterValues(testgpu.Context(t), g, root, values, nil)
			require.NoError(t, err)
			require.Equal(t, values, got)
		}
	})
	for root := range 2 {
		got := make([]choice, 2)
		errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
			list := values
			if rank != root {
				list = nil
			}
			mine, err := comm.ScatterValues(ctx, g, root, list, comm.JSON)
			if err == nil {
				got[rank] = mine[0]
			}
			return err
		})
		require.NoError(t, errors.Join(errs[:]...))
		require.Equal(t, values, got)
	}
}

// A list that cannot be scattered is an error on all ranks, which go on.
func TestScatterOfWrongLists(t *testing.T) {
	for _, c := range []struct {
		list  []any
		about int
		text  string
	}{
		{[]any{1, make(chan int)}, 1, "gob"},
		{[]any{make(chan int), 1}, 0, "gob"},
		{[]any{1}, 1, "1 value for 2 ranks: want one for each"},
		{nil, 1, "0 values for 2 ranks"},
	} {
		errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
			list := c.list
			if rank == 0 {
				list = nil
			}
			_, err := comm.ScatterValues(ctx, g, 1, list, nil)
			if next, failed := comm.ScatterValues(ctx, g, 0, []int{3, 4}, nil); failed != nil || next[0] != 3+rank {
				return errors.Join(errors.New("the next values are wrong"), failed)
			}
			return err
		})
		for _, err := range errs {
			requireValueError(t, err, c.about, c.text)
		}
	}
}

// A rank that closes its group when it has the error does not take it from ranks that do not have it yet.
func TestErrorsOfValuesReachAllRanks(t *testing.T) {
	for name, call := range map[string]func(context.Context, *comm.Group, int) error{
		"gather": func(ctx context.Context, g *comm.Group, rank int) error {
			_, err := comm.GatherValues(ctx, g, nil, []any{1, make(chan int)}[rank])
			return err
		},
		"broadcast": func(ctx context.Context, g *comm.Group, rank int) error {
			return comm.BroadcastValue(ctx, g, 1, new([]any{1, make(chan int)}[rank]), nil)
		},
		"scatter": func(ctx context.Context, g *comm.Group, rank int) error {
			_, err := comm.ScatterValues(ctx, g, 1, []any{1}, nil)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				for _, err := range both(t, func(ctx context.Context, rank int, g *comm.Group) error {
					return errors.Join(call(ctx, g, rank), g.Close())
				}) {
					requireValueError(t, err, 1, "")
				}
			}
		})
	}
}

// A value that cannot be decoded is an error that names its rank.
func TestScatterOfWhatCannotBeDecoded(t *testing.T) {
	errs := both(t, func(ctx context.Context, rank int, g *comm.Group) error {
		_, err := comm.ScatterValues(ctx, g, 0, []any{1, 2}, undecodable{comm.JSON})
		return err
	})
	for rank, err := range errs {
		require.ErrorContains(t, err, fmt.Sprintf("decode the value of rank %d: no decoder", rank))
	}
}

type undecodable struct{ comm.Codec }

func (undecodable) Decode([]byte, any) error { return errors.New("no decoder") }
