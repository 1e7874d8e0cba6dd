package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/safe"
)

// A fileWriter writes the file of one rank, and computes digests on the way.
type fileWriter struct {
	job     *saveJob
	s       *snapshotter
	path    string
	out     savingFile
	digests map[string][]string // by key: of the blocks

	mu  sync.Mutex
	err error // the first one
}

// fileWorkers is how many goroutines hash and write the runs of one file.
const fileWorkers = 4

// writeFile writes the runs that the snapshot brings, and frees their slots
// even after an error.
func (v *Saver) writeFile(job *saveJob, s *snapshotter) error {
	if s.file < 0 {
		return nil
	}
	w := &fileWriter{job: job, s: s, path: filepath.Join(job.temp, s.name), digests: s.newDigests()}
	w.fail(w.create(v.fs))
	runs := make(chan filling)
	var workers sync.WaitGroup
	for range fileWorkers {
		workers.Go(func() {
			for f := range runs {
				w.run(f)
			}
		})
	}
	f := <-s.filled
	for ; !f.end; f = <-s.filled {
		runs <- f
	}
	w.fail(f.err)
	close(runs)
	workers.Wait()
	return w.end(v.fs)
}

// create creates the file, reserves space for all its bytes, and writes the header.
func (w *fileWriter) create(fs fileSystem) error {
	if err := w.job.makeTemp(fs); err != nil {
		return err
	}
	out, err := fs.Create(w.path)
	if err != nil {
		return err
	}
	w.out = out
	if err := out.Reserve(w.s.size); err != nil {
		return err
	}
	return w.write(w.s.start, 0)
}

// run writes and hashes a run once it has been copied.
func (w *fileWriter) run(f filling) {
	w.fail(f.slot.copied.Sync(context.Background()))
	if w.failed() == nil {
		data := f.slot.mem.Data()[:f.run.end-f.run.begin]
		w.fail(w.write(data, f.run.begin))
		w.hash(data, f.run.begin)
	}
	f.slot.free <- struct{}{}
}

// hash computes the digests of the blocks of a run, which begins at an offset of the file.
func (w *fileWriter) hash(data []byte, off int64) {
	for len(data) > 0 {
		p := &w.s.pieces[w.s.pieceAt(off)]
		at := off - p.off
		n := min(blockBytes, int64(p.mem.Len())-at)
		w.digests[p.part.Key][at/blockBytes] = digest(data[:n])
		data, off = data[n:], off+n
	}
}

// write writes bytes at an offset of the file, and names the tensor there in
// its error.
func (w *fileWriter) write(data []byte, off int64) error {
	n, err := w.out.WriteAt(data, off)
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	n = max(n, 0)
	w.job.moved.Add(int64(n))
	if err != nil {
		at := off + int64(n)
		return &TensorError{Op: "save", Path: w.path, Tensor: w.s.tensorAt(at), Offset: at, Err: err}
	}
	return nil
}

// fail keeps the first error.
func (w *fileWriter) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		w.err = err
	}
}

func (w *fileWriter) failed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// end brings the file to the disk, and tells rank 0.
func (w *fileWriter) end(fs fileSystem) error {
	err := w.err
	if w.out != nil {
		if err == nil {
			err = w.out.Sync()
		}
		err = errors.Join(err, w.out.Close())
	}
	if err != nil {
		return err
	}
	r := rankReport{Digests: w.digests, Value: w.job.values[w.s.local], Header: digest(w.s.start)}
	return writeReport(fs, w.job.temp, w.s.rank, &r)
}

// A rankReport is the message of a rank that has written its file.
type rankReport struct {
	Digests map[string][]string // by key: of the blocks
	Header  string
	Value   json.RawMessage
	Error   string // why the rank failed
}

// decode reads the message of another rank.
func (r *rankReport) decode(text []byte) error {
	err := json.Unmarshal(text, r)
	r.Error = safe.Text(safe.Clip(r.Error, maxReason))
	return err
}

// maxReason limits the error of another rank, in bytes.
const maxReason = 4 << 10

// reportName is the file of a rank's message.
func reportName(rank int) string { return fmt.Sprintf("rank-%05d.done", rank) }

// writeReport publishes the message atomically, by a rename.
func writeReport(fs fileSystem, temp string, rank int, r *rankReport) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := filepath.Join(temp, reportName(rank))
	if err := writeWhole(fs, path+".new", text); err != nil {
		return err
	}
	return fs.Rename(path+".new", path)
}

// A fileSystem is the calls of a save. Tests let them fail.
type fileSystem interface {
	MkdirAll(path string) error
	Mkdir(path string) error
	Create(path string) (savingFile, error)
	ReadFile(path string) ([]byte, error)
	Rename(from, to string) error
	Exchange(a, b string) error // lets two folders trade their names at once; see trade
	Remove(path string) error
	RemoveAll(path string) error
	SyncFolder(path string) error
}

