package safe

import (
	"strings"
	"testing"
	"time"
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

type inner struct{ Text string }

type record struct {
	inner
	Name   string
	More   []*inner
	At     time.Time
	Bytes  []byte
	hidden string
}

func TestRecord(t *testing.T) {
	const bad, good = "a\r\x1b[K\nb", `a\x0d\x1b[K\x0ab`
	at := time.Now()
	r := record{inner{bad}, bad, []*inner{{bad}, nil}, at, []byte(bad), bad}
	Record(&r)
	require.Equal(t, record{inner{good}, good, []*inner{{good}, nil}, at, []byte(bad), bad}, r)
	list := []string{bad, "é"}
	Record(&list)
	require.Equal(t, []string{good, "é"}, list)
	Record((*record)(nil))
}

func TestClippedRecords(t *testing.T) {
	long := strings.Repeat("é\xff", 1000)
	for n := range 200 {
		short := Clip(long, n)
		require.LessOrEqual(t, len(short), n)
		require.Equal(t, short, Clip(short, n))
	}
	require.Equal(t, strings.Repeat("é\xff", 21)+"... (2937 more bytes)", Clip(long, 100))
	r := struct {
		By   map[int][]*inner
		Some map[string]string
	}{map[int][]*inner{7: {{long}}}, map[string]string{"a": long, "b": "b\n"}}
	require.Equal(t, 3000, LongestText(r))
	ShortRecord(&r, 64)
	require.Equal(t, `b\x0a`, r.Some["b"])
	require.LessOrEqual(t, LongestText(&r), 64)
	require.Contains(t, r.By[7][0].Text, `é\xffé`)
	ClipRecord(&r, 50)
	require.LessOrEqual(t, LongestText(&r), 50)
}
