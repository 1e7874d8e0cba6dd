package gds

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

var newStream, hostBytes, randomBytes = streamtest.NewStream, streamtest.Host, streamtest.Random

// makeBytes returns poisoned device memory.
func makeBytes(t testing.TB, s *stream.Stream, n int) memory.Slice[byte] {
	t.Helper()
	x, err := memory.Make[byte](s, n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	poison(t, s, x)
	return x
}

func poison(t testing.TB, s *stream.Stream, x memory.Slice[byte]) {
	t.Helper()
	junk := make([]byte, x.Len())
	for i := range junk {
		junk[i] = 0xa5
	}
	require.NoError(t, x.CopyFrom(s, junk))
}

// writeFile creates a file on the file system of temporary files.
func writeFile(t testing.TB, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, content, 0o644))
	return path
}

func openFile(t testing.TB, path string, cfg *FileConfig) *File {
	t.Helper()
	f, err := Open(path, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// setPollTime changes how long workers ask before they sleep, for one test.
func setPollTime(t testing.TB, d time.Duration) {
	t.Helper()
	was := pollTime
	pollTime = d
	t.Cleanup(func() { pollTime = was })
}
