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
	"hello":       `:0: 1 \+ .* = \d+\n`,
	"copy":        `and back: equal: true\n`,
	"load":        `10 tensors of 10485760 bytes on \d+ devices, .*\nsaved again: every tensor is equal\n`,
	"overlap":     `parts of \d+ numbers over 3 streams: `,
	"timing":      `64 MiB copied on .*: \d+ GB/s\n`,
	"graph":       `the mean of 1 to \d+ is [\d.]+; 100 launches of \d+ operations`,
	"elementwise": `radius \[5.000 1.000 2.000\], angle \[0.927 1.571 3.142\]\nleaky: \[-0.5 0 3\]\n`,
	"random":      `(?s)first  .*second  .*third, by a graph.*first, by the same graph +\[`,
}

func TestExamples(t *testing.T) {
	dir := programs(t)
	for name, want := range outputs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := exec.Command(filepath.Join(dir, name)).CombinedOutput()
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
	if _, err := os.Stat(filepath.Join(packed, "hello")); err == nil {
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
