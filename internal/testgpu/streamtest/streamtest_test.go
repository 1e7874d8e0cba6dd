package streamtest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/stream"
)

// An operation that hangs for minutes takes no time, both clocks show the minutes, and nothing of it is left.
func TestRunInVirtualTime(t *testing.T) {
	begin := time.Now()
	RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 1, Faults: "hang@cuEventRecord#1"}, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		from, recorded := time.Now(), collective.Now()
		e, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		require.NoError(t, e.Record(s))
		time.Sleep(5 * time.Minute)
		done, err := e.Query()
		require.NoError(t, err)
		require.False(t, done, "it hangs until the end of the test")
		require.Equal(t, 5*time.Minute, time.Since(from))
		require.Equal(t, (5 * time.Minute).Nanoseconds(), collective.Now()-recorded)
		require.Positive(t, recorded)
	})
	require.Less(t, time.Since(begin), time.Minute)
	require.InDelta(t, 0, time.Until(collective.Moment(collective.Now())).Seconds(), 10, "the recorder's clock is the real one again")
}
