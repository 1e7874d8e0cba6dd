package checkpoint

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// emptyPlans are plans that mean something for tensors without elements.
var emptyPlans = map[string]Plan{
	"replicated":   nil,
	"by the first": func(i Info) Placement { return Shard(0) },
	"by the last":  func(i Info) Placement { return Shard(-1) },
	"owned":        func(i Info) Placement { return Own(0) },
	"sliced":       func(i Info) Placement { return Slice(0, func(_, _, size int) Range { return Range{size, 0} }) },
}

// TestCheckpointsWithoutBytes: no tensors at all, or none that has elements, whatever
// the other dimensions say.
func TestCheckpointsWithoutBytes(t *testing.T) {
	empty := func(name string, shape ...int) made {
		return made{info: safetensors.Tensor{Name: name, DType: safetensors.F32, Shape: shape}}
	}
	for what, list := range map[string][]made{
		"nothing":    {},
		"no bytes":   {empty("a", 0), empty("b", 3, 0, 2), empty("c", 5, 0)},
		"huge sides": {empty("d", 0, math.MaxInt), empty("e", 0, 1<<40, 1<<40), empty("f", 0, 1<<62, 4), empty("g", 1<<60, 0)},
	} {
		for how, plan := range emptyPlans {
			t.Run(what+"/"+how, func(t *testing.T) {
				testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
					g := localGroup(t, devs)
					c := openCheckpoint(t, writeCheckpoint(t, [][]made{list})+"/part-0.safetensors")
					all, err := c.Load(t.Context(), g, &LoadConfig{Plan: plan, DType: func(Info) memory.DType { return memory.BFloat16 }})
					require.NoError(t, err)
					for _, w := range all {
						for _, name := range w.Names() {
							x, err := w.Tensor(name)
							require.NoError(t, err)
							require.Zero(t, x.Len())
						}
					}
					require.NoError(t, closeAll(all))
					if all, err = c.Load(t.Context(), g, &LoadConfig{Plan: plan}); how != "sliced" {
						require.NoError(t, err)
						path := filepath.Join(t.TempDir(), "out.safetensors")
						require.NoError(t, c.Verify(t.Context(), all[0]))
						require.NoError(t, Save(t.Context(), g, path, all, nil))
						require.Len(t, readBack(t, path), len(list))
					}
					require.NoError(t, closeAll(all))
				})
			})
		}
	}
}

// TestReversedGroup: the ranks of a group that was split need not be in device
// order.
func TestReversedGroup(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		whole := localGroup(t, devs)
		groups, err := whole.Split(t.Context(), []int{0, 0}, []int{1, 0})
		require.NoError(t, err)
		g := groups[0]
		defer func() { require.NoError(t, g.Close()) }()
		c := openCheckpoint(t, folder)
		all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement { return Shard(1) }})
		require.NoError(t, err)
		for i, w := range all {
			rank := g.Communicator(i).Rank()
			for _, m := range list {
				x, err := w.Tensor(m.info.Name)
				require.NoError(t, err)
				require.Equal(t, partOf(m.data, 4, m.info.Shape, 1, 256*rank, 256), bytesOfTensor(t, x, g, i))
			}
		}
		path := filepath.Join(t.TempDir(), "out.safetensors")
		require.NoError(t, Save(t.Context(), g, path, all, nil))
		for _, m := range list {
			require.Equal(t, m.data, readBack(t, path)[m.info.Name].data)
		}
		require.NoError(t, closeAll(all))
	})
}

// TestLoadsWhileClosing: loads of one checkpoint by several goroutines, of which
// another one closes it: each has everything or says that it was closed.
func TestLoadsWhileClosing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		g := localGroup(t, devs)
		requireFreed(t, g, func() {
			c, err := Open([]string{folder}, nil)
			require.NoError(t, err)
			begun := make(chan struct{})
			var once sync.Once
			var all sync.WaitGroup
			for range 6 {
				s := newStream(t, devs[0])
				all.Go(func() {
					w, err := c.LoadOn(t.Context(), s, &LoadConfig{Progress: func(int64, int64) { once.Do(func() { close(begun) }) }})
					if err != nil {
						require.ErrorIs(t, err, device.ErrClosed)
						return
					}
					x, err := w.Tensor("2.middle")
					require.NoError(t, err)
					mem, err := view(x, x.Offset(), x.Bytes())
					require.NoError(t, err)
					require.Equal(t, list[1].data, hostBytes(t, s, mem))
					require.NoError(t, w.Close())
					require.NoError(t, s.Sync(t.Context()))
				})
			}
			<-begun
			require.NoError(t, c.Close())
			all.Wait()
		})
	})
}

// TestSaveOverOpenCheckpoint saves over the file that is loaded from, by a link in a
// folder whose name looks like a pattern. Who has it open still has the old one.
func TestSaveOverOpenCheckpoint(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		from, list := bigCheckpoint(t)
		folder := filepath.Join(t.TempDir(), `a [*] "?" %d \ folder`)
		require.NoError(t, os.Mkdir(folder, 0o755))
		file, path := filepath.Join(folder, "real.bin"), filepath.Join(folder, "model.safetensors")
		content, err := os.ReadFile(filepath.Join(from, "part-0.safetensors"))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(file, content, 0o644))
		require.NoError(t, os.Symlink("real.bin", path))
		g := localGroup(t, devs)
		c := openCheckpoint(t, folder)
		all, err := c.Load(t.Context(), g, &LoadConfig{Plan: func(i Info) Placement {
			if i.Name == list[0].info.Name {
				return Skip()
			}
			return Shard(1)
		}})
		require.NoError(t, err)
		require.NoError(t, Save(t.Context(), g, path, all, nil))
		require.NoError(t, closeAll(all))
		require.Len(t, openCheckpoint(t, folder).Infos(), 2)
		to, err := os.Readlink(path)
		require.NoError(t, err)
		require.Equal(t, "real.bin", to, "the link stays")
		all, err = c.Load(t.Context(), g, nil)
		require.NoError(t, err)
		for _, m := range list {
			x, err := all[1].Tensor(m.info.Name)
			require.NoError(t, err)
			require.Equal(t, m.data, bytesOfTensor(t, x, g, 1))
		}
		require.NoError(t, closeAll(all))
	})
}

