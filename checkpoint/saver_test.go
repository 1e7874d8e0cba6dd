package checkpoint

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var saverModels = flag.Int("saver.models", 6, "`number` of random models that TestSavedStatesReshard saves and loads")

// A stateTensor is a tensor of a random model, with the elements of the whole.
type stateTensor struct {
	name  string
	shape []int
	want  []int32
}

func randomState(r *rand.Rand) []stateTensor {
	var all []stateTensor
	for i := range 1 + r.IntN(24) {
		x := stateTensor{name: fmt.Sprintf("layer.%d", i)}
		for range r.IntN(5) {
			x.shape = append(x.shape, r.IntN(9))
		}
		if r.IntN(4) == 0 {
			x.shape = []int{1 + r.IntN(40), 1 + r.IntN(90)}
		}
		for range product(x.shape) {
			x.want = append(x.want, int32(r.Uint32()))
		}
		all = append(all, x)
	}
	return all
}

// layOutParts gives each rank of g parts of the tensors, in a random layout. fill says whether
// the parts have their values, or others.
func layOutParts(t testing.TB, r *rand.Rand, g *comm.Group, model []stateTensor, fill bool) (parts [][]Part, wants [][][]int32) {
	parts, wants = make([][]Part, g.Locals()), make([][][]int32, g.Locals())
	for _, x := range model {
		how, dim := r.IntN(3), 0
		if len(x.shape) == 0 && how == 1 {
			how = 2
		}
		if how == 1 {
			dim = r.IntN(len(x.shape))
		}
		width := product(x.shape)
		if how == 1 {
			width = x.shape[dim]
		}
		cuts := []int{0, width}
		for range g.Size() - 1 {
			cuts = append(cuts, r.IntN(width+1))
		}
		slices.Sort(cuts)
		for i := range parts {
			p, want := Part{Name: x.name}, x.want
			shape := x.shape
			rank := g.Communicator(i).Rank()
			from, to := cuts[rank], cuts[rank+1]
			switch how {
			case 1:
				p.Shape, p.Dim, p.Start = x.shape, dim, from
				shape = slices.Clone(shape)
				shape[dim] = to - from
				want = nil
				for k, v := range x.want {
					if at := k / product(x.shape[dim+1:]) % width; at >= from && at < to {
						want = append(want, v)
					}
				}
			case 2:
				p.Shape, p.Flat, p.Start = x.shape, true, from
				if x.shape == nil {
					p.Shape = []int{}
				}
				shape, want = []int{to - from}, want[from:to]
			}
			values := want
			if !fill {
				values = make([]int32, len(want))
			}
			p.Data = makeTensor(t, g.Stream(i), values, shape)
			parts[i], wants[i] = append(parts[i], p), append(wants[i], want)
		}
	}
	return parts, wants
}

