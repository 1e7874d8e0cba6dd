package machine

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// newShareable creates a block that other processes can open. If the system has
// no more files or addresses, the block is private.
func newShareable(dev *Device, n uint64) *Block {
	f, _, err := newMemFile(dev, n)
	if err != nil {
		return newBlock(dev, n, blockAlign)
	}
	r, err := mapFile(f, n)
	if err != nil {
		f.Close()
		return newBlock(dev, n, blockAlign)
	}
	return &Block{dev: dev, size: n, data: r.bytes(n), region: r, file: f, clean: newPages(n)}
}

// A ticket is the content of an IpcMemHandle: the process that owns the memory
// and its file descriptor.
type ticket struct {
	Magic   [8]byte
	Machine uint64
	PID     uint32
	FD      int32
	Start   uint64 // start time of the process, because its number may be reused
	Serial  uint64
}

var ticketMagic = [8]byte([]byte("chorusvm"))

func (t *ticket) handle() (h cudadrv.IpcMemHandle) {
	var text bytes.Buffer
	_ = binary.Write(&text, binary.LittleEndian, t) // a buffer does not fail
	copy(h[:], text.Bytes())
	return h
}

func readTicket(h cudadrv.IpcMemHandle) (t ticket, ok bool) {
	_ = binary.Read(bytes.NewReader(h[:]), binary.LittleEndian, &t) // h is long enough
	return t, t.Magic == ticketMagic
}

// startOf returns the start time of a process in the system's ticks since boot,
// or 0 if the process does not exist.
func startOf(pid uint32) (ticks uint64) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	return startIn(text)
}

// startIn reads the start time in the content of /proc/<pid>/stat. The second field is a name
// in parentheses that may contain any byte.
func startIn(text []byte) (ticks uint64) {
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) > 19 {
		_, _ = fmt.Sscan(fields[19], &ticks)
	}
	return ticks
}

// open opens the file of a ticket.
func (t *ticket) open() (*os.File, label, cudadrv.Result) {
	if start := startOf(t.PID); start == 0 || start != t.Start {
		return nil, label{}, cudadrv.ErrorMapFailed
	}
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", t.PID, t.FD), os.O_RDWR, 0)
	if err != nil {
		return nil, label{}, cudadrv.ErrorMapFailed
	}
	l, ok := readLabel(f)
	if !ok || l.Serial != t.Serial { // the memory was freed, and the descriptor was reused
		f.Close()
		return nil, label{}, cudadrv.ErrorMapFailed
	}
	return f, l, cudadrv.Success
}

// IpcGetMemHandle returns the same handle for all addresses of a block.
func (d driver) IpcGetMemHandle(p cudadrv.DevicePtr) (h cudadrv.IpcMemHandle, r cudadrv.Result) {
	c, r := d.begin("cuIpcGetMemHandle")
	if r != cudadrv.Success {
		return h, r
	}
	defer c.end()
	b, _ := d.m.Find(p)
	if b == nil || b.dev == nil || b.freeing || b.pool != nil || b.public || b.space != nil || b.opened != nil {
		return h, cudadrv.ErrorInvalidValue
	}
	if b.file == nil {
		return h, cudadrv.ErrorNotSupported
	}
	l, ok := readLabel(b.file)
	if !ok {
		return h, cudadrv.ErrorOperatingSystem
	}
	b.clean.lay(b.data, 0, b.size) // the other process cannot poison pages at their first touch
	t := ticket{Magic: ticketMagic, Machine: d.m.id, PID: uint32(os.Getpid()), FD: int32(b.file.Fd()),
		Start: startOf(uint32(os.Getpid())), Serial: l.Serial}
	return t.handle(), cudadrv.Success
}

// An opened is an opened handle; count is the number of opens.
type opened struct {
	key   openedKey
	count int
	addr  uint64
}

type openedKey struct {
	handle cudadrv.IpcMemHandle
	by     *Device
}