// TestWeightsOutliveTheirGroup: what was loaded stays when the group is closed.
func TestWeightsOutliveTheirGroup(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		first, second := localGroup(t, devs), localGroup(t, devs)
		c := openCheckpoint(t, folder)
		requireFreed(t, second, func() {
			all, err := c.Load(t.Context(), first, &LoadConfig{Plan: func(Info) Placement { return Shard(0) }})
			require.NoError(t, err)
			require.NoError(t, first.Close())
			_, err = c.Load(t.Context(), first, nil)
			require.ErrorIs(t, err, device.ErrClosed)
			require.NoError(t, c.Verify(t.Context(), all[1]))
			path := filepath.Join(t.TempDir(), "out.safetensors")
			require.NoError(t, Save(t.Context(), second, path, all, nil))
			require.Equal(t, list[2].data, readBack(t, path)[list[2].info.Name].data)
			require.NoError(t, closeAll(all))
		})
	})
}

// TestMetadataOfTheFirst: of files that have texts of the same key, the first one's
// counts.
func TestMetadataOfTheFirst(t *testing.T) {
	_, list := bigCheckpoint(t)
	c := openCheckpoint(t, writeCheckpoint(t, [][]made{list[:1], list[1:]}))
	require.Equal(t, map[string]string{"file": "part-0.safetensors"}, c.Metadata())
}

// TestOrderOfTheStream: what is on the stream by now comes before a load to memory that
// it has used, and before a save.
func TestOrderOfTheStream(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		s := newStream(t, devs[0])
		c := openCheckpoint(t, folder)
		zeros, err := tensor.Make(s, memory.Float32, 512, 512)
		require.NoError(t, err)
		host, err := tensor.OfHost(make([]float32, 512*512), 512, 512)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, zeros, host))
		before, err := tensor.Make(s, memory.Float32, 3, 512, 512)
		require.NoError(t, err)
		part, err := before.Select(0, 1)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, part, zeros))
		require.NoError(t, before.Close())
		w, err := c.LoadOn(t.Context(), s, nil)
		require.NoError(t, err)
		require.NoError(t, c.Verify(t.Context(), w))
		x, err := w.Tensor(list[1].info.Name)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, x, zeros))
		path := filepath.Join(t.TempDir(), "out.safetensors")
		require.NoError(t, SaveOn(t.Context(), s, path, w, nil))
		require.NoError(t, errors.Join(w.Close(), zeros.Close()))
		require.Equal(t, make([]byte, 1<<20), readBack(t, path)[list[1].info.Name].data)
	})
}

// TestHugeSparseFile: a file of more bytes than any device has is refused for want of
// memory, before any time or memory of the host goes into it.
func TestHugeSparseFile(t *testing.T) {
	const side = 1 << 60
	var list []safetensors.Tensor
	for i := range 2 {
		list = append(list, safetensors.Tensor{Name: fmt.Sprint(i), DType: safetensors.U8, Shape: []int{side}})
	}
	h, start, err := safetensors.NewHeader(list, nil)
	require.NoError(t, err)
	folder, err := os.MkdirTemp("/dev/shm", "sparse")
	if err != nil {
		t.Skip("there is no file system in memory: ", err)
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "model.safetensors")
	require.NoError(t, os.WriteFile(path, start, 0o644))
	if err := os.Truncate(path, h.Size); err != nil {
		t.Skip("the file system has no such files: ", err)
	}
	g := localGroup(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	c := openCheckpoint(t, path)
	for to, says := range map[memory.DType]string{
		memory.Uint8:   "bytes of weights for rank 0: memory: out of memory",
		memory.Float32: `the tensors of rank 0 up to "1" are larger than any memory`,
		memory.Float64: `tensor "0": shape [1152921504606846976] of uint8, as float64, is larger than any memory`,
	} {
		requireFreed(t, g, func() {
			_, err := c.Load(t.Context(), g, &LoadConfig{DType: func(Info) memory.DType { return to }})
			require.ErrorContains(t, err, says)
		})
	}
}

// TestPartsKeepElements: what ranks read for each other is divided between elements,
// also where it begins in the middle of a tensor of single bytes.
func TestPartsKeepElements(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		data := randomBytes(1 << 20)
		list := []made{
			{safetensors.Tensor{Name: "a", DType: safetensors.U8, Shape: []int{400 * slotAlign}}, data[:400*slotAlign]},
			{safetensors.Tensor{Name: "b", DType: safetensors.F32, Shape: []int{100_000}}, data[:400_000]},
		}
		c := openCheckpoint(t, writeCheckpoint(t, [][]made{list[:1], list[1:]}))
		all, err := c.Load(t.Context(), g, &LoadConfig{RoundBytes: 10_000, Plan: func(i Info) Placement {
			return Slice(0, func(rank, _, size int) Range {
				switch {
				case rank < 2:
					return Range{0, size}
				case i.Name == "a":
					return Range{0, 3}
				}
				return Range{}
			})
		}})
		require.NoError(t, err)
		for i, w := range all[:2] {
			for _, m := range list {
				x, err := w.Tensor(m.info.Name)
				require.NoError(t, err)
				require.Equal(t, m.data, bytesOfTensor(t, x, g, i))
			}
		}
		require.NoError(t, closeAll(all))
	})
}
