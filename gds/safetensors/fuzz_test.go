package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the seeds of the fuzzers anew")

// TestSeeds keeps the fuzzers' seeds in testdata/fuzz, where other tools find them:
// every attack, every curiosity and every wrong index.
func TestSeeds(t *testing.T) {
	seeds := map[string]string{}
	add := func(fuzzer, name, text string) {
		name = strings.Map(func(r rune) rune {
			if strings.ContainsRune(` \'`, r) {
				return '_'
			}
			return r
		}, name)
		seeds[filepath.Join("testdata", "fuzz", fuzzer, name)] = fmt.Sprintf("go test fuzz v1\n[]byte(%q)\n", text)
	}
	for _, a := range attacks() {
		if len(a.file) < 5000 {
			add("FuzzReadHeader", "attack_"+a.name, a.file)
		}
	}
	for _, c := range curiosities() {
		add("FuzzReadHeader", "curiosity_"+c.name, c.file)
	}
	for _, c := range wrongIndexes {
		add("FuzzIndex", "wrong_"+c.name, c.text)
	}
	add("FuzzIndex", "right", `{"metadata":{"total_size":3,"x":[1.5,"\n",null]},"y":{},"weight_map":{"a":"1","\u00e9":"2","b":"1"}}`)
	for name, want := range seeds {
		if *update {
			require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
			require.NoError(t, os.WriteFile(name, []byte(want), 0o644))
		}
		got, err := os.ReadFile(name)
		require.NoError(t, err, "run the test with -update")
		require.Equal(t, want, string(got), "%s: run the test with -update", name)
	}
}

// Whatever a file says, ReadHeader refuses it with its reason or reads what another
// reader of JSON reads, and what it reads can be written and read again.
func FuzzReadHeader(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		h, err := ReadHeader(bytes.NewReader(text), int64(len(text)))
		if err != nil {
			requireFormatError(t, h, err)
			return
		}
		requireWhole(t, h, text)
		again, start, err := NewHeader(h.Tensors, h.Metadata)
		require.NoError(t, err)
		read, err := ReadHeader(zeros{start}, again.Size)
		require.NoError(t, err)
		require.Equal(t, h.Metadata, read.Metadata)
		require.Len(t, read.Tensors, len(h.Tensors))
		for _, x := range h.Tensors {
			y, ok := read.Lookup(x.Name)
			require.True(t, ok)
			require.Equal(t, x.DType, y.DType)
			require.Equal(t, x.Shape, y.Shape)
			require.Equal(t, x.Bytes(), y.Bytes())
		}
	})
}

// zeros is a file that begins so and is zeros from there on.
type zeros struct{ start []byte }

func (z zeros) ReadAt(b []byte, off int64) (int, error) {
	clear(b)
	copy(b, z.start[min(off, int64(len(z.start))):])
	return len(b), nil
}

// requireWhole compares the header with what encoding/json reads, and requires that
// the tensors fill the file.
func requireWhole(t *testing.T, h *Header, text []byte) {
	t.Helper()
	n := binary.LittleEndian.Uint64(text)
	require.Equal(t, int64(8+n), h.DataOffset)
	var entries map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(text[8:8+n], &entries))
	var metadata map[string]string
	if m, ok := entries[reserved]; ok {
		require.NoError(t, json.Unmarshal(m, &metadata))
		delete(entries, reserved)
	}
	require.Equal(t, metadata, h.Metadata)
	require.Len(t, h.Tensors, len(entries))
	end := h.DataOffset
	for _, x := range h.Tensors {
		require.Equal(t, end, x.Begin)
		end = x.End
		bytes, wrong := size(x.DType, x.Shape)
		require.Empty(t, wrong)
		require.Equal(t, bytes, x.Bytes())
		var fields map[string]json.RawMessage // of exactly these letters, unlike in a struct
		require.NoError(t, json.Unmarshal(entries[x.Name], &fields), "%q", x.Name)
		var shape []int
		require.NoError(t, json.Unmarshal(fields["shape"], &shape))
		require.Equal(t, shape, x.Shape)
		var offsets [2]int64
		require.NoError(t, json.Unmarshal(fields["data_offsets"], &offsets))
		require.Equal(t, [2]int64{x.Begin - h.DataOffset, x.End - h.DataOffset}, offsets)
		var dtype string
		require.NoError(t, json.Unmarshal(fields["dtype"], &dtype))
		require.Equal(t, dtype, x.DType.String())
	}
	require.Equal(t, int64(len(text)), end)
}

func FuzzIndex(f *testing.F) {
	f.Fuzz(func(t *testing.T, text []byte) {
		x, err := ReadIndex(bytes.NewReader(text), int64(len(text)))
		if err != nil {
			require.Nil(t, x)
			var broken *FormatError
			require.ErrorAs(t, err, &broken)
			return
		}
		var fields map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(text, &fields))
		var files map[string]string
		require.NoError(t, json.Unmarshal(fields["weight_map"], &files))
		require.Equal(t, files, x.WeightMap)
		for _, file := range files {
			require.Equal(t, file, filepath.Base(file))
			require.True(t, filepath.IsLocal(file) && file != ".", "%q", file)
		}
		var b bytes.Buffer
		require.NoError(t, x.Write(&b))
		again, err := ReadIndex(bytes.NewReader(b.Bytes()), int64(b.Len()))
		require.NoError(t, err)
		require.Equal(t, x.WeightMap, again.WeightMap)
		require.Equal(t, x.Metadata == nil, again.Metadata == nil)
		if x.Metadata != nil {
			require.JSONEq(t, string(x.Metadata), string(again.Metadata))
		}
	})
}
