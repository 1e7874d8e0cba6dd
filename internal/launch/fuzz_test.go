package launch

import (
	"bytes"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("1234 (a) Z 1 1 1"))
	f.Add([]byte("1 (a) b) c) S"))
	f.Add([]byte(")"))
	f.Fuzz(func(t *testing.T, b []byte) { parseStat(b) })
}

func FuzzOrphans(f *testing.F) {
	f.Add("started 10\nstarted 11\nended 10\n")
	f.Fuzz(func(t *testing.T, s string) {
		for pid := range orphans(strings.NewReader(s)) {
			require.Greater(t, pid, 1)
		}
	})
}

// FuzzLines: a worker writes no line without its prefix and nothing that a terminal obeys.
func FuzzLines(f *testing.F) {
	f.Add([]byte("mine\r[rank 7] forged\x1b[2J\n"))
	f.Add([]byte("\r\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		line, _, _ := bytes.Cut(b, []byte("\n"))
		if len(line) == 0 {
			return
		}
		o := &output{prefix: true}
		text := string(o.lines(nil, &stream{from: &child{rankNow: func() int { return 0 }}}, line))
		require.True(t, strings.HasSuffix(text, "\n") || text == "")
		for shown := range strings.Lines(text) {
			require.True(t, strings.HasPrefix(shown, "[rank 0] "), "%q", shown)
			for _, r := range strings.TrimSuffix(shown, "\n") {
				require.True(t, r == '\t' || unicode.IsGraphic(r), "%q", shown)
			}
		}
	})
}
