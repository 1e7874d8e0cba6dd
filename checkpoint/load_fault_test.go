package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds"
	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// bigCheckpoint has three tensors of 1 MiB each in one file.
func bigCheckpoint(t *testing.T) (folder string, list []made) {
	t.Helper()
	data := randomBytes(3 << 20)
	for i := 3; i < len(data); i += 4 {
		data[i] &= 0xbf // numbers: what a NaN is converted to differs between machines
	}
	for i, name := range []string{"1.first", "2.middle", "3.last"} {
		list = append(list, made{safetensors.Tensor{Name: name, DType: safetensors.F32, Shape: []int{512, 512}}, data[i<<20 : (i+1)<<20]})
	}
	return writeCheckpoint(t, [][]made{list}), list
}

// requireFreed checks that a failed call has left no memory behind.
func requireFreed(t *testing.T, g *comm.Group, fn func()) {
	t.Helper()
	var before []int64
	for i := range g.Locals() {
		n, err := memory.Allocated(g.Device(i))
		require.NoError(t, err)
		before = append(before, n)
	}
	fn()
	for i := range g.Locals() {
		require.NoError(t, g.Stream(i).Sync(t.Context()))
		n, err := memory.Allocated(g.Device(i))
		require.NoError(t, err)
		require.Equal(t, before[i], n, "memory is left on %v", g.Device(i))
	}
}

// TestLoadFaults: whatever goes wrong while a checkpoint is read, the error names the
// file, the tensor and the byte, and nothing is left.
func TestLoadFaults(t *testing.T) {
	cases := map[string]struct {
		break_ func(t *testing.T, c *Checkpoint)
		is     error
		says   string
	}{
		"the file shrinks": {func(t *testing.T, c *Checkpoint) {
			require.NoError(t, os.Truncate(c.files[0].Path(), 2<<20))
		}, nil, "the file has changed"},
		"the file grows": {func(t *testing.T, c *Checkpoint) {
			f, err := os.OpenFile(c.files[0].Path(), os.O_WRONLY|os.O_APPEND, 0)
			require.NoError(t, err)
			_, err = f.WriteString("more")
			require.NoError(t, errors.Join(err, f.Close()))
		}, gds.ErrChanged, "the file has changed"},
		"it ends in the middle of a read": {func(t *testing.T, c *Checkpoint) { failRead(c, nil) }, io.ErrUnexpectedEOF,
			`tensor "2.middle" at byte `},
		"the disk fails":           {func(t *testing.T, c *Checkpoint) { failRead(c, syscall.EIO) }, syscall.EIO, `tensor "2.middle" at byte `},
		"the checkpoint is closed": {func(t *testing.T, c *Checkpoint) { require.NoError(t, c.Close()) }, device.ErrClosed, "part-0.safetensors"},
	}
	for what, tc := range cases {
		for _, ranks := range []int{1, 2} {
			for how, plan := range map[string]Plan{"whole": nil, "sharded": func(Info) Placement { return Shard(1) }} {
				t.Run(what+"/"+how, func(t *testing.T) {
					testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
						folder, _ := bigCheckpoint(t)
						g := localGroup(t, devs)
						c, err := Open([]string{folder}, &gds.FileConfig{Engine: gds.Cached})
						require.NoError(t, err)
						defer c.Close()
						requireFreed(t, g, func() {
							tc.break_(t, c)
							all, err := c.Load(t.Context(), g, &LoadConfig{Plan: plan, RoundBytes: 100_000})
							require.Empty(t, all)
							require.ErrorContains(t, err, tc.says)
							require.ErrorContains(t, err, "part-0.safetensors")
							if tc.is != nil {
								require.ErrorIs(t, err, tc.is)
							}
						})
						require.NoError(t, g.Err(), "the group still works")
					})
				})
			}
		}
	}
}

// failRead lets reads of what lies from 1.5 to 1.6 MiB fail, or end there.
func failRead(c *Checkpoint, err error) {
	const from, to = 3 << 19, 16 << 20 / 10
	f := c.files[0]
	pread := files.Of(f).System().Pread
	files.Of(f).System().Pread = func(fd int, p []byte, off int64) (int, error) {
		if off >= to || off+int64(len(p)) <= from {
			return pread(fd, p, off)
		}
		if off >= from || err != nil {
			return 0, err
		}
		return pread(fd, p[:from-off], off)
	}
}

