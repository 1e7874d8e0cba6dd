package checkpoint

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
)

func copyFolder(t *testing.T, from, to string) {
	t.Helper()
	require.NoError(t, os.CopyFS(to, os.DirFS(from)))
}

// TestSavedHasTheStepOfItsFolder: a copy with the name of another step is damaged. A copy with a name
// that has no step is a checkpoint.
func TestSavedHasTheStepOfItsFolder(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		folder := t.TempDir()
		saveSteps(t, devs[0], folder, 6)
		from, other := filepath.Join(folder, stepName(6)), filepath.Join(folder, stepName(100))
		copyFolder(t, from, other)
		const reason = `its manifest says step 6, and the folder has the name of step 100`
		_, err := OpenSaved(other)
		require.ErrorContains(t, err, reason)
		_, err = OpenSaved(other + "/")
		require.ErrorContains(t, err, reason)
		_, err = Open([]string{other}, nil)
		require.ErrorContains(t, err, reason)
		require.ErrorContains(t, Reshard(t.Context(), other, filepath.Join(folder, "x"), nil), reason)

		s, skipped, err := Latest(t.Context(), localGroup(t, devs), folder)
		require.NoError(t, err)
		require.Len(t, skipped, 1)
		require.Equal(t, other, skipped[0].Folder)
		require.Contains(t, skipped[0].Reason, reason)
		require.EqualValues(t, 6, s.Step())
		require.NoError(t, s.Close())

		copyFolder(t, from, filepath.Join(folder, "copy"))
		require.NoError(t, os.Symlink(stepName(6), filepath.Join(folder, "newest")))
		require.NoError(t, Reshard(t.Context(), from, filepath.Join(folder, "resharded"), nil))
		for _, name := range []string{stepName(6), "copy", "newest", "resharded"} {
			s, err := OpenSaved(filepath.Join(folder, name))
			require.NoError(t, err, name)
			require.EqualValues(t, 6, s.Step())
			require.NoError(t, s.Close())
		}
	})
}
