package archtest

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSerialTestsRun checks that make test runs the packages with tests that the race detector
// skips a second time without it.
func TestSerialTestsRun(t *testing.T) {
	grep := exec.Command("grep", "-rl", "--include=*_test.go", "testhost[.]Serial(", ".")
	grep.Dir = "../.."
	files, err := grep.Output()
	require.NoError(t, err)
	var want []string
	for file := range strings.Lines(string(files)) {
		dir := strings.TrimSpace(file[:strings.LastIndexByte(file, '/')])
		if dir != "./internal/archtest" {
			want = append(want, dir)
		}
	}
	slices.Sort(want)
	makefile, err := os.ReadFile("../../Makefile")
	require.NoError(t, err)
	twice := regexp.MustCompile(`(?m)^TWICE = (.*)$`).FindStringSubmatch(string(makefile))
	require.NotNil(t, twice)
	got := strings.Fields(twice[1])
	slices.Sort(got)
	require.Equal(t, slices.Compact(want), got)
}
