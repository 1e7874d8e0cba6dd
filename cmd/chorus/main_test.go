package main

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLateFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "results")
	holds := func(want string) {
		t.Helper()
		have, err := os.ReadFile(name)
		require.NoError(t, err)
		require.Equal(t, want, string(have))
	}
	for _, text := range []string{"the first results", "others"} {
		f, err := createLate(name)
		require.NoError(t, err)
		for _, part := range []string{text[:3], text[3:]} {
			n, err := io.WriteString(f, part)
			require.NoError(t, err)
			require.Len(t, part, n)
		}
		require.NoError(t, f.Close())
		holds(text)
	}
	f, err := createLate(name)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	holds("others")

	_, err = createLate(filepath.Join(name, "below a file"))
	require.Error(t, err)
	device, err := createLate(os.DevNull)
	require.NoError(t, err)
	_, err = device.Write([]byte("gone"))
	require.NoError(t, err)
	require.NoError(t, device.Close())
}
