package comm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestIncompatibleRanks(t *testing.T) {
	a := rankInfo{Host: "h", PID: 1, Device: "cuda:0", UUID: "GPU-1", Backend: "cuda"}
	b := rankInfo{Host: "h", PID: 2, Device: "cuda:1", UUID: "GPU-2", Backend: "cuda"}
	require.Empty(t, incompatibility([]rankInfo{a, b}))
	same := b
	same.UUID = a.UUID
	require.Contains(t, incompatibility([]rankInfo{a, same}), "ranks 0 (pid 1) and 1 (pid 2) are both on")
	a.Shares, same.Shares, a.Strategy, same.Strategy = true, true, "own", "own"
	require.Empty(t, incompatibility([]rankInfo{a, same}))
	inside := same
	inside.PID = a.PID
	require.Contains(t, incompatibility([]rankInfo{a, same, inside}), "ranks 0 (pid 1) and 2 (pid 1) are on cuda:1 GPU-1 of host h in one process: NCCL refuses")
	a.Shares, a.Strategy = false, ""
	other := b
	other.Backend = "virtual"
	require.Contains(t, incompatibility([]rankInfo{a, other}), "rank 0 uses cuda devices and rank 1 virtual devices")
	other = b
	other.Encrypts = true
	require.Contains(t, incompatibility([]rankInfo{a, other}), "ranks 0 and 1 differ in CHORUS_NCCL_ENCRYPT")
}