func makeTensor(t testing.TB, s *stream.Stream, values []int32, shape []int) tensor.Tensor {
	x, err := tensor.Make(s, memory.Int32, shape...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	if len(values) > 0 {
		mem, err := tensor.Slice[int32](x)
		require.NoError(t, err)
		require.NoError(t, mem.CopyFrom(s, values))
	}
	return x
}

func checkParts(t testing.TB, g *comm.Group, parts [][]Part, wants [][][]int32) {
	t.Helper()
	for i, list := range parts {
		for j, p := range list {
			b := bytesOfTensor(t, p.Data, g, i)
			var got []int32
			for k := 0; k < len(b); k += 4 {
				got = append(got, int32(binary.LittleEndian.Uint32(b[k:])))
			}
			require.Len(t, got, len(wants[i][j]), "rank %d, %s", i, p.Name)
			for k := range got {
				require.Equal(t, wants[i][j][k], got[k], "rank %d, %s, element %d", i, p.Name, k)
			}
		}
	}
}

func groupStreams(g *comm.Group) (all []*stream.Stream) {
	for i := range g.Locals() {
		all = append(all, g.Stream(i))
	}
	return all
}

// TestSavedStatesReshard saves random models by some ranks, and loads them by others.
func TestSavedStatesReshard(t *testing.T) {
	for k := range *saverModels {
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 1))
		n, m := 1+r.IntN(16), 1+r.IntN(16)
		if k > 0 {
			n, m = 1+r.IntN(4), 1+r.IntN(4) // most GPU hosts have as many
		}
		t.Run(fmt.Sprintf("seed=%d,%d to %d", seed, n, m), func(t *testing.T) {
			testgpu.Each(t, max(n, m), func(t *testing.T, devs []*device.Device) {
				r := rand.New(rand.NewPCG(seed, 2))
				model, folder := randomState(r), filepath.Join(t.TempDir(), "run")
				from := localGroup(t, devs[:n])
				parts, _ := layOutParts(t, r, from, model, true)
				v, err := NewSaver(t.Context(), from, folder, parts, &SaverConfig{HostBytes: int64(r.IntN(2) * 5000)})
				require.NoError(t, err)
				values := make([]any, n)
				for i := range values {
					values[i] = map[string]int{"rank": i}
				}
				require.NoError(t, v.Save(t.Context(), 7, groupStreams(from), values...))
				for i := range parts { // the snapshot is of the time before
					for _, p := range parts[i] {
						if p.Data.Len() > 0 {
							mem, err := bytesOf(p.Data)
							require.NoError(t, err)
							require.NoError(t, mem.Zero(from.Stream(i)))
						}
					}
				}
				require.NoError(t, v.Close())
				to := localGroup(t, devs[len(devs)-m:])
				saved, skipped, err := Latest(t.Context(), to, folder)
				require.NoError(t, err)
				require.Empty(t, skipped)
				require.NotNil(t, saved)
				defer saved.Close()
				require.EqualValues(t, 7, saved.Step())
				var value map[string]int
				require.NoError(t, saved.Value(n-1, &value))
				require.Equal(t, n-1, value["rank"])
				parts, wants := layOutParts(t, r, to, model, false)
				res, err := saved.Restore(t.Context(), to, parts, &RestoreConfig{RoundBytes: 1 << (6 + r.IntN(12))})
				require.NoError(t, err)
				require.Empty(t, res.Missing)
				require.Empty(t, res.Unused)
				checkParts(t, to, parts, wants)
			})
		})
	}
}

// failingFiles are a file system whose call number at fails. If dead is set, all later calls
// fail too, as after the end of the process. short lets a failing write take half of its bytes.
// kill ends the process with SIGKILL instead.
type failingFiles struct {
	systemFiles
	mu    sync.Mutex
	calls int
	at    int
	dead  bool
	short bool
	kill  bool
}

var errInjected = fmt.Errorf("injected: %w", syscall.ENOSPC)

func (f *failingFiles) fails() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	if f.kill && f.calls == f.at {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the signal arrives
	}
	return f.calls == f.at || f.dead && f.calls > f.at && f.at > 0
}

func (f *failingFiles) do(fn func() error) error {
	if f.fails() {
		return errInjected
	}
	return fn()
}

func (f *failingFiles) MkdirAll(p string) error {
	return f.do(func() error { return f.systemFiles.MkdirAll(p) })
}
func (f *failingFiles) Rename(a, b string) error {
	return f.do(func() error { return f.systemFiles.Rename(a, b) })
}
func (f *failingFiles) Exchange(a, b string) error {
	return f.do(func() error { return f.systemFiles.Exchange(a, b) })
}
func (f *failingFiles) Remove(p string) error {
	return f.do(func() error { return f.systemFiles.Remove(p) })
}
func (f *failingFiles) RemoveAll(p string) error {
	return f.do(func() error { return f.systemFiles.RemoveAll(p) })
}
func (f *failingFiles) SyncFolder(p string) error {
	return f.do(func() error { return f.systemFiles.SyncFolder(p) })
}

func (f *failingFiles) ReadFile(p string) (b []byte, err error) {
	return b, f.do(func() error { b, err = f.systemFiles.ReadFile(p); return err })
}

func (f *failingFiles) Create(p string) (out savingFile, err error) {
	err = f.do(func() error { out, err = f.systemFiles.Create(p); return err })
	return &failingFile{out, f}, err
}

type failingFile struct {
	savingFile
	fs *failingFiles
}

