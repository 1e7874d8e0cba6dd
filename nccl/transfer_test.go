package nccl_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Transfers of a group that do not fit each other are refused before NCCL sees any.
func TestTransfersThatDoNotFit(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 8)
		floats, err := memory.Make[float64](ranks[1].s, 8)
		require.NoError(t, err)
		defer floats.Close()
		c0, s0, c1, s1 := ranks[0].c, ranks[0].s, ranks[1].c, ranks[1].s
		type issued []error
		for name, issue := range map[string]func(on onto) issued{
			"length": func(on onto) issued {
				return issued{nccl.Send(on(c0), s0, xs[0].Slice(0, 4), 1), nccl.Recv(on(c1), s1, xs[1].Slice(0, 2), 0)}
			},
			"receive first": func(on onto) issued {
				return issued{nccl.Recv(on(c1), s1, xs[1].Slice(0, 4), 0), nccl.Send(on(c0), s0, xs[0].Slice(0, 2), 1)}
			},
			"type": func(on onto) issued {
				return issued{nccl.Send(on(c0), s0, xs[0], 1), nccl.Recv(on(c1), s1, floats, 0)}
			},
			"order": func(on onto) issued {
				return issued{
					nccl.Send(on(c0), s0, xs[0].Slice(0, 1), 1), nccl.Send(on(c0), s0, xs[0].Slice(1, 3), 1),
					nccl.Recv(on(c1), s1, xs[1].Slice(0, 2), 0), nccl.Recv(on(c1), s1, xs[1].Slice(2, 3), 0),
				}
			},
			"uneven": func(on onto) issued {
				return issued{
					nccl.AllToAllV(on(c0), s0, xs[0].Slice(0, 2), []int{1, 1}, xs[0].Slice(2, 5), []int{1, 2}),
					nccl.AllToAllV(on(c1), s1, xs[1].Slice(0, 2), []int{1, 1}, xs[1].Slice(2, 4), []int{1, 1}),
				}
			},
			"of one rank": func(on onto) issued {
				return issued{
					nccl.Send(on(c0), s0, xs[0].Slice(0, 2), 0), nccl.AllToAllV(on(c0), s0, xs[0].Slice(2, 3), []int{1, 0}, xs[0].Slice(3, 4), []int{1, 0}),
					nccl.Recv(on(c0), s0, xs[0].Slice(4, 6), 0),
				}
			},
			"to itself":   func(on onto) issued { return issued{nccl.Send(on(c0), s0, xs[0], 0)} },
			"from itself": func(on onto) issued { return issued{nccl.Recv(on(c1), s1, xs[1], 1)} },
		} {
			err := nccl.Group(func(b *nccl.Batch) error {
				for _, err := range issue(b.On) {
					require.NoError(t, err, name)
				}
				return nil
			})
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage, name)
			_, seen := err.(*nccl.Error)
			require.False(t, seen, "%s: NCCL has seen it", name)
		}
		require.ErrorContains(t, nccl.Send(c0, s0, xs[0], 0), "its own peer", "without a group")
		require.Empty(t, c0.Trace(), "nothing was scheduled")

		// Those that fit, of two ways at once, and to itself.
		require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
			for _, err := range []error{
				nccl.Recv(b.On(c1), s1, xs[1].Slice(0, 2), 0), nccl.Recv(b.On(c1), s1, xs[1].Slice(2, 3), 0),
				nccl.Send(b.On(c1), s1, xs[1].Slice(4, 8), 0), nccl.Recv(b.On(c0), s0, xs[0].Slice(4, 8), 1),
				nccl.Send(b.On(c0), s0, xs[0].Slice(0, 2), 1), nccl.Send(b.On(c0), s0, xs[0].Slice(2, 3), 1),
				nccl.Send(b.On(c1), s1, xs[1].Slice(7, 8), 1), nccl.Recv(b.On(c1), s1, xs[1].Slice(3, 4), 1),
			} {
				if err != nil {
					return err
				}
			}
			return nil
		}))
		got := make([]int64, 8)
		require.NoError(t, xs[1].CopyTo(s1, got))
		require.Equal(t, append(append(append([]int64{}, in[0][:3]...), in[1][7]), in[1][4:]...), got)
		require.NoError(t, xs[0].CopyTo(s0, got))
		require.Equal(t, append(append([]int64{}, in[0][:4]...), in[1][4:]...), got)
	})
}
