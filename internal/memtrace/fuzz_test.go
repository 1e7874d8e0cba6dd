package memtrace

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzRead reads what somebody may have written for a trace.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"events": [["alloc", 512, 100, 0, 1.5], ["free_requested", 512, 100, 0, 2], ["free_completed", 512, 100, 0, 3]]}`))
	f.Add([]byte(sequence(step)))
	f.Add([]byte(`{"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 10, "stream": 0}]]}`))
	f.Add([]byte("\x80\x04}."))
	f.Add([]byte{0x1f, 0x8b, 8})
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := Read(bytes.NewReader(b))
		if err != nil {
			return
		}
		defer rec.Close()
		for _, x := range rec.Traces {
			require.LessOrEqual(t, x.Streams, mostStreams)
			requireValid(t, x)
			for _, e := range eventsOf(t, x) {
				require.True(t, e.Op == EmptyCache || e.Block >= 0 && e.Block < x.Blocks)
				require.True(t, e.Stream >= 0 && (e.Op != Alloc || e.Stream < x.Streams))
			}
		}
	})
}
