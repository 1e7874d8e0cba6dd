package checkpoint

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A made is a tensor of a checkpoint that a test has made, with its bytes.
type made struct {
	info safetensors.Tensor
	data []byte
}

// writeCheckpoint writes tensors into files with an index.
func writeCheckpoint(t testing.TB, files [][]made) string {
	t.Helper()
	folder := t.TempDir()
	x := safetensors.Index{WeightMap: map[string]string{}}
	for i, list := range files {
		name := fmt.Sprintf("part-%d.safetensors", i)
		f, err := os.Create(filepath.Join(folder, name))
		require.NoError(t, err)
		var data []safetensors.Data
		for _, m := range list {
			data = append(data, safetensors.Data{Tensor: m.info, Raw: m.data})
			x.WeightMap[m.info.Name] = name
		}
		require.NoError(t, safetensors.Write(f, map[string]string{"file": name}, data...))
		require.NoError(t, f.Close())
	}
	text, err := x.MarshalJSON()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, indexName), text, 0o644))
	return folder
}

func openCheckpoint(t testing.TB, paths ...string) *Checkpoint {
	t.Helper()
	c, err := Open(paths, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func localGroup(t testing.TB, devs []*device.Device) *comm.Group {
	t.Helper()
	g, err := comm.Local(t.Context(), devs, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// bytesOfTensor returns the elements of a tensor in device memory, row-major.
func bytesOfTensor(t testing.TB, x tensor.Tensor, g *comm.Group, local int) []byte {
	t.Helper()
	if x.Len() == 0 {
		return []byte{}
	}
	require.True(t, x.Contiguous())
	require.Zero(t, x.Ptr()%slotAlign, "tensors lie at aligned addresses")
	mem, err := memory.View[byte](x.Buffer(), x.Offset(), x.Bytes())
	require.NoError(t, err)
	out := make([]byte, x.Bytes())
	require.NoError(t, mem.CopyTo(g.Stream(local), out))
	return out
}

// partOf is what a rank should get of a tensor's bytes, by plain counting.
func partOf(data []byte, size int, shape []int, dim, start, n int) []byte {
	if dim < 0 {
		return data
	}
	inner := size
	for _, d := range shape[dim+1:] {
		inner *= d
	}
	out := []byte{}
	for at := 0; at < len(data); at += shape[dim] * inner {
		out = append(out, data[at+start*inner:at+(start+n)*inner]...)
	}
	return out
}

func floatBytes(x float32) []byte {
	return binary.LittleEndian.AppendUint32(nil, math.Float32bits(x))
}

// castOf converts float32 or float16 bytes by the rules of the host.
func castOf(data []byte, from, to memory.DType) []byte {
	var out []byte
	for i := 0; i < len(data); i += from.Size() {
		var x float32
		if from == memory.Float32 {
			x = math.Float32frombits(binary.LittleEndian.Uint32(data[i:]))
		} else {
			x = memory.Float16Bits(binary.LittleEndian.Uint16(data[i:])).Float32()
		}
		switch to {
		case memory.BFloat16:
			out = binary.LittleEndian.AppendUint16(out, uint16(memory.BFloat16Of(x)))
		case memory.Float32:
			out = append(out, floatBytes(x)...)
		case memory.Float64:
			out = binary.LittleEndian.AppendUint64(out, math.Float64bits(float64(x)))
		}
	}
	return out
}

// randomTensors returns tensors of any type and shape. Floats are numbers.
func randomTensors(r *rand.Rand, n int) []made {
	var list []made
	for i := range n {
		types := []safetensors.DType{safetensors.F32, safetensors.F16, safetensors.BF16, safetensors.U8, safetensors.I64, safetensors.Bool, safetensors.F8E4M3}
		m := made{info: safetensors.Tensor{Name: fmt.Sprintf("t.%d", i), DType: types[r.IntN(len(types))]}}
		elements := 1
		for range r.IntN(4) {
			d := r.IntN(24)
			if r.IntN(8) > 0 {
				d++
			}
			m.info.Shape = append(m.info.Shape, d)
			elements *= d
		}
		for range elements {
			x := float32(r.IntN(4001)-2000) / 8
			switch m.info.DType {
			case safetensors.F32:
				m.data = append(m.data, floatBytes(x)...)
			case safetensors.F16:
				m.data = binary.LittleEndian.AppendUint16(m.data, uint16(memory.Float16Of(x)))
			case safetensors.Bool:
				m.data = append(m.data, byte(r.IntN(2)))
			default:
				for range m.info.DType.Bits() / 8 {
					m.data = append(m.data, byte(r.IntN(256)))
				}
			}
		}
		list = append(list, m)
	}
	return list
}

// A wish is what the plan of a test says of a tensor, and what it should mean.
type wish struct {
	placement Placement
	dim       int
	of        func(rank, size int) (start, n int)
	has       func(rank int) bool
	to        memory.DType
}

func randomWish(r *rand.Rand, info safetensors.Tensor, ranks int) wish {
	w := wish{placement: Replicate(), dim: -1, has: func(int) bool { return true }}
	if len(info.Shape) > 0 {
		w.dim = r.IntN(len(info.Shape))
	}
	kind := r.IntN(6)
	if w.dim < 0 {
		kind %= 3
	}
	chosen, shift := r.IntN(ranks), r.IntN(5)
	switch kind {
	case 0:
		w.dim = -1
	case 1:
		w.placement, w.dim, w.has = Own(chosen), -1, func(rank int) bool { return rank == chosen }
	case 2:
		w.placement, w.has = Skip(), func(int) bool { return false }
	case 3, 4:
		w.placement = Shard(w.dim - r.IntN(2)*len(info.Shape))
		w.of = func(rank, size int) (int, int) {
			part := (size + ranks - 1) / ranks
			start := min(size, rank*part)
			return start, min(size, start+part) - start
		}
	case 5: // ranges that overlap, leave gaps and are empty
		w.of = func(rank, size int) (int, int) {
			start := min(size, (rank/2)*(shift+1))
			return start, min(size-start, rank*shift)
		}
		w.placement = Slice(w.dim, func(rank, _, size int) Range { s, n := w.of(rank, size); return Range{s, n} })
	}
	if r.IntN(3) == 0 {
		switch info.DType {
		case safetensors.F32:
			w.to = []memory.DType{memory.BFloat16, memory.Float64}[r.IntN(2)]
		case safetensors.F16:
			w.to = []memory.DType{memory.Float32, memory.Float64}[r.IntN(2)]
		}
	}
	return w
}

// TestLoadRandomPlans loads checkpoints of any tensors by any plan, and compares
// every part of every rank with the bytes of the file.
func TestLoadRandomPlans(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for n := range 12 {
		ranks := 1 + n%8
		t.Run(fmt.Sprintf("%d ranks", ranks), func(t *testing.T) {
			loadRandomly(t, r, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks}))
		})
	}
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for range 3 {
			loadRandomly(t, r, devs)
		}
	})
}

