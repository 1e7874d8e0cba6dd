package plain

import (
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
