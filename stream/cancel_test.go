package stream_test

import (
	"context"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

var background = context.Background()

// Waits that are given up leave neither a goroutine nor an OS thread behind.
func TestCancelledWaitsLeaveNothing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		e, err := s.Record(&stream.EventConfig{Blocking: true})
		require.NoError(t, err)
		defer e.Close()
		giveUp := func(times int) {
			for i := range times {
				ctx, cancel := context.WithTimeout(background, time.Millisecond)
				wait := s.Sync
				if i%2 == 1 {
					wait = e.Sync
				}
				require.ErrorIs(t, wait(ctx), context.DeadlineExceeded)
				cancel()
			}
		}
		giveUp(20)
		goroutines, before := runtime.NumGoroutine(), threads(t)
		giveUp(200)
		require.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+3 }, time.Minute, time.Millisecond) // one is Eventually's
		require.LessOrEqual(t, threads(t), before+50, "of 200 waits; the runtime starts threads beside those that a busy machine stops in a system call")
		close(gate)
		require.NoError(t, s.Sync(testgpu.Context(t)))
	})
}

func threads(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Skip("no list of threads here: ", err)
	}
	return len(list)
}
