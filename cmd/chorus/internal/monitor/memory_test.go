package monitor

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/status"
)

// TestPrintMemory checks the table of all ranks.
func TestPrintMemory(t *testing.T) {
	j := &Job{Ranks: []Rank{
		{Rank: 0, Host: "a", Devices: []status.Device{{Name: "cuda:0", Total: 80 << 30, Free: 20 << 30, Uses: []status.Use{{Owner: "buffers", Bytes: 56 << 30}, {Owner: "NCCL", Bytes: 4 << 30}}}}},
		{Rank: 1, Host: "a", Missing: "it did not answer"},
		{Rank: 2, Host: "b"},
		{Rank: 3, Host: "b", Devices: []status.Device{{Name: "cuda:1", Total: 80 << 30, Free: 79 << 30}}},
	}}
	var out strings.Builder
	require.NoError(t, j.PrintMemory(&out))
	require.Equal(t, `RANK  HOST  DEVICE  BYTES   SHARE  USE
0     a     cuda:0  56 GiB  70.0%  buffers
0     a     cuda:0  4 GiB   5.0%   NCCL
0     a     cuda:0  20 GiB  25.0%  free
1     a     -       -       -      it did not answer
2     b     -       -       -      this rank has no device yet
3     b     cuda:1  1 GiB   1.2%   in use; the process did not tell for what
3     b     cuda:1  79 GiB  98.8%  free
`, out.String())
}
