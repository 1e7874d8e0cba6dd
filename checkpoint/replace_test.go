package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// simpleFiles are a file system that cannot exchange two names. Rename number failsAt fails, and all
// later ones if dead is set.
type simpleFiles struct {
	systemFiles
	refuses error
	renames int
	failsAt int
	dead    bool
}

func (f *simpleFiles) Exchange(a, b string) error {
	return &os.LinkError{Op: "exchange", Old: a, New: b, Err: f.refuses}
}

func (f *simpleFiles) Rename(a, b string) error {
	if f.renames++; f.renames == f.failsAt || f.dead && f.failsAt > 0 && f.renames > f.failsAt {
		return errInjected
	}
	return f.systemFiles.Rename(a, b)
}

// saved makes a folder whose file has the text, and fileOf returns the text.
func saved(t *testing.T, folder, text string) {
	t.Helper()
	require.NoError(t, os.Mkdir(folder, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "file"), []byte(text), 0o600))
}

func fileOf(t *testing.T, folder string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(folder, "file"))
	require.NoError(t, err)
	return string(b)
}

// replacing returns a checkpoint, and a folder that replaces it.
func replacing(t *testing.T) (final, temp string) {
	t.Helper()
	folder := t.TempDir()
	final, temp = filepath.Join(folder, stepName(7)), filepath.Join(folder, tempPrefix+stepName(7)+"-id")
	saved(t, final, "old")
	saved(t, temp, "new")
	return final, temp
}

// namesIn returns the names in a folder.
func namesIn(t *testing.T, folder string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(folder)
	require.NoError(t, err)
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

// TestReplaceWithoutExchange checks file systems that refuse an exchange of two names, and that other
// errors of an exchange end the save.
func TestReplaceWithoutExchange(t *testing.T) {
	for _, refuses := range []error{syscall.EINVAL, syscall.ENOSYS, syscall.EOPNOTSUPP} {
		final, temp := replacing(t)
		require.NoError(t, reveal(&simpleFiles{refuses: refuses}, temp, final, true), refuses)
		require.Equal(t, "new", fileOf(t, final))
		require.Equal(t, []string{stepName(7)}, namesIn(t, filepath.Dir(final)))
	}
	final, temp := replacing(t)
	require.ErrorIs(t, reveal(&simpleFiles{refuses: syscall.EIO}, temp, final, true), syscall.EIO)
	require.Equal(t, "old", fileOf(t, final))
}

// TestFailureBetweenTwoRenames checks that a failure keeps the old checkpoint or shows the new one, and
// so does the end of the process, at the latest when another job begins.
func TestFailureBetweenTwoRenames(t *testing.T) {
	for failsAt, want := range map[int]string{1: "old", 2: "old", 3: "new"} {
		for _, dead := range []bool{false, true} {
			final, temp := replacing(t)
			err := reveal(&simpleFiles{refuses: syscall.EINVAL, failsAt: failsAt, dead: dead}, temp, final, true)
			require.True(t, errors.Is(err, errInjected), "%v", err)
			if !dead {
				require.Equal(t, want, fileOf(t, final), "rename %d fails", failsAt)
			}
			require.NoError(t, removeLeftovers(systemFiles{}, filepath.Dir(final)))
			require.Equal(t, want, fileOf(t, final), "rename %d fails", failsAt)
			require.Equal(t, []string{stepName(7)}, namesIn(t, filepath.Dir(final)))
		}
	}
}
