package archtest

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var fuzzTarget = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(`)

// TestFuzzTargetsHaveCorpora compares the fuzz targets with the folders of inputs: tests run
// no input of a folder that has another place or name than its target.
func TestFuzzTargetsHaveCorpora(t *testing.T) {
	needSource(t)
	var targets, corpora []string
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && filepath.Base(filepath.Dir(path)) == "fuzz" && filepath.Base(filepath.Dir(filepath.Dir(path))) == "testdata":
			inputs, err := os.ReadDir(path)
			if len(inputs) > 0 {
				corpora = append(corpora, filepath.Join(filepath.Dir(path), "../..", d.Name()))
			}
			return err
		case strings.HasSuffix(path, "_test.go"):
			b, err := os.ReadFile(path)
			for _, m := range fuzzTarget.FindAllSubmatch(b, -1) {
				targets = append(targets, filepath.Join(filepath.Dir(path), string(m[1])))
			}
			return err
		}
		return nil
	}))
	slices.Sort(targets)
	slices.Sort(corpora)
	require.NotEmpty(t, targets)
	require.Equal(t, targets, corpora)
}
