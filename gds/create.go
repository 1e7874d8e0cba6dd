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

// A fresh file has a name of its own until it is committed.
type fresh struct {
	temp  string
	final string
}

// Create makes a file that is written and then takes the place of the one at path,
// if there is one, all at once: until Commit it has another name in the same
// folder, and Close or Abort removes it. A crash at any time leaves the old file or
// the new one, whole; what it leaves beside them, .NAME.XXXXXXXX.tmp, nobody removes,
// and may be removed when nobody writes it. The new file has the permissions of the
// old one.
func Create(path string, cfg *FileConfig) (*File, error) {
	const op = "create"
	final, mode, err := target(path)
	if err != nil {
		return nil, &Error{Op: op, Path: path, Offset: -1, Err: err}
	}
	name := filepath.Base(final)
	name = name[:min(len(name), 200)] // what comes to it must not make it too long
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

// target returns the file that a path leads to, and its permissions if it is there.
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
		return "", 0, fmt.Errorf("there is no regular file but %s", info.Mode())
	}
	return final, info.Mode().Perm(), nil
}

// Commit brings what was written to the disk, lets the file take its place, and
// closes it. After an error the old file is as it was, and the new one is gone;
// only where the last step has failed, bringing the folder to the disk, it is open
// which of them a crash would leave. Calls that write the file must have returned.
// A ctx that ends before the new file has its place is obeyed.
func (f *File) Commit(ctx context.Context) error {
	const op = "commit"
	x, err := f.takeFresh(op)
	if err != nil {
		return err
	}
	defer f.unuse()
	if err = f.flush(ctx); err == nil {
		err = x.rename(f.sys.fsync)
	}
	if err != nil {
		err = f.fail(op, errors.Join(err, x.remove()))
	}
	return errors.Join(err, f.Close())
}

// takeFresh takes the new file over from Close, which would remove it.
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

// Abort closes the file and removes it, unless it was committed: the old one
// stays. It is Close under a name that says so.
func (f *File) Abort() error { return f.Close() }

// rename lets the new file take its place, and brings that to the disk.
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

// remove removes the new file if it has not taken its place.
func (x *fresh) remove() error {
	if x == nil {
		return nil
	}
	if err := os.Remove(x.temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
