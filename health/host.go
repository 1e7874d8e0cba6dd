package health

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/nvml"
)

// A Host is the source of the evidence: files, the environment, the driver and its libraries. [NewHost]
// returns this machine. A tool in a container that mounts the file system of its host replaces Root, for example
// by os.DirFS("/host").
type Host struct {
	Name  string            // in the results
	Local string            // the name that the host has for itself
	Root  fs.FS             // the file system from /, with /proc, /sys, /dev and /etc
	Env   map[string]string // the environment
	Ranks int               // processes on this host; 0: one for each GPU

	Measured *Measured // the results that checks with Measures need; nil: not measured

	spaceOf     func(path string) (*space, error)
	writeSpeed  func(ctx context.Context, dir string) (bytesPerSecond float64, err error)
	openDevice  func(path string) error
	kernelLog   func() ([]logLine, error)
	clockStatus func() (synchronized bool, err error)
	interfaces  func() ([]nic, error)
	lookup      func(ctx context.Context, name string) ([]netip.Addr, error)
	cuda        func() *cudaStatus
	nccl        func() (*library, error)
	listGPUs    func() ([]*gpu, error)
	interval    time.Duration // between two readings of a counter

	once    sync.Once
	gpuList []*gpu
	gpuErr  error
}

// A space is the size of a file system.
type space struct{ Total, Free uint64 }

// A logLine is a line of the kernel's log.
type logLine struct {
	Age  time.Duration
	Text string
}

// A nic is a network interface with its addresses.
type nic struct {
	Name  string
	MTU   int
	Up    bool
	Addrs []netip.Prefix
}

// A library is a loaded library.
type library struct{ Path, Version string }

// A cudaStatus is the state of the CUDA driver after cuInit.
type cudaStatus struct {
	Path    string // of libcuda, with links resolved
	Err     error  // of loading the library
	Code    int    // CUresult of cuInit
	Meaning string // of Code
	DMABuf  bool   // whether all GPUs export memory as DMA buffers
}

// A gpu is a GPU of the host, with NVML's index.
type gpu struct {
	Index int
	UUID  string
	nvml.Device
	nvml.Health
}

// Measured has the results of copies, and of chorus perf on all GPUs together.
type Measured struct {
	Copies                  []Copy
	Peers, Pairs, AllReduce Speed
	Pinned                  Speed
}

// A Speed is the verdict of a benchmark, or the reason for its absence.
type Speed struct {
	OK      bool
	Reason  string
	Missing string
}

// gpus returns the GPUs, or the reason for their absence.
func (h *Host) gpus() ([]*gpu, error) {
	h.once.Do(func() {
		if reason := h.noGPU(); reason != "" {
			h.gpuErr = errors.New(reason)
			return
		}
		h.gpuList, h.gpuErr = h.listGPUs()
	})
	return h.gpuList, h.gpuErr
}

// noGPU returns the reason if the host has no GPU that NVML could find, or "".
func (h *Host) noGPU() string {
	if h.hasDriver() || len(h.pciGPUs()) > 0 {
		return ""
	}
	return "this host has no NVIDIA GPU"
}

// hasDriver reports whether the kernel driver is loaded.
func (h *Host) hasDriver() bool {
	_, err := fs.Stat(h.Root, "proc/driver/nvidia/version")
	return err == nil
}

// pciGPUs returns the PCI addresses of the GPUs on the bus.
func (h *Host) pciGPUs() []string {
	const nvidia, display = "0x10de", "0x03"
	return h.pciDevices(nvidia, display)
}

// pciDevices returns the PCI addresses of the devices of a vendor whose class has a prefix.
func (h *Host) pciDevices(vendor, class string) (list []string) {
	dirs, _ := fs.Glob(h.Root, "sys/bus/pci/devices/*") // the pattern is valid
	for _, dir := range dirs {
		v, err := h.read(dir + "/vendor")
		if err != nil || v != vendor {
			continue
		}
		if c, err := h.read(dir + "/class"); err == nil && strings.HasPrefix(c, class) {
			list = append(list, dir[strings.LastIndexByte(dir, '/')+1:])
		}
	}
	return list
}

// ranks returns the number of processes that use this host.
func (h *Host) ranks() int {
	if h.Ranks > 0 {
		return h.Ranks
	}
	gpus, _ := h.gpus()
	return max(len(gpus), 1)
}

