package analyze

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// recorded unpacks the dumps that PyTorch 2.11 with NCCL 2.28.9 wrote while jobs of 2 and 8 ranks hung on 4 GPUs, or with gloo. Only paths were
// shortened. The ranks of most jobs with 8 ranks shared GPUs, and some had no time to write a file.
func recorded(t *testing.T) (dir string) {
	dir = t.TempDir()
	f, err := os.Open(filepath.Join("testdata", "torch-2.11.tar.gz"))
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return dir
		}
		require.NoError(t, err)
		b, err := io.ReadAll(r)
		require.NoError(t, err)
		put(t, filepath.Join(dir, filepath.FromSlash(h.Name)), b)
	}
}

// The rank that made each job hang is named: rank 1 of 2, and rank 5 of 8.
func TestRecordedHangs(t *testing.T) {
	dir := recorded(t)
	for name, want := range map[string]struct {
		kind string
		sure Sureness
		also []int // ranks that are named although they did what most ranks did
	}{
		"nccl-2-groups":      {KindOrder, Certain, []int{0}},
		"nccl-2-othercall":   {KindMismatch, Certain, []int{0}},
		"nccl-2-queuedtimed": {KindQueued, Likely, nil},
		"nccl-2-stopped":     {KindMissing, Likely, nil},
		"nccl-8-groups":      {KindOrder, Likely, nil},
		"nccl-8-othercall":   {KindMismatch, Likely, nil},
		"nccl-8-queuedtimed": {KindQueued, Likely, nil},
		"nccl-8-skip":        {KindBehind, Likely, nil},
		"nccl-8-stopped":     {KindMissing, Likely, nil},
		"nccl-8-subgroup":    {KindBehind, Likely, nil},
		"gloo-2-skip":        {KindBehind, Likely, nil},
		"gloo-8-groups":      {KindOrder, Likely, []int{0}},
		"gloo-8-othercall":   {KindMismatch, Likely, nil},
		"gloo-8-skip":        {KindBehind, Likely, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := analyze(t, filepath.Join(dir, name))
			require.Equal(t, want.kind, r.Kind, r.Verdict)
			require.Equal(t, want.sure, r.Sure, r.Doubts)
			guilty := 1
			if name[5] == '8' {
				guilty = 5
			}
			require.ElementsMatch(t, append(want.also, guilty), culprits(r), r.Verdict)
			require.NotContains(t, r.Verdict, "site-packages", "the line of the program is named, not of PyTorch")
		})
	}
}

// All jobs in one call: each has its report.
func TestRecordedHangsTogether(t *testing.T) {
	dir := recorded(t)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var paths []string
	for _, e := range entries {
		paths = append(paths, filepath.Join(dir, e.Name()))
	}
	r := analyze(t, paths...)
	for _, j := range r.Jobs {
		require.NotEqual(t, KindTwice, j.Kind, j.Verdict)
	}
	require.Len(t, r.Jobs, len(paths))
}
