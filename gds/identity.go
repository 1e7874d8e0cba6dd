package gds

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// An identity distinguishes the states of a file.
type identity struct {
	dev, inode uint64
	size       int64
	changed    unix.Timespec
}

func (f *File) identity() (identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return identity{}, fmt.Errorf("stat: %w", err)
	}
	return identity{uint64(st.Dev), st.Ino, st.Size, st.Mtim}, nil
}

// Size returns the length of the file in bytes.
func (f *File) Size() (int64, error) { return f.size("size") }

func (f *File) size(op string) (int64, error) {
	if err := f.use(op); err != nil {
		return 0, err
	}
	defer f.unuse()
	id, err := f.identity()
	if err != nil {
		return 0, f.fail(op, err)
	}
	return id.size, nil
}

// unchanged returns an error if the file has changed since it was opened. A file that is
// open for writing is not compared.
func (f *File) unchanged() error {
	if f.write {
		return nil
	}
	now, err := f.identity()
	switch {
	case err != nil:
		return err
	case now.size != f.was.size:
		return fmt.Errorf("%w: it had %d bytes and has %d", ErrChanged, f.was.size, now.size)
	case now != f.was:
		return fmt.Errorf("%w: its time of modification is another", ErrChanged)
	}
	return nil
}
