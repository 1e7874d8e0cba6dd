package torchfile

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
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
		"a line end":    {"__1_0.distcp", "__1\n0.distcp", "has control characters"},
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
	_, err = ReadMetadata([]byte("\x80\x04\x8c\x02o\n\x8c\x06system\x93."))
	require.ErrorContains(t, err, `it has the global o\x0a.system`)
}

// metadataOfChunks returns metadata with n places, each of another tensor or, if name is not empty, of one, and with a tensor for each
// place that has the same chunks.
func metadataOfChunks(n int, name string) []byte {
	text := func(s string) string { return "X" + string(binary.LittleEndian.AppendUint32(nil, uint32(len(s)))) + s }
	class := func(name string) string { return "ctorch.distributed.checkpoint." + name + "\n)\x81}(" }
	number := func(i int) string { return "J" + string(binary.LittleEndian.AppendUint32(nil, uint32(i))) }
	zeros := "(" + strings.Repeat("K\x00", mostDepth) + "t"
	s := "\x80\x02" + class("metadata\nMetadata") + text("shared") + "(" + text(name) + "q\x00" +
		class("filesystem\n_StorageInfo") + text("relative_path") + text("f") + text("offset") + "K\x00" + text("length") + "K\x01ubq\x01" +
		class("metadata\nTensorStorageMetadata") + text("size") + zeros + text("properties") + class("metadata\nTensorProperties") + text("dtype") + "ctorch\nfloat32\nub" +
		text("chunks") + "(" + class("metadata\nChunkStorageMetadata") + text("offsets") + zeros + text("sizes") + zeros + "ubq\x02" +
		strings.Repeat("h\x02", mostChunks-1) + "lubq\x03l"
	places, tensors := text("storage_data")+"}(", text("state_dict_metadata")+"}("
	for i := range n {
		fqn, at := "h\x00", "("+number(i)+"t"
		if name == "" {
			fqn, at = text(fmt.Sprint(i)), zeros
			tensors += fqn + "h\x03"
		}
		places += class("metadata\nMetadataIndex") + text("fqn") + fqn + text("offset") + at + "ubh\x01"
	}
	return []byte(s + places + "u" + tensors + "uub.")
}

// TestMemoryOfMetadata: chunks and names that many tensors or places share take memory in proportion to the pickle.
func TestMemoryOfMetadata(t *testing.T) {
	m, err := ReadMetadata(metadataOfChunks(2, ""))
	require.NoError(t, err)
	require.Len(t, m.Tensors[1].Chunks, 1, "chunks without elements are at one place")
	for says, in := range map[string][]byte{
		"its chunks take more than":     metadataOfChunks(200, ""),
		"whose name is longer than":     metadataOfChunks(1000, strings.Repeat("n", mostName+1)),
		"want an object":                []byte("\x80\x02]."),
		"it lacks the list of tensors ": []byte("\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}b."),
		"":                              metadataOfChunks(2000, strings.Repeat("n", mostName)),
	} {
		before := allocated()
		_, err := ReadMetadata(in)
		took := allocated() - before
		if says != "" {
			require.ErrorContains(t, err, says)
		} else {
			require.NoError(t, err)
		}
		require.Less(t, took, uint64(4*(memorySlack+memoryOfByte*len(in))), says)
	}
}

// TestLongStates: a search for fields in a long state, which many objects share, would take quadratic time.
func TestLongStates(t *testing.T) {
	state := Dict{{"a", int64(1)}}
	require.Equal(t, int64(1), (&instance{state: &state}).field("a"))
	for range mostFields {
		state = append(state, DictItem{nil, nil})
	}
	require.Nil(t, (&instance{state: &state}).field("a"))
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