func (f *failingFile) WriteAt(b []byte, off int64) (int, error) {
	if !f.fs.fails() {
		return f.savingFile.WriteAt(b, off)
	}
	if !f.fs.short {
		return 0, errInjected
	}
	return f.savingFile.WriteAt(b[:len(b)/2], off)
}

func (f *failingFile) Reserve(size int64) error {
	return f.fs.do(func() error { return f.savingFile.Reserve(size) })
}

func (f *failingFile) Sync() error { return f.fs.do(f.savingFile.Sync) }

func (f *failingFile) Close() error {
	err := f.savingFile.Close()
	if f.fs.fails() {
		return errInjected
	}
	return err
}

// recordedFiles record the calls that bring a save to the disk.
type recordedFiles struct {
	systemFiles
	mu    sync.Mutex
	calls []string
}

func (f *recordedFiles) record(call, path string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := filepath.Base(path)
	if strings.HasPrefix(name, tempPrefix) {
		name = "temp"
	}
	f.calls = append(f.calls, call+" "+name)
}

func (f *recordedFiles) Rename(a, b string) error {
	f.record("rename", b)
	return f.systemFiles.Rename(a, b)
}

func (f *recordedFiles) Exchange(a, b string) error {
	f.record("exchange", b)
	return f.systemFiles.Exchange(a, b)
}

func (f *recordedFiles) SyncFolder(p string) error {
	f.record("sync", p)
	return f.systemFiles.SyncFolder(p)
}

func (f *recordedFiles) Create(p string) (savingFile, error) {
	out, err := f.systemFiles.Create(p)
	return &recordedFile{out, f, p}, err
}

type recordedFile struct {
	savingFile
	fs   *recordedFiles
	path string
}

func (f *recordedFile) WriteAt(b []byte, off int64) (int, error) {
	f.fs.record("write", f.path)
	return f.savingFile.WriteAt(b, off)
}

func (f *recordedFile) Sync() error {
	f.fs.record("sync", f.path)
	return f.savingFile.Sync()
}

// requireOnDisk requires that all files are on the disk before the call that shows their folder, and
// the names in the parent after it.
func (f *recordedFiles) requireOnDisk(t *testing.T, show, parent string) {
	t.Helper()
	shown := slices.Index(f.calls, show)
	require.Positive(t, shown, "%q", f.calls)
	require.Equal(t, "sync temp", f.calls[shown-1])
	require.Equal(t, "sync "+parent, f.calls[shown+1])
	written := map[string]bool{}
	for _, call := range f.calls[:shown] {
		switch what, name, _ := strings.Cut(call, " "); what {
		case "write":
			written[name] = true
		case "sync":
			written[name] = false
		}
	}
	require.Contains(t, written, manifestName)
	for name, open := range written {
		require.False(t, open, "%s is not on the disk: %q", name, f.calls)
	}
}

// TestSaveIsOnTheDisk: a loss of power leaves a whole checkpoint, because each file is on the disk
// after its last write and before the folder gets its name, and the names are on the disk, too.
func TestSaveIsOnTheDisk(t *testing.T) {
	onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		model := []stateTensor{{"a", []int{3, 5}, make([]int32, 15)}, {"b", nil, []int32{9}}}
		parts, _ := layOutParts(t, rand.New(rand.NewPCG(1, 2)), g, model, true)
		folder := t.TempDir()
		fs := &recordedFiles{systemFiles: systemFiles{folder}}
		v, err := newSaver(t.Context(), g, folder, parts, nil, fs)
		require.NoError(t, err)
		defer v.Close()
		for _, show := range []string{"rename", "exchange"} { // the second one replaces the first
			fs.calls = nil
			require.NoError(t, v.Save(t.Context(), 7, groupStreams(g)))
			require.NoError(t, v.Wait(t.Context()))
			fs.requireOnDisk(t, show+" "+stepName(7), filepath.Base(folder))
		}
	})
}