// TestShortReadsAreContinued: a system that reads little at a time is only slower.
func TestShortReadsAreContinued(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, list := bigCheckpoint(t)
		g := localGroup(t, devs)
		c := openCheckpoint(t, folder)
		f := c.files[0]
		pread := files.Of(f).System().Pread
		var calls atomic.Int64
		files.Of(f).System().Pread = func(fd int, p []byte, off int64) (int, error) {
			if calls.Add(1)%5 == 0 {
				return 0, syscall.EINTR
			}
			if n := 4096 * 10; len(p) > n {
				p = p[:n]
			}
			return pread(fd, p, off)
		}
		all, err := c.Load(t.Context(), g, nil)
		require.NoError(t, err)
		for i, w := range all {
			for _, m := range list {
				x, err := w.Tensor(m.info.Name)
				require.NoError(t, err)
				require.Equal(t, m.data, bytesOfTensor(t, x, g, i))
			}
			require.NoError(t, w.Close())
		}
		require.Positive(t, c.Status()[0].Continued)
		require.Positive(t, c.Status()[0].Retried)
	})
}

// TestLoadOutOfMemory lets the driver refuse the nth allocation, one after the other,
// until there is enough for the weights and for what it takes to bring them.
func TestLoadOutOfMemory(t *testing.T) {
	folder, _ := bigCheckpoint(t)
	for n := 1; ; n++ {
		require.Less(t, n, 30)
		var faults []string
		for call := n; call < n+4; call++ { // the allocator tries again
			faults = append(faults, fmt.Sprintf("cuMemAlloc#%d=CUDA_ERROR_OUT_OF_MEMORY", call))
		}
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: strings.Join(faults, ",")})
		g := localGroup(t, devs)
		c := openCheckpoint(t, folder)
		var all []*Weights
		var err error
		requireFreed(t, g, func() {
			all, err = c.Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement { return Shard(1) },
				DType: func(Info) memory.DType { return memory.Float64 }, RoundBytes: 1 << 20})
			for _, w := range all {
				require.NoError(t, w.Close())
			}
		})
		if err == nil {
			require.Greater(t, n, 2, "nothing was refused")
			return
		}
		require.Empty(t, all)
		var oom *memory.OutOfMemoryError
		require.ErrorAs(t, err, &oom)
		require.ErrorContains(t, err, "load")
		require.NoError(t, g.Err())
	}
}

// TestCancelledLoad ends in the middle.
func TestCancelledLoad(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, _ := bigCheckpoint(t)
		g := localGroup(t, devs)
		c := openCheckpoint(t, folder)
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("somebody wants to leave")
		requireFreed(t, g, func() {
			_, err := c.Load(ctx, g, &LoadConfig{RoundBytes: 4096, Progress: func(done, total int64) { cancel(cause) }})
			require.ErrorIs(t, err, cause)
		})
		_, err := c.Load(ctx, g, nil)
		require.ErrorIs(t, err, cause, "one that has ended before")
	})
}

// TestOpenFaults opens what is no checkpoint.
func TestOpenFaults(t *testing.T) {
	folder, _ := bigCheckpoint(t)
	file := filepath.Join(folder, "part-0.safetensors")
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	put := func(name, content string) string {
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
		return path
	}
	in := func(index string, files ...string) string {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, indexName), []byte(index), 0o644))
		for _, f := range files {
			require.NoError(t, os.WriteFile(filepath.Join(dir, f), whole, 0o644))
		}
		return dir
	}
	for _, tc := range []struct {
		paths []string
		says  []string
	}{
		{nil, []string{"no file given"}},
		{[]string{"/no/such/file"}, []string{"/no/such/file", "no such file"}},
		{[]string{t.TempDir()}, []string{"not a checkpoint: want a safetensors file"}},
		{[]string{put("cut.safetensors", string(whole[:len(whole)-1]))}, []string{"cut.safetensors", "truncated"}},
		{[]string{put("long.safetensors", string(whole)+"x")}, []string{"long.safetensors"}},
		{[]string{put("x.safetensors", "no header")}, []string{"x.safetensors"}},
		{[]string{file, file}, []string{"part-0.safetensors", `tensor "1.first" is in`, "too"}},
		{[]string{in(`{"weight_map":{"1.first":"gone.safetensors"}}`)}, []string{"gone.safetensors", "no such file", indexName}},
		{[]string{in(`{"weight_map":{"nowhere":"a.safetensors"}}`, "a.safetensors")}, []string{indexName, `"nowhere"`, "a.safetensors"}},
		{[]string{in(`{"weight_map":{"1.first":"a.safetensors","2.middle":"b.safetensors"}}`, "a.safetensors", "b.safetensors")}, []string{"also in"}},
		{[]string{in(`{"weight_map":{"1.first":"../a.safetensors"}}`)}, []string{indexName, "separators"}},
		{[]string{in(`{"weight_map"`)}, []string{indexName}},
		{[]string{in(`{"weight_map":{}}`)}, []string{indexName, "names no file"}},
	} {
		_, err := Open(tc.paths, nil)
		require.Error(t, err, tc.says)
		for _, s := range tc.says {
			require.ErrorContains(t, err, s)
		}
	}
	two := t.TempDir()
	for _, name := range []string{"a.safetensors", "b.safetensors"} {
		require.NoError(t, os.WriteFile(filepath.Join(two, name), whole, 0o644))
	}
	_, err = Open([]string{two}, nil)
	require.ErrorContains(t, err, "has 2 files *.safetensors and no "+indexName)
}

