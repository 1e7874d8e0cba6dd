package gds

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cufileapi"
)

// TestUnknownDisk checks what is said of a file that cuFile did not register.
func TestUnknownDisk(t *testing.T) {
	defer func(folder string) { udevFolder = folder }(udevFolder)
	udevFolder = t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(udevFolder, "b254:1"), nil, 0o600))
	require.Empty(t, unknownDisk(unix.Mkdev(254, 1)))
	require.Contains(t, unknownDisk(unix.Mkdev(254, 16)), udevFolder+"/b254:16")
	require.Contains(t, unknownDisk(unix.Mkdev(0, 27)), "no disk")

	f, err := os.Open(t.TempDir())
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, unregistered(cufileapi.Success, int(f.Fd())))
	err = unregistered(cufileapi.HandleNotRegistered, int(f.Fd()))
	require.ErrorIs(t, err, cufileapi.HandleNotRegistered)
	require.Contains(t, err.Error(), "disk")
	require.NotContains(t, unregistered(cufileapi.InvalidFileType, int(f.Fd())).Error(), "disk")
}