// TestSnapshotsThatFail: a snapshot that fails leaves its memory for the next one.
func TestSnapshotsThatFail(t *testing.T) {
	withBlocks(t, 16)
	failed := 0
	for _, call := range []string{"cuMemcpyDtoHAsync", "cuEventRecord"} {
		for n := range 8 {
			fault := fmt.Sprintf("%s#%d=CUDA_ERROR_INVALID_VALUE", call, n+1)
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault})
			g := localGroup(t, devs)
			parts, _ := layOutParts(t, rand.New(rand.NewPCG(1, 2)), g, []stateTensor{{"a", []int{3, 5}, make([]int32, 15)}}, true)
			v, err := NewSaver(t.Context(), g, t.TempDir(), parts, &SaverConfig{HostBytes: 32})
			require.NoError(t, err, fault)
			for step := range int64(4) { // the fault is in one of the first
				if v.Save(t.Context(), step, groupStreams(g)) != nil {
					require.Less(t, step, int64(3), fault)
					require.Error(t, v.Wait(t.Context()), fault)
					failed++
				}
				require.NoError(t, v.Wait(t.Context()), fault)
			}
			require.Len(t, v.locals[0].slots, 2, fault)
			for _, x := range v.locals[0].slots {
				require.Len(t, x.free, 1, fault)
			}
			require.NoError(t, v.Close())
		}
	}
	require.Greater(t, failed, 4)
}

// TestSaveFailsAtEachCall lets each call of a save fail, or the process end there: the
// checkpoint before it stays, and the new one is whole or absent. Then the next save works.
func TestSaveFailsAtEachCall(t *testing.T) {
	for name, kind := range map[string]*failingFiles{"error": {}, "end": {dead: true}, "short write": {short: true}} {
		t.Run(name, func(t *testing.T) {
			onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
				g := localGroup(t, devs)
				r := rand.New(rand.NewPCG(1, 2))
				model := []stateTensor{{"a", []int{3, 5}, make([]int32, 15)}, {"b", nil, []int32{9}}}
				parts, _ := layOutParts(t, r, g, model, true)
				failed := 0
				for at := 1; ; at++ {
					folder := t.TempDir()
					fs := &failingFiles{systemFiles: systemFiles{folder}, dead: kind.dead, short: kind.short}
					v, err := newSaver(t.Context(), g, folder, parts, &SaverConfig{KeepLast: 2}, fs)
					require.NoError(t, err)
					for step := range int64(3) { // the next one removes step 0
						require.NoError(t, v.Save(t.Context(), step, groupStreams(g)))
						require.NoError(t, v.Wait(t.Context()))
					}
					fs.mu.Lock()
					fs.calls, fs.at = 0, at
					fs.mu.Unlock()
					require.NoError(t, v.Save(t.Context(), 3, groupStreams(g)))
					err = v.Wait(t.Context())
					ends := fs.calls < at
					if err != nil {
						failed++
						require.ErrorContains(t, err, "save step 3")
						if !kind.short {
							require.ErrorIs(t, err, syscall.ENOSPC)
						}
					}
					require.NoError(t, v.Close())
					saved, skipped, latestErr := Latest(t.Context(), g, folder)
					require.NoError(t, latestErr)
					require.Empty(t, skipped, "call %d", at)
					require.Contains(t, []int64{2, 3}, saved.Step(), "call %d", at)
					if err == nil {
						require.EqualValues(t, 3, saved.Step(), "call %d", at)
					}
					require.NoError(t, saved.Close())
					again, err := NewSaver(t.Context(), g, folder, parts, nil)
					require.NoError(t, err)
					require.NoError(t, again.Save(t.Context(), 3, groupStreams(g)))
					require.NoError(t, again.Close())
					hidden, err := filepath.Glob(filepath.Join(folder, ".saving-*"))
					require.NoError(t, err)
					require.Empty(t, hidden)
					if ends {
						break
					}
				}
				require.Greater(t, failed, 5)
			})
		})
	}
}

