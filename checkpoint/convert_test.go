package checkpoint

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu"
)

// requireRecorded compares the digests of all tensors with a recording.
func requireRecorded(t *testing.T, rec recording, path string) {
	t.Helper()
	c := openCheckpoint(t, path)
	require.Len(t, c.Infos(), len(rec.digests), path)
	for name, want := range rec.digests {
		got, err := c.SHA256(t.Context(), name)
		require.NoError(t, err)
		require.Equal(t, want.SHA256, got, "%s: %s", path, name)
	}
}

// TestExportAndReshard converts checkpoints of all formats.
func TestExportAndReshard(t *testing.T) {
	for _, rec := range recordings(t) {
		folder := t.TempDir()
		c := openCheckpoint(t, rec.path)
		one, many := filepath.Join(folder, "one.safetensors"), filepath.Join(folder, "many.safetensors")
		require.NoError(t, c.Export(t.Context(), one, nil))
		requireRecorded(t, rec, one)
		require.Equal(t, "pt", openCheckpoint(t, one).Metadata()["format"])
		require.NoError(t, c.Export(t.Context(), many, &SaveConfig{MaxFileBytes: max(c.Bytes()/3, 1)}))
		if len(rec.digests) > 1 {
			requireRecorded(t, rec, many+indexExtension)
		}
		for _, files := range []int{1, min(3, len(rec.digests)), len(rec.digests)} {
			to := filepath.Join(folder, stepName(int64(files)))
			require.NoError(t, Reshard(t.Context(), rec.path, to, &ReshardConfig{Files: files}))
			requireRecorded(t, rec, to)
			requireRecorded(t, rec, filepath.Join(to, indexName))
			s, err := OpenSaved(to)
			require.NoError(t, err)
			require.Equal(t, []any{files, int64(files), 1}, []any{s.Files(), s.Step(), s.Ranks()})
			require.NoError(t, s.Verify(t.Context()))
			require.NoError(t, s.Close())
			differences, err := Compare(t.Context(), c, openCheckpoint(t, to))
			require.NoError(t, err)
			require.Empty(t, differences)
		}
		left, err := filepath.Glob(filepath.Join(folder, ".*"))
		require.NoError(t, err)
		require.Empty(t, left, "temporary files")
	}
}

// addColumns adds a matrix to the parts, of which each rank has two columns, and returns it.
func addColumns(t *testing.T, g *comm.Group, parts [][]Part) stateTensor {
	x := stateTensor{name: "columns", shape: []int{2, 2 * len(parts)}}
	for v := range product(x.shape) {
		x.want = append(x.want, int32(v))
	}
	for i := range parts {
		first := int32(2 * g.Communicator(i).Rank())
		below := first + int32(x.shape[1])
		data := makeTensor(t, g.Stream(i), []int32{first, first + 1, below, below + 1}, []int{2, 2})
		parts[i] = append(parts[i], Part{Name: x.name, Data: data, Shape: x.shape, Dim: 1, Start: int(first)})
	}
	return x
}

// TestReshardSaved: a checkpoint of several ranks, with cut tensors, keeps its elements and
// values, also if it replaces itself. A damaged byte does not get a new digest.
func TestReshardSaved(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		folder := t.TempDir()
		model := append(randomState(r), randomState(r)...)
		for i := range model {
			model[i].name = fmt.Sprint("t", i)
		}
		parts, _ := layOutParts(t, r, g, model, true)
		model = append(model, addColumns(t, g, parts))
		v, err := NewSaver(t.Context(), g, folder, parts, nil)
		require.NoError(t, err)
		require.NoError(t, v.Save(t.Context(), 5, groupStreams(g), 1, 2, 3))
		require.NoError(t, v.Wait(t.Context()))
		require.NoError(t, v.Close())
		from := filepath.Join(folder, stepName(5))
		before := openCheckpoint(t, from)
		require.NotEmpty(t, before.scattered)
		for _, x := range model {
			var want []byte
			for _, v := range x.want {
				want = binary.LittleEndian.AppendUint32(want, uint32(v))
			}
			got, err := before.SHA256(t.Context(), x.name)
			require.NoError(t, err)
			require.Equal(t, hashOf(want), got, "%s %v", x.name, x.shape)
		}
		require.NoError(t, Reshard(t.Context(), from, filepath.Join(folder, "copy"), &ReshardConfig{MaxFileBytes: 100}))
		require.NoError(t, Reshard(t.Context(), from, from, &ReshardConfig{Files: 1}))
		for _, to := range []string{from, filepath.Join(folder, "copy")} {
			differences, err := Compare(t.Context(), before, openCheckpoint(t, to))
			require.NoError(t, err)
			require.Empty(t, differences)
			s, err := OpenSaved(to)
			require.NoError(t, err)
			value := 0
			require.NoError(t, s.Value(2, &value))
			require.Equal(t, []any{3, int64(5), 3}, []any{value, s.Step(), s.Ranks()})
			require.NoError(t, s.Close())
		}
		damage(t, filepath.Join(from, "model.safetensors"), -1)
		err = Reshard(t.Context(), from, filepath.Join(folder, "again"), nil)
		require.ErrorContains(t, err, "the file was damaged")
		var e *TensorError
		require.ErrorAs(t, err, &e)
		require.NoDirExists(t, filepath.Join(folder, "again"))
	})
}

