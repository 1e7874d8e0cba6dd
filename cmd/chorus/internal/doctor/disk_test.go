package doctor

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDisk(t *testing.T) {
	writes := func(speed float64, err error) func(w *world) {
		return func(w *world) {
			w.WriteSpeed = func(context.Context, string) (float64, error) { return speed, err }
		}
	}
	try(t, disk,
		change{"slow", writes(0.2e9, nil), Warn, "0.2 GB/s"},
		change{"full", func(w *world) { w.space.Free = 1 << 30 }, Warn, "1 GiB free"},
		change{"read-only", writes(0, errors.New("read-only file system")), Unknown, "read-only"},
		change{"no folder", func(w *world) { w.SpaceOf = func(string) (*Space, error) { return nil, os.ErrNotExist } }, Unknown, "not exist"},
	)
}

// TestWriteSpeed writes to a real directory, and leaves no file.
func TestWriteSpeed(t *testing.T) {
	dir := t.TempDir()
	speed, err := writeSpeed(t.Context(), dir)
	require.NoError(t, err)
	require.Positive(t, speed)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	_, err = writeSpeed(t.Context(), dir+"/missing")
	require.ErrorIs(t, err, os.ErrNotExist)
}
