package gds

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// What is on the stream comes before the call, and what is enqueued later after it.
func TestOrder(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ctx, s := testgpu.Context(t), newStream(t, devs[0])
		want := randomBytes(1 << 20)
		f := openFile(t, writeFile(t, want), nil)
		x, y := makeBytes(t, s, len(want)), makeBytes(t, s, len(want))
		open := streamtest.Hold(t, s)
		require.NoError(t, x.Zero(s))
		done := make(chan error, 1)
		go func() { done <- f.Load(ctx, s, x, 0) }()
		open()
		require.NoError(t, <-done)
		require.NoError(t, memory.Copy(s, y, x))
		require.True(t, string(want) == string(hostBytes(t, s, y)))

		path := filepath.Join(t.TempDir(), "file")
		out, err := OpenFile(path, os.O_RDWR|os.O_CREATE, nil)
		require.NoError(t, err)
		defer out.Close()
		poison(t, s, x)
		open = streamtest.Hold(t, s)
		require.NoError(t, memory.Copy(s, x, y))
		go func() { done <- out.Save(ctx, s, x, 0) }()
		open()
		require.NoError(t, <-done)
		require.NoError(t, x.Zero(s))
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.True(t, string(want) == string(got))
	})
}

// A call that waits for its stream keeps nothing from others.
func TestWaitingKeepsNoSlots(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		smallRing(t, devs[0], minSlot)
		r := newRig(t, devs[0])
		ctx, other := testgpu.Context(t), newStream(t, devs[0])
		y := makeBytes(t, other, r.x.Len())
		f := r.open(t, Auto)
		defer f.Close()
		open := streamtest.Hold(t, r.s)
		done := make(chan error, 1)
		go func() { done <- f.Load(ctx, r.s, r.x, 0) }()
		for range 20 {
			require.NoError(t, f.Load(ctx, other, y, 0))
		}
		open()
		require.NoError(t, <-done)
		require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)))
		require.True(t, string(r.content) == string(hostBytes(t, other, y)))
	})
}

// Wrong arguments are found before anything moves.
func TestArguments(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		ctx, s := testgpu.Context(t), newStream(t, devs[0])
		path := writeFile(t, randomBytes(1000))
		f := openFile(t, path, nil)
		x := makeBytes(t, s, 1000)
		refuse := func(err error, says string) {
			t.Helper()
			require.ErrorContains(t, err, says)
			require.ErrorContains(t, err, path)
		}
		_, err := f.ReadAt(ctx, s, x, -1)
		refuse(err, "offset -1 is negative")
		refuse(f.Load(ctx, s, x, -1), "at byte -1")
		refuse(f.Load(ctx, s, x, 1), "at byte 1: 999 of 1000 bytes: unexpected EOF")
		refuse(f.Load(ctx, s, x, 2000), "at byte 2000: 0 of 1000 bytes")
		refuse(f.Load(ctx, s, x, 1<<63-1), "no file has such bytes")
		refuse(f.Load(ctx, nil, x, 0), "no stream given")
		refuse(f.Save(ctx, s, x, 0), "opened to be read only")
		refuse(f.readPieces(ctx, s, []piece{{Off: 10, Mem: x.Slice(0, 10)}, {Off: 19, Mem: x.Slice(20, 30)}}, hooks{}), "piece 1 begins at byte 19, before byte 20")

		closed, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		require.NoError(t, closed.Close())
		err = f.Load(ctx, closed, x, 0)
		refuse(err, "use after Close")
		require.ErrorIs(t, err, device.ErrClosed)

		restore := devs[0].System().SetSyncDebug(device.SyncError)
		err = f.Load(ctx, s, x, 0)
		restore()
		refuse(err, "gds: read")
		require.ErrorIs(t, err, device.ErrSynchronizing)

		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			err := f.Load(ctx, s, x, 0)
			refuse(err, "before the capture")
			var capture *device.CaptureError
			require.True(t, errors.As(err, &capture))
			return nil
		}, nil)
		require.NoError(t, err)
		require.NoError(t, g.Close())
		for _, b := range hostBytes(t, s, x) {
			require.EqualValues(t, 0xa5, b, "nothing was written")
		}
		require.NoError(t, f.Load(ctx, s, x, 0))

		w, err := OpenFile(path, os.O_WRONLY, nil)
		require.NoError(t, err)
		refuse(w.Load(ctx, s, x, 0), "opened to be written only")
		require.NoError(t, w.Save(ctx, s, x, 0))
		require.NoError(t, w.Close())

		require.NoError(t, f.Close())
		require.NoError(t, f.Close())
		_, err = f.ReadAt(ctx, s, x, 0)
		refuse(err, "gds: read")
		require.ErrorIs(t, f.Load(ctx, s, x, 0), device.ErrClosed)
		_, err = f.Size()
		require.ErrorIs(t, err, device.ErrClosed)
		require.ErrorContains(t, (*File)(nil).Load(ctx, s, x, 0), "no file given")
		require.NoError(t, (*File)(nil).Close())
	})
}

