package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
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

// systemFiles are the file system of the operating system.
type systemFiles struct{}

func (systemFiles) MkdirAll(path string) error { return os.MkdirAll(path, 0o777) }

func (systemFiles) Mkdir(path string) error { return os.Mkdir(path, 0o777) }

func (systemFiles) Create(path string) (savingFile, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, err
	}
	return systemFile{f}, nil
}

func (systemFiles) ReadFile(path string) ([]byte, error) { return os.ReadFile(path) }
func (systemFiles) Rename(from, to string) error         { return os.Rename(from, to) }
func (systemFiles) Remove(path string) error             { return os.Remove(path) }
func (systemFiles) RemoveAll(path string) error          { return os.RemoveAll(path) }

func (systemFiles) Exchange(a, b string) error {
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return &os.LinkError{Op: "exchange", Old: a, New: b, Err: err}
	}
	return nil
}

func (systemFiles) SyncFolder(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
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
func writeWhole(fs fileSystem, path string, data []byte) error {
	f, err := fs.Create(path)
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
