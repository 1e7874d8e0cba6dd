package checkpoint

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/memory"
)

// withBlocks lets digests be of fewer bytes, so that small tensors have several.
func withBlocks(t *testing.T, block int64) {
	old := blockBytes
	blockBytes = block
	t.Cleanup(func() { blockBytes = old })
}

// TestDamagedBlockIsNamed changes one byte of a file: the error has the file, the tensor and the
// block. Blocks and parts have ends at different bytes.
func TestDamagedBlockIsNamed(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	withBlocks(t, 64)
	onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
		g, folder := localGroup(t, devs), t.TempDir()
		model := []stateTensor{{"a", []int{70, 3}, make([]int32, 210)}, {"b", []int{16}, make([]int32, 16)}, {"c", []int{0}, nil}, {"d", nil, []int32{9}}}
		parts, _ := layOutParts(t, r, g, model, true)
		v, err := NewSaver(t.Context(), g, folder, parts, nil)
		require.NoError(t, err)
		require.NoError(t, v.Save(t.Context(), 1, groupStreams(g)))
		require.NoError(t, v.Close())
		s, err := OpenSaved(filepath.Join(folder, stepName(1)))
		require.NoError(t, err)
		require.NoError(t, s.Verify(t.Context()))
		blocks := s.blocks()
		require.NoError(t, s.Close())
		require.Greater(t, len(blocks), 14)
		for _, b := range blocks {
			if b.begin == b.end {
				continue
			}
			path := filepath.Join(folder, stepName(1), s.m.Files[b.file].Name)
			whole, err := os.ReadFile(path)
			require.NoError(t, err)
			at := b.begin + r.Int64N(b.end-b.begin)
			bit := byte(1 << r.IntN(8))
			whole[at] ^= bit
			require.NoError(t, os.WriteFile(path, whole, 0o644))
			s, err := OpenSaved(filepath.Dir(path))
			require.NoError(t, err)
			e, ok := errors.AsType[*TensorError](s.Verify(t.Context()))
			require.True(t, ok)
			require.Equal(t, []any{path, b.key, b.begin}, []any{e.Path, e.Tensor, e.Offset}, "byte %d", at)
			require.NoError(t, s.Close())
			whole[at] ^= bit
			require.NoError(t, os.WriteFile(path, whole, 0o644))
		}
	})
}

// TestFailedSavesLeakNothing: saves that fail at any call leave no open files, goroutines or memory.
func TestFailedSavesLeakNothing(t *testing.T) {
	onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		parts := killedParts(t, g, true)
		fails := func(at int, short bool) bool {
			folder := t.TempDir()
			fs := &failingFiles{systemFiles: systemFiles{folder}, at: at + 2, short: short} // NewSaver has made and read the folder
			v, err := newSaver(t.Context(), g, folder, parts, nil, fs)
			require.NoError(t, err)
			require.NoError(t, v.Save(t.Context(), 1, groupStreams(g)))
			err = v.Close()
			var failed *TensorError
			if errors.As(err, &failed) {
				require.NotEmpty(t, failed.Tensor)
				require.NotEmpty(t, failed.Path)
			}
			return err != nil
		}
		fails(1, false)
		files, routines, active := openFiles(t), runtime.NumGoroutine(), memory.ReadHostStats(devs[0]).ActiveRequests.Current
		some := 0
		for at := range 60 {
			for _, short := range []bool{false, true} {
				if fails(at, short) {
					some++
				}
			}
		}
		require.Greater(t, some, 20)
		require.LessOrEqual(t, openFiles(t), files)
		require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { // streams may use closed memory for a while
			require.NoError(t, memory.EmptyHostCache(devs[0]))
			return memory.ReadHostStats(devs[0]).ActiveRequests.Current <= active
		}), "pinned memory")
		require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { return runtime.NumGoroutine() <= routines }), "goroutines")
	})
}

// openFiles returns the regular files that the process has open.
func openFiles(t *testing.T) (n int) {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if info, err := os.Stat(fmt.Sprint("/proc/self/fd/", e.Name())); err == nil && info.Mode().IsRegular() {
			n++
		}
	}
	return n
}

// TestLateRankLearnsOfAFailedSave: a process that writes its file after the process of rank 0 has given
// up creates the folder again. It learns the reason, and does not wait until Timeout.
func TestLateRankLearnsOfAFailedSave(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		folder := t.TempDir()
		process := func(root bool) *Saver {
			return &Saver{folder: folder, cfg: SaverConfig{Timeout: time.Minute}, fs: systemFiles{folder}, group: localGroup(t, devs), ranks: 2, root: root, locals: make([]*snapshotter, 1)}
		}
		first, late := process(true), process(false)
		job := &saveJob{step: 1, id: "id", temp: filepath.Join(folder, tempPrefix+stepName(1)+"-id")}
		require.NoError(t, first.giveUp(job, errors.New("the disk is full")))
		require.NoError(t, late.fs.MkdirAll(job.temp))
		require.NoError(t, writeReport(late.fs, job.temp, 1, &rankReport{}))
		require.ErrorContains(t, late.awaitRoot(job), "the disk is full")
	})
}

// fullFiles are a disk that is full from this byte of a rank's file on.
type fullFiles struct {
	systemFiles
	from int64
}

func (f fullFiles) Create(p string) (savingFile, error) {
	out, err := f.systemFiles.Create(p)
	return fullFile{out, f.from}, err
}

type fullFile struct {
	savingFile
	from int64
}

func (f fullFile) WriteAt(b []byte, off int64) (int, error) {
	room := max(f.from-off, 0)
	if room >= int64(len(b)) {
		return f.savingFile.WriteAt(b, off)
	}
	n, err := f.savingFile.WriteAt(b[:room], off)
	return n, errors.Join(err, errInjected)
}

// TestFullDiskNamesTheTensor: several goroutines write a file, and the error has the tensor and the
// byte that did not fit.
func TestFullDiskNamesTheTensor(t *testing.T) {
	withBlocks(t, 64)
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		model := []stateTensor{{"a", []int{100}, make([]int32, 100)}, {"b", []int{50}, make([]int32, 50)}, {"c", []int{4}, make([]int32, 4)}}
		var parts []Part
		for _, x := range model {
			parts = append(parts, Part{Name: x.name, Data: makeTensor(t, g.Stream(0), x.want, x.shape)})
		}
		plain, err := NewSaver(t.Context(), g, t.TempDir(), [][]Part{parts}, nil)
		require.NoError(t, err)
		defer plain.Close()
		last := plain.locals[0].pieces[len(parts)-1]
		for _, piece := range plain.locals[0].pieces {
			full := piece.off + 7
			if piece.off == last.off { // the only one that does not fit
				full = last.off + int64(last.mem.Len()) - 1
			}
			folder := t.TempDir()
			v, err := newSaver(t.Context(), g, folder, [][]Part{parts}, &SaverConfig{HostBytes: 200}, fullFiles{systemFiles: systemFiles{folder}, from: full})
			require.NoError(t, err)
			require.NoError(t, v.Save(t.Context(), 1, groupStreams(g)))
			e, ok := errors.AsType[*TensorError](v.Close())
			require.True(t, ok)
			require.ErrorIs(t, e, syscall.ENOSPC)
			require.GreaterOrEqual(t, e.Offset, full)
			require.Equal(t, plain.locals[0].tensorAt(e.Offset), e.Tensor)
			if piece.off == last.off {
				require.Equal(t, []any{piece.name, full}, []any{e.Tensor, e.Offset})
			}
		}
	})
}
