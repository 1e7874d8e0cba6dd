package osthread

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// The set has the thread that entered, and no other thread.
func TestThreads(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var set Threads
	require.False(t, set.Has())
	leave := set.Enter()
	require.True(t, set.Has())
	other := make(chan bool)
	go func() { other <- set.Has() }() // on another thread, because this one is locked
	require.False(t, <-other)
	leave()
	require.False(t, set.Has())
}