// damage changes a byte of a file, counted from the end if at is negative.
func damage(t *testing.T, path string, at int) {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	if at < 0 {
		at += len(data)
	}
	data[at] ^= 1
	require.NoError(t, os.WriteFile(path, data, 0o644))
}

// TestVerifyNamesAllDamages damages two tensors.
func TestVerifyNamesAllDamages(t *testing.T) {
	to := filepath.Join(t.TempDir(), "x")
	require.NoError(t, Reshard(t.Context(), writeCheckpoint(t, [][]made{{
		{safetensors.Tensor{Name: "a", DType: safetensors.U8, Shape: []int{100}}, randomBytes(100)},
		{safetensors.Tensor{Name: "b", DType: safetensors.U8, Shape: []int{100}}, randomBytes(100)},
		{safetensors.Tensor{Name: "c", DType: safetensors.U8, Shape: []int{100}}, randomBytes(100)},
	}}), to, nil))
	file := filepath.Join(to, "model.safetensors")
	damage(t, file, -250)
	damage(t, file, -50)
	s, err := OpenSaved(to)
	require.NoError(t, err)
	err = s.Verify(t.Context())
	lines := strings.Split(err.Error(), "\n")
	require.Len(t, lines, 2)
	size := s.m.Files[0].Bytes
	require.Contains(t, lines[0], fmt.Sprintf("%s: tensor \"a\" at byte %d: SHA-256", file, size-300))
	require.Contains(t, lines[1], fmt.Sprintf("tensor \"c\" at byte %d: SHA-256", size-100))
	require.NoError(t, s.Close())
}

// TestReshardIsOnTheDisk is TestSaveIsOnTheDisk for Reshard.
func TestReshardIsOnTheDisk(t *testing.T) {
	folder := t.TempDir()
	for _, show := range []string{"rename", "exchange"} { // the second one replaces the first
		fs := &recordedFiles{systemFiles: systemFiles{folder}}
		require.NoError(t, reshard(t.Context(), torchFixtures+"views.pt", filepath.Join(folder, stepName(7)), &ReshardConfig{Files: 2}, fs))
		require.Contains(t, fs.calls, "write model-00002-of-00002.safetensors")
		fs.requireOnDisk(t, show+" "+stepName(7), filepath.Base(folder))
	}
}

func TestReshardMistakes(t *testing.T) {
	from, folder := "../internal/torchfile/testdata/views.pt", t.TempDir()
	for says, cfg := range map[string]*ReshardConfig{
		"99 files: want at most 9, the number of tensors": {Files: 99},
		"want one of the two numbers":                     {Files: 1, MaxFileBytes: 1},
		"-1 files":                                        {Files: -1},
	} {
		require.ErrorContains(t, Reshard(t.Context(), from, filepath.Join(folder, "x"), cfg), says)
	}
	require.ErrorContains(t, Reshard(t.Context(), from, folder, nil), "exists and is not a checkpoint")
	require.ErrorContains(t, Reshard(t.Context(), "/no/such", filepath.Join(folder, "x"), nil), "no such file")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, Reshard(ctx, from, filepath.Join(folder, "x"), nil), context.Canceled)
	c := openCheckpoint(t, from)
	require.ErrorIs(t, c.Export(ctx, filepath.Join(folder, "x.safetensors"), nil), context.Canceled)
	require.ErrorContains(t, c.Export(t.Context(), filepath.Join(folder, "x"), nil), "ends in .safetensors")
	left, err := os.ReadDir(folder)
	require.NoError(t, err)
	require.Empty(t, left)
}

