package job

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLongRecordsArePacked(t *testing.T) {
	w := World{}
	for i := range 8000 {
		w.Members = append(w.Members, Member{Rank: i, LocalRank: i % 8, LocalSize: 8, Node: i / 8, Host: fmt.Sprint("gpu-node-", i/8), PID: 1000 + rand.IntN(1<<20)})
	}
	m := Note(KindWorld, &w)
	b, err := json.Marshal(&w)
	require.NoError(t, err)
	t.Logf("a world of %d members has %d bytes instead of %d", len(w.Members), len(m.Body), len(b))
	require.Less(t, len(m.Body), len(b)/5)
	var got World
	require.NoError(t, m.Record(&got))
	require.Equal(t, w, got)
}

func TestPack(t *testing.T) {
	noise := make([]byte, 10*packFrom)
	for i := range noise {
		noise[i] = byte('a' + rand.IntN(2))
	}
	for name, b := range map[string][]byte{
		"short": []byte("{}"), "long": noise, "too regular": bytes.Repeat([]byte("x"), 1000*packFrom), "empty": nil,
		"bytes": append([]byte("{"), bytes.Repeat([]byte{7, 7, 250}, packFrom)...),
	} {
		got, err := unpack(Pack(b), maxRecord)
		require.NoError(t, err, name)
		require.Equal(t, b, got, name)
	}
	require.Less(t, len(Pack(noise)), len(noise))
	require.Len(t, Pack(make([]byte, 1000*packFrom)), 1000*packFrom, "it would grow too much")
}

// A short message must not fill the memory.
func TestPackedBomb(t *testing.T) {
	b := bytes.NewBuffer([]byte{packed})
	full := make([]byte, 100<<20)
	require.NoError(t, deflate(b, full))
	_, err := unpack(b.Bytes(), maxRecord)
	require.ErrorContains(t, err, "has more than")
	for _, bad := range [][]byte{{packed}, {packed, 7, 7, 7}, b.Bytes()[:10]} {
		_, err := unpack(bad, maxRecord)
		require.Error(t, err)
	}
}
