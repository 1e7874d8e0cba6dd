package torchfile

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const metadataFixture = "testdata/distributed/" + MetadataName

func TestReadMetadata(t *testing.T) {
	text, err := os.ReadFile(metadataFixture)
	require.NoError(t, err)
	m, err := ReadMetadata(text)
	require.NoError(t, err)
	require.Equal(t, []string{"epoch"}, m.Others)
	recordedText, err := os.ReadFile("testdata/distributed/sha256.json")
	require.NoError(t, err)
	var want map[string]recorded
	require.NoError(t, json.Unmarshal(recordedText, &want))
	require.Len(t, m.Tensors, len(want))
	for _, x := range m.Tensors {
		require.Equal(t, want[x.Name].DType, x.DType.String())
		require.True(t, slices.Equal(want[x.Name].Shape, x.Shape))
	}
	i := slices.IndexFunc(m.Tensors, func(x Distributed) bool { return x.Name == "rows" })
	require.Equal(t, []int{3, 0}, m.Tensors[i].Chunks[1].At)
	require.Equal(t, "__1_0.distcp", m.Tensors[i].Chunks[1].File)
}

// TestMetadataMistakes changes the fixture.
func TestMetadataMistakes(t *testing.T) {
	text, err := os.ReadFile(metadataFixture)
	require.NoError(t, err)
	for what, tc := range map[string]struct{ old, new, says string }{
		"another class": {"\x8c\x08Metadata", "\x8c\x08Metadoto", "the global torch.distributed.checkpoint.metadata.Metadoto"},
		"a folder":      {"__1_0.distcp", "../0.distcp.", "is outside of the folder"},
		"a larger size": {"K\x05K\x06\x86", "K\x06K\x06\x86", "its chunks have 30 elements: want 36"},
		"overlap":       {"K\x02K\x06\x86", "K\x02K\x05\x86", "its chunks have 28 elements: want 30"},
	} {
		changed := strings.Replace(string(text), tc.old, tc.new, 1)
		require.NotEqual(t, string(text), changed, what)
		_, err := ReadMetadata([]byte(changed))
		require.ErrorContains(t, err, tc.says, what)
	}
	_, err = ReadMetadata([]byte("\x80\x04K\x01."))
	require.ErrorContains(t, err, "want an object of class Metadata")
	_, err = ReadMetadata([]byte("\x80\x04\x8c\x02os\x8c\x06system\x93."))
	require.ErrorContains(t, err, "it has the global os.system")
}

// FuzzMetadata: no input panics, and the chunks of a tensor have as many elements as the tensor.
func FuzzMetadata(f *testing.F) {
	text, err := os.ReadFile(metadataFixture)
	require.NoError(f, err)
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		before := allocated()
		m, err := ReadMetadata(text)
		require.Less(t, allocated()-before, uint64(64<<20+1000*len(text)))
		if err != nil {
			return
		}
		for _, x := range m.Tensors {
			n := 0
			for _, c := range x.Chunks {
				n += elements(c.N)
			}
			require.Equal(t, elements(x.Shape), n)
		}
	})
}
