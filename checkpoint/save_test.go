package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// readBack returns the tensors of a checkpoint's files, by the format alone.
func readBack(t testing.TB, files ...string) map[string]made {
	t.Helper()
	all := map[string]made{}
	for _, path := range files {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		f, err := os.Open(path)
		require.NoError(t, err)
		h, err := safetensors.ReadHeader(f, int64(len(data)))
		require.NoError(t, err)
		require.NoError(t, f.Close())
		for _, x := range h.Tensors {
			require.NotContains(t, all, x.Name)
			all[x.Name] = made{x, data[x.Begin:x.End]}
		}
	}
	return all
}

// TestSaveRandomPlans loads by random plans that leave nothing out, saves what the
// ranks have, and compares the files' tensors with those that were loaded.
func TestSaveRandomPlans(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	for n := range 8 {
		t.Run(fmt.Sprintf("%d ranks", 1+n), func(t *testing.T) {
			saveRandomly(t, r, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1 + n}))
		})
	}
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) { saveRandomly(t, r, devs) })
}

func saveRandomly(t *testing.T, r *rand.Rand, devs []*device.Device) {
	tensors := randomTensors(r, 1+r.IntN(30))
	plan := map[string]Placement{}
	total := int64(0)
	for _, m := range tensors {
		total += int64(len(m.data))
		switch dims := len(m.info.Shape); {
		case dims > 0 && r.IntN(3) > 0:
			plan[m.info.Name] = Shard(r.IntN(dims))
		case r.IntN(2) == 0:
			plan[m.info.Name] = Own(r.IntN(len(devs)))
		}
	}
	g := localGroup(t, devs)
	c := openCheckpoint(t, writeCheckpoint(t, [][]made{tensors}))
	round := 512 << r.IntN(9)
	all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(i Info) Placement { return plan[i.Name] }})
	require.NoError(t, err)
	folder := t.TempDir()
	var done, of int64
	require.NoError(t, Save(t.Context(), g, filepath.Join(folder, "out.safetensors"), all, &SaveConfig{
		Metadata: map[string]string{"format": "pt"}, RoundBytes: round, MaxFileBytes: []int64{0, 1 + total/3}[r.IntN(2)],
		Progress: func(d, total int64) { require.Greater(t, d, done); done, of = d, total },
	}))
	require.Equal(t, []int64{total, total}, []int64{done, of})
	for _, w := range all {
		require.NoError(t, w.Close())
	}
	files, err := filepath.Glob(filepath.Join(folder, "*.safetensors"))
	require.NoError(t, err)
	got := readBack(t, files...)
	require.Len(t, got, len(tensors))
	for _, m := range tensors {
		require.Equal(t, append([]byte{}, m.data...), append([]byte{}, got[m.info.Name].data...), "%v", m.info)
		require.Equal(t, m.info.DType, got[m.info.Name].info.DType)
		require.Equal(t, append([]int{}, m.info.Shape...), append([]int{}, got[m.info.Name].info.Shape...))
	}
	again := openCheckpoint(t, folder)
	require.Len(t, again.Infos(), len(tensors))
	require.Equal(t, "pt", again.Metadata()["format"])
	left, err := os.ReadDir(folder)
	require.NoError(t, err)
	want := len(files)
	if len(files) > 1 {
		want++ // the index
	}
	require.Len(t, left, want, "nothing but the checkpoint is left")
}

// TestSaveConverted saves what was converted on the way, whole and cut, as the type
// that it has in memory, and refuses what the ranks do not have all of.
func TestSaveConverted(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		g := localGroup(t, devs)
		c := openCheckpoint(t, folder)
		for i, p := range []Placement{Replicate(), Shard(0), Shard(1)} {
			all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement { return p }, DType: func(Info) memory.DType { return memory.BFloat16 }})
			require.NoError(t, err)
			path := filepath.Join(t.TempDir(), "out.safetensors")
			require.NoError(t, Save(t.Context(), g, path, all, &SaveConfig{RoundBytes: 100_000}))
			require.NoError(t, closeAll(all))
			for _, m := range list {
				got := readBack(t, path)[m.info.Name]
				require.Equal(t, safetensors.BF16, got.info.DType)
				require.Equal(t, castOf(m.data, memory.Float32, memory.BFloat16), got.data, "placement %d", i)
			}
		}
		all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement {
			return Slice(1, func(rank, _, size int) Range { return Range{rank * 300, 212} })
		}})
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "out.safetensors")
		require.ErrorContains(t, Save(t.Context(), g, path, all, nil), `tensor "1.first": no rank has index 212 of dimension 1`)
		require.NoError(t, closeAll(all))
		require.NoFileExists(t, path)
	})
}

