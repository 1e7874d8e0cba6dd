package analyze_test

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/analyze"
)

// The service of NCCL 2.28.9 answered these while jobs of PyTorch 2.11 hung, because of rank 1 of 2 or of rank 5 of 8. In some of them the
// counts of all ranks are equal, so that the service does not show the rank.
func TestRecordedAnswers(t *testing.T) {
	want := map[string]string{
		"nccl-2-groups":      "",
		"nccl-2-othercall":   `rank 1 \(process \d+ on host 127\.0\.0\.1\) is in another operation: it has launched 1 AllGather and not 0, and 5 AllReduce and not 6 as rank 0, and which of them is wrong is not known`,
		"nccl-2-queuedtimed": "",
		"nccl-2-skip":        `rank 1 \(process \d+ on host 127\.0\.0\.1\) is behind: it has launched 5 AllReduce and not 6 as rank 0`,
		"nccl-2-stopped":     `rank 1 \(process \d+ on host 127\.0\.0\.1\) does not answer$`,
		"nccl-8-died":        `rank 5 \(process \d+ on host 127\.0\.0\.1\) does not answer$`,
		"nccl-8-groups":      "",
		"nccl-8-othercall":   `rank 5 \(process \d+ on host 127\.0\.0\.1\) is in another operation: it has launched 1 AllGather and not 0, and 5 AllReduce and not 6 as most other ranks`,
		"nccl-8-queuedtimed": "",
		"nccl-8-skip":        `rank 5 \(process \d+ on host 127\.0\.0\.1\) is behind: it has launched 5 AllReduce and not 6 as most other ranks`,
		"nccl-8-stopped":     `rank 5 \(process \d+ on host 127\.0\.0\.1\) does not answer$`,
		"nccl-8-transfer":    `rank 0 \(process \d+ on host 127\.0\.0\.1\) is behind: .*sends and receives do not count$`,
	}
	f, err := os.Open(filepath.Join("testdata", "nccl-2.28.9.tar.gz"))
	require.NoError(t, err)
	defer f.Close()
	z, err := gzip.NewReader(f)
	require.NoError(t, err)
	count := 0
	for r := tar.NewReader(z); ; count++ {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		b, err := io.ReadAll(r)
		require.NoError(t, err)
		a, err := analyze.DecodeRAS(b)
		require.NoError(t, err, h.Name)
		s := analyze.CompareRAS("addr", a, a, 3*time.Second)
		name := filepath.Dir(h.Name)
		switch text, found := want[name]; {
		case name == "nccl-8-subgroup":
			// Rank 5 is rank 1 of the group of ranks 4 to 7. The others of this group wait there, so they are not to blame in the world.
			require.Len(t, s.Findings, 2)
			require.Regexp(t, `of 4 ranks: rank 1 \(process (\d+) on host 127\.0\.0\.1\) is behind: it has launched 1 AllReduce and not 2 as most other ranks`, s.Findings[0])
			require.Regexp(t, `of 8 ranks: rank 5 \(process \d+ on host 127\.0\.0\.1\) is behind: it has launched 5 AllReduce and not 6 as .*; rank 4 .*, rank 6 .*, rank 7 .* are behind too, but they wait in communicator 0x`, s.Findings[1])
		default:
			require.True(t, found, name)
			if text == "" {
				require.Empty(t, s.Findings, name)
				require.Equal(t, analyze.Idle, s.Communicators[0].State, name)
				continue
			}
			require.Len(t, s.Findings, map[bool]int{true: 2, false: 1}[name == "nccl-8-died"], name) // of the death, some had an error
			require.Regexp(t, text, s.Findings[0], name)
		}
	}
	require.Equal(t, len(want)+1, count)
}
