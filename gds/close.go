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
		_ = f.release() // bytes written since the last Sync have no guarantee
	}
}

// Close closes the file and returns at once; calls in progress continue. A file of Create
// that was not committed is removed, and the old file stays. Close is idempotent.
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

// release closes the descriptors. f.mu is held.
func (f *File) release() error {
	f.forget()
	return errors.Join(f.direct.close(), f.plain.Close())
}
