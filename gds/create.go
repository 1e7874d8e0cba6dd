package gds

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// A fresh file has a temporary name until it is committed.
type fresh struct {
	temp  string
	final string
}

// Create makes a file that replaces the file at path, if there is one, atomically: until
// Commit it has a temporary name in the same directory, and Close removes it.
// After a crash the path has either the complete old file or the complete new one. A crash
// may leave a temporary file, .NAME.XXXXXXXX.tmp, which nothing removes; it can be deleted
// once no process writes it. The new file has the permissions of the old one.
func Create(path string, cfg *FileConfig) (*File, error) {
	const op = "create"
	final, mode, err := target(path)
	if err != nil {
		return nil, &Error{Op: op, Path: path, Offset: -1, Err: err}
	}
	name := filepath.Base(final)
	name = name[:min(len(name), 200)] // leave room for the prefix and suffix
	temp := filepath.Join(filepath.Dir(final), "."+name+"."+rand.Text()[:8]+".tmp")
	f, err := open(op, temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, cfg)
	if err != nil {
		if e, ok := errors.AsType[*Error](err); ok {
			e.Path = path
		}
		return nil, err
	}
	f.path, f.new, f.fresh = path, true, &fresh{temp, final}
	if mode != 0 {
		if err := f.plain.Chmod(mode); err != nil {
			return nil, errors.Join(f.fail(op, errors.Unwrap(err)), f.Close())
		}
	}
	return f, nil
}

// target resolves a path to its file, and returns the file's permissions if it exists.
func target(path string) (final string, mode fs.FileMode, err error) {
	final, err = filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return path, 0, nil
	}
	if err != nil {
		return "", 0, err
	}
	info, err := os.Stat(final)
	if err != nil {
		return "", 0, err
	}
	if !info.Mode().IsRegular() {
		return "", 0, fmt.Errorf("it is not a regular file but %s", info.Mode())
	}
	return final, info.Mode().Perm(), nil
}

// Commit flushes the file to the disk, renames it to its path, and closes it. After an
// error the old file is unchanged and the new one is removed. The exception is a failure of
// the last step, flushing the directory: then a crash may leave either file. Calls that write
// the file must have returned. ctx can end Commit until the file is renamed.
func (f *File) Commit(ctx context.Context) error {
	const op = "commit"
	x, err := f.takeFresh(op)
	if err != nil {
		return err
	}
	defer f.unuse()
	if err = f.flush(ctx); err == nil {
		err = x.rename(f.sys.Fsync)
	}
	if err != nil {
		err = f.fail(op, errors.Join(err, x.remove()))
	}
	return errors.Join(err, f.Close())
}

// takeFresh takes the new file over, so that Close does not remove it.
func (f *File) takeFresh(op string) (*fresh, error) {
	if err := f.use(op); err != nil {
		return nil, err
	}
	f.mu.Lock()
	x, busy := f.fresh, f.users > 1
	if !busy {
		f.fresh = nil
	}
	f.mu.Unlock()
	switch {
	case busy:
		f.unuse()
		return nil, f.fail(op, errBusy)
	case x == nil:
		f.unuse()
		return nil, f.fail(op, errors.New("the file was not made by Create, or is being committed: Sync it"))
	}
	return x, nil
}

// rename moves the new file to its path, and flushes that to the disk.
func (x *fresh) rename(fsync func(fd int) error) error {
	if err := os.Rename(x.temp, x.final); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(x.final))
	if err != nil {
		return err
	}
	return errors.Join(os.NewSyscallError("fsync", fsync(int(dir.Fd()))), dir.Close())
}

// remove removes the new file unless it was moved to its path.
func (x *fresh) remove() error {
	if x == nil {
		return nil
	}
	if err := os.Remove(x.temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
