package machine

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Memory that other processes may use is a memfd. It disappears with the last
// process that has it open or mapped. A page after the bytes identifies the
// memory.

// A label is the content of that page.
type label struct {
	Magic  [24]byte
	UUID   cudadrv.UUID // of the device
	Bytes  uint64
	Serial uint64 // unique number of the file
}

var labelMagic = [24]byte([]byte("chorus virtual memory v1"))

// newMemFile creates a file for n bytes of a device's memory.
func newMemFile(dev *Device, n uint64) (*os.File, uint64, error) {
	fd, err := unix.MemfdCreate("chorus virtual memory", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, 0, fmt.Errorf("virtual: create a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "virtual memory")
	l := label{Magic: labelMagic, UUID: dev.uuid, Bytes: n, Serial: rand.Uint64()}
	var text bytes.Buffer
	_ = binary.Write(&text, binary.LittleEndian, &l) // a buffer does not fail
	at := pageCeil(uintptr(n))
	err = f.Truncate(int64(at) + int64(os.Getpagesize()))
	if err == nil {
		_, err = f.WriteAt(text.Bytes(), int64(at))
	}
	if err == nil { // the file can then be mapped without a risk of truncation
		_, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
	}
	if err != nil {
		f.Close()
		return nil, 0, fmt.Errorf("virtual: create a file in memory of %d bytes: %w", n, err)
	}
	return f, l.Serial, nil
}

// readLabel returns the label of a file, if the file is virtual device memory.
func readLabel(f *os.File) (l label, ok bool) {
	info, err := f.Stat()
	if err != nil || info.Size() < int64(os.Getpagesize()) {
		return l, false
	}
	text := make([]byte, binary.Size(&l))
	at := info.Size() - int64(os.Getpagesize())
	if _, err := f.ReadAt(text, at); err != nil {
		return l, false
	}
	_ = binary.Read(bytes.NewReader(text), binary.LittleEndian, &l) // text is long enough
	seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	ok = err == nil && seals&unix.F_SEAL_SHRINK != 0 && l.Magic == labelMagic && uint64(at) == uint64(pageCeil(uintptr(l.Bytes)))
	runtime.KeepAlive(f)
	return l, ok
}

// mapFile maps a file of n bytes at new addresses.
func mapFile(f *os.File, n uint64) (*region, error) {
	r, err := newRegion(uintptr(n))
	if err != nil {
		return nil, err
	}
	return r, r.attach(f, 0, uintptr(n))
}