func loadRandomly(t *testing.T, r *rand.Rand, devs []*device.Device) {
	tensors := randomTensors(r, 1+r.IntN(40))
	files := make([][]made, 1+r.IntN(3))
	wishes := map[string]wish{}
	for _, m := range tensors {
		i := r.IntN(len(files))
		files[i] = append(files[i], m)
		wishes[m.info.Name] = randomWish(r, m.info, len(devs))
	}
	files = slices.DeleteFunc(files, func(f []made) bool { return len(f) == 0 })
	g := localGroup(t, devs)
	c := openCheckpoint(t, writeCheckpoint(t, files))
	var done, total int64
	all, err := c.Load(t.Context(), g, &LoadConfig{
		Plan:       func(i Info) Placement { return wishes[i.Name].placement },
		DType:      func(i Info) memory.DType { return wishes[i.Name].to },
		Progress:   func(d, of int64) { require.Greater(t, d, done); done, total = d, of },
		RoundBytes: 512 << r.IntN(9),
	})
	require.NoError(t, err)
	require.Equal(t, total, done)
	for local, w := range all {
		rank := g.Communicator(local).Rank()
		for _, m := range tensors {
			checkPart(t, w, m, wishes[m.info.Name], rank, g, local)
		}
		require.NoError(t, w.Close())
	}
}