// TestWrongWishes asks for what the checkpoint or the weights do not have.
func TestWrongWishes(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	list := []made{
		{safetensors.Tensor{Name: "x", DType: safetensors.F32, Shape: []int{4, 2}}, randomBytes(32)},
		{safetensors.Tensor{Name: "scalar", DType: safetensors.I64}, randomBytes(8)},
		{safetensors.Tensor{Name: "complex", DType: safetensors.C64, Shape: []int{2}}, randomBytes(16)},
	}
	g := localGroup(t, devs)
	c := openCheckpoint(t, writeCheckpoint(t, [][]made{list}))
	plan := func(p Placement) *LoadConfig {
		return &LoadConfig{Plan: func(i Info) Placement {
			if i.Name == "complex" {
				return Skip()
			}
			return p
		}}
	}
	for says, cfg := range map[string]*LoadConfig{
		`tensor "complex": device memory has no elements of type C64`: nil,
		`tensor "scalar": the plan's shard along dimension 0`:         plan(Shard(0)),
		`dimension 7`:                 plan(Shard(7)),
		`the plan gives it to rank 2`: plan(Own(2)),
		`rounds of -1 bytes`:          {RoundBytes: -1},
		`gives rank 1 indices 3 to 5 of dimension 0`: {Plan: func(i Info) Placement {
			if i.Name != "x" {
				return Skip()
			}
			return Slice(-2, func(rank, _, _ int) Range { return Range{3 * rank, 2} })
		}},
	} {
		requireFreed(t, g, func() {
			_, err := c.Load(t.Context(), g, cfg)
			require.ErrorContains(t, err, says)
		})
	}
	all, err := c.Load(t.Context(), g, plan(Own(1)))
	require.NoError(t, err)
	defer all[0].Close()
	_, err = all[0].Tensor("x")
	require.ErrorContains(t, err, `rank 0 has no part of tensor "x"`)
	_, err = Get[float32](all[1], "y")
	require.ErrorContains(t, err, `there is no tensor "y"`)
	_, err = Get[int32](all[1], "x")
	require.ErrorContains(t, err, `tensor "x" is of type float32: want int32`)
	_, err = Get[float32](all[1], "x", 8)
	require.ErrorContains(t, err, `has shape [4 2]: want [8]`)
	x, err := Get[float32](all[1], "x", 4, 2)
	require.NoError(t, err)
	require.Equal(t, 8, x.Len())

	path := filepath.Join(t.TempDir(), "out.safetensors")
	again, err := c.Load(t.Context(), g, plan(Own(1)))
	require.NoError(t, err)
	require.ErrorContains(t, Save(t.Context(), g, path, []*Weights{all[0], again[1]}, nil), "ranks 0 and 1 are of different loads")
	require.NoError(t, closeAll(again))
	for says, try := range map[string]func() error{
		"ends in .safetensors":         func() error { return Save(t.Context(), g, "out.bin", all, nil) },
		"1 weights for 2 local ranks":  func() error { return Save(t.Context(), g, path, all[:1], nil) },
		"given for rank 0 of 2":        func() error { return Save(t.Context(), g, path, []*Weights{all[1], all[0]}, nil) },
		"no weights of rank 1":         func() error { return Save(t.Context(), g, path, []*Weights{all[0], nil}, nil) },
		"files of -1 bytes":            func() error { return Save(t.Context(), g, path, all, &SaveConfig{MaxFileBytes: -1}) },
		"no group given":               func() error { return Save(t.Context(), nil, path, all, nil) },
		"rank 1 of 2 are given for ra": func() error { return SaveOn(t.Context(), g.Stream(1), path, all[1], nil) },
	} {
		require.ErrorContains(t, try(), says)
	}
	require.NoError(t, all[1].Close())
	require.NoError(t, all[1].Close(), "twice")
	require.ErrorIs(t, Save(t.Context(), g, path, all, nil), device.ErrClosed)
	parts, err := c.Load(t.Context(), g, plan(Slice(0, func(rank, _, size int) Range { return Range{0, min(size, 1+rank)} })))
	require.ErrorContains(t, err, "scalar", "a scalar has no dimension")
	require.Empty(t, parts)
	_, err = os.Stat(path)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestSaveFaults: a disk that is full, or a device that fails, leaves the old file.
func TestSaveFaults(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		folder, _ := bigCheckpoint(t)
		g := localGroup(t, devs)
		all, err := openCheckpoint(t, folder).Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement { return Shard(1) }})
		require.NoError(t, err)
		defer func() {
			for _, w := range all {
				require.NoError(t, w.Close())
			}
		}()
		dir := t.TempDir()
		path := filepath.Join(dir, "model.safetensors")
		require.NoError(t, os.WriteFile(path, []byte("the old one"), 0o600))
		untouched := func() {
			t.Helper()
			old, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, "the old one", string(old))
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Len(t, left, 1, "nothing else is left")
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		cause := errors.New("somebody wants to leave")
		requireFreed(t, g, func() {
			err = Save(ctx, g, path, all, &SaveConfig{RoundBytes: 4096, Progress: func(done, _ int64) { cancel(cause) }})
			require.ErrorIs(t, err, cause)
		})
		untouched()
		require.NoError(t, Save(t.Context(), g, path, all, nil))
		require.Len(t, readBack(t, path), 3)
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "the permissions of the old one")
	})
}

