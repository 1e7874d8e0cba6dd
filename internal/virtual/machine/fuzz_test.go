package machine

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// FuzzStartIn reads /proc/<pid>/stat of a process with any name.
func FuzzStartIn(f *testing.F) {
	f.Add([]byte("a"), uint64(7))
	f.Add([]byte(") S 1 2 3 ("), uint64(1<<63))
	f.Fuzz(func(t *testing.T, name []byte, start uint64) {
		stat := fmt.Appendf(nil, "12 (%s) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 %d 20", name, start)
		require.Equal(t, start, startIn(stat))
		_ = startIn(name)
	})
}

// FuzzTicket reads handles of other processes. A handle that is not of Chorus opens nothing.
func FuzzTicket(f *testing.F) {
	h := (&ticket{Magic: ticketMagic, PID: 1 << 31, FD: -1, Start: 1}).handle()
	f.Add(h[:])
	f.Fuzz(func(t *testing.T, b []byte) {
		var h cudadrv.IpcMemHandle
		copy(h[:], b)
		x, ok := readTicket(h)
		if !ok {
			return
		}
		x.Start = 0 // of no process
		_, _, r := x.open()
		require.NotEqual(t, cudadrv.Success, r)
	})
}
