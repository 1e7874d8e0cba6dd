package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var namedTest = regexp.MustCompile("`([a-z/]+): (Test[A-Za-z]+)`")

// TestSecurityNamesTests: what SECURITY.md guarantees, a test shows.
func TestSecurityNamesTests(t *testing.T) {
	needSource(t)
	text, err := os.ReadFile("../../SECURITY.md")
	require.NoError(t, err)
	_, guarantees, found := strings.Cut(string(text), "## Guarantees\n")
	require.True(t, found)
	guarantees, _, _ = strings.Cut(guarantees, "## ")
	rows := 0
	for line := range strings.Lines(guarantees) {
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| guarantee") || strings.HasPrefix(line, "| ---") {
			continue
		}
		rows++
		tests := namedTest.FindAllStringSubmatch(line, -1)
		require.NotEmpty(t, tests, "no test shows %q", line)
		for _, m := range tests {
			require.True(t, hasTest(t, m[1], m[2]), "%s has no test %s, which SECURITY.md names", m[1], m[2])
		}
	}
	require.NotZero(t, rows)
}

func hasTest(t *testing.T, folder, name string) bool {
	files, err := filepath.Glob(filepath.Join("../..", folder, "*_test.go"))
	require.NoError(t, err)
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		if strings.Contains(string(b), "func "+name+"(") {
			return true
		}
	}
	return false
}
