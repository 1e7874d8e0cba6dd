// Package examples runs the examples as a reader would.
package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// Each example that runs by itself, and what its output says in the end.
var outputs = map[string]string{
	"preflight": `(GPU-[-0-9a-f]+ \([0-9a-f:.]+\) of host \S+, rank \d: healthy true\n){2}`,
	"load":      `10 tensors of 10485760 bytes on \d+ devices, .*\nsaved again: every tensor is equal\n`,
}

// settings are the variables that an example needs without a GPU.
var settings = map[string][]string{"preflight": {"CHORUS_BACKEND=virtual", "CHORUS_VIRTUAL_DEVICES=2"}}

func TestExamples(t *testing.T) {
	dir := programs(t)
	for name, want := range outputs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(filepath.Join(dir, name))
			cmd.Env = append(os.Environ(), settings[name]...)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
			require.Regexp(t, regexp.MustCompile(want), string(out))
		})
	}
}

// programs returns the folder of the examples: the pack's for GPU machines, or a new one,
// which one command builds with the race detector if it watches this test, because the
// packages are then compiled already.
func programs(t *testing.T) string {
	packed := filepath.Join("..", "..", "bin")
	if _, err := os.Stat(filepath.Join(packed, "load")); err == nil {
		return packed
	}
	dir := t.TempDir()
	args := []string{"build", "-ldflags=-s -w", "-o", dir + string(filepath.Separator)}
	if testhost.On {
		args = append(args, "-race")
	}
	for name := range outputs {
		args = append(args, "./"+name)
	}
	out, err := exec.Command("go", args...).CombinedOutput()
	require.NoError(t, err, string(out))
	return dir
}
