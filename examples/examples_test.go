// Package examples runs the examples as a reader would.
package examples

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each example that runs by itself, and what its output says in the end.
func TestExamples(t *testing.T) {
	for name, want := range map[string]string{
		"hello":       `:0: 1 \+ .* = \d+\n`,
		"copy":        `and back: equal is true\n`,
		"load":        `10 tensors of 10485760 bytes on \d+ devices, .*\nsaved again: every tensor is equal\n`,
		"overlap":     `parts of \d+ numbers over 3 streams: `,
		"timing":      `64 MiB copied on .*: \d+ GB/s\n`,
		"graph":       `the mean of 1 to \d+ is [\d.]+; 100 launches of \d+ operations`,
		"elementwise": `radius \[5.000 1.000 2.000\], angle \[0.927 1.571 3.142\]\nleaky: \[-0.5 0 3\]\n`,
		"random":      `(?s)first  .*second  .*third, by a graph.*first, by the same graph +\[`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, err := program(t, name).CombinedOutput()
			require.NoError(t, err, string(out))
			require.Regexp(t, regexp.MustCompile(want), string(out))
		})
	}
}

// program is the example of the pack for GPU machines, or built of this checkout.
func program(t *testing.T, name string) *exec.Cmd {
	packed := filepath.Join("..", "..", "bin", name)
	if _, err := os.Stat(packed); err == nil {
		return exec.Command(packed)
	}
	bin := filepath.Join(t.TempDir(), name)
	out, err := exec.Command("go", "build", "-o", bin, "./"+name).CombinedOutput()
	require.NoError(t, err, string(out))
	return exec.Command(bin)
}
