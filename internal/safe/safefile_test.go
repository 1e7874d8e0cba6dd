package safe

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// otherUser is the id of a user who is neither root nor the one who runs the tests.
const otherUser = 65534

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
}

// odd creates one of each thing that is not a regular file, by its description.
func odd(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	pipe, socket := filepath.Join(dir, "pipe"), filepath.Join(dir, "socket")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	return map[string]string{"a directory": dir, "a named pipe": pipe, "a socket": socket, "a device": "/dev/zero"}
}

func TestOnlyRegularFilesAreRead(t *testing.T) {
	for what, path := range odd(t) {
		_, err := Open(path)
		require.ErrorContains(t, err, path)
		require.ErrorContains(t, err, "not a regular file but a")
		if what != "a socket" { // open itself refuses those
			require.ErrorContains(t, err, what)
		}
		_, err = Read(path, 10)
		require.ErrorContains(t, err, "not a regular file")
	}
	path := filepath.Join(t.TempDir(), "file")
	_, err := Read(path, 10)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, os.WriteFile(path, []byte("0123456789"), 0o600))
	b, err := Read(path, 10)
	require.NoError(t, err)
	require.Equal(t, "0123456789", string(b))
	_, err = Read(path, 9)
	require.ErrorContains(t, err, "the file has 10 bytes: want at most 9")
	_, err = Read("/proc/self/status", 9) // whose size is shown as 0
	require.ErrorContains(t, err, "beyond the limit of 9 bytes")
}

func TestCreateEmptiesOwnFilesOnly(t *testing.T) {
	for _, path := range odd(t) {
		if path == "/dev/zero" {
			continue
		}
		_, err := Create(path)
		require.ErrorContains(t, err, "not a regular file but a")
	}
	_, err := Create("/dev/zero")
	require.ErrorContains(t, err, "not a regular file but a device")

	dir := t.TempDir()
	target := filepath.Join(dir, "target")
	holds := func(want string) {
		t.Helper()
		b, err := os.ReadFile(target)
		require.NoError(t, err)
		require.Equal(t, want, string(b))
	}
	f, err := Create(target)
	require.NoError(t, err)
	_, err = f.WriteString("precious")
	require.NoError(t, errors.Join(err, f.Close()))
	holds("precious")
	for name, make := range map[string]func(old, name string) error{"link": os.Symlink, "hard": os.Link} {
		path := filepath.Join(dir, name)
		require.NoError(t, make(target, path))
		_, err := Create(path)
		require.Error(t, err)
		holds("precious")
		require.NoError(t, os.Remove(path))
	}
	dangling := filepath.Join(dir, "dangling")
	require.NoError(t, os.Symlink(filepath.Join(dir, "new"), dangling))
	_, err = Create(dangling)
	require.ErrorContains(t, err, "is a symbolic link, which is not followed")
	require.NoFileExists(t, filepath.Join(dir, "new"))

	f, err = Keep(target)
	require.NoError(t, errors.Join(err, f.Close()))
	holds("precious")
	f, err = Create(target)
	require.NoError(t, errors.Join(err, f.Close()))
	holds("")

	r, w, err := os.Pipe() // an output of the process that is not a file
	require.NoError(t, err)
	defer r.Close()
	defer w.Close()
	for _, path := range []string{os.DevNull, fmt.Sprintf("/dev/fd/%d", w.Fd())} {
		f, err := Create(path)
		require.NoError(t, errors.Join(err, f.Close()))
	}
}

func TestCreatePrivate(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	path := filepath.Join(t.TempDir(), "private")
	for range 2 { // a new file, and an existing file that others may read
		f, err := CreatePrivate(path)
		require.NoError(t, err)
		info, err := f.Stat()
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode())
		require.Zero(t, info.Size())
		_, err = f.WriteString("secret")
		require.NoError(t, errors.Join(err, f.Chmod(0o644), f.Close()))
	}
	link := path + "-link"
	require.NoError(t, os.Symlink(path, link))
	_, err := CreatePrivate(link)
	require.ErrorContains(t, err, "is a symbolic link")
	f, err := CreatePrivate(os.DevNull)
	require.NoError(t, errors.Join(err, f.Close()))
	info, err := os.Stat(os.DevNull)
	require.NoError(t, err)
	require.NotEqual(t, os.FileMode(0o600), info.Mode().Perm())
}

func TestCreateLeavesFilesOfOthers(t *testing.T) {
	needRoot(t)
	path := filepath.Join(t.TempDir(), "theirs")
	require.NoError(t, os.WriteFile(path, []byte("theirs"), 0o666))
	require.NoError(t, os.Chown(path, otherUser, otherUser))
	_, err := Create(path)
	require.ErrorContains(t, err, "belongs to the user with id 65534")
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "theirs", string(b))
}

