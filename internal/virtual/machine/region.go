package machine

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A region is a readable and writable range of host addresses outside of Go's
// memory. Parts of a region map memory files. A region is unmapped when it is no
// longer referenced.
type region struct {
	base unsafe.Pointer
	size uintptr
}

// Go's garbage collector does not count the memory of regions, so regions of
// unused machines would accumulate. Therefore it runs after this many newly
// mapped bytes.
const collectEvery = 1 << 30

var shownAnew atomic.Int64

const (
	readWrite = unix.PROT_READ | unix.PROT_WRITE
	anonymous = unix.MAP_PRIVATE | unix.MAP_ANON | unix.MAP_NORESERVE
)

// newRegion reserves addresses for n bytes.
func newRegion(n uintptr) (*region, error) {
	n = pageCeil(n)
	p, err := unix.MmapPtr(-1, 0, nil, n, readWrite, anonymous)
	if err != nil {
		return nil, fmt.Errorf("virtual: reserve addresses for %d bytes: %w", n, err)
	}
	r := &region{base: p, size: n}
	runtime.AddCleanup(r, func(r region) { _ = unix.MunmapPtr(r.base, r.size) }, *r)
	return r, nil
}

// writable reports whether all pages of [addr, addr+n) are mapped and writable. It returns true
// if the system does not say.
func writable(addr, n uint64) bool {
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return true
	}
	defer f.Close()
	end := addr + n
	for lines := bufio.NewScanner(f); addr < end && lines.Scan(); {
		var lo, hi uint64
		var mode string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &lo, &hi, &mode); err != nil {
			return true
		}
		if hi <= addr {
			continue
		}
		if lo > addr || len(mode) < 2 || mode[:2] != "rw" {
			return false
		}
		addr = hi
	}
	return addr >= end
}

func pageCeil(n uintptr) uintptr {
	page := uintptr(os.Getpagesize())
	return (n + page - 1) &^ (page - 1)
}

// bytes returns the first n bytes of the region.
func (r *region) bytes(n uint64) []byte { return unsafe.Slice((*byte)(r.base), n) }

// attach maps n bytes of the file at an offset of the region.
func (r *region) attach(f *os.File, at, n uintptr) error {
	_, err := unix.MmapPtr(int(f.Fd()), 0, unsafe.Add(r.base, at), pageCeil(n), readWrite, unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		return fmt.Errorf("virtual: map %d bytes: %w", n, err)
	}
	if shownAnew.Add(int64(n)) > collectEvery {
		shownAnew.Store(0)
		runtime.GC()
	}
	return nil
}

// detach replaces a file by new private memory, so that a late operation cannot
// damage the file.
func (r *region) detach(at, n uintptr) {
	_, _ = unix.MmapPtr(-1, 0, unsafe.Add(r.base, at), pageCeil(n), readWrite, anonymous|unix.MAP_FIXED)
}

// poisonBytes is the size of the file that poison maps. A process may have 65,530 mappings.
const poisonBytes = 4 << 20

var poisonFile = sync.OnceValues(func() (*os.File, error) {
	fd, err := unix.MemfdCreate("chorus virtual poison", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("virtual: create a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "virtual poison")
	data := make([]byte, poisonBytes)
	Poison(data)
	if _, err := f.WriteAt(data, 0); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
})

// poison replaces the whole region by memory with Poison's pattern. The system copies a page of it
// when that page is first written.
func (r *region) poison() error {
	f, err := poisonFile()
	if err != nil {
		return err
	}
	for at := uintptr(0); at < r.size; at += poisonBytes {
		n := min(poisonBytes, r.size-at)
		if _, err := unix.MmapPtr(int(f.Fd()), 0, unsafe.Add(r.base, at), n, readWrite, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
			return fmt.Errorf("virtual: map %d poisoned bytes: %w", n, err)
		}
	}
	return nil
}
