package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/launch"
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

// TestMistakesOfCobra: the commands that cobra adds refuse what they do not know.
func TestMistakesOfCobra(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"completion", "no command given: want bash, fish, powershell, zsh"},
		{"completion tcsh", `unknown command "tcsh"; see chorus completion --help`},
		{"completion bash now", `unknown argument "now"`},
		{"help nothing", `unknown command "nothing"; see chorus --help`},
		{"help mem nothing", `unknown command "mem nothing"`},
	} {
		code, stderr := command(t, strings.Fields(c.args)...)
		require.Equal(t, launch.ExitUsage, code, "%s: %s", c.args, stderr)
		require.Contains(t, stderr, c.want)
	}
	for _, good := range []string{"completion zsh", "help", "help mem replay"} {
		code, stderr := command(t, strings.Fields(good)...)
		require.Zero(t, code, "%s: %s", good, stderr)
	}
}