// getenv returns a variable, or "".
func (h *Host) getenv(name string) string { return h.Env[name] }

// mostText limits the size of a file. /proc/modules and /proc/cpuinfo have up to 1 MiB.
const mostText = 4 << 20

// read returns the text of a file without spaces at its ends.
func (h *Host) read(name string) (string, error) {
	b, err := h.readBytes(name)
	return strings.TrimSpace(string(b)), err
}

// readBytes returns the content of a regular file. Any other file is an error,
// because a pipe could block.
func (h *Host) readBytes(name string) ([]byte, error) {
	f, err := h.Root.Open(name)
	if err != nil {
		return nil, rooted(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, rooted(err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("/%s is not a regular file", name)
	}
	b, err := io.ReadAll(io.LimitReader(f, mostText))
	return b, rooted(err)
}

// rooted adds the slash to the path of an error of the file system.
func rooted(err error) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*fs.PathError](err); ok && !strings.HasPrefix(e.Path, "/") {
		return &fs.PathError{Op: e.Op, Path: "/" + e.Path, Err: e.Err}
	}
	return err
}

// readInt returns the number in a file.
func (h *Host) readInt(name string) (int, error) {
	s, err := h.read(name)
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, fmt.Errorf("/%s has %q: want a number", name, s)
	}
	return n, nil
}

// absent reports whether an error says that a file does not exist.
func absent(err error) bool { return errors.Is(err, fs.ErrNotExist) }

// isLoopback reports whether all addresses are of this host only.
func isLoopback(addrs []netip.Addr) bool {
	for _, a := range addrs {
		if !a.Unmap().IsLoopback() {
			return false
		}
	}
	return len(addrs) > 0
}

// wait waits between two readings of a counter.
func (h *Host) wait(ctx context.Context) error {
	select {
	case <-time.After(h.interval):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// interfacesOf converts the interfaces of package net.
func interfacesOf(list []net.Interface) ([]nic, error) {
	var out []nic
	for _, i := range list {
		addrs, err := i.Addrs()
		if err != nil {
			return nil, err
		}
		x := nic{Name: i.Name, MTU: i.MTU, Up: i.Flags&net.FlagUp != 0}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				x.Addrs = append(x.Addrs, p)
			}
		}
		out = append(out, x)
	}
	return out, nil
}

// bytesText writes a number of bytes with a binary unit.
func bytesText(n uint64) string {
	for _, u := range []struct {
		name string
		size uint64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.size {
			return fmt.Sprintf("%.4g %s", float64(n)/float64(u.size), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}

// NewHost returns this machine. It reads only the name of the host and the
// environment, and the checks read everything else, each time that they run.
func NewHost() (*Host, error) {
	name, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("health: the name of this host: %w", err)
	}
	env := map[string]string{}
	for _, e := range os.Environ() {
		k, v, _ := strings.Cut(e, "=")
		env[k] = v
	}
	return &Host{
		Name: name, Local: name, Root: rootFS{os.DirFS("/")}, Env: env, interval: time.Second,
		spaceOf: spaceOf, writeSpeed: writeSpeed, openDevice: openDevice, kernelLog: kernelLog, clockStatus: clockStatus,
		interfaces: func() ([]nic, error) {
			list, err := net.Interfaces()
			if err != nil {
				return nil, err
			}
			return interfacesOf(list)
		},
		lookup: func(ctx context.Context, name string) ([]netip.Addr, error) {
			ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			return net.DefaultResolver.LookupNetIP(ctx, "ip", name)
		},
		cuda: sync.OnceValue(startCUDA), nccl: sync.OnceValues(loadNCCL), listGPUs: listGPUs,
	}, nil
}

// rootFS is the file system of the host. Open does not wait for the other end of a pipe.
type rootFS struct{ fs.FS }

func (r rootFS) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	return os.OpenFile("/"+name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
}

func (r rootFS) ReadLink(name string) (string, error)       { return fs.ReadLink(r.FS, name) }
func (r rootFS) Lstat(name string) (fs.FileInfo, error)     { return fs.Lstat(r.FS, name) }
func (r rootFS) Stat(name string) (fs.FileInfo, error)      { return fs.Stat(r.FS, name) }
func (r rootFS) ReadDir(name string) ([]fs.DirEntry, error) { return fs.ReadDir(r.FS, name) }

func spaceOf(path string) (*space, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return nil, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return &space{s.Blocks * uint64(s.Bsize), s.Bavail * uint64(s.Bsize)}, nil
}

// openDevice opens and closes a device file for reading and writing.
func openDevice(path string) error {
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_NONBLOCK|syscall.O_NOCTTY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return syscall.Close(fd)
}

// clockStatus reads the kernel's state of the clock without changing it.
func clockStatus() (bool, error) {
	const unsynchronized = 0x40 // STA_UNSYNC
	var t syscall.Timex
	if _, err := syscall.Adjtimex(&t); err != nil {
		return false, os.NewSyscallError("adjtimex", err)
	}
	return t.Status&unsynchronized == 0, nil
}

// mostLines limits the lines that are read from the kernel's log.
const mostLines = 200_000

// kernelLog reads the records of /dev/kmsg that exist.
func kernelLog() ([]logLine, error) {
	const path = "/dev/kmsg"
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer syscall.Close(fd)
	now, err := uptime()
	if err != nil {
		return nil, err
	}
	var lines []logLine
	b := make([]byte, 8192) // a record is shorter
	for range mostLines {
		n, err := syscall.Read(fd, b)
		switch {
		case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EINTR): // records were overwritten
			continue
		case errors.Is(err, syscall.EAGAIN), err == nil && n == 0:
			return lines, nil
		case err != nil:
			return nil, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		if l, ok := kernelLine(string(b[:n]), now); ok {
			lines = append(lines, l)
		}
	}
	return lines, nil
}

func uptime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0, err
	}
	return parseSeconds(strings.Fields(string(b)))
}