func TestFolderOfThisUserOnly(t *testing.T) {
	dir := t.TempDir()
	for mode, ok := range map[os.FileMode]bool{0o700: true, 0o755: true, 0o775: false, 0o757: false, 0o777 | os.ModeSticky: false} {
		require.NoError(t, os.Chmod(dir, mode))
		d, err := OpenFolder(dir)
		if !ok {
			require.ErrorContains(t, err, "lets other users write", "mode %v", mode)
			continue
		}
		require.NoError(t, err)
		require.NoError(t, d.Close())
	}
	require.NoError(t, os.Chmod(dir, 0o700))
	link := filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	d, err := OpenFolder(link)
	require.NoError(t, err, "the directory behind the link is checked")
	require.NoError(t, d.Close())
	for _, path := range []string{link, link + "/"} {
		_, err = OutputFolder(path)
		require.ErrorContains(t, err, "is a symbolic link, which is not followed")
	}
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(dir, otherUser, otherUser))
		_, err = OpenFolder(dir)
		require.ErrorContains(t, err, "the directory belongs to the user with id 65534")
	}
}

func TestFilesOfAFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	d, err := OutputFolder(dir)
	require.NoError(t, err)
	defer d.Close()
	require.NoError(t, d.Replace("f", 0o644, []byte("one "), []byte("two")))
	b, info, err := d.Read("f", 7)
	require.NoError(t, err)
	require.Equal(t, "one two", string(b))
	require.Equal(t, os.FileMode(0o644), info.Mode().Perm())
	_, _, err = d.Read("f", 6)
	require.ErrorContains(t, err, "want at most 6")

	// A directory that takes the place of the open one changes nothing.
	require.NoError(t, os.Rename(dir, dir+"-moved"))
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "f"), []byte("planted"), 0o600))
	b, _, err = d.Read("f", 10)
	require.NoError(t, err)
	require.Equal(t, "one two", string(b))
	require.NoError(t, d.Replace("g", 0o600, nil))
	require.NoFileExists(t, filepath.Join(dir, "g"))
	dir += "-moved"

	require.NoError(t, os.Chmod(filepath.Join(dir, "g"), 0o620))
	_, _, err = d.Read("g", 10)
	require.ErrorContains(t, err, "mode 0620 of the file lets other users write to it")
	require.NoError(t, os.Symlink("f", filepath.Join(dir, "link")))
	_, _, err = d.Read("link", 10)
	require.ErrorContains(t, err, "a symbolic link")
	_, err = d.Create("link")
	require.ErrorContains(t, err, "a symbolic link")
	require.NoError(t, syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600))
	_, _, err = d.Read("pipe", 10)
	require.ErrorContains(t, err, "a named pipe")
	_, err = d.Create("pipe")
	require.ErrorContains(t, err, "a named pipe")
	for _, name := range []string{"../f", "a/b", "", ".", "..", "/"} {
		_, _, err = d.Read(name, 10)
		require.Error(t, err, "%q", name)
	}
	b, _, err = d.Read("f", 10)
	require.NoError(t, err)
	require.Equal(t, "one two", string(b))
	require.NoError(t, d.Remove("f"))
	require.ErrorIs(t, d.Remove("f"), fs.ErrNotExist)
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(filepath.Join(dir, "g"), otherUser, otherUser))
		require.NoError(t, os.Chmod(filepath.Join(dir, "g"), 0o600))
		_, _, err = d.Read("g", 10)
		require.ErrorContains(t, err, "the file belongs to the user with id 65534")
	}
}

// TestCreateLocked: a file that is open for writing is refused, and keeps its contents.
func TestCreateLocked(t *testing.T) {
	dir, err := OutputFolder(filepath.Join(t.TempDir(), "logs"))
	require.NoError(t, err)
	defer dir.Close()
	first, err := dir.CreateLocked("log")
	require.NoError(t, err)
	_, err = first.WriteString("text")
	require.NoError(t, err)
	_, err = dir.CreateLocked("log")
	require.ErrorIs(t, err, ErrInUse)
	require.NoError(t, first.Close())
	second, err := dir.CreateLocked("log")
	require.NoError(t, err)
	defer second.Close()
	text, err := os.ReadFile(second.Name())
	require.NoError(t, err)
	require.Equal(t, "text", string(text))
	_, err = dir.CreateLocked("../log")
	require.ErrorContains(t, err, "not the name of a file in a directory")
}