// TestDamagedCheckpointsAreSkipped changes one byte at many places of each file.
func TestDamagedCheckpointsAreSkipped(t *testing.T) {
	onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
		g, folder := localGroup(t, devs), t.TempDir()
		parts := make([][]Part, 2)
		for i := range parts {
			parts[i] = []Part{{Name: "w", Data: makeTensor(t, g.Stream(i), make([]int32, 12), []int{3, 4})}, {Name: "v", Data: makeTensor(t, g.Stream(i), make([]int32, 9), []int{9})}}
		}
		v, err := NewSaver(t.Context(), g, folder, parts, nil)
		require.NoError(t, err)
		for step := range int64(2) {
			require.NoError(t, v.Save(t.Context(), step, groupStreams(g)))
		}
		require.NoError(t, v.Close())
		files, err := filepath.Glob(filepath.Join(folder, stepName(1), "*"))
		require.NoError(t, err)
		require.Len(t, files, 4) // of two ranks, index, manifest
		for _, path := range files {
			whole, err := os.ReadFile(path)
			require.NoError(t, err)
			for at := 0; at < len(whole); at += 37 {
				b := slices.Clone(whole)
				b[at] ^= 1
				require.NoError(t, os.WriteFile(path, b, 0o644))
				saved, skipped, err := Latest(t.Context(), g, folder)
				require.NoError(t, err)
				require.Len(t, skipped, 1, "%s at %d", path, at)
				require.Contains(t, skipped[0].Reason, filepath.Base(path))
				require.EqualValues(t, 0, saved.Step())
				require.NoError(t, saved.Close())
			}
			require.NoError(t, os.WriteFile(path, whole, 0o644))
		}
		b, err := os.ReadFile(files[2])
		require.NoError(t, err)
		b[len(b)-1] ^= 1
		require.NoError(t, os.WriteFile(files[2], b, 0o644))
		s, err := OpenSaved(filepath.Join(folder, stepName(1)))
		require.NoError(t, err)
		defer s.Close()
		e, ok := errors.AsType[*TensorError](s.Verify(t.Context()))
		require.True(t, ok)
		require.Equal(t, files[2], e.Path)
		require.Contains(t, []string{"w", "v"}, e.Tensor)
		require.Positive(t, e.Offset)
	})
}

// TestRestoreNamesWhatIsMissing restores with other names than the checkpoint has.
func TestRestoreNamesWhatIsMissing(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		g, folder := localGroup(t, devs), t.TempDir()
		old := makeTensor(t, g.Stream(0), []int32{1, 2, 3}, []int{3})
		v, err := NewSaver(t.Context(), g, folder, [][]Part{{{Name: "old", Data: old}, {Name: "rest", Data: old}}}, nil)
		require.NoError(t, err)
		require.NoError(t, v.Save(t.Context(), 0, groupStreams(g)))
		require.NoError(t, v.Close())
		s, _, err := Latest(t.Context(), g, folder)
		require.NoError(t, err)
		defer s.Close()
		a, b := makeTensor(t, g.Stream(0), []int32{0, 0, 0}, []int{3}), makeTensor(t, g.Stream(0), []int32{7, 7, 7}, []int{3})
		parts := [][]Part{{{Name: "new", Data: a}, {Name: "absent", Data: b}}}
		cfg := &RestoreConfig{Rename: func(name string) string {
			if name == "new" {
				return "old"
			}
			return name
		}}
		_, err = s.Restore(t.Context(), g, parts, cfg)
		require.ErrorContains(t, err, `"absent"`)
		cfg.Partial = true
		res, err := s.Restore(t.Context(), g, parts, cfg)
		require.NoError(t, err)
		require.Equal(t, &Restored{Missing: []string{"absent"}, Unused: []string{"rest"}}, res)
		checkParts(t, g, parts, [][][]int32{{{1, 2, 3}, {7, 7, 7}}})
	})
}

// onVirtual runs fn on virtual devices only, because it tests files.
func onVirtual(t *testing.T, n int, fn func(t *testing.T, devs []*device.Device)) {
	fn(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}))
}

