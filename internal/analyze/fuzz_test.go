package analyze

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzDecode analyzes what anybody may have written as the dumps of two ranks.
func FuzzDecode(f *testing.F) {
	for _, name := range []string{"testdata/torch/nccl_trace_rank_0", "testdata/pickle/nccl_trace_rank_0"} {
		b, err := os.ReadFile(name)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		j := newJob()
		for _, name := range []string{"rank_0", "rank_1"} {
			d, err := decode(bytes.NewReader(b))
			if err != nil {
				return
			}
			d.file = filepath.Join("folder", name)
			_ = j.add(d)
		}
		var text strings.Builder
		require.NoError(t, j.Analyze().WriteText(&text))
		require.NotContains(t, text.String(), "\x1b")
	})
}