func parseSeconds(fields []string) (time.Duration, error) {
	if len(fields) == 0 {
		return 0, errors.New("/proc/uptime is empty")
	}
	s, err := strconv.ParseFloat(fields[0], 64)
	return time.Duration(s * float64(time.Second)), err
}

// kernelLine parses a record such as "4,1234,5678901,-;text". The third number is the time since
// the start in µs.
func kernelLine(record string, now time.Duration) (logLine, bool) {
	head, text, ok := strings.Cut(record, ";")
	f := strings.Split(head, ",")
	if !ok || len(f) < 3 {
		return logLine{}, false
	}
	us, err := strconv.ParseInt(f[2], 10, 64)
	if err != nil {
		return logLine{}, false
	}
	text, _, _ = strings.Cut(text, "\n") // further lines hold the device
	return logLine{Age: now - time.Duration(us)*time.Microsecond, Text: text}, true
}

// startCUDA initializes the driver, without creating a context.
func startCUDA() *cudaStatus {
	lib, err := cudadrv.Open()
	if err != nil {
		return &cudaStatus{Err: err}
	}
	r := lib.Init()
	c := &cudaStatus{Path: lib.Path(), Code: int(r)}
	if r != cudadrv.Success {
		c.Meaning = r.Meaning()
		return c
	}
	const dmaBufSupported = 124 // CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
	n, r := lib.DeviceGetCount()
	c.DMABuf = r == cudadrv.Success && n > 0
	for i := range n {
		d, r := lib.DeviceGet(i)
		v, r2 := lib.DeviceGetAttribute(dmaBufSupported, d)
		c.DMABuf = c.DMABuf && r == cudadrv.Success && r2 == cudadrv.Success && v != 0
	}
	return c
}

func loadNCCL() (*library, error) {
	lib, err := ncclapi.Open()
	if err != nil {
		return nil, err
	}
	return &library{Path: lib.Path(), Version: ncclapi.VersionText(lib.Version())}, nil
}

func listGPUs() ([]*gpu, error) {
	api, err := nvml.Open()
	if err != nil {
		return nil, err
	}
	return gpusOf(api)
}

// gpusOf lists the GPUs of NVML.
func gpusOf(api nvml.API) ([]*gpu, error) {
	uuids, err := api.UUIDs()
	if err != nil {
		return nil, err
	}
	gpus := make([]*gpu, len(uuids))
	for i, u := range uuids {
		d, err := api.Device(u)
		if err != nil {
			return nil, err
		}
		health, err := nvml.HealthOf(d)
		if err != nil {
			return nil, err
		}
		gpus[i] = &gpu{Index: i, UUID: u, Device: d, Health: health}
	}
	return gpus, nil
}
