package stream_test

import (
	"testing"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
	"github.com/stretchr/testify/require"
)

// An event of other code orders streams, and closing the wrapper does not destroy it.
func TestExternalEvent(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		other, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer other.Close()
		theirs, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		defer theirs.Close()
		for range 2 {
			e, err := stream.ExternalEvent(devs[0], theirs.Handle())
			require.NoError(t, err)
			require.Equal(t, theirs.Handle(), e.Handle())
			gate, passed, saw := make(chan struct{}), false, false
			require.NoError(t, s.Callback(func() { <-gate; passed = true }))
			require.NoError(t, theirs.Record(s))
			done, err := e.Query()
			require.NoError(t, err)
			require.False(t, done)
			require.NoError(t, other.Wait(e))
			require.NoError(t, other.Callback(func() { saw = passed }))
			close(gate)
			require.NoError(t, e.Sync(t.Context()))
			require.NoError(t, other.Sync(t.Context()))
			require.True(t, saw, "the other stream did not wait")
			_, err = e.Elapsed(theirs)
			require.ErrorIs(t, err, device.ErrorInvalidHandle)
			require.NoError(t, e.Record(s))
			require.NoError(t, e.Close())
			require.NoError(t, theirs.Sync(t.Context()), "it still exists")
		}
		_, err = stream.ExternalEvent(nil, theirs.Handle())
		require.Error(t, err)
		_, err = stream.ExternalEvent(devs[0], 0)
		require.ErrorIs(t, err, device.ErrorInvalidHandle)
	})
}