// saveInJob saves by several processes and restores in another layout. Then one process
// cannot write, and all processes get an error and use the checkpoint before it.
func saveInJob(t *testing.T, ctx context.Context, g *comm.Group, seed uint64) {
	r, folder := rand.New(rand.NewPCG(seed, 5)), filepath.Join(os.Getenv(folderVar), "run")
	model := randomState(r)
	parts, _ := layOutParts(t, r, g, model, true)
	fs := &failingFiles{systemFiles: systemFiles{folder}}
	v, err := newSaver(ctx, g, folder, parts, nil, fs)
	require.NoError(t, err)
	for step := range int64(2) {
		require.NoError(t, v.Save(ctx, step, groupStreams(g), g.Rank()))
	}
	require.NoError(t, v.Save(ctx, 1, groupStreams(g), g.Rank()), "replaces step 1")
	require.NoError(t, v.Wait(ctx))
	writer := v.plan.Files[len(v.plan.Files)-1].rank // a rank without parts of its own writes no file
	fs.mu.Lock()
	fs.calls = 0
	if g.Rank() == writer {
		fs.at = 1
	}
	fs.mu.Unlock()
	require.NoError(t, v.Save(ctx, 2, groupStreams(g), g.Rank()))
	err = v.Close()
	require.ErrorContains(t, err, "save step 2")
	if g.Rank() == 0 {
		require.ErrorContains(t, err, "injected")
		if writer > 0 {
			require.ErrorContains(t, err, fmt.Sprintf("rank %d", writer))
		}
	}
	saved, skipped, err := Latest(ctx, g, folder)
	require.NoError(t, err)
	require.Empty(t, skipped)
	defer saved.Close()
	require.EqualValues(t, 1, saved.Step())
	for rank := range g.Size() {
		var value int
		require.NoError(t, saved.Value(rank, &value))
		require.Equal(t, rank, value)
	}
	parts, wants := layOutParts(t, r, g, model, false)
	_, err = saved.Restore(ctx, g, parts, &RestoreConfig{RoundBytes: 600})
	require.NoError(t, err)
	checkParts(t, g, parts, wants)
}

// TestProcessesSaveStates runs saveInJob in several processes.
func TestProcessesSaveStates(t *testing.T) {
	backends(t, 3, func(t *testing.T, backend string, ranks int) {
		code, out := runJob(t, backend, "state", ranks)
		require.Zero(t, code, out)
	})
}

// An epochOfJob is the membership of one process in an epoch of a job.
type epochOfJob struct {
	ctx         context.Context
	run         string
	term, epoch uint64
	values      *sync.Map
}

func (e epochOfJob) Rank() int                               { return 0 }
func (e epochOfJob) Size() int                               { return 1 }
func (e epochOfJob) Job() string                             { return "training" }
func (e epochOfJob) Context() context.Context                { return e.ctx }
func (e epochOfJob) Fence() (run string, term, epoch uint64) { return e.run, e.term, e.epoch }

func (e epochOfJob) Set(_ context.Context, key string, value []byte) error {
	e.values.Store(key, value)
	return nil
}

