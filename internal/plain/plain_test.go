package plain

import (
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
)

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"":                      "",
		"node-1 [é] 日本\u00a0x":  "node-1 [é] 日本\u00a0x",
		"\r[rank 7] ":           `\x0d[rank 7] `,
		"a\nchorus: done\tb":    `a\x0achorus: done\x09b`,
		"\x1b[2J\x7f\x00":       `\x1b[2J\x7f\x00`,
		"\u009b2J":              `\x9b2J`,
		"\x9b2J":                `\x9b2J`,
		"a\u202eb\ufeff":        `a\u202eb\ufeff`,
		"\U000e0001":            `\U000e0001`,
		"cut \xe6\x97":          `cut \xe6\x97`,
		string(unicode.MaxRune): `\U0010ffff`,
		"\ufffd":                "\ufffd",
	} {
		require.Equal(t, want, Text(in))
	}
	require.Equal(t, "a\n\tb"+`\x0d`, Lines("a\n\tb\r"))
	var b strings.Builder
	n, err := NewWriter(&b).Write([]byte("a\n\x1b"))
	require.NoError(t, err)
	require.Equal(t, 3, n)
	require.Equal(t, "a\n"+`\x1b`, b.String())
}

func FuzzText(f *testing.F) {
	f.Add("a\r\x1b\u202e\xff")
	f.Fuzz(func(t *testing.T, s string) {
		text := Text(s)
		for _, r := range text {
			require.True(t, unicode.IsGraphic(r), "%q", text)
		}
		require.Equal(t, text, Text(text))
		require.LessOrEqual(t, len(text), 5*len(s))
	})
}