// IpcOpenMemHandle rejects handles of the same machine, like CUDA rejects handles
// of the same process.
func (d driver) IpcOpenMemHandle(h cudadrv.IpcMemHandle, flags uint32) (cudadrv.DevicePtr, cudadrv.Result) {
	c, r := d.begin("cuIpcOpenMemHandle")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	t, ok := readTicket(h)
	switch {
	case !ok || flags != cudadrv.IpcMemLazyEnablePeerAccess:
		return 0, cudadrv.ErrorInvalidValue
	case t.Machine == d.m.id:
		return 0, cudadrv.ErrorInvalidContext
	}
	key := openedKey{h, c.dev}
	if x := d.m.opened[key]; x != nil {
		x.count++
		return cudadrv.DevicePtr(x.addr), cudadrv.Success
	}
	b, r := d.m.openTicket(&t)
	if r != cudadrv.Success {
		return 0, r
	}
	if b.dev != c.dev {
		c.dev.peers[b.dev.ordinal] = true
	}
	b.opened = &opened{key: key, count: 1, addr: b.addr}
	d.m.opened[key] = b.opened
	return cudadrv.DevicePtr(b.addr), cudadrv.Success
}

// openTicket maps the memory of another process or machine.
func (m *Machine) openTicket(t *ticket) (*Block, cudadrv.Result) {
	f, l, r := t.open()
	if r != cudadrv.Success {
		return nil, r
	}
	defer f.Close() // the mapping keeps the memory alive
	dev := m.deviceWith(l.UUID)
	if dev == nil {
		return nil, cudadrv.ErrorInvalidDevice
	}
	where, err := mapFile(f, l.Bytes)
	if err != nil {
		return nil, cudadrv.ErrorMapFailed
	}
	addr, ok := dev.arena.place(l.Bytes, blockAlign)
	if !ok {
		return nil, cudadrv.ErrorOutOfMemory
	}
	b := &Block{dev: dev, addr: addr, size: l.Bytes, data: where.bytes(l.Bytes), region: where}
	dev.arena.blocks = append(dev.arena.blocks, b)
	return b, cudadrv.Success
}

// IpcCloseMemHandle does not wait: a use that the host has not waited for is a race.
func (d driver) IpcCloseMemHandle(p cudadrv.DevicePtr) cudadrv.Result {
	c, r := d.beginEnding("cuIpcCloseMemHandle")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	b, _ := d.m.Find(p)
	if b == nil || b.opened == nil || b.freeing || b.addr != uint64(p) {
		return cudadrv.ErrorInvalidValue
	}
	if b.opened.count--; b.opened.count > 0 {
		return cudadrv.Success
	}
	delete(d.m.opened, b.opened.key)
	b.leave()
	return b.freeNow(c.name)
}

// resetOpened closes the handles that the device's context opened. m.mu is held.
func (d *Device) resetOpened() {
	for key, x := range d.m.opened {
		b, _ := d.m.Find(cudadrv.DevicePtr(x.addr))
		if key.by != d && b.dev != d {
			continue
		}
		delete(d.m.opened, key)
		b.leave()
		b.retire("cuDevicePrimaryCtxRelease")
	}
}

func (d driver) MemGetAddressRange(p cudadrv.DevicePtr) (base cudadrv.DevicePtr, n uintptr, r cudadrv.Result) {
	c, r := d.begin("cuMemGetAddressRange")
	if r != cudadrv.Success {
		return 0, 0, r
	}
	defer c.end()
	b, _ := d.m.Find(p)
	switch {
	case b == nil || b.dev == nil || b.freeing:
		return 0, 0, cudadrv.ErrorNotFound
	case b.space == nil:
		return cudadrv.DevicePtr(b.addr), uintptr(b.size), cudadrv.Success
	}
	list := b.space.within(uint64(p)-b.addr, 1)
	if len(list) == 0 {
		return 0, 0, cudadrv.ErrorNotFound
	}
	return cudadrv.DevicePtr(b.addr + list[0].lo), uintptr(list[0].hi - list[0].lo), cudadrv.Success
}

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
