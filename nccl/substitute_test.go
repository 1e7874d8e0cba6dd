package nccl_test

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A taker is a Substitute that takes all-reduces, and does nothing with them.
type taker struct {
	taken   atomic.Int32
	aborted atomic.Bool
}

func (x *taker) Takes(c nccl.Collective) nccl.Service {
	if c.Kind == nccl.AllReduceKind {
		return nccl.Instead
	}
	return nccl.Nothing
}
func (x *taker) Enqueue(*stream.Stream, nccl.Collective) error {
	x.taken.Add(1)
	return nil
}
func (x *taker) Lend(*stream.Stream, nccl.Collective) (dst, src uint64, err error) { return 0, 0, nil }
func (x *taker) Return(*stream.Stream, nccl.Collective, bool) error                { return nil }
func (x *taker) Together([]*stream.Stream, []nccl.Collective) error                { return nil }
func (x *taker) Abort()                                                            { x.aborted.Store(true) }

// Where NCCL refuses its part of a group, what a Substitute has enqueued before does not
// count as refused: its communicators end, since other ranks may wait for the rest.
func TestGroupThatNCCLRefusesInPart(t *testing.T) {
	for name, c := range map[string]struct {
		fault string
		early bool // the transfers come before the collectives
		taken int32
	}{
		"at its end":                {"ncclGroupEnd#2=ncclSystemError", false, 1},
		"an operation":              {"ncclSend#2=ncclSystemError", false, 1},
		"one before the collective": {"ncclSend#2=ncclSystemError", true, 0},
		"at its beginning":          {"ncclGroupStart#2=ncclSystemError", false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: c.fault}))
			xs, _ := buffers(t, ranks, 24)
			ys, _ := buffers(t, ranks, 24)
			takers := []*taker{{}, {}}
			for i, k := range ranks {
				k.c.Substitute(k.s, takers[i])
			}
			transfer := func() error {
				if err := nccl.Send(ranks[0].c, ranks[0].s, ys[0], 1); err != nil {
					return err
				}
				return nccl.Recv(ranks[1].c, ranks[1].s, ys[1], 0)
			}
			group := func() error {
				return nccl.Group(ranks[0].c, func() error {
					if c.early {
						if err := transfer(); err != nil {
							return err
						}
					}
					for i, k := range ranks {
						if err := nccl.AllReduce(k.c, k.s, xs[i], xs[i], nccl.Sum); err != nil {
							return err
						}
					}
					if c.early {
						return nil
					}
					return transfer()
				})
			}
			require.NoError(t, group())
			require.ErrorIs(t, group(), nccl.ErrorSystem)
			for i, k := range ranks {
				require.Equal(t, 1+c.taken, takers[i].taken.Load())
				if c.taken == 0 {
					require.NoError(t, k.c.Err(), "nothing was enqueued")
					require.EqualValues(t, 1, k.c.Progress().Issued.Collective)
					continue
				}
				until(t, func() bool { return k.c.Err() != nil })
				require.ErrorIs(t, k.c.Err(), nccl.ErrorSystem)
				until(t, takers[i].aborted.Load)
				require.EqualValues(t, 2, k.c.Progress().Issued.Collective, "the collective counts")
			}
			if c.taken == 0 {
				require.NoError(t, group(), "after which all goes on")
			}
		})
	}
}
