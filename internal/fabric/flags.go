package fabric

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
)

// A flagPage is a page of host memory with flags, which the ranks of a group and their GPUs share. Streams wait for flags, and
// write those of other ranks. It is in host memory, so that the host can set the flags of a rank that is aborted. The
// device may be unable to: if as many streams wait as a device has hardware queues, no other stream of the device proceeds.
//
// Each rank has a section of flags. A flag of a phase and a sender is 0 until the sender's stream writes a mark; the
// receiver's stream then writes 0. The rank's clear flag is 1 unless a rank with pending operations was aborted: what
// such a rank sends is undefined, and so are the marks behind it.
type flagPage struct {
	name string
	data []byte
	pin  *memory.Pinned[uint32]
	file *os.File // of the process that has made it, or nil
	uses int      // guarded by flagPages.mu
}

const (
	flagPageBytes = 4096
	sectionFlags  = 32
	clearFlag     = 2 * maxRanks // behind the marks of two phases
	testFlag      = clearFlag + 1
)

var flagPages struct {
	mu   sync.Mutex
	open map[string]*flagPage
	idle []*flagPage // that no rank uses, but that may be unpinned only when the devices are idle
}

// newFlagPage creates and maps a page, with one use.
func newFlagPage(dev *device.Device) (*flagPage, error) {
	fd, err := unix.MemfdCreate("chorus flags", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, unsupported("memory that processes share (memfd_create)", err.Error())
	}
	f := os.NewFile(uintptr(fd), "flags")
	if err = f.Truncate(flagPageBytes); err == nil {
		if _, err = unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, pageSeals); err != nil { // an access behind the end of the file would end a process
			err = unsupported("shared memory that keeps its length (F_ADD_SEALS)", err.Error())
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	b, err := mapFlagPage(dev, fmt.Sprintf("/proc/%d/fd/%d %s", os.Getpid(), fd, identity(info)), f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	b.file = f
	return b, nil
}

// identity tells a file from others that have its name at another time.
func identity(info os.FileInfo) string {
	s := info.Sys().(*syscall.Stat_t)
	return fmt.Sprintf("%d:%d", s.Dev, s.Ino)
}

// openFlagPage opens a page of flags that another rank has made, by its name.
func openFlagPage(dev *device.Device, name string) (*flagPage, error) {
	flagPages.mu.Lock()
	b := flagPages.open[name]
	if b != nil {
		b.uses++
	}
	flagPages.mu.Unlock()
	if b != nil {
		return b, nil
	}
	f, err := openNamed(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return mapFlagPage(dev, name, f)
}

// openNamed opens the file of a page of flags.
func openNamed(name string) (*os.File, error) {
	var path, want string
	if _, err := fmt.Sscan(name, &path, &want); err != nil {
		return nil, fmt.Errorf("open a page of flags: %q is no name of one", name)
	}
	info, err := os.Stat(path) // another file must not even be opened
	if err == nil && identity(info) != want {
		return nil, unsupported("processes of one PID namespace", path+" is another file")
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, unsupported("processes that can open each other's files in /proc", err.Error())
	}
	if info, err = f.Stat(); err != nil || identity(info) != want {
		return nil, errors.Join(unsupported("processes of one PID namespace", path+" has become another file"), f.Close())
	}
	if seals, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0); err != nil || seals&pageSeals != pageSeals || info.Size() < flagPageBytes {
		return nil, errors.Join(fmt.Errorf("open a page of flags: %s is another file, or its length may change", path), f.Close())
	}
	return f, nil
}

// pageSeals keep the length of a page of flags.
const pageSeals = unix.F_SEAL_SHRINK

// A presence is a lock on the file of a page of flags, a byte for each rank. The system releases it when the process ends.
type presence struct {
	file *os.File
	rank int
}

func (b *flagPage) enter(rank int) (*presence, error) {
	f, err := openNamed(b.name)
	if err != nil {
		return nil, err
	}
	p := &presence{f, rank}
	if err := p.lock(unix.F_WRLCK); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return p, nil
}

func (p *presence) lock(kind int16) error {
	if err := unix.FcntlFlock(p.file.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: kind, Start: int64(p.rank), Len: 1}); err != nil {
		return fmt.Errorf("lock a page of flags: %w", err)
	}
	return nil
}

// leave says that the rank's streams do not write to the memory of other ranks any more.
func (p *presence) leave() error { return p.lock(unix.F_UNLCK) }

// sees reports whether another rank is present.
func (p *presence) sees(rank int) bool {
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(rank), Len: 1}
	return unix.FcntlFlock(p.file.Fd(), unix.F_OFD_GETLK, &l) == nil && l.Type != unix.F_UNLCK
}

// mapFlagPage maps and pins the page of a file.
func mapFlagPage(dev *device.Device, name string, f *os.File) (*flagPage, error) {
	data, err := unix.Mmap(int(f.Fd()), 0, flagPageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map a page of flags: %w", err)
	}
	pin, err := memory.PinSlice(dev, unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(data))), flagPageBytes/4))
	if err != nil {
		return nil, errors.Join(unsupported("page-locked memory of several processes", err.Error()), unix.Munmap(data))
	}
	b := &flagPage{name: name, data: data, pin: pin, uses: 1}
	flagPages.mu.Lock()
	defer flagPages.mu.Unlock()
	if flagPages.open == nil {
		flagPages.open = map[string]*flagPage{}
	}
	if flagPages.open[name] == nil { // otherwise another rank has mapped it meanwhile; both mappings are of the same page
		flagPages.open[name] = b
	}
	return b, nil
}

// close ends a use. It leaves unpinning, which waits for all devices, to a
// later call if these have work.
func (b *flagPage) close(dev *device.Device) error {
	if b == nil {
		return nil
	}
	flagPages.mu.Lock()
	defer flagPages.mu.Unlock()
	if b.uses--; b.uses == 0 {
		if flagPages.open[b.name] == b {
			delete(flagPages.open, b.name)
		}
		flagPages.idle = append(flagPages.idle, b)
	}
	if !gpu.DeviceOf(dev).System().Quiet() {
		return nil
	}
	var errs []error
	flagPages.idle = slices.DeleteFunc(flagPages.idle, func(x *flagPage) bool {
		if x.pin.Close() != nil { // a device has got work meanwhile
			return false
		}
		errs = append(errs, unix.Munmap(x.data))
		if x.file != nil {
			errs = append(errs, x.file.Close())
		}
		return true
	})
	return errors.Join(errs...)
}

// flag returns a flag of a rank's section.
func (b *flagPage) flag(rank, i int) *uint32 { return &b.pin.Data()[rank*sectionFlags+i] }

// at returns the address of a flag for devices.
func (b *flagPage) at(rank, i int) cudadrv.DevicePtr {
	return cudadrv.DevicePtr(uintptr(unsafe.Pointer(b.flag(rank, i))))
}

// arrivalFlag is the index of the flag of a phase and a sender.
func arrivalFlag(phase, sender int) int { return phase*maxRanks + sender }

// taint clears the clear flags of all ranks.
func (b *flagPage) taint(ranks int) {
	for r := range ranks {
		atomic.StoreUint32(b.flag(r, clearFlag), 0)
	}
}

// release sets all flags of a rank, so that no stream waits for them, and
// reports whether a stream had reset one.
func (b *flagPage) release(rank int) (reset bool) {
	for i := range clearFlag + 1 {
		reset = atomic.SwapUint32(b.flag(rank, i), ^uint32(0)) != ^uint32(0) || reset
	}
	return reset
}