// TestCompare: each kind of difference.
func TestCompare(t *testing.T) {
	tensors := func(change bool) []made {
		f32 := safetensors.Tensor{Name: "f", DType: safetensors.F32, Shape: []int{2, 3}}
		i64 := safetensors.Tensor{Name: "i", DType: safetensors.I64, Shape: []int{2}}
		u64 := safetensors.Tensor{Name: "u", DType: safetensors.U64, Shape: []int{1}}
		c64 := safetensors.Tensor{Name: "c", DType: safetensors.C64, Shape: []int{2}}
		nan := safetensors.Tensor{Name: "n", DType: safetensors.F32, Shape: []int{2}}
		list := []made{{f32, floats(0, 1, 2, 3, 4, 5)}, {i64, ints64(math.MaxInt64, 1)}, {u64, ints64(-1)}, {c64, floats(0, 0, 0, 0)}, {nan, floats(0, 0)}}
		if !change {
			return append(list, made{safetensors.Tensor{Name: "type", DType: safetensors.U8, Shape: []int{1}}, []byte{1}},
				made{safetensors.Tensor{Name: "shape", DType: safetensors.U8, Shape: []int{2}}, []byte{1, 1}},
				made{safetensors.Tensor{Name: "first", DType: safetensors.U8, Shape: []int{1}}, []byte{1}})
		}
		list[0].data = floats(0, 1, 2, 3, 4.5, 4)
		list[1].data = ints64(math.MaxInt64-1, 1)
		list[2].data = ints64(0)
		list[3].data = floats(0, 0, 0, 2)
		list[4].data = floats(1, float32(math.NaN()))
		return append(list, made{safetensors.Tensor{Name: "type", DType: safetensors.I8, Shape: []int{1}}, []byte{1}},
			made{safetensors.Tensor{Name: "shape", DType: safetensors.U8, Shape: []int{1, 2}}, []byte{1, 1}},
			made{safetensors.Tensor{Name: "second", DType: safetensors.U8, Shape: []int{1}}, []byte{1}})
	}
	a, b := openCheckpoint(t, writeCheckpoint(t, [][]made{tensors(false)})), openCheckpoint(t, writeCheckpoint(t, [][]made{tensors(true)}))
	list, err := Compare(t.Context(), a, b)
	require.NoError(t, err)
	var got []string
	for i := range list {
		got = append(got, list[i].String())
	}
	require.Equal(t, []string{
		`tensor "c": 1 elements differ, the first at [1], by at most 2`,
		`tensor "f": 2 elements differ, the first at [1 1], by at most 1`,
		`tensor "first": only in the first checkpoint`,
		`tensor "i": 1 elements differ, the first at [0], by at most 1`,
		`tensor "n": 2 elements differ, the first at [0], by at most NaN`,
		`tensor "second": only in the second checkpoint`,
		`tensor "shape": U8 [2] in the first checkpoint, U8 [1 2] in the second`,
		`tensor "type": U8 [1] in the first checkpoint, I8 [1] in the second`,
		`tensor "u": 1 elements differ, the first at [0], by at most 1.8446744073709552e+19`,
	}, got)
	list, err = Compare(t.Context(), a, a)
	require.NoError(t, err)
	require.Empty(t, list)
}

func floats(list ...float32) (b []byte) {
	for _, x := range list {
		n := math.Float32bits(x)
		b = append(b, byte(n), byte(n>>8), byte(n>>16), byte(n>>24))
	}
	return b
}

func ints64(list ...int64) (b []byte) {
	for _, x := range list {
		for i := range 8 {
			b = append(b, byte(x>>(8*i)))
		}
	}
	return b
}
