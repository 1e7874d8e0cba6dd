package checkpoint

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/torchfile"
)

const torchFixtures = "../internal/torchfile/testdata/"

// TestDigestsOfRecordings compares the digests that the host computes.
func TestDigestsOfRecordings(t *testing.T) {
	for _, rec := range recordings(t) {
		requireRecorded(t, rec, rec.path)
	}
}

// TestVerifyTorch compares loaded views and chunks with the files, after conversion of the
// layout on the way.
func TestVerifyTorch(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		for _, path := range []string{"views.pt", "distributed"} {
			c := openCheckpoint(t, torchFixtures+path)
			all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(i Info) Placement {
				if len(i.Shape) == 0 {
					return Replicate()
				}
				return Shard(len(i.Shape) - 1)
			}})
			require.NoError(t, err)
			for _, w := range all {
				require.NoError(t, c.Verify(t.Context(), w))
				require.NoError(t, w.Close())
			}
		}
	})
}

// TestProgressOfTorch: progress ends at the total, also for tensors that pass the host.
func TestProgressOfTorch(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		for _, path := range []string{"views.pt", "distributed"} {
			var done, total int64
			all, err := openCheckpoint(t, torchFixtures+path).Load(t.Context(), g, &LoadConfig{Progress: func(d, n int64) { done, total = d, n }})
			require.NoError(t, err)
			require.Positive(t, total)
			require.Equal(t, total, done)
			require.NoError(t, closeAll(all))
		}
	})
}

// TestShardedTorchFiles opens files of torch.save by an index, as old versions of transformers
// write them, and by their folder.
func TestShardedTorchFiles(t *testing.T) {
	folder := t.TempDir()
	index := map[string]map[string]string{"weight_map": {}}
	for file, names := range map[string]string{"nested": "model.layer.weight model.layer.bias", "lone": "tensor"} {
		data, err := os.ReadFile(torchFixtures + file + ".pt")
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(folder, file+".bin"), data, 0o644))
		for name := range strings.FieldsSeq(names) {
			index["weight_map"][name] = file + ".bin"
		}
	}
	text, err := json.Marshal(index)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "pytorch_model.bin.index.json"), text, 0o644))
	c := openCheckpoint(t, folder)
	require.Len(t, c.Infos(), 3)
	info, ok := c.Info("tensor")
	require.True(t, ok)
	require.Equal(t, []int{3, 5}, info.Shape)
}

// TestDamagedTorchFiles changes files of torch.distributed.checkpoint. Errors name the file and
// the tensor, and leave nothing open.
func TestDamagedTorchFiles(t *testing.T) {
	for says, change := range map[string]func(data []byte) []byte{
		"the file ends at byte":                     func(data []byte) []byte { return data[:len(data)-10] },
		"does not begin like a zip archive":         func(data []byte) []byte { return make([]byte, len(data)) },
		"entry \"archive/data/0\" has no header at": func(data []byte) []byte { return breakHeader(data) },
	} {
		folder := t.TempDir()
		require.NoError(t, os.CopyFS(folder, os.DirFS(torchFixtures+"distributed")))
		path := filepath.Join(folder, "__1_0.distcp")
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, change(data), 0o644))
		_, err = Open([]string{folder}, nil)
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, err, path)
		var e *TensorError
		require.ErrorAs(t, err, &e)
	}
}

// TestChangedTorchFile: a view cannot be read any more. All ranks get the error.
func TestChangedTorchFile(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		path := filepath.Join(t.TempDir(), "views.pt")
		data, err := os.ReadFile(torchFixtures + "views.pt")
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(path, data, 0o644))
		c := openCheckpoint(t, path)
		require.NoError(t, os.Truncate(path, 100))
		_, err = c.Load(t.Context(), g, &LoadConfig{Plan: func(i Info) Placement {
			if i.Name == "transposed" {
				return Replicate()
			}
			return Skip()
		}})
		require.ErrorContains(t, err, fmt.Sprintf("%s: tensor \"transposed\" at byte", path))
		require.ErrorContains(t, c.Export(t.Context(), filepath.Join(t.TempDir(), "x.safetensors"), nil), path)
	})
}

