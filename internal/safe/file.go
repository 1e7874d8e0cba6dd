package safe

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// noWait holds the flags of all calls that open files: a FIFO without its other
// end does not block, and a terminal does not become the controlling terminal.
const noWait = syscall.O_NONBLOCK | syscall.O_NOCTTY

// maxTries limits the retries of Create if another process creates and removes the file.
const maxTries = 10

// Open opens a regular file for reading, and follows links, because the user
// named them.
func Open(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|noWait, 0)
	return regular(path, f, err)
}

// Read returns the contents of a regular file of at most limit bytes.
func Read(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(path, f, limit)
}

// OpenIn is Open for a file in a folder whose author chooses its links: it follows none that leads out of the folder.
func OpenIn(folder *os.Root, name string) (*os.File, error) {
	path := filepath.Join(folder.Name(), name)
	f, err := folder.OpenFile(name, os.O_RDONLY|noWait, 0)
	if err != nil {
		err = &os.PathError{Op: "open", Path: path, Err: outside(folder, name, errors.Unwrap(err))}
	}
	return regular(path, f, err)
}

// outside adds the cure to the error of a link that leads out of a folder.
func outside(folder *os.Root, name string, err error) error {
	if info, e := folder.Lstat(name); e == nil && info.Mode()&fs.ModeSymlink != 0 && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("is a symbolic link that leads out of the folder, or around in circles: replace it by a copy of its target: %w", err)
	}
	return err
}

// ReadIn is Read for a file in a folder; see OpenIn.
func ReadIn(folder *os.Root, name string, limit int64) ([]byte, error) {
	f, err := OpenIn(folder, name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readAll(f.Name(), f, limit)
}

// Create opens a file for writing and truncates it, or creates it. An existing
// file must be a regular file of this user with one name, and not a link, so that
// a planted link cannot choose the file to overwrite. /dev/null and the names of
// the process's outputs, such as /dev/stdout, are opened without these checks.
func Create(path string) (*os.File, error) {
	f, err := Keep(path)
	if err != nil {
		return nil, err
	}
	return empty(path, f)
}

// CreatePrivate is Create for a file that only this user can read. It removes the
// permissions of other users from an existing file.
func CreatePrivate(path string) (*os.File, error) {
	f, err := keep(path, 0o600)
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && info.Mode().Perm() != 0o600 {
		if err := f.Chmod(0o600); err != nil {
			_ = f.Close()
			return nil, err
		}
	}
	return empty(path, f)
}

// Keep is Create without truncation.
func Keep(path string) (*os.File, error) { return keep(path, 0o666) }

func keep(path string, perm os.FileMode) (*os.File, error) {
	if clean := filepath.Clean(path); clean == os.DevNull || clean == "/dev/stdout" || clean == "/dev/stderr" || strings.HasPrefix(clean, "/dev/fd/") {
		return os.OpenFile(path, os.O_WRONLY, 0)
	}
	return create(path, func(flag int) (*os.File, error) { return os.OpenFile(path, flag, perm) })
}

// create opens a file for writing with open and passes flags to it. A file
// that it created belongs to this user, whatever owner the file system shows.
func create(path string, open func(flag int) (*os.File, error)) (*os.File, error) {
	for range maxTries {
		f, err := open(os.O_WRONLY | os.O_CREATE | os.O_EXCL | noWait)
		if !errors.Is(err, fs.ErrExist) {
			return f, err
		}
		f, err = open(os.O_WRONLY | syscall.O_NOFOLLOW | noWait)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if f, err = regular(path, f, err); err != nil {
			return nil, err
		}
		if err := mine(f); err != nil {
			_ = f.Close()
			return nil, &os.PathError{Op: "open for writing", Path: path, Err: err}
		}
		return f, nil
	}
	return nil, &os.PathError{Op: "open for writing", Path: path, Err: errors.New("another process repeatedly creates and removes it")}
}

// mine returns the reason why a file must not be overwritten, or nil.
func mine(f *os.File) error {
	_, sys, err := stat(f)
	switch {
	case err != nil:
		return err
	case int(sys.Uid) != os.Geteuid():
		return fmt.Errorf("the file belongs to the user with id %d: remove it, or name another file", sys.Uid)
	case sys.Nlink > 1:
		return fmt.Errorf("the file has %d names: remove it, or name another file", sys.Nlink)
	}
	return nil
}

func empty(path string, f *os.File) (*os.File, error) {
	info, err := f.Stat()
	if err == nil && info.Mode().IsRegular() {
		err = f.Truncate(0)
	}
	if err != nil {
		_ = f.Close()
		return nil, &os.PathError{Op: "empty", Path: path, Err: err}
	}
	return f, nil
}

// regular returns f if it is a regular file, and otherwise closes f and returns
// an error.
func regular(path string, f *os.File, err error) (*os.File, error) {
	switch {
	case errors.Is(err, syscall.ELOOP):
		return nil, isLink(path)
	case errors.Is(err, syscall.ENXIO): // a FIFO without a reader, for writing
		return nil, notRegular(path, "a named pipe, a socket or a device")
	case errors.Is(err, syscall.EISDIR):
		return nil, notRegular(path, "a directory")
	case err != nil:
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = notRegular(path, kindOf(info.Mode()))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func isLink(path string) error {
	return &os.PathError{Op: "open", Path: path, Err: errors.New("is a symbolic link, which is not followed: name its target")}
}

func notRegular(path, what string) error {
	return &os.PathError{Op: "open", Path: path, Err: fmt.Errorf("not a regular file but %s", what)}
}

func kindOf(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&fs.ModeNamedPipe != 0:
		return "a named pipe"
	case m&fs.ModeSocket != 0:
		return "a socket"
	}
	return "a device"
}

// readAll reads a file that another process may truncate or extend at the same time.
func readAll(path string, f *os.File, limit int64) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > limit {
		return nil, &os.PathError{Op: "read", Path: path, Err: fmt.Errorf("the file has %d bytes: want at most %d", info.Size(), limit)}
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = &os.PathError{Op: "read", Path: path, Err: fmt.Errorf("the file grows beyond the limit of %d bytes", limit)}
	}
	return b, err
}

func stat(f *os.File) (os.FileInfo, *syscall.Stat_t, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	sys, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, nil, errors.New("the system does not report the owner")
	}
	return info, sys, nil
}

// EndsEarly reports whether a decoder failed because its file is truncated.
func EndsEarly(err error) bool {
	if s, ok := errors.AsType[*json.SyntaxError](err); ok {
		return s.Error() == "unexpected end of JSON input" // of Decoder.Token after Decoder.More, since Go 1.27
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}
