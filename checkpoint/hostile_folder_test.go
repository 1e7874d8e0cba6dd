package checkpoint

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
)

// foldersToOpen returns folders of all formats, with the same tensor.
func foldersToOpen(t *testing.T, devs []*device.Device) map[string]string {
	root := t.TempDir()
	saveSteps(t, devs[0], root, 1)
	all := map[string]string{"saver": filepath.Join(root, stepName(1)), "distributed": filepath.Join(root, "distributed"), "torch": filepath.Join(root, "torch"), "index": filepath.Join(root, "index")}
	copyFolder(t, torchFixtures+"distributed", all["distributed"])
	require.NoError(t, os.Mkdir(all["torch"], 0o700))
	text, err := os.ReadFile(torchFixtures + "views.pt")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(all["torch"], "pytorch_model.bin"), text, 0o600))
	require.NoError(t, os.Mkdir(all["index"], 0o700))
	c := openCheckpoint(t, all["saver"])
	x, err := safetensors.NewIndex([]safetensors.Shard{{File: filepath.Base(c.Infos()[0].File), Tensors: []safetensors.Tensor{{Name: "w", DType: safetensors.I32, Shape: []int{3}}}}})
	require.NoError(t, err)
	index, err := os.Create(filepath.Join(all["index"], indexName))
	require.NoError(t, err)
	require.NoError(t, errors.Join(x.Write(index), index.Close()))
	text, err = os.ReadFile(c.Infos()[0].File)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(all["index"], filepath.Base(c.Infos()[0].File)), text, 0o600))
	return all
}

// readAll opens a folder, and reads what is only read to verify it.
func readAll(t *testing.T, folder string) error {
	c, err := Open([]string{folder}, nil)
	err = errors.Join(err, c.Close())
	if err != nil || !isSaved(folder) {
		return err
	}
	s, err := OpenSaved(folder)
	require.NoError(t, err)
	return errors.Join(s.Verify(t.Context()), s.Close())
}

// soon fails the test if fn does not return, as it does not while it opens a pipe whose other end nobody opens.
func soon(t *testing.T, what string, fn func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- fn() }()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatalf("%s blocks", what)
		return nil
	}
}

// TestPipesInAFolder puts a pipe in the place of each file that a loader reads.
func TestPipesInAFolder(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		for name, folder := range foldersToOpen(t, devs) {
			entries, err := os.ReadDir(folder)
			require.NoError(t, err)
			opened := 0
			for _, e := range entries {
				path := filepath.Join(folder, e.Name())
				require.NoError(t, os.Rename(path, path+".kept"))
				require.NoError(t, syscall.Mkfifo(path, 0o600))
				err := soon(t, name+": "+e.Name(), func() error { return readAll(t, folder) })
				if err != nil {
					require.ErrorContains(t, err, "not a regular file", "%s: %s", name, e.Name())
					opened++
				}
				require.NoError(t, os.Rename(path+".kept", path))
			}
			require.NotZero(t, opened, name)
			require.NoError(t, openCheckpoint(t, folder).Close())
		}
	})
}

// TestLinksOutOfAFolder replaces each file of a folder by a link to it, in the folder and outside. The formats whose files are links
// in the caches of models are opened anyway.
func TestLinksOutOfAFolder(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		for name, folder := range foldersToOpen(t, devs) {
			outside := t.TempDir()
			entries, err := os.ReadDir(folder)
			require.NoError(t, err)
			follows := name == "torch" || name == "index"
			for _, e := range entries {
				path := filepath.Join(folder, e.Name())
				kept := filepath.Join(outside, e.Name())
				require.NoError(t, os.Rename(path, kept))
				relative, err := filepath.Rel(folder, kept)
				require.NoError(t, err)
				for _, to := range []string{kept, relative} {
					require.NoError(t, os.Symlink(to, path))
					err := readAll(t, folder)
					if follows || err == nil {
						require.NoError(t, err)
						require.True(t, follows || e.Name() == "sha256.json", "%s: %s -> %s", name, e.Name(), to)
					} else {
						require.ErrorContains(t, err, "is a symbolic link that leads out of the folder", "%s: %s", name, e.Name())
						require.ErrorContains(t, err, e.Name())
					}
					require.NoError(t, os.Remove(path))
				}
				require.NoError(t, os.Rename(kept, path+".kept"))
				require.NoError(t, os.Symlink(e.Name()+".kept", path))
				if !follows { // another pattern may match the file, too
					require.NoError(t, readAll(t, folder))
				}
				require.NoError(t, os.Remove(path))
				require.NoError(t, os.Rename(path+".kept", path))
			}
		}
	})
}

// TestSaverInAHostileFolder: who can write to the folder of a saver neither blocks it by a pipe nor has it write, rename or remove
// files elsewhere.
func TestSaverInAHostileFolder(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		folder, outside := t.TempDir(), t.TempDir()
		files := systemFiles{folder}
		job := &saveJob{step: 1, id: "id", temp: filepath.Join(folder, tempPrefix+stepName(1)+"-id")}
		v := &Saver{folder: folder, cfg: SaverConfig{Timeout: 100 * time.Millisecond}, fs: files, group: localGroup(t, devs), ranks: 2, root: true, locals: make([]*snapshotter, 1)}
		require.NoError(t, files.MkdirAll(job.temp))
		for rank := range 2 {
			require.NoError(t, syscall.Mkfifo(filepath.Join(job.temp, reportName(rank)), 0o600))
		}
		err := soon(t, "the message of a rank", func() error {
			_, err := v.awaitReport(job, 1, time.Now().Add(time.Minute))
			return err
		})
		require.ErrorContains(t, err, "not a regular file but a named pipe")
		err = soon(t, "the message of rank 0", func() error { return v.awaitRoot(job) })
		require.ErrorContains(t, err, "it has not completed the checkpoint")
		require.NoError(t, files.RemoveAll(job.temp))

		kept := filepath.Join(outside, "kept")
		require.NoError(t, os.WriteFile(kept, []byte("{}"), 0o600))
		require.NoError(t, os.Symlink(outside, job.temp))
		in := func(name string) string { return filepath.Join(job.temp, name) }
		file := filepath.Join(folder, "file")
		require.NoError(t, os.WriteFile(file, nil, 0o600))
		_, create := files.Create(in("new"))
		_, read := files.ReadFile(in("kept"))
		for what, err := range map[string]error{"create": create, "read": read, "make": files.Mkdir(in("new")), "make all": files.MkdirAll(in("new/x")),
			"rename from": files.Rename(in("kept"), file), "rename to": files.Rename(file, in("new")), "exchange": files.Exchange(in("kept"), file),
			"exchange with": files.Exchange(file, in("kept")), "remove": files.Remove(in("kept")), "remove all": files.RemoveAll(in("kept")), "sync": files.SyncFolder(job.temp)} {
			require.Error(t, err, what)
			require.False(t, errors.Is(err, fs.ErrNotExist), "%s: %v", what, err)
		}
		require.Equal(t, []string{"kept"}, namesIn(t, outside))
		require.NoError(t, files.RemoveAll(job.temp), "the link itself")
		require.Equal(t, []string{"kept"}, namesIn(t, outside))

		// The folder that the user names may be a link.
		link := filepath.Join(outside, "link")
		require.NoError(t, os.Symlink(folder, link))
		saveSteps(t, devs[0], link, 2)
		require.True(t, isSaved(filepath.Join(folder, stepName(2))))
	})
}
