package doctor

import (
	"context"
	"errors"
	"fmt"
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

// NewHost returns this machine.
func NewHost() (*Host, error) {
	name, err := os.Hostname()
	if err != nil {
		return nil, fmt.Errorf("doctor: the name of this host: %w", err)
	}
	env := map[string]string{}
	for _, e := range os.Environ() {
		k, v, _ := strings.Cut(e, "=")
		env[k] = v
	}
	return &Host{
		Name: name, Local: name, Root: rootFS{os.DirFS("/")}, Env: env, Interval: time.Second,
		SpaceOf: spaceOf, WriteSpeed: writeSpeed, OpenDevice: openDevice, KernelLog: kernelLog, ClockStatus: clockStatus,
		Interfaces: func() ([]Interface, error) {
			list, err := net.Interfaces()
			if err != nil {
				return nil, err
			}
			return interfacesOf(list)
		},
		Lookup: func(ctx context.Context, name string) ([]netip.Addr, error) {
			ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			return net.DefaultResolver.LookupNetIP(ctx, "ip", name)
		},
		CUDA: sync.OnceValue(startCUDA), NCCL: sync.OnceValues(loadNCCL), NVML: listGPUs,
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

func spaceOf(path string) (*Space, error) {
	var s syscall.Statfs_t
	if err := syscall.Statfs(path, &s); err != nil {
		return nil, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return &Space{s.Blocks * uint64(s.Bsize), s.Bavail * uint64(s.Bsize)}, nil
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
func kernelLog() ([]KernelLine, error) {
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
	var lines []KernelLine
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
func kernelLine(record string, now time.Duration) (KernelLine, bool) {
	head, text, ok := strings.Cut(record, ";")
	f := strings.Split(head, ",")
	if !ok || len(f) < 3 {
		return KernelLine{}, false
	}
	us, err := strconv.ParseInt(f[2], 10, 64)
	if err != nil {
		return KernelLine{}, false
	}
	text, _, _ = strings.Cut(text, "\n") // further lines hold the device
	return KernelLine{Age: now - time.Duration(us)*time.Microsecond, Text: text}, true
}

// startCUDA initializes the driver. It does not create a context.
func startCUDA() *CUDA {
	lib, err := cudadrv.Open()
	if err != nil {
		return &CUDA{Err: err}
	}
	r := lib.Init()
	c := &CUDA{Path: lib.Path(), Code: int(r)}
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

func loadNCCL() (*Library, error) {
	lib, err := ncclapi.Open()
	if err != nil {
		return nil, err
	}
	return &Library{Path: lib.Path(), Version: ncclapi.VersionText(lib.Version())}, nil
}

func listGPUs() ([]*GPU, error) {
	api, err := nvml.Open()
	if err != nil {
		return nil, err
	}
	uuids, err := api.UUIDs()
	if err != nil {
		return nil, err
	}
	gpus := make([]*GPU, len(uuids))
	for i, u := range uuids {
		d, err := api.Device(u)
		if err != nil {
			return nil, err
		}
		health, err := nvml.HealthOf(d)
		if err != nil {
			return nil, err
		}
		gpus[i] = &GPU{Index: i, UUID: u, Device: d, Health: health}
	}
	return gpus, nil
}
