package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/safefile"
)

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
		text, err = safefile.ReadIn(root, name, manifestLimit)
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

// WriteAt also lets the disk begin, so that Sync is short. Sync returns the errors of the disk.
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