func checkPart(t *testing.T, w *Weights, m made, wish wish, rank int, g *comm.Group, local int) {
	t.Helper()
	what := fmt.Sprintf("tensor %v, %v, on rank %d", m.info, wish.placement, rank)
	if !wish.has(rank) {
		_, err := w.Tensor(m.info.Name)
		require.ErrorContains(t, err, m.info.Name, what)
		require.NotContains(t, w.Names(), m.info.Name)
		return
	}
	x, err := w.Tensor(m.info.Name)
	require.NoError(t, err, what)
	require.Contains(t, w.Names(), m.info.Name)
	shape, dim, start, n := append([]int{}, m.info.Shape...), -1, 0, 0
	if wish.of != nil {
		dim = wish.dim
		start, n = wish.of(rank, shape[dim])
		shape[dim] = n
	}
	require.Equal(t, shape, x.Shape(), what)
	d, part, err := w.Part(m.info.Name)
	require.NoError(t, err)
	require.Equal(t, []int{dim, start, n}, []int{d, part.Start, part.Len}, what)
	want := partOf(m.data, m.info.DType.Bits()/8, m.info.Shape, dim, start, n)
	if wish.to != memory.Invalid {
		want = castOf(want, dtypes[m.info.DType], wish.to)
		require.Equal(t, wish.to, x.DType())
	}
	require.Equal(t, len(want), x.Bytes(), what)
	require.Equal(t, append([]byte{}, want...), bytesOfTensor(t, x, g, local), what)
}

// TestEachByteIsReadOnce: whatever the plan, and however small the tensors, what all
// ranks read together is what the files have.
func TestEachByteIsReadOnce(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 5))
	var list []made
	for i := range 24 {
		m := made{info: safetensors.Tensor{Name: fmt.Sprintf("t.%02d", i), DType: safetensors.BF16, Shape: []int{8, 1 << r.IntN(8), 64}}}
		m.data = randomBytes(2 * 8 * m.info.Shape[1] * 64)
		list = append(list, m)
	}
	folder := writeCheckpoint(t, [][]made{list[:15], list[15:]})
	for what, plan := range map[string]Plan{
		"replicated": nil, "first dimension": func(Info) Placement { return Shard(0) }, "second dimension": func(Info) Placement { return Shard(1) },
		"last dimension": func(Info) Placement { return Shard(-1) }, "owned": func(i Info) Placement { return Own(int(i.Name[3]) % 4) },
	} {
		t.Run(what, func(t *testing.T) {
			g := localGroup(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4}))
			c, err := Open([]string{folder}, &gds.FileConfig{Engine: gds.Cached})
			require.NoError(t, err)
			defer c.Close()
			before := bytesRead(c)
			all, err := c.Load(t.Context(), g, &LoadConfig{Plan: plan, RoundBytes: 100_000})
			require.NoError(t, err)
			require.Equal(t, c.Bytes(), bytesRead(c)-before)
			for i, w := range all {
				require.NoError(t, c.Verify(t.Context(), w), "rank %d", i)
				require.NoError(t, w.Close())
			}
		})
	}
}

func bytesRead(c *Checkpoint) (n int64) {
	for _, s := range c.Status() {
		n += s.Cached.BytesRead + s.Direct.BytesRead + s.CuFile.BytesRead
	}
	return n
}

// TestWhatLiesBetweenIsKept: two of three ranks share tensors, but of the one in the
// middle the first rank has more than the second. What both need of it and of the next
// lies equally far apart on both, and is not sent as one run over what only the first
// has between.
func TestWhatLiesBetweenIsKept(t *testing.T) {
	first := func(lens ...int) Placement {
		return Slice(0, func(rank, _, _ int) Range { return Range{0, lens[rank]} })
	}
	const n = 2 * smallTensor
	plan := map[string]Placement{"0": first(4*n, 4*n, 0), "1": first(n+100, n+90, 0), "2": first(n, n, 0)}
	lens := map[string][]int{"0": {4 * n, 4 * n}, "1": {n + 100, n + 90}, "2": {n, n}}
	var list []made
	for _, name := range []string{"0", "1", "2"} {
		size := lens[name][0]
		list = append(list, made{safetensors.Tensor{Name: name, DType: safetensors.U8, Shape: []int{size}}, randomBytes(size)})
	}
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		c := openCheckpoint(t, writeCheckpoint(t, [][]made{list}))
		for _, budget := range []int{0, n, 512 << 10} {
			all, err := c.Load(t.Context(), g, &LoadConfig{RoundBytes: budget, Plan: func(i Info) Placement { return plan[i.Name] }})
			require.NoError(t, err)
			for _, m := range list {
				for rank, size := range lens[m.info.Name] {
					x, err := all[rank].Tensor(m.info.Name)
					require.NoError(t, err)
					require.True(t, bytes.Equal(m.data[:size], bytesOfTensor(t, x, g, rank)), "tensor %s of rank %d in rounds of %d bytes", m.info.Name, rank, budget)
				}
			}
			require.NoError(t, closeAll(all))
		}
	})
}