type savingFile interface {
	io.WriterAt
	io.Closer
	Reserve(size int64) error // allocates the bytes on the disk, if the file system can do so
	Sync() error
}

// systemFiles are the file system of the operating system. All paths are in a folder that the user has named: other links in
// them do not lead out of it, because who can write to the folder would choose the files to write or remove. The folder is
// opened for each call, because the user may make it again.
type systemFiles struct{ folder string }

// in calls fn with the folder and a path in it.
func (f systemFiles) in(path string, fn func(root *os.Root, name string) error) error {
	root, err := os.OpenRoot(f.folder)
	if err != nil {
		return err
	}
	defer root.Close()
	name, err := filepath.Rel(f.folder, path)
	if err != nil {
		return err
	}
	return fn(root, name)
}

func (f systemFiles) MkdirAll(path string) error {
	if err := os.MkdirAll(f.folder, 0o777); err != nil {
		return err
	}
	return f.in(path, func(root *os.Root, name string) error { return root.MkdirAll(name, 0o777) })
}

func (f systemFiles) Mkdir(path string) error {
	return f.in(path, func(root *os.Root, name string) error { return root.Mkdir(name, 0o777) })
}

func (f systemFiles) Create(path string) (savingFile, error) {
	var out *os.File
	err := f.in(path, func(root *os.Root, name string) (err error) {
		out, err = root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		return err
	})
	if err != nil {
		return nil, err
	}
	return systemFile{out}, nil
}

func (f systemFiles) ReadFile(path string) (text []byte, err error) {
	return text, f.in(path, func(root *os.Root, name string) (err error) {
		text, err = safe.ReadIn(root, name, manifestLimit)
		return err
	})
}

func (f systemFiles) Rename(from, to string) error {
	return f.in(from, func(root *os.Root, from string) error {
		return f.in(to, func(_ *os.Root, to string) error { return root.Rename(from, to) })
	})
}

func (f systemFiles) Remove(path string) error {
	return f.in(path, func(root *os.Root, name string) error { return root.Remove(name) })
}

func (f systemFiles) RemoveAll(path string) error {
	err := f.in(path, func(root *os.Root, name string) error { return root.RemoveAll(name) })
	if errors.Is(err, fs.ErrNotExist) { // not even the folder
		return nil
	}
	return err
}

func (f systemFiles) Exchange(a, b string) error {
	return f.inFolderOf(a, func(da *os.File) error {
		return f.inFolderOf(b, func(db *os.File) error {
			if err := unix.Renameat2(int(da.Fd()), filepath.Base(a), int(db.Fd()), filepath.Base(b), unix.RENAME_EXCHANGE); err != nil {
				return &os.LinkError{Op: "exchange", Old: a, New: b, Err: err}
			}
			return nil
		})
	})
}

func (f systemFiles) SyncFolder(path string) error {
	return f.open(path, (*os.File).Sync)
}

// inFolderOf calls fn with the open folder that has a path's last element.
func (f systemFiles) inFolderOf(path string, fn func(*os.File) error) error {
	return f.open(filepath.Dir(path), fn)
}

// open calls fn with an open folder.
func (f systemFiles) open(path string, fn func(*os.File) error) error {
	return f.in(path, func(root *os.Root, name string) error {
		dir, err := root.OpenFile(name, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		return errors.Join(fn(dir), dir.Close())
	})
}

type systemFile struct{ *os.File }

// WriteAt also makes the disk begin to write, so that Sync, which returns the
// errors of the disk, is short.
func (f systemFile) WriteAt(data []byte, off int64) (int, error) {
	n, err := f.File.WriteAt(data, off)
	if err == nil {
		_ = unix.SyncFileRange(int(f.Fd()), off, int64(n), unix.SYNC_FILE_RANGE_WRITE)
	}
	return n, err
}

func (f systemFile) Reserve(size int64) error {
	for {
		switch err := unix.Fallocate(int(f.Fd()), 0, 0, size); err {
		case unix.EINTR:
		case nil, unix.EOPNOTSUPP, unix.ENOSYS:
			return nil
		default:
			return &os.PathError{Op: fmt.Sprintf("allocate %d bytes for", size), Path: f.Name(), Err: err}
		}
	}
}

// writeWhole writes a small file to the disk.
func writeWhole(files fileSystem, path string, data []byte) error {
	f, err := files.Create(path)
	if err != nil {
		return err
	}
	n, err := f.WriteAt(data, 0)
	if err == nil && n < len(data) {
		err = io.ErrShortWrite
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