// TestRepeatedChunks: the tensors of a folder may have 64 times the bytes of its files, or 1 GiB.
func TestRepeatedChunks(t *testing.T) {
	o := &opening{folder: "run", size: 1000}
	x := &torchfile.Distributed{Name: "x", DType: safetensors.F64, Shape: []int{1 << 26}}
	require.NoError(t, o.count(x))
	require.NoError(t, o.count(x))
	require.ErrorContains(t, o.count(x), `checkpoint: open run: tensor "x" of shape [67108864]: it has 1610612736 bytes or more of tensors in 1000 bytes`)
}

// TestChunksOfOnePlace: chunks that share a place are read again for each of them, and therefore limited.
func TestChunksOfOnePlace(t *testing.T) {
	o := &opening{c: &Checkpoint{headers: []*safetensors.Header{{Size: 1000}}}, size: 1000, read: mostSmallChunks + mostReads*1000}
	_, err := o.chunk(&torchfile.Distributed{}, &torchfile.Chunk{Length: 1}, 0)
	require.ErrorContains(t, err, "the chunks so far have 67112865 bytes in files of 1000 bytes: too many of them share a place")
}

// breakHeader changes the header of the entry of the first storage.
func breakHeader(data []byte) []byte {
	at := bytes.Index(data, []byte("archive/data/0"))
	data[at-30] ^= 1
	return data
}

// TestHostileManifests: the memory for a manifest is proportional to it, and damaged and
// contradictory manifests are errors.
func TestHostileManifests(t *testing.T) {
	tensor := func(text string) string {
		return `{"version":1,"ranks":1,"files":[{"name":"a"}],"tensors":[` + text + `]}`
	}
	for says, text := range map[string]string{
		"is outside of the folder":    `{"version":1,"ranks":1,"files":[{"name":"../a"}]}`,
		"has control characters":      `{"version":1,"ranks":1,"files":[{"name":"a\n"}]}`,
		"it has version 9":            `{"version":9}`,
		"it has no files or no ranks": `{"version":1,"ranks":0,"files":[{"name":"a"}]}`,
		"is larger than any memory":   tensor(`{"dtype":"F32","shape":[9223372036854775807,2],"rows":1,"width":1,"parts":[{"len":1}]}`),
		"is not 1 rows of 3":          tensor(`{"dtype":"F32","shape":[2],"rows":1,"width":3,"parts":[{"len":3}]}`),
		"no rank has elements 1 to 2": tensor(`{"dtype":"F32","shape":[2],"rows":1,"width":2,"parts":[{"len":1}]}`),
		"two parts have element 0":    tensor(`{"dtype":"F32","shape":[2],"rows":1,"width":2,"parts":[{"len":2},{"len":2}]}`),
		"is in file 7 of 1":           tensor(`{"dtype":"F32","shape":[2],"rows":1,"width":2,"parts":[{"file":7,"len":2}]}`),
		"it is not a manifest":        `{"version":"x"}`,
		`unknown dtype "F33"`:         tensor(`{"dtype":"F33","shape":[2]}`),
		"it has 100004 objects":       tensor(`{"parts":[` + strings.Repeat(`{},`, 100_000) + `{}]}`),
		"of more than 2000000 ranks":  `{"values":[` + strings.Repeat("0,", 2_000_000) + `0],"files":[{"name":"a"}]}`,
	} {
		sealedText, err := json.Marshal(sealed{digest([]byte(text)), json.RawMessage(text)})
		require.NoError(t, err)
		before := allocated()
		_, err = decodeManifest(sealedText)
		require.ErrorContains(t, err, says)
		require.Less(t, allocated()-before, uint64(16<<20+4*len(text)))
	}
	large := `{"values":["a\"]}{",{"a":[` + strings.Repeat(`{},`, 100_000) + `{}]}],"files":[` + strings.Repeat(`{},`, 4000) + `{}]}`
	require.NoError(t, checkDensity([]byte(large)), "values are the program's")
}
