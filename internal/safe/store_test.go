package safe

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
)

func TestStoreForgetsWhatIsOldOrTooMuch(t *testing.T) {
	s := &Store{Folder: t.TempDir(), Limit: StoreLimit}
	age := func(name string, by time.Duration) string {
		path := filepath.Join(s.Folder, name)
		require.NoError(t, os.WriteFile(path, make([]byte, 1000), 0o600))
		then := time.Now().Add(-by)
		require.NoError(t, os.Chtimes(path, then, then))
		return path
	}
	ancient := age("ancient.kernel", storeAge+time.Hour)
	left := age(".new-1", tempAge+time.Minute) // of a writer that was killed
	writing := age(".new-2", time.Second)
	foreign := age("README", 2*storeAge)
	old, young := age("old.kernel", 50*time.Hour), age("young.kernel", time.Hour)
	s.Save("k", make([]byte, 100))
	require.NoFileExists(t, ancient)
	require.NoFileExists(t, left)
	for _, p := range []string{writing, foreign, old, young} {
		require.FileExists(t, p)
	}
	s.Limit = 1500
	s.Save("l", make([]byte, 100))
	require.NoFileExists(t, old)
	require.FileExists(t, young)
	_, ok := s.Load("k")
	require.True(t, ok)

	// What is used stays.
	path := filepath.Join(s.Folder, "k"+StoreSuffix)
	then := time.Now().Add(-storeAge / 2)
	require.NoError(t, os.Chtimes(path, then, then))
	_, ok = s.Load("k")
	require.True(t, ok)
	st, err := os.Stat(path)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), st.ModTime(), time.Minute)
}

func TestUserStore(t *testing.T) {
	home := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", home)
	t.Setenv(env.KernelCache.Name, "")
	require.Equal(t, filepath.Join(home, "chorus", "kernels"), UserStore().Folder)
	t.Setenv(env.KernelCache.Name, "/some/where")
	require.Equal(t, "/some/where", UserStore().Folder)
	t.Setenv(env.KernelCache.Name, "off")
	require.Nil(t, UserStore())
	t.Setenv(env.KernelCache.Name, "")
	t.Setenv("XDG_CACHE_HOME", "")
	t.Setenv("HOME", "")
	require.Nil(t, UserStore())
}
