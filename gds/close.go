package gds

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
)

// use keeps the descriptors open until unuse.
func (f *File) use(op string) error {
	if f == nil {
		return fmt.Errorf("gds: %s: no file given", op)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.fail(op, device.ErrClosed)
	}
	f.users++
	return nil
}

func (f *File) unuse() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users--; f.users == 0 && f.closed {
		_ = f.release() // nothing has been written since Sync that anybody was promised
	}
}

// Close closes the file. It returns at once: calls that are under way go on to
// their end. A file of Create that was not committed is removed, and the old one
// stays. Close is idempotent.
func (f *File) Close() error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	f.closed = true
	f.owner.Close()
	err := f.fresh.remove()
	if f.users == 0 {
		err = errors.Join(err, f.release())
	}
	if err != nil {
		return f.fail("close", err)
	}
	return nil
}

// release gives the descriptors back. f.mu is held.
func (f *File) release() error {
	f.forget()
	return errors.Join(f.direct.close(), f.plain.Close())
}
