package doctor

import (
	"context"
	"os"
	"syscall"
	"time"
	"unsafe"
)

const (
	writtenBytes = 256 << 20
	writtenPart  = 8 << 20
	alignment    = 4096 // of memory and lengths for O_DIRECT
)

// writeSpeed writes a temporary file and returns the bytes a second, until they are on the disk. It
// bypasses the page cache if the file system supports that.
func writeSpeed(ctx context.Context, dir string) (float64, error) {
	f, err := os.CreateTemp(dir, ".chorus-doctor-*")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	defer os.Remove(f.Name())
	if direct, err := os.OpenFile(f.Name(), os.O_WRONLY|syscall.O_DIRECT, 0); err == nil {
		defer direct.Close()
		f = direct
	}
	part := aligned(writtenPart)
	for i := range part {
		part[i] = byte(i * 7) // no zeros, which a file system may not store
	}
	begin, n := time.Now(), 0
	for ; n < writtenBytes && ctx.Err() == nil; n += len(part) {
		if _, err := f.Write(part); err != nil {
			return 0, err
		}
	}
	if err := f.Sync(); err != nil {
		return 0, err
	}
	return float64(n) / time.Since(begin).Seconds(), nil
}

// aligned returns memory for direct writes.
func aligned(n int) []byte {
	b := make([]byte, n+alignment)
	skip := alignment - int(uintptr(unsafe.Pointer(&b[0]))%alignment)
	return b[skip : skip+n]
}
