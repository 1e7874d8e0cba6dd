package fabric

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/safe"
)

// FuzzCards gives a rank what another rank of its group may say about itself.
func FuzzCards(f *testing.F) {
	f.Add([]byte(`{"Value":{"Rank":1,"Ranks":2,"Bytes":64,"Host":"h","Process":"q","GPU":"GPU-1","Blocks":4}}`))
	f.Add([]byte(`{"Value":{"Rank":-1,"Ranks":2,"Bytes":-64,"Host":"h\u001b[K","Blocks":-9223372036854775808}}`))
	f.Add([]byte(`{"Failed":"\r[rank 7]"}`))
	f.Add([]byte(`[]`))
	mine := rankInfo{Ranks: 2, Bytes: 64, Host: "h", Process: "p", GPU: "GPU-0", Blocks: 4}
	f.Fuzz(func(t *testing.T, b []byte) {
		exchange := func(_ context.Context, text []byte) ([][]byte, error) { return [][]byte{text, b}, nil }
		infos, err := collective.Agree(t.Context(), exchange, 2, mine, nil)
		if err == nil {
			err = compareRanks(infos)
		}
		if err != nil {
			require.Equal(t, safe.Text(err.Error()), err.Error())
			return
		}
		require.Equal(t, 1, infos[1].Rank)
		require.Equal(t, mine.Bytes, infos[1].Bytes)
		require.NotEqual(t, mine.GPU, infos[1].GPU)
	})
}
