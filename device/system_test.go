package device_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Virtual devices have every library but a compiler, and each says its version.
func TestLibrariesOfVirtualDevices(t *testing.T) {
	s := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
	versions := map[string]string{}
	for _, l := range s.Libraries() {
		require.NoError(t, l.Err, l.Name)
		require.Equal(t, "built in", l.Path, l.Name)
		versions[l.Name] = l.Version
	}
	require.Len(t, versions, 5)
	require.Equal(t, "2.28.3", versions["NCCL"])
	require.Equal(t, "1.15", versions["cuFile"])
	require.Contains(t, versions["CUDA driver"], "CUDA ")
	require.Contains(t, versions, "cuBLAS")
	require.Equal(t, "13.0.2", versions["cuBLASLt"])
}

func TestSyncDebug(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d, sys, ctx := devs[0], devs[0].System(), testgpu.Context(t)
		s, err := stream.New(d, nil)
		require.NoError(t, err)
		defer s.Close()
		e, err := stream.NewEvent(d, nil)
		require.NoError(t, err)
		defer e.Close()
		x, err := memory.MakeFrom(s, []int32{1, 2, 3})
		require.NoError(t, err)
		defer x.Close()
		pinned, err := memory.MakePinned[int32](d, 3)
		require.NoError(t, err)
		defer pinned.Close()
		out := []int32{-1, -1, -1}
		flagged := map[string]func() error{
			"stream: sync":            func() error { return s.Sync(context.Background()) },
			"memory: copy to host":    func() error { return x.CopyTo(s, out) },
			"memory: copy from host":  func() error { return x.CopyFrom(s, []int32{7, 8, 9}) },
			"stream: sync, a context": func() error { return s.Sync(ctx) },
		}
		allowed := map[string]func() error{
			"Device.Sync":    func() error { return d.Sync(ctx) },
			"Event.Sync":     func() error { return e.Sync(ctx) },
			"Stream.Query":   func() error { _, err := s.Query(); return err },
			"CopyToPinned":   func() error { return x.CopyToPinned(s, pinned) },
			"CopyFromPinned": func() error { return x.CopyFromPinned(s, pinned) },
		}
		logged := catchLog(t)

		require.Equal(t, device.SyncOff, sys.SyncDebug())
		restore := sys.SetSyncDebug(device.SyncError)
		require.Equal(t, device.SyncError, sys.SyncDebug())
		for name, call := range flagged {
			err := call()
			require.ErrorIs(t, err, device.ErrSynchronizing, name)
			require.ErrorContains(t, err, "called a synchronizing CUDA operation")
		}
		require.Equal(t, []int32{-1, -1, -1}, out, "nothing was copied")
		require.ErrorContains(t, x.CopyTo(s, out), "memory: copy to host on "+d.String())
		for name, call := range allowed {
			require.NoError(t, call(), name)
		}
		require.NoError(t, e.Record(s))

		inner := sys.SetSyncDebug(device.SyncWarn)
		require.Empty(t, logged.String())
		for name, call := range flagged {
			logged.Reset()
			require.NoError(t, call(), name)
			require.Equal(t, 1, bytes.Count(logged.Bytes(), []byte("\n")), "one line each: %s", logged)
			require.Contains(t, logged.String(), "called a synchronizing CUDA operation")
			require.Contains(t, logged.String(), "device="+d.String())
			require.Contains(t, logged.String(), "system_test.go:", "the line of the program")
		}
		logged.Reset()
		inner()
		require.Equal(t, device.SyncError, sys.SyncDebug(), "the mode before")
		restore()
		require.Equal(t, device.SyncOff, sys.SyncDebug())
		require.NoError(t, x.CopyTo(s, out))
		require.Empty(t, logged.String())

		defer sys.SetSyncDebug(99)()
		require.ErrorIs(t, s.Sync(ctx), device.ErrSynchronizing, "an unknown mode is the strictest")
	})
}

// catchLog returns what is logged until the test ends.
func catchLog(t *testing.T) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&b, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return &b
}

func TestSyncDebugCostsNothingWhenOff(t *testing.T) {
	d := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	require.Zero(t, testgpu.Allocs(100, func() {
		if gpu.DeviceOf(d).Blocking("test") != nil {
			t.Fatal("the mode is off")
		}
	}))
}