// TestSaveWriteFaults lets the system refuse what is written to the middle of a file,
// or to bring it to the disk: the error names file, tensor and byte, and the old file
// stays.
func TestSaveWriteFaults(t *testing.T) {
	full := func(f *gds.File) {
		pwrite := files.Of(f).System().Pwrite
		files.Of(f).System().Pwrite = func(fd int, p []byte, off int64) (int, error) {
			if off+int64(len(p)) > 3<<19 && off < 16<<20/10 {
				return 0, syscall.ENOSPC
			}
			return pwrite(fd, p, off)
		}
	}
	for says, tc := range map[string]struct {
		break_ func(f *gds.File)
		is     error
	}{
		`model.safetensors: tensor "2.middle" at byte \d+: .*make room`: {full, syscall.ENOSPC},
		`sync .*model.safetensors: `:                                    {func(f *gds.File) { files.Of(f).System().Fsync = func(int) error { return syscall.EIO } }, syscall.EIO},
	} {
		for _, ranks := range []int{1, 2} {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				folder, _ := bigCheckpoint(t)
				g := localGroup(t, devs)
				all, err := openCheckpoint(t, folder).Load(t.Context(), g, &LoadConfig{Plan: func(Info) Placement { return Shard(1) }})
				require.NoError(t, err)
				path := filepath.Join(t.TempDir(), "model.safetensors")
				require.NoError(t, os.WriteFile(path, []byte("the old one"), 0o600))
				requireFreed(t, g, func() {
					w, err := peersOf(g)
					require.NoError(t, err)
					s := newSaving(w, path, &SaveConfig{RoundBytes: 100_000, File: &gds.FileConfig{Engine: gds.Cached}})
					require.NoError(t, s.begin(all))
					tc.break_(s.files[0])
					err = s.steps(t.Context(), nil)
					require.NoError(t, s.release())
					require.Regexp(t, says, err)
					require.ErrorIs(t, err, tc.is)
				})
				old, err := os.ReadFile(path)
				require.NoError(t, err)
				require.Equal(t, "the old one", string(old))
				left, err := os.ReadDir(filepath.Dir(path))
				require.NoError(t, err)
				require.Len(t, left, 1, "nothing else is left")
				require.NoError(t, closeAll(all))
			})
		}
	}
}

// TestTensorErrorNamesOnce: the tensor that has the byte, or the next one, and the file
// once.
func TestTensorErrorNamesOnce(t *testing.T) {
	h := &safetensors.Header{Tensors: []safetensors.Tensor{
		{Name: "empty", Begin: 8, End: 8}, {Name: "a", Begin: 8, End: 10}, {Name: "b", Begin: 10, End: 11}}}
	for off, name := range map[int64]string{0: "empty", 8: "a", 9: "a", 10: "b", 11: "(after the last)"} {
		require.Equal(t, name, tensorAt(h, off), "byte %d", off)
	}
	cause := &gds.Error{Op: "read", Path: "file", Offset: 9, Wanted: 2, Got: 1, Err: syscall.EIO}
	err := &TensorError{Op: "load", Path: "file", Tensor: "a", Offset: 9, Err: cause}
	require.Equal(t, 1, strings.Count(err.Error(), "file at byte 9")+strings.Count(err.Error(), "file: tensor"), err.Error())
	require.ErrorIs(t, err, syscall.EIO)
}
