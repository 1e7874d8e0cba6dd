package nccl_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// memory.Ledger has NCCL's memory of each open communicator, and what remains of it while it is
// suspended.
func TestLedgerHasCommunicators(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ncclOf := func() (list []memory.Use) {
		u, err := memory.Ledger(devs[1])
		require.NoError(t, err)
		for _, x := range u.Uses {
			if !x.Reserved && strings.HasPrefix(x.Owner, "NCCL") {
				list = append(list, x)
			}
		}
		return list
	}
	require.Empty(t, ncclOf())
	rs := connect(t, devs)
	stats, err := rs[1].c.MemoryStats()
	require.NoError(t, err)
	uses := ncclOf()
	require.Len(t, uses, 1, "each device has one rank")
	require.Equal(t, stats.Total, uses[0].Bytes)
	require.Regexp(t, `^NCCL, communicator \d+, rank 1 of 2$`, uses[0].Owner)
	for _, r := range rs {
		require.NoError(t, r.c.Suspend())
	}
	uses = ncclOf()
	require.Equal(t, stats.Persistent, uses[0].Bytes)
	require.Regexp(t, `rank 1 of 2, suspended$`, uses[0].Owner)
	require.NoError(t, rs[1].c.Close())
	require.Empty(t, ncclOf())
}

// An NCCL without statistics has no entry.
func TestLedgerWithoutStatistics(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: "2.28.3"})
	connect(t, devs)
	u, err := memory.Ledger(devs[0])
	require.NoError(t, err)
	for _, x := range u.Uses {
		require.NotContains(t, x.Owner, "NCCL")
	}
}
