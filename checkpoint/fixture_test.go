package checkpoint

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
)

// A recording is a checkpoint that the safetensors library wrote, with the digests of
// its tensors.
type recording struct {
	path    string
	digests map[string]struct {
		Shape  []int
		SHA256 string
	}
}

// recordings are those of the format's tests and of CHORUS_FIXTURES.
func recordings(t *testing.T) (all []recording) {
	t.Helper()
	folders := []string{"../gds/safetensors/testdata", "../internal/torchfile/testdata"}
	if env.Fixtures.IsSet() {
		folders = append(folders, env.Fixtures.Value(), filepath.Join(env.Fixtures.Value(), "safetensors"), filepath.Join(env.Fixtures.Value(), "torch"))
	}
	for _, folder := range folders {
		files, err := filepath.Glob(filepath.Join(folder, "*.safetensors"))
		require.NoError(t, err)
		indexes, err := filepath.Glob(filepath.Join(folder, "*", "*.index.json"))
		require.NoError(t, err)
		torch, err := filepath.Glob(filepath.Join(folder, "*.pt"))
		require.NoError(t, err)
		distributed, err := filepath.Glob(filepath.Join(folder, "*", ".metadata"))
		require.NoError(t, err)
		for _, path := range slices.Concat(files, indexes, torch, distributed) {
			recorded := strings.TrimSuffix(path, filepath.Ext(path)) + ".json"
			switch filepath.Base(path) {
			case ".metadata":
				path = filepath.Dir(path)
				recorded = filepath.Join(path, "sha256.json")
			case "complex.pt": // device memory has no such type
				continue
			}
			if strings.HasSuffix(path, ".index.json") {
				recorded = filepath.Join(filepath.Dir(path), "sha256.json")
			}
			text, err := os.ReadFile(recorded)
			if os.IsNotExist(err) {
				continue
			}
			require.NoError(t, err)
			r := recording{path: path}
			require.NoError(t, json.Unmarshal(text, &r.digests))
			all = append(all, r)
		}
	}
	require.GreaterOrEqual(t, len(all), 2)
	return all
}

// TestRecordedCheckpoints loads what the safetensors library wrote: whole, cut along
// each dimension, by one owner each; and saves and loads it once more.
func TestRecordedCheckpoints(t *testing.T) {
	plans := map[string]Plan{
		"replicated": nil,
		"owned": func(i Info) Placement {
			return Own(len(i.Name) % 2)
		},
	}
	for dim := range 3 {
		plans[fmt.Sprint("sharded by ", dim)] = func(i Info) Placement { return Shard(min(dim, len(i.Shape)-1)) }
	}
	for _, rec := range recordings(t) {
		most := 0
		for _, d := range rec.digests {
			most = max(most, len(d.Shape))
		}
		for what, plan := range plans {
			if dim, cut := strings.CutPrefix(what, "sharded by "); cut && dim >= fmt.Sprint(most) {
				continue // no tensor has that dimension
			}
			for _, ranks := range []int{1, 2, 3} {
				if ranks == 1 && plan != nil { // all are alike
					continue
				}
				t.Run(fmt.Sprintf("%s/%s on %d", rec.path, what, ranks), func(t *testing.T) {
					testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
						g := localGroup(t, devs)
						first := loadRecorded(t, g, rec.path, plan)
						checkRecorded(t, g, rec, first)
						saved := filepath.Join(t.TempDir(), "model.safetensors")
						require.NoError(t, Save(t.Context(), g, saved, first, nil))
						checkRecorded(t, g, rec, loadRecorded(t, g, saved, plan))
					})
				})
			}
		}
	}
}

func loadRecorded(t *testing.T, g *comm.Group, path string, plan Plan) []*Weights {
	t.Helper()
	if plan != nil {
		whole := plan
		plan = func(i Info) Placement {
			if len(i.Shape) == 0 {
				return Replicate()
			}
			return whole(i)
		}
	}
	all, err := openCheckpoint(t, path).Load(t.Context(), g, &LoadConfig{Plan: plan})
	require.NoError(t, err)
	t.Cleanup(func() {
		for _, w := range all {
			require.NoError(t, w.Close())
		}
	})
	return all
}

// checkRecorded puts the parts of all ranks together and compares their digests.
func checkRecorded(t *testing.T, g *comm.Group, rec recording, all []*Weights) {
	t.Helper()
	for name, want := range rec.digests {
		var parts [][]byte
		dim := -1
		for i, w := range all {
			x, err := w.Tensor(name)
			if err != nil {
				require.ErrorContains(t, err, "gave it to others")
				continue
			}
			parts = append(parts, bytesOfTensor(t, x, g, i))
			dim, _, err = w.Part(name)
			require.NoError(t, err)
		}
		require.NotEmpty(t, parts, name)
		if dim < 0 {
			for _, p := range parts {
				require.Equal(t, want.SHA256, hashOf(p), name)
			}
			continue
		}
		require.Equal(t, want.SHA256, hashOf(interleave(parts, want.Shape, dim)), name)
	}
}

// interleave puts parts of a dimension together, row by row.
func interleave(parts [][]byte, shape []int, dim int) []byte {
	rows := 1
	for _, d := range shape[:dim] {
		rows *= d
	}
	var whole []byte
	for row := range rows {
		for _, p := range parts {
			n := len(p) / max(rows, 1)
			whole = append(whole, p[row*n:(row+1)*n]...)
		}
	}
	return whole
}

func hashOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// TestEnginesLoadAlike loads a recorded checkpoint by each engine.
func TestEnginesLoadAlike(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		for _, rec := range recordings(t) {
			for _, e := range []gds.Engine{gds.Cached, gds.Direct, gds.CuFile} {
				c, err := Open([]string{rec.path}, &gds.FileConfig{Engine: e})
				require.NoError(t, err)
				w, err := c.LoadOn(t.Context(), g.Stream(0), nil)
				require.NoError(t, err)
				checkRecorded(t, g, rec, []*Weights{w})
				require.NoError(t, w.Close())
				for _, st := range c.Status() {
					if len(c.scattered) > 0 { // perhaps the host has read all tensors of the file
						break
					}
					require.Positive(t, st.Cached.BytesRead+st.Direct.BytesRead+st.CuFile.BytesRead, "%s", st.Path)
				}
				require.NoError(t, c.Close())
			}
		}
	})
}
