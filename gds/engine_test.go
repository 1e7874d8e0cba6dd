package gds

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// onDisk returns a file of the content on a file system that can be read directly,
// or skips the test.
func onDisk(t *testing.T, content []byte) string {
	t.Helper()
	path := writeFile(t, content)
	f := openFile(t, path, nil)
	if f.mem || !f.directReady() || !tellsResidency(f) {
		t.Skipf("%s: memory=%v, direct: %v", path, f.mem, f.Status().Direct.Reason)
	}
	return path
}

func tellsResidency(f *File) bool {
	f.resident(0, 1)
	return !f.refuses(Direct)
}

// What is in the page cache is read from there, and the rest past it.
func TestResidency(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	ctx, s := testgpu.Context(t), newStream(t, dev)
	want := randomBytes(4<<20 + 17)
	path := onDisk(t, want)
	forget(t, path)
	half, err := os.Open(path)
	require.NoError(t, err)
	defer half.Close()
	require.NoError(t, unix.Fadvise(int(half.Fd()), 0, 0, unix.FADV_RANDOM)) // reads nothing ahead
	_, err = half.ReadAt(make([]byte, 2<<20), 0)
	require.NoError(t, err)
	_, err = half.ReadAt(make([]byte, minWindow/4), 3<<20) // a little of a part does not count
	require.NoError(t, err)

	f := openFile(t, path, nil)
	require.Equal(t, Direct, f.Status().Engine)
	x := makeBytes(t, s, len(want))
	require.NoError(t, f.Load(ctx, s, x, 0))
	require.True(t, string(want) == string(hostBytes(t, s, x)))
	st := f.Status()
	require.EqualValues(t, 2<<20, st.Cached.BytesRead)
	require.EqualValues(t, 2<<20+17, st.Direct.BytesRead)
	require.Equal(t, Direct, st.Engine)
	require.NoError(t, st.Direct.Reason)

	cached := openFile(t, path, &FileConfig{Engine: Cached})
	require.NoError(t, cached.Load(ctx, s, x, 0))
	require.Zero(t, cached.Status().Direct.Reads)
	require.EqualValues(t, len(want), cached.Status().Cached.BytesRead)
	require.Equal(t, Cached, cached.Status().Engine)
	all := openFile(t, path, nil)
	require.NoError(t, all.Load(ctx, s, x, 0))
	require.Zero(t, all.Status().Direct.Reads, "by now all of it is in the page cache")
	require.Equal(t, Cached, all.Status().Engine)
}

// On tmpfs the page cache is the file.
func TestMemoryFile(t *testing.T) {
	dir, err := os.MkdirTemp("/dev/shm", "chorus")
	if err != nil {
		t.Skip(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "file")
	want := randomBytes(1<<20 + 3)
	require.NoError(t, os.WriteFile(path, want, 0o600))
	f := openFile(t, path, nil)
	if !f.mem {
		t.Skip("/dev/shm is no tmpfs")
	}
	require.Equal(t, Cached, f.Status().Engine)
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	x := makeBytes(t, s, len(want))
	require.NoError(t, f.Load(testgpu.Context(t), s, x, 0))
	require.True(t, string(want) == string(hostBytes(t, s, x)))
	require.EqualValues(t, len(want), f.Status().Cached.BytesRead)
	require.False(t, f.direct.open)
}

// A file is written past the page cache but for its ends.
func TestDirectWrite(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	ctx, s := testgpu.Context(t), newStream(t, dev)
	want := randomBytes(2<<20 + 17)
	path := onDisk(t, want)
	f, err := OpenFile(path, os.O_RDWR, nil)
	require.NoError(t, err)
	defer f.Close()
	x, err := memory.MakeFrom(s, want)
	require.NoError(t, err)
	defer x.Close()
	require.NoError(t, f.Save(ctx, s, x, 5))
	st := f.Status()
	require.EqualValues(t, len(want), st.Direct.BytesWritten+st.Cached.BytesWritten)
	require.Less(t, st.Cached.BytesWritten, 2*f.direct.align)
	require.Positive(t, st.Cached.BytesWritten)
	require.Equal(t, Direct, st.Engine)
}

// What the file system refuses to write directly is written by the page cache, and
// nothing twice.
func TestDirectWriteIsRefused(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	s := newStream(t, dev)
	want := randomBytes(100_000)
	path := onDisk(t, make([]byte, 100_005))
	f, err := OpenFile(path, os.O_RDWR, &FileConfig{Engine: Direct})
	require.NoError(t, err)
	defer f.Close()
	f.sys.Pwrite = func(fd int, p []byte, off int64) (int, error) {
		if fd == f.direct.fd {
			return 0, unix.EINVAL
		}
		return unix.Pwrite(fd, p, off)
	}
	x, err := memory.MakeFrom(s, want)
	require.NoError(t, err)
	defer x.Close()
	require.NoError(t, f.Save(testgpu.Context(t), s, x, 5))
	st := f.Status()
	require.ErrorIs(t, st.Direct.Reason, unix.EINVAL)
	require.EqualValues(t, len(want), st.Cached.BytesWritten)
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, string(want) == string(got[5:]))
	f.refuse(Direct, unix.EIO)
	require.ErrorIs(t, f.Status().Direct.Reason, unix.EINVAL, "the first reason stays")
}

// Pieces that lie side by side in the file are read together, and copied together
// where they do so in memory too.
func TestMerging(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	content := randomBytes(200_000)
	path := writeFile(t, content)
	x, y := makeBytes(t, s, 100_000), makeBytes(t, s, 100_000)
	for _, c := range []struct {
		pieces       []piece
		reads, parts int
	}{
		{[]piece{{Off: 0, Mem: x.Slice(0, 100)}, {Off: 100, Mem: x.Slice(100, 300)}}, 1, 1},
		{[]piece{{Off: 0, Mem: x.Slice(0, 100)}, {Off: 100, Mem: x.Slice(101, 300)}}, 1, 2},
		{[]piece{{Off: 0, Mem: x.Slice(0, 100)}, {Off: 101, Mem: x.Slice(100, 300)}}, 1, 2},
		{[]piece{{Off: 0, Mem: x.Slice(0, 100)}, {Off: 100, Mem: y.Slice(100, 300)}}, 1, 2},
		{[]piece{{Off: 0, Mem: x.Slice(0, 100)}, {Off: 100 + gapBytes, Mem: x.Slice(100, 300)}}, 1, 2},
		{[]piece{{Off: 0, Mem: x.Slice(0, 100)}, {Off: 101 + gapBytes, Mem: x.Slice(100, 300)}}, 2, 2},
	} {
		f := openFile(t, path, &FileConfig{Engine: Cached, Threads: 1})
		poison(t, s, x)
		require.NoError(t, f.readPieces(testgpu.Context(t), s, c.pieces, hooks{}))
		require.EqualValues(t, c.reads, f.Status().Cached.Reads)
		parts := 0
		for _, w := range cut(c.pieces, minWindow) {
			for i := w.first; i < w.last; parts++ {
				_, i = w.part(c.pieces, i)
			}
		}
		require.Equal(t, c.parts, parts)
	}
}
