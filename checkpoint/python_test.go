package checkpoint

import (
	"encoding/binary"
	"encoding/json"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu"
)

// reader prints what the safetensors library reads of some files, by tensor.
const reader = `
import hashlib, json, sys, torch
from safetensors.torch import load_file
print(json.dumps({name: [str(x.dtype)[6:], list(x.shape), hashlib.sha256(x.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()]
    for path in sys.argv[1:] for name, x in load_file(path).items()}))
`

// TestPythonReadsWhatIsSaved lets the safetensors library read files that Save wrote.
func TestPythonReadsWhatIsSaved(t *testing.T) {
	if err := exec.Command("python3", "-c", "import torch, safetensors").Run(); err != nil {
		t.Skip("there is no Python with PyTorch and safetensors")
	}
	list := []made{}
	for name, dtype := range map[string]safetensors.DType{"f32": safetensors.F32, "bf16": safetensors.BF16, "f16": safetensors.F16, "i64": safetensors.I64,
		"u8": safetensors.U8, "bool": safetensors.Bool, "f8": safetensors.F8E4M3, "a\"b\\ü": safetensors.I32} {
		data := randomBytes(24 * dtype.Bits() / 8)
		if dtype == safetensors.Bool {
			for i := range data {
				data[i] &= 1
			}
		}
		list = append(list, made{safetensors.Tensor{Name: name, DType: dtype, Shape: []int{4, 3, 2}}, data})
	}
	list = append(list, made{safetensors.Tensor{Name: "scalar", DType: safetensors.F64}, randomBytes(8)},
		made{safetensors.Tensor{Name: "empty", DType: safetensors.F32, Shape: []int{3, 0}}, nil})
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		c := openCheckpoint(t, writeCheckpoint(t, [][]made{list}))
		all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(i Info) Placement {
			if len(i.Shape) == 0 {
				return Own(1)
			}
			return Shard(1)
		}})
		require.NoError(t, err)
		folder := t.TempDir()
		require.NoError(t, Save(t.Context(), g, filepath.Join(folder, "model.safetensors"), all, &SaveConfig{MaxFileBytes: 300, Metadata: map[string]string{"format": "pt"}}))
		for _, w := range all {
			require.NoError(t, w.Close())
		}
		files, err := filepath.Glob(filepath.Join(folder, "*.safetensors"))
		require.NoError(t, err)
		require.Greater(t, len(files), 1)
		out, err := exec.Command("python3", append([]string{"-c", reader}, files...)...).Output()
		require.NoError(t, err)
		var got map[string][3]any
		require.NoError(t, json.Unmarshal(out, &got))
		require.Len(t, got, len(list))
		for _, m := range list {
			require.Equal(t, hashOf(m.data), got[m.info.Name][2], m.info.Name)
			require.Len(t, got[m.info.Name][1], len(m.info.Shape), m.info.Name)
			require.Equal(t, dtypes[m.info.DType].String(), got[m.info.Name][0])
		}
	})
}

// TestPythonReadsASaver lets a reader that shares no code with Chorus read random models that a
// Saver wrote. Tensors have several parts, and parts several blocks.
func TestPythonReadsASaver(t *testing.T) {
	if err := exec.Command("python3", "-c", "import hashlib, json, struct").Run(); err != nil {
		t.Skip("there is no python3:", err)
	}
	withBlocks(t, 64)
	onVirtual(t, 3, func(t *testing.T, devs []*device.Device) {
		for range 3 {
			seed, folder := rand.Uint64(), t.TempDir()
			t.Logf("seed %d", seed)
			r, g := rand.New(rand.NewPCG(seed, 1)), localGroup(t, devs)
			model := append(randomState(r), stateTensor{"large", []int{40, 9}, make([]int32, 360)})
			parts, _ := layOutParts(t, r, g, model, true)
			v, err := NewSaver(t.Context(), g, folder, parts, nil)
			require.NoError(t, err)
			require.NoError(t, v.Save(t.Context(), 7, groupStreams(g)))
			require.NoError(t, v.Close())
			out, err := exec.Command("python3", "testdata/read_saved.py", filepath.Join(folder, stepName(7))).CombinedOutput()
			require.NoError(t, err, "%s", out)
			var got map[string]string
			require.NoError(t, json.Unmarshal(out, &got), "%s", out)
			require.Len(t, got, len(model))
			for _, x := range model {
				var b []byte
				for _, e := range x.want {
					b = binary.LittleEndian.AppendUint32(b, uint32(e))
				}
				require.Equal(t, hashOf(b), got[x.name], x.name)
			}
		}
	})
}
