package safetensors_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/env"
)

// A digest is what the safetensors library recorded of a tensor that it wrote.
type digest struct {
	DType  string `json:"dtype"`
	Shape  []int  `json:"shape"`
	SHA256 string `json:"sha256"`
}

// torchName has torch's names of the types.
var torchName = map[string]string{
	"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64",
	"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
	"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}

// places are the folders with recordings, also those of CHORUS_FIXTURES, which has
// these in a folder of their own.
func places() []string {
	p := []string{"testdata"}
	if env.Fixtures.IsSet() {
		p = append(p, env.Fixtures.Value(), filepath.Join(env.Fixtures.Value(), "safetensors"))
	}
	return p
}

func glob(t *testing.T, patterns ...string) (files []string) {
	t.Helper()
	for _, dir := range places() {
		for _, p := range patterns {
			found, err := filepath.Glob(filepath.Join(dir, p))
			require.NoError(t, err)
			files = append(files, found...)
		}
	}
	require.NotEmpty(t, files)
	slices.Sort(files)
	return slices.Compact(files)
}

func load(t *testing.T, file string) ([]byte, *safetensors.Header) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	h, err := safetensors.ReadHeader(bytes.NewReader(b), int64(len(b)))
	require.NoError(t, err)
	return b, h
}

func digests(t *testing.T, file string) map[string]digest {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	var d map[string]digest
	require.NoError(t, json.Unmarshal(b, &d))
	return d
}

func requireDigest(t *testing.T, want digest, x safetensors.Tensor, file []byte) {
	t.Helper()
	if want.DType != "" {
		require.Equal(t, want.DType, torchName[x.DType.String()], x.Name)
	}
	shape := slices.Clone(x.Shape)
	if x.DType == safetensors.F4 {
		shape[len(shape)-1] /= 2 // torch counts the bytes
	}
	require.Equal(t, want.Shape, shape, x.Name)
	sum := sha256.Sum256(file[x.Begin:x.End])
	require.Equal(t, want.SHA256, hex.EncodeToString(sum[:]), x.Name)
}

// Every recorded file reads with the recorded types, shapes and bytes.
func TestFixtures(t *testing.T) {
	for _, file := range glob(t, "*.safetensors") {
		recorded := strings.TrimSuffix(file, ".safetensors") + ".json"
		if _, err := os.Stat(recorded); err != nil {
			continue
		}
		t.Run(file, func(t *testing.T) {
			b, h := load(t, file)
			want := digests(t, recorded)
			require.Len(t, h.Tensors, len(want))
			for name, d := range want {
				x, ok := h.Lookup(name)
				require.True(t, ok, name)
				requireDigest(t, d, x, b)
			}
			_, ok := h.Lookup("no such tensor")
			require.False(t, ok)
		})
	}
}

// The reference implementation's files are ours to the byte, given their header.
func TestFixturesAreWrittenAlike(t *testing.T) {
	for _, file := range glob(t, "*.safetensors", "*/*.safetensors") {
		t.Run(file, func(t *testing.T) {
			b, h := load(t, file)
			again, start, err := safetensors.NewHeader(h.Tensors, h.Metadata)
			require.NoError(t, err)
			require.Equal(t, string(b[:h.DataOffset]), string(start))
			require.Equal(t, h.Tensors, again.Tensors)
			require.Equal(t, h.Size, again.Size)
		})
	}
}

func TestShardedFixtures(t *testing.T) {
	for _, file := range glob(t, "*/*.index.json") {
		t.Run(file, func(t *testing.T) {
			dir := filepath.Dir(file)
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			x, err := safetensors.ReadIndex(bytes.NewReader(text), int64(len(text)))
			require.NoError(t, err)
			headers, content := map[string]*safetensors.Header{}, map[string][]byte{}
			for _, f := range x.Files() {
				content[f], headers[f] = load(t, filepath.Join(dir, f))
			}
			require.NoError(t, x.Check(headers))
			want := digests(t, filepath.Join(dir, "sha256.json"))
			require.Len(t, x.WeightMap, len(want))
			total := int64(0)
			for name, d := range want {
				f := x.WeightMap[name]
				tensor, ok := headers[f].Lookup(name)
				require.True(t, ok, name)
				requireDigest(t, d, tensor, content[f])
				total += tensor.Bytes()
			}
			said, ok := x.TotalSize()
			require.True(t, ok)
			require.Equal(t, total, said)
			var b bytes.Buffer
			require.NoError(t, x.Write(&b))
			require.JSONEq(t, string(text), b.String())
		})
	}
}