func (e epochOfJob) Get(ctx context.Context, key string) ([]byte, error) {
	if v, ok := e.values.Load(key); ok {
		return v.([]byte), nil
	}
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

// groupOf returns the group of an epoch of a job.
func groupOf(t *testing.T, dev *device.Device, run string, term, epoch uint64) *comm.Group {
	t.Helper()
	g, err := comm.Join(t.Context(), epochOfJob{t.Context(), run, term, epoch, new(sync.Map)}, dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// lateFiles call before, once, when a save is about to get its name.
type lateFiles struct {
	systemFiles
	before func()
}

func (f *lateFiles) reveals() {
	if before := f.before; before != nil {
		f.before = nil
		before()
	}
}

func (f *lateFiles) Rename(a, b string) error   { f.reveals(); return f.systemFiles.Rename(a, b) }
func (f *lateFiles) Exchange(a, b string) error { f.reveals(); return f.systemFiles.Exchange(a, b) }

// A process of an earlier epoch completes no save and removes no checkpoint when a later epoch has begun to save, also if that happens
// at the last moment. Another run of the job takes over, too.
func TestFence(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		folder := t.TempDir()
		saver := func(run string, term, epoch uint64, fs fileSystem) (*Saver, *comm.Group, error) {
			g := groupOf(t, devs[0], run, term, epoch)
			w := makeTensor(t, g.Stream(0), []int32{int32(epoch), 2, 3}, []int{3})
			v, err := newSaver(t.Context(), g, folder, [][]Part{{{Name: "w", Data: w}}}, &SaverConfig{KeepLast: 2}, fs)
			return v, g, err
		}
		save := func(v *Saver, g *comm.Group, step int64) error {
			require.NoError(t, v.Save(t.Context(), step, groupStreams(g)))
			return v.Wait(t.Context())
		}
		late := &lateFiles{systemFiles: systemFiles{folder}}
		old, g1, err := saver("one", 1, 1, late)
		require.NoError(t, err)
		defer old.Close()
		for step := range int64(2) {
			require.NoError(t, save(old, g1, step))
		}
		first, err := readManifest(filepath.Join(folder, stepName(1)))
		require.NoError(t, err)
		require.Equal(t, &fence{Job: "training", Run: "one", Term: 1, Epoch: 1}, first.Fence)

		var next *Saver
		var g2 *comm.Group
		late.before = func() { next, g2, err = saver("one", 2, 2, systemFiles{folder}) }
		failed := save(old, g1, 1) // it would replace step 1
		require.NoError(t, err)
		defer next.Close()
		require.ErrorContains(t, failed, `epoch 1 of job "training" does not save to this folder any more`)
		require.ErrorContains(t, save(old, g1, 7), "does not save to this folder any more")
		require.ErrorContains(t, old.removeStep(0), "no such file")
		kept, err := readManifest(filepath.Join(folder, stepName(1)))
		require.NoError(t, err)
		require.Equal(t, first.ID, kept.ID)
		require.NoError(t, save(next, g2, 1))
		kept, err = readManifest(filepath.Join(folder, stepName(1)))
		require.NoError(t, err)
		require.EqualValues(t, 2, kept.Fence.Epoch)

		_, _, err = saver("one", 1, 1, systemFiles{folder})
		require.ErrorContains(t, err, "epoch 2 of the job saves to this folder, and this process is in epoch 1")
		require.NoError(t, save(next, g2, 2))
		other, g3, err := saver("two", 1, 1, systemFiles{folder})
		require.NoError(t, err)
		defer other.Close()
		require.NoError(t, save(other, g3, 3))
		require.ErrorContains(t, save(next, g2, 4), "does not save to this folder any more")
		steps, err := stepsIn(folder)
		require.NoError(t, err)
		require.Equal(t, []int64{2, 3}, steps)
	})
}

// A checkpoint without a fence, of an older library or of one process, is read and replaced as before.
func TestFenceIsOptional(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		folder := t.TempDir()
		saveSteps(t, devs[0], folder, 1)
		m, err := readManifest(filepath.Join(folder, stepName(1)))
		require.NoError(t, err)
		require.Nil(t, m.Fence)
		text, err := os.ReadFile(filepath.Join(folder, stepName(1), manifestName))
		require.NoError(t, err)
		require.NotContains(t, string(text), "fence")
		g := groupOf(t, devs[0], "one", 1, 1)
		w := makeTensor(t, g.Stream(0), []int32{1, 2, 3}, []int{3})
		v, err := NewSaver(t.Context(), g, folder, [][]Part{{{Name: "w", Data: w}}}, nil)
		require.NoError(t, err)
		require.NoError(t, v.Save(t.Context(), 1, groupStreams(g)))
		require.NoError(t, v.Close())
		s, _, err := Latest(t.Context(), localGroup(t, devs), folder)
		require.NoError(t, err)
		require.EqualValues(t, 1, s.Step())
		require.NoError(t, s.Close())
	})
}

// Names of epochs are read back, and other names are not.
func TestFenceNames(t *testing.T) {
	f := &fence{Job: "j", Run: "r", Term: 3, Epoch: 12}
	got, ok := f.parse(f.name())
	require.True(t, ok)
	require.Equal(t, fence{Run: "r", Term: 3, Epoch: 12}, got)
	got, ok = f.parse((&fence{Job: "j", Run: "other", Term: 1, Epoch: 2}).name())
	require.True(t, ok)
	require.Empty(t, got.Run)
	for _, name := range []string{"", fencePrefix, fencePrefix + "x", fencePrefix + "x-1", stepName(1), tempPrefix + stepName(1)} {
		_, ok = f.parse(name)
		require.False(t, ok, name)
	}
	require.True(t, f.earlier(&fence{Run: "r", Term: 3, Epoch: 13}))
	require.True(t, f.earlier(&fence{Run: "r", Term: 4, Epoch: 12}))
	require.False(t, f.earlier(&fence{Run: "r", Term: 4, Epoch: 11}))
	require.False(t, f.earlier(&fence{Run: "s", Term: 4, Epoch: 13}))
}
