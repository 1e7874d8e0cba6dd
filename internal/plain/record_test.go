package plain

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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
