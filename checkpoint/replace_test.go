package checkpoint

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
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

// saved creates a folder whose file has the text, and fileOf returns the text.
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
		require.NoError(t, reveal(&simpleFiles{systemFiles: systemFiles{filepath.Dir(final)}, refuses: refuses}, temp, final, true), refuses)
		require.Equal(t, "new", fileOf(t, final))
		require.Equal(t, []string{stepName(7)}, namesIn(t, filepath.Dir(final)))
	}
	final, temp := replacing(t)
	require.ErrorIs(t, reveal(&simpleFiles{systemFiles: systemFiles{filepath.Dir(final)}, refuses: syscall.EIO}, temp, final, true), syscall.EIO)
	require.Equal(t, "old", fileOf(t, final))
}

// TestFailureBetweenTwoRenames checks that a failure keeps the old checkpoint or shows the new one, and
// so does the end of the process, at the latest when another job begins.
func TestFailureBetweenTwoRenames(t *testing.T) {
	for failsAt, want := range map[int]string{1: "old", 2: "old", 3: "new"} {
		for _, dead := range []bool{false, true} {
			final, temp := replacing(t)
			err := reveal(&simpleFiles{systemFiles: systemFiles{filepath.Dir(final)}, refuses: syscall.EINVAL, failsAt: failsAt, dead: dead}, temp, final, true)
			require.True(t, errors.Is(err, errInjected), "%v", err)
			if !dead {
				require.Equal(t, want, fileOf(t, final), "rename %d fails", failsAt)
			}
			steps, err := stepsIn(filepath.Dir(final))
			require.NoError(t, err)
			require.Equal(t, []int64{7}, steps)
			require.Equal(t, want, fileOf(t, folderOf(filepath.Dir(final), 7)), "rename %d fails", failsAt)
			require.NoError(t, removeLeftovers(systemFiles{filepath.Dir(final)}, filepath.Dir(final)))
			require.Equal(t, want, fileOf(t, final), "rename %d fails", failsAt)
			require.Equal(t, []string{stepName(7)}, namesIn(t, filepath.Dir(final)))
		}
	}
}

// TestLatestBetweenTwoRenames resumes from the only checkpoint, whose replacement was interrupted, and renames
// nothing.
func TestLatestBetweenTwoRenames(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		folder := t.TempDir()
		saveSteps(t, devs[0], folder, 7)
		old := replacedName(filepath.Join(folder, stepName(7)))
		require.NoError(t, os.Rename(filepath.Join(folder, stepName(7)), old))
		s, skipped, err := Latest(t.Context(), localGroup(t, devs), folder)
		require.NoError(t, err)
		require.Empty(t, skipped)
		require.NotNil(t, s)
		require.EqualValues(t, 7, s.Step())
		require.NoError(t, s.Close())
		list, err := List(folder)
		require.NoError(t, err)
		require.Equal(t, []string{old}, list)
		require.Equal(t, []string{filepath.Base(old)}, namesIn(t, folder))
	})
}

// TestReplaceAfterAFailure checks that a replaced checkpoint that is still there does not stop the next
// replacement, and goes with the step.
func TestReplaceAfterAFailure(t *testing.T) {
	final, temp := replacing(t)
	folder := filepath.Dir(final)
	files := &simpleFiles{systemFiles: systemFiles{filepath.Dir(final)}, refuses: syscall.EINVAL, failsAt: 3}
	require.ErrorIs(t, reveal(files, temp, final, true), errInjected)
	require.True(t, exists(replacedName(final)))
	saved(t, temp, "newer")
	require.NoError(t, reveal(files, temp, final, true))
	require.Equal(t, "newer", fileOf(t, final))
	require.Equal(t, []string{stepName(7)}, namesIn(t, folder))

	saved(t, replacedName(final), "old")
	v := &Saver{folder: folder, fs: files, cfg: SaverConfig{KeepLast: 1}}
	saved(t, filepath.Join(folder, stepName(8)), "next")
	saved(t, filepath.Join(folder, stepName(6)+replacedSuffix), "a copy of the user")
	require.NoError(t, v.retain(8))
	require.Equal(t, []string{stepName(6) + replacedSuffix, stepName(8)}, namesIn(t, folder))
}