// TestIndexNotWritten: an index that cannot be written leaves nothing.
func TestIndexNotWritten(t *testing.T) {
	folder := t.TempDir()
	shards := []safetensors.Shard{{File: "not/beside", Tensors: []safetensors.Tensor{{Name: "x", DType: safetensors.U8, Shape: []int{1}}}}}
	o := &output{path: filepath.Join(folder, "model.safetensors"), cfg: &SaveConfig{}, shards: shards}
	err := o.writeIndex(t.Context())
	require.ErrorContains(t, err, "model.safetensors.index.json")
	left, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestSaveInFewerFiles: a folder has what was saved last, also where that was several
// files before and is one now.
func TestSaveInFewerFiles(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		folder := t.TempDir()
		for _, most := range []int64{100, 0, 100} {
			x, err := tensor.Make(s, memory.Int64, 10)
			require.NoError(t, err)
			y, err := tensor.Make(s, memory.Int64, 10)
			require.NoError(t, err)
			name := strings.Repeat("n", 220) // with more before and behind it, too long for a file
			require.NoError(t, SaveTensors(t.Context(), s, filepath.Join(folder, name+extension), map[string]tensor.Tensor{"x": x, fmt.Sprint("y", most): y}, &SaveConfig{MaxFileBytes: most}))
			require.NoError(t, errors.Join(x.Close(), y.Close()))
			c, err := Open([]string{folder}, nil)
			if most == 0 {
				require.NoFileExists(t, filepath.Join(folder, name+extension+indexExtension))
				c, err = Open([]string{filepath.Join(folder, name+extension)}, nil)
			}
			require.NoError(t, err)
			_, ok := c.Info(fmt.Sprint("y", most))
			require.True(t, ok)
			require.NoError(t, c.Close())
		}
	})
}

// TestSaveTensors writes views of any layout of a stream's device.
func TestSaveTensors(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		host := make([]float32, 30*50)
		for i := range host {
			host[i] = float32(i)
		}
		src, err := tensor.OfHost(host, 30, 50)
		require.NoError(t, err)
		x, err := tensor.Make(s, src.DType(), 30, 50)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, tensor.Copy(s, x, src))
		cut, err := x.Narrow(1, 7, 11)
		require.NoError(t, err)
		one, err := x.Select(0, 3)
		require.NoError(t, err)
		one, err = one.Select(0, 4)
		require.NoError(t, err)
		empty, err := tensor.Make(s, src.DType(), 0, 3)
		require.NoError(t, err)
		defer empty.Close()
		path := filepath.Join(t.TempDir(), "model.safetensors")
		require.NoError(t, SaveTensors(t.Context(), s, path, map[string]tensor.Tensor{"x": x, "x.T": x.T(), "cut": cut, "one": one, "empty": empty}, nil))
		got := readBack(t, path)
		require.Len(t, got, 5)
		require.Equal(t, []int{50, 30}, got["x.T"].info.Shape)
		for name, at := range map[string]func(i int) int{
			"x": func(i int) int { return i }, "x.T": func(i int) int { return i%30*50 + i/30 },
			"cut": func(i int) int { return i/11*50 + 7 + i%11 }, "one": func(int) int { return 154 },
		} {
			want := []byte{}
			for i := range len(got[name].data) / 4 {
				want = append(want, floatBytes(float32(at(i)))...)
			}
			require.NotEmpty(t, want)
			require.Equal(t, want, got[name].data, name)
		}
		require.Empty(t, got["empty"].data)
		require.Equal(t, []int{0, 3}, got["empty"].info.Shape)

		hostOnly := map[string]tensor.Tensor{"h": src}
		err = SaveTensors(t.Context(), s, path, hostOnly, nil)
		require.ErrorContains(t, err, `tensor "h"`)
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, SaveTensors(ended, s, path, map[string]tensor.Tensor{"x": x}, nil), context.Canceled)
		left, err := os.ReadDir(filepath.Dir(path))
		require.NoError(t, err)
		require.Len(t, left, 1, "nothing but the old file is left")
		require.Equal(t, got, readBack(t, path), "the old file is as it was")
		require.ErrorContains(t, SaveTensors(t.Context(), s, "model.bin", nil, nil), "ends in .safetensors")
	})
}
