package fabric

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// A page of flags of another rank is a sealed one: no other file is mapped, and none that could become shorter, whose
// use would end this process.
func TestHostileFlagPages(t *testing.T) {
	named := func(f *os.File) string {
		info, err := f.Stat()
		require.NoError(t, err)
		return fmt.Sprintf("/proc/%d/fd/%d %s", os.Getpid(), f.Fd(), identity(info))
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	require.NoError(t, err)
	defer file.Close()
	require.NoError(t, file.Truncate(flagPageBytes))
	names := []string{"", "x", "/proc/self/mem 0:0", named(file), fmt.Sprint(file.Name(), " ", named(file)[len(fmt.Sprintf("/proc/%d/fd/%d ", os.Getpid(), file.Fd())):])}
	for _, c := range []struct {
		bytes int64
		seals int
	}{{0, pageSeals}, {flagPageBytes - 1, pageSeals}, {flagPageBytes, 0}} {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		require.NoError(t, err)
		f := os.NewFile(uintptr(fd), "test")
		defer f.Close()
		require.NoError(t, f.Truncate(c.bytes))
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, c.seals)
		require.NoError(t, err)
		names = append(names, named(f))
	}
	for _, name := range names {
		f, err := openNamed(name)
		require.Error(t, err, name)
		require.Nil(t, f, name)
	}
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	page, err := newFlagPage(dev)
	require.NoError(t, err)
	f, err := openNamed(page.name)
	require.NoError(t, err)
	require.Error(t, f.Truncate(0), "its length stays")
	require.NoError(t, f.Close())
	require.NoError(t, page.close(dev))
}