func TestPiecesOfAnotherDevice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		a, b := newStream(t, devs[0]), newStream(t, devs[1])
		f := openFile(t, writeFile(t, randomBytes(1000)), nil)
		require.ErrorContains(t, f.Load(testgpu.Context(t), b, makeBytes(t, a, 10), 0), "the buffer is of")
	})
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		path string
		flag int
		cfg  *FileConfig
		says string
	}{
		{filepath.Join(dir, "none"), os.O_RDONLY, nil, "no such file"},
		{dir, os.O_RDONLY, nil, "not a regular file"},
		{"/dev/null", os.O_RDONLY, nil, "not a regular file"},
		{filepath.Join(dir, "x"), os.O_RDWR | os.O_CREATE | os.O_APPEND, nil, "O_APPEND"},
		{filepath.Join(dir, "x"), os.O_RDWR | os.O_CREATE, &FileConfig{Engine: 9}, "no engine 9"},
		{filepath.Join(dir, "x"), os.O_RDWR | os.O_CREATE, &FileConfig{Threads: -1}, "-1 threads"},
	} {
		before := openFiles(t)
		_, err := OpenFile(c.path, c.flag, c.cfg)
		require.ErrorContains(t, err, "gds: open "+c.path)
		require.ErrorContains(t, err, c.says)
		require.Equal(t, before, openFiles(t))
		_, ok := errors.AsType[*Error](err)
		require.True(t, ok)
	}
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, list, "an error of the options makes no file")
	_, err = Open(filepath.Join(dir, "none"), nil)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Create(filepath.Join(dir, "none", "file"), nil)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Create(dir, nil)
	require.ErrorContains(t, err, "not a regular file")
}

func TestEnvironment(t *testing.T) {
	path := writeFile(t, randomBytes(10))
	t.Setenv("CHORUS_GDS_ENGINE", "direct")
	t.Setenv("CHORUS_GDS_THREADS", "3")
	f := openFile(t, path, nil)
	require.Equal(t, Direct, f.Status().Engine)
	require.Equal(t, 3, f.threads)
	f = openFile(t, path, &FileConfig{Engine: Cached, Threads: 2})
	require.Equal(t, Cached, f.Status().Engine)
	require.Equal(t, 2, f.threads)
	t.Setenv("CHORUS_GDS_ENGINE", "fast")
	_, err := Open(path, nil)
	require.ErrorContains(t, err, "CHORUS_GDS_ENGINE")
	t.Setenv("CHORUS_GDS_ENGINE", "auto")
	for _, value := range []string{"many", "-1", "1025", ""} {
		t.Setenv("CHORUS_GDS_THREADS", value)
		_, err = Open(path, nil)
		require.ErrorContains(t, err, fmt.Sprintf("CHORUS_GDS_THREADS=%q: want 1 to 1024, or 0 for as many", value))
	}
	t.Setenv("CHORUS_GDS_THREADS", "0")
	t.Setenv("CHORUS_GDS_PINNED", "100")
	f = openFile(t, path, nil)
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	require.ErrorContains(t, f.Load(testgpu.Context(t), s, makeBytes(t, s, 10), 0), `CHORUS_GDS_PINNED="100": want at least 65536 bytes`)
}
