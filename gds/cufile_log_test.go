package gds

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// cuFile opens its log by name: it lies where nobody else can plant a link.
func TestLogFolder(t *testing.T) {
	home := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", home)
	path, err := logFolder()
	require.NoError(t, err)
	require.Equal(t, filepath.Join(home, "chorus", "cufile"), path)
	require.NoError(t, os.Chmod(path, 0o777))
	_, err = logFolder()
	require.ErrorContains(t, err, "lets other users write to it")
	require.NoError(t, os.Remove(path))
	require.NoError(t, os.Symlink(home, path))
	_, err = logFolder()
	require.ErrorContains(t, err, "a symbolic link")
}
