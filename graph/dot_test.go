package graph_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// A writerFunc is an io.Writer.
type writerFunc func(b []byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// The driver writes graphs to files. Dot makes a folder for it that other users can neither
// predict nor enter, whatever the umask, and removes the folder.
func TestFolderOfDot(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(0)
		x := capture(t, func() error { return b.launch(b.add, b.s, v, 1) }, b.s)
		temp := t.TempDir()
		t.Setenv("TMPDIR", temp)
		defer syscall.Umask(syscall.Umask(0))
		folders := map[string]bool{}
		look := writerFunc(func(text []byte) (int, error) {
			list, err := os.ReadDir(temp)
			require.NoError(t, err)
			require.Len(t, list, 1, "the file is in a folder of its own")
			folder, err := list[0].Info()
			require.NoError(t, err)
			require.Equal(t, os.ModeDir|0o700, folder.Mode())
			folders[folder.Name()] = true
			file, err := os.Lstat(filepath.Join(temp, folder.Name(), "graph.dot"))
			require.NoError(t, err)
			require.True(t, file.Mode().IsRegular())
			return len(text), nil
		})
		for range 2 {
			require.NoError(t, x.Dot(look))
		}
		require.Len(t, folders, 2, "the name is not predictable")
		failed := errors.New("the reader has gone")
		require.ErrorIs(t, x.Dot(writerFunc(func([]byte) (int, error) { return 0, failed })), failed)
		list, err := os.ReadDir(temp)
		require.NoError(t, err)
		require.Empty(t, list)
	})
}
