package gds

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// Until Commit the old file is there, and after Close nothing else.
func TestCloseUncommitted(t *testing.T) {
	path := writeFile(t, []byte("old"))
	f, err := Create(path, nil)
	require.NoError(t, err)
	require.Equal(t, path, f.Path())
	require.NoError(t, f.Close())
	require.NoError(t, f.Close())
	alone(t, path, "old")
	require.ErrorIs(t, f.Commit(context.Background()), device.ErrClosed)
}

func TestCommit(t *testing.T) {
	ctx := testgpu.Context(t)
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	s := newStream(t, dev)
	x, err := memory.MakeFrom(s, []byte("new"))
	require.NoError(t, err)
	defer x.Close()
	path := writeFile(t, []byte("the old file"))
	require.NoError(t, os.Chmod(path, 0o600))
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(path, link))
	f, err := Create(link, nil)
	require.NoError(t, err)
	require.NoError(t, f.Save(ctx, s, x, 0))
	old, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "the old file", string(old))
	var synced []string
	f.sys.Fsync = func(fd int) error {
		to, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		require.NoError(t, err)
		synced = append(synced, to)
		return unix.Fsync(fd)
	}
	temp := f.fresh.temp
	require.NoError(t, f.Commit(ctx))
	alone(t, path, "new")
	require.Equal(t, []string{temp, filepath.Dir(path)}, synced, "the file before it takes its place, the folder after")
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode(), "the new file has the old one's permissions")
	to, err := os.Readlink(link)
	require.NoError(t, err)
	require.Equal(t, path, to, "the link still leads there")
	require.ErrorIs(t, f.Save(ctx, s, x, 0), device.ErrClosed)

	in, err := OpenFile(path, os.O_RDWR, nil)
	require.NoError(t, err)
	require.ErrorContains(t, in.Commit(ctx), "not made by Create")
	require.NoError(t, in.Sync(ctx))
	require.NoError(t, in.Close())
}

// A commit that is given up, or that comes while the file is being written, leaves
// the old file.
func TestCommitIsRefused(t *testing.T) {
	before := openFiles(t)
	path := writeFile(t, []byte("old"))
	f, err := Create(path, nil)
	require.NoError(t, err)
	require.NoError(t, f.use("test"))
	require.ErrorContains(t, f.Commit(context.Background()), "wait for it")
	f.unuse()
	ctx, cancel := context.WithCancel(context.Background())
	syncing, goOn := make(chan struct{}), make(chan struct{})
	f.sys.Fsync = func(int) error { close(syncing); <-goOn; return nil }
	done := make(chan error, 1)
	go func() { done <- f.Commit(ctx) }()
	<-syncing
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	close(goOn)
	alone(t, path, "old")
	require.NoError(t, f.Close())
	// What waits for the disk holds the file until then.
	require.True(t, poll.UntilNoLaterThan(10*time.Second, func() bool { return openFiles(t) == before }))
}

// What is under way when a file is closed goes on, and the descriptors go with it.
func TestCloseWhileInUse(t *testing.T) {
	before := openFiles(t)
	f, err := Open(writeFile(t, []byte("bytes")), nil)
	require.NoError(t, err)
	require.NoError(t, f.use("test"))
	require.NoError(t, f.Close())
	require.Equal(t, before+1, openFiles(t))
	p := make([]byte, 5)
	n, err := f.plain.ReadAt(p, 0)
	require.NoError(t, err)
	require.Equal(t, "bytes", string(p[:n]))
	require.ErrorIs(t, f.use("test"), device.ErrClosed)
	f.unuse()
	require.Equal(t, before, openFiles(t))
}

// The disk's room for a new file is taken before it is written, and once.
func TestReserve(t *testing.T) {
	ctx := testgpu.Context(t)
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	f, err := Create(filepath.Join(t.TempDir(), "file"), nil)
	require.NoError(t, err)
	defer f.Close()
	f.mem = false
	var asked [][2]int64
	f.sys.Fallocate = func(fd int, mode uint32, off, bytes int64) error {
		asked = append(asked, [2]int64{off, bytes})
		return unix.Ftruncate(fd, off+bytes)
	}
	x := makeBytes(t, s, 100_000)
	require.NoError(t, f.Save(ctx, s, x, 50))
	require.NoError(t, f.Save(ctx, s, x, 0))
	require.NoError(t, f.Save(ctx, s, x, 60))
	require.Equal(t, [][2]int64{{0, 100_050}, {100_050, 10}}, asked)
}

// So it is for a file of a checkpoint, which has its length from the beginning.
func TestReserveCheckpoint(t *testing.T) {
	start := []byte("header")
	for name, full := range map[string]error{"room": nil, "full": unix.ENOSPC, "too large": unix.EFBIG, "unsupported": unix.EOPNOTSUPP} {
		t.Run(name, func(t *testing.T) {
			f, err := Create(filepath.Join(t.TempDir(), "file"), nil)
			require.NoError(t, err)
			defer f.Close()
			f.mem = false
			var asked [][2]int64
			f.sys.Fallocate = func(fd int, mode uint32, off, bytes int64) error {
				asked = append(asked, [2]int64{off, bytes})
				return full
			}
			err = f.begin(start, 100_000)
			require.Equal(t, [][2]int64{{0, 100_000}}, asked)
			size, errSize := f.Size()
			require.NoError(t, errSize)
			if says := map[error]string{unix.ENOSPC: "make room", unix.EFBIG: "ulimit -f"}[full]; says != "" {
				require.ErrorIs(t, err, full)
				require.ErrorContains(t, err, "at byte 0: 0 of 100000 bytes: "+full.Error()+": ")
				require.ErrorContains(t, err, says)
				require.Zero(t, size)
				return
			}
			require.NoError(t, err)
			require.EqualValues(t, 100_000, size)
		})
	}
}
