package safe

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// A Folder is an open directory that belongs to this user or root and that no
// other user can write to. Names are names of its files, without a slash.
type Folder struct {
	dir  *os.File
	path string
}

// TempPattern matches the temporary files of Replace.
const TempPattern = ".new-*"

// OpenFolder opens an existing directory, and follows links, because it checks
// the directory that they lead to.
func OpenFolder(path string) (*Folder, error) { return openFolder(path, 0) }

// OutputFolder opens a directory for outputs and creates it, with its parents, if
// it does not exist. The last element of the path must not be a link, which could
// select files of this user to overwrite.
func OutputFolder(path string) (*Folder, error) {
	path = filepath.Clean(path)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, err
	}
	return openFolder(path, syscall.O_NOFOLLOW)
}

func openFolder(path string, flag int) (*Folder, error) {
	dir, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|flag|noWait, 0)
	if info, e := os.Lstat(path); err != nil && e == nil && info.Mode()&os.ModeSymlink != 0 {
		err = isLink(path)
	}
	if err != nil {
		return nil, err
	}
	if err := trusted(dir, "directory"); err != nil {
		_ = dir.Close()
		return nil, &os.PathError{Op: "use", Path: path, Err: err}
	}
	return &Folder{dir, path}, nil
}

// trusted returns the reason why another user may have written f, or nil.
func trusted(f *os.File, kind string) error {
	info, sys, err := stat(f)
	switch {
	case err != nil:
		return err
	case int(sys.Uid) != os.Geteuid() && sys.Uid != 0:
		return fmt.Errorf("the %s belongs to the user with id %d: use your own %[1]s", kind, sys.Uid)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("mode %04o of the %s lets other users write to it: run chmod go-w, or use another one", info.Mode().Perm(), kind)
	}
	return nil
}

// File returns the open directory, for locks and for listing its files.
func (d *Folder) File() *os.File { return d.dir }

// Close closes the directory. It is safe on nil.
func (d *Folder) Close() error {
	if d == nil {
		return nil
	}
	return d.dir.Close()
}

// at opens a file relative to the directory's descriptor.
func (d *Folder) at(name string, flag int, perm uint32) (*os.File, error) {
	path := filepath.Join(d.path, name)
	if name != filepath.Base(name) || name == "." || name == ".." || name == "/" {
		return nil, &os.PathError{Op: "open", Path: path, Err: errors.New("not the name of a file in a directory")}
	}
	for {
		fd, err := syscall.Openat(int(d.dir.Fd()), name, flag|syscall.O_NOFOLLOW|syscall.O_CLOEXEC|noWait, perm)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			return nil, &os.PathError{Op: "open", Path: path, Err: err}
		}
		return os.NewFile(uintptr(fd), path), nil
	}
}

// Read returns the contents of a file of at most limit bytes that only this user
// or root can write.
func (d *Folder) Read(name string, limit int64) ([]byte, os.FileInfo, error) {
	path := filepath.Join(d.path, name)
	f, err := d.at(name, os.O_RDONLY, 0)
	if f, err = regular(path, f, err); err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if err := trusted(f, "file"); err != nil {
		return nil, nil, &os.PathError{Op: "use", Path: path, Err: err}
	}
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	b, err := readAll(path, f, limit)
	return b, info, err
}

// Create is [Create] for a file of the directory.
func (d *Folder) Create(name string) (*os.File, error) {
	path := filepath.Join(d.path, name)
	f, err := create(path, func(flag int) (*os.File, error) { return d.at(name, flag, 0o666) })
	if err != nil {
		return nil, err
	}
	return empty(path, f)
}

// ErrInUse matches the error of CreateLocked for a file that another process, or another caller in this one, has locked.
var ErrInUse = errors.New("another process writes to it")

// CreateLocked is like Create, but it does not truncate the file, and locks it until it is closed: whoever opens it by CreateLocked
// until then gets an error that matches ErrInUse. Where the file system has no locks, the file is not locked.
func (d *Folder) CreateLocked(name string) (*os.File, error) {
	path := filepath.Join(d.path, name)
	f, err := create(path, func(flag int) (*os.File, error) { return d.at(name, flag, 0o666) })
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case errors.Is(err, syscall.EWOULDBLOCK):
			_ = f.Close()
			return nil, &os.PathError{Op: "lock", Path: path, Err: ErrInUse}
		}
		return f, nil // other errors, such as ENOLCK, ENOSYS and ENOTSUP, are those of file systems without locks
	}
}

// Replace replaces the contents of a file atomically.
func (d *Folder) Replace(name string, perm os.FileMode, parts ...[]byte) error {
	f, temp, err := d.temp()
	if err != nil {
		return err
	}
	for _, part := range parts {
		if err == nil {
			_, err = f.Write(part)
		}
	}
	if err == nil {
		err = f.Chmod(perm)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.NewSyscallError("renameat", syscall.Renameat(int(d.dir.Fd()), temp, int(d.dir.Fd()), name))
	}
	if err != nil {
		return errors.Join(err, d.Remove(temp))
	}
	return nil
}

// Probe returns the reason why Replace would fail for every file, or nil.
func (d *Folder) Probe() error {
	f, temp, err := d.temp()
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), d.Remove(temp))
}

// temp creates a file that only this user can read.
func (d *Folder) temp() (f *os.File, name string, err error) {
	name = TempPattern[:len(TempPattern)-1] + rand.Text()
	f, err = d.at(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	return f, name, err
}

// Remove removes a file.
func (d *Folder) Remove(name string) error {
	if err := syscall.Unlinkat(int(d.dir.Fd()), name); err != nil {
		return &os.PathError{Op: "remove", Path: filepath.Join(d.path, name), Err: err}
	}
	return nil
}

// Limits of a decompressed file: gzip expands up to 1,000 times; traces and
// snapshots expand 6 to 30 times.
const (
	UnzipRatio = 64
	UnzipSlack = 1 << 20 // additional bytes, for small files
)

// Unzip returns a reader of r that decompresses gzip data. It fails if the output
// becomes longer than UnzipSlack plus UnzipRatio times the input.
func Unzip(r io.Reader) (io.Reader, error) {
	count := &counter{r: r}
	b := bufio.NewReader(count)
	if start, _ := b.Peek(2); !bytes.Equal(start, []byte{0x1f, 0x8b}) {
		return b, nil
	}
	z, err := gzip.NewReader(b)
	if err != nil {
		return nil, err
	}
	return &unzipped{r: z, packed: count}, nil
}

type counter struct {
	r io.Reader
	n int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	return n, err
}

type unzipped struct {
	r      io.Reader
	packed *counter
	n      int64
}

func (u *unzipped) Read(b []byte) (int, error) {
	n, err := u.r.Read(b)
	u.n += int64(n)
	if u.n > UnzipSlack+UnzipRatio*u.packed.n {
		return 0, fmt.Errorf("%d compressed bytes expand to more than %d: if you trust the file, decompress it with gunzip first", u.packed.n, u.n)
	}
	return n, err
}
