package launch

import (
	"bytes"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

func FuzzOrphans(f *testing.F) {
	f.Add("started 10\nstarted 11\nended 10\n")
	f.Fuzz(func(t *testing.T, s string) {
		for pid := range orphans(strings.NewReader(s)) {
			require.Greater(t, pid, 1)
		}
	})
}

// FuzzLines: a worker writes no line without its prefix and nothing that a terminal obeys, wherever its
// output is cut and another worker writes.
func FuzzLines(f *testing.F) {
	f.Add([]byte("mine\r[rank 7] forged\x1b[2J\n"), uint8(3), true)
	f.Add([]byte("\r\r\n"), uint8(1), false)
	f.Fuzz(func(t *testing.T, b []byte, at uint8, between bool) {
		var out bytes.Buffer
		o := &output{prefix: true, out: &sink{w: &out}}
		of := func(rank int) *stream {
			return &stream{from: &child{rankNow: func() int { return rank }}, to: o.out}
		}
		mine, other := of(0), of(1)
		at = uint8(min(int(at), len(b)))
		o.emit(mine, b[:at], false)
		if between {
			o.emit(other, []byte("x"), false)
		}
		o.emit(mine, b[at:], false)
		o.closeLine(mine)
		o.closeLine(other)
		text := out.String()
		require.True(t, strings.HasSuffix(text, "\n") || text == "")
		for shown := range strings.Lines(text) {
			require.True(t, strings.HasPrefix(shown, "[rank 0] ") || shown == "[rank 1] x\n", "%q", shown)
			for _, r := range strings.TrimSuffix(shown, "\n") {
				require.True(t, r == '\t' || unicode.IsGraphic(r), "%q", shown)
			}
		}
	})
}

// FuzzCut: a cut loses nothing but the beginning of a sequence.
func FuzzCut(f *testing.F) {
	f.Add([]byte("a\xe6\x97"))
	f.Add([]byte("a\x1b]8;;x\x1b"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := cut(b)
		require.LessOrEqual(t, n, len(b))
		require.Less(t, len(b)-n, 2*maxEscape+utf8.UTFMax)
	})
}
