package checkpoint

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
)

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
