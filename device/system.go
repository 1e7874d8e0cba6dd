package device

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
)

// A System is one set of devices: the GPUs of this machine, or a set of virtual
// devices. Objects of two systems cannot be used together.
type System struct {
	systemRef
	devs []*Device
}

type systemRef = handle.Ref[*gpu.System]

// SystemConfig configures NewSystem. Zero values mean the values of the environment.
type SystemConfig struct {
	Backend        string // "cuda", "virtual" or "auto"; "" means CHORUS_BACKEND
	VirtualDevices int    // their number; 0 means CHORUS_VIRTUAL_DEVICES
	Seed           uint64 // of the virtual devices' delays; 0 means CHORUS_VIRTUAL_SEED or random
	Faults         string // the virtual devices' fault plan; "" means CHORUS_VIRTUAL_FAULTS

	// VirtualMultiprocessors is the number per virtual device; 0 means 132, as on an H200.
	// Random numbers depend on it.
	VirtualMultiprocessors int
	// VirtualNCCL is the version of the virtual NCCL, such as "2.23.4"; "" means
	// CHORUS_VIRTUAL_NCCL.
	VirtualNCCL string
	// VirtualPCIe are pairs of virtual devices joined by PCIe; NVLink joins all others.
	VirtualPCIe [][2]int
}

var defaultSystem = sync.OnceValues(func() (*System, error) { return NewSystem(nil) })

// Default returns the process's System, which the first call opens according to
// CHORUS_BACKEND. Later calls return the same result or the same error.
func Default() (*System, error) { return defaultSystem() }

// NewSystem opens a set of devices. A device's context is created when it is first used.
// Programs use Default; tests make their own virtual systems.
//
// NewSystem returns an error if the driver has not answered within CHORUS_DRIVER_TIMEOUT.
func NewSystem(cfg *SystemConfig) (*System, error) {
	limit, err := env.DriverTimeout.Duration()
	if err == nil && limit <= 0 {
		err = fmt.Errorf("%s is %v: want a positive duration", env.DriverTimeout.Name, limit)
	}
	if err != nil {
		return nil, fmt.Errorf("device: %w", err)
	}
	type result struct {
		s   *System
		err error
	}
	r, returned := poll.Within(limit, func() result {
		s, err := newSystem(cfg, limit)
		return result{s, err}
	})
	if !returned {
		return nil, fmt.Errorf("device: open the devices: %w", &gpu.HangError{Op: "the driver's initialization", Limit: limit})
	}
	return r.s, r.err
}

func newSystem(cfg *SystemConfig, callTimeout time.Duration) (*System, error) {
	c := *cmp.Or(cfg, new(SystemConfig))
	b, err := gpu.OpenBackend(&gpu.BackendConfig{Backend: c.Backend, Devices: c.VirtualDevices, Seed: c.Seed, Faults: c.Faults,
		Multiprocessors: c.VirtualMultiprocessors, NCCL: c.VirtualNCCL, PCIe: c.VirtualPCIe})
	if err != nil {
		return nil, fmt.Errorf("device: %w", err)
	}
	if stacks, err := env.LeakStacks.OneOf("yes", "no"); err != nil {
		return nil, fmt.Errorf("device: %w", err)
	} else if stacks == "yes" {
		handle.Trace.Store(true)
	}
	if err := timeline.StartFromEnv(); err != nil {
		return nil, fmt.Errorf("device: %w", err)
	}
	s := &System{}
	sys := gpu.NewSystem(b, errorsOf{s}, callTimeout)
	s.systemRef = handle.NewRef(sys)
	n, r := b.Driver.DeviceGetCount()
	if r != cudadrv.Success {
		return nil, s.fail("cuDeviceGetCount", -1, r)
	}
	for i := range n {
		h, r := b.Driver.DeviceGet(i)
		if r != cudadrv.Success {
			return nil, s.fail("cuDeviceGet", int(i), r)
		}
		s.devs = append(s.devs, &Device{ref: sys.Add(h), sys: s})
	}
	if len(s.devs) == 0 {
		return nil, s.fail("cuDeviceGetCount", -1, cudadrv.ErrorNoDevice)
	}
	return s, nil
}

// Backend returns "cuda" or "virtual".
func (s *System) Backend() string { return gpu.SystemOf(s).Name }

// Devices returns all devices, by ordinal.
func (s *System) Devices() []*Device { return append([]*Device(nil), s.devs...) }

// Open returns the device with the ordinal, which counts from 0 over the devices that
// CUDA_VISIBLE_DEVICES selects. It is cheap: the device's context is created when it is
// first used.
func (s *System) Open(ordinal int) (*Device, error) {
	if s == nil {
		return nil, fmt.Errorf("device: open device %d: no system given", ordinal)
	}
	if ordinal < 0 || ordinal >= len(s.devs) {
		return nil, fmt.Errorf("device: open device %d: there are %d (0 to %d): %w",
			ordinal, len(s.devs), len(s.devs)-1, ErrorInvalidDevice)
	}
	return s.devs[ordinal], nil
}

// Reports returns the errors that strict virtual devices have detected so far.
// These are accesses to memory that the stream must not use, with the earlier
// free or use, and accesses of two streams to a block of memory without an
// event between them. The cause of a sticky error is always among them, unless
// a fault plan made it. On CUDA it has the reports of the sanitizer, which
// CHORUS_SANITIZER=1 switches on (torch.cuda._sanitizer). They name both calls,
// with file and line. Unlike virtual devices, the sanitizer does not lose the
// device.
func (s *System) Reports() []string {
	var reports []string
	if m := gpu.SystemOf(s).Machine; m != nil {
		reports = m.Reports()
	}
	if x := gpu.SystemOf(s).Sanitizer; x != nil {
		reports = append(reports, x.Reports()...)
	}
	return reports
}

// Close releases the primary contexts that were used. Close every object on the
// devices first: later calls that need a context return ErrClosed. Close is
// idempotent, and does not close the System of Default, which stays open until
// the process ends.
func (s *System) Close() error {
	if s == nil {
		return nil
	}
	return gpu.SystemOf(s).Close()
}

// Open returns a device of the default System; see System.Open.
func Open(ordinal int) (*Device, error) {
	s, err := Default()
	if err != nil {
		return nil, err
	}
	return s.Open(ordinal)
}

// All returns the devices of the default System. Unlike torch.cuda.device_count, it
// reports why there are none.
func All() ([]*Device, error) {
	s, err := Default()
	if err != nil {
		return nil, err
	}
	return s.Devices(), nil
}

// Count returns how many devices a System that is opened now would have; it queries them
// again on each call. If NVML is available, Count does not initialize the driver, so that
// a later change of CUDA_VISIBLE_DEVICES by the process still takes effect; it never
// creates a context. It mirrors torch.cuda.device_count before CUDA is initialized.
// Without any GPU it returns 0 or an error that says which library is missing.
func Count() (int, error) {
	n, err := gpu.CountDevices()
	if err != nil {
		return 0, fmt.Errorf("device: count: %w", err)
	}
	return n, nil
}

// A Library is a shared library that Chorus uses.
type Library struct {
	Name    string // "CUDA driver", "NCCL", "NVRTC", "cuBLAS", "cuBLASLt" or "cuFile"
	Version string // as the library reports it, or ""
	Path    string // the file that was loaded, or "built in" for virtual devices
	Err     error  // why it cannot be used, or nil
}

// Libraries opens every library that Chorus can use and returns which file each one came
// from. If a library is missing, its Err is set.
func (s *System) Libraries() []Library {
	sys := gpu.SystemOf(s)
	libs := []Library{s.describe("CUDA driver", sys.Driver, nil, func() (string, error) {
		v, r := sys.Driver.DriverGetVersion()
		if r != cudadrv.Success {
			return "", s.fail("cuDriverGetVersion", -1, r)
		}
		return fmt.Sprintf("CUDA %d.%d", v/1000, v%1000/10), nil
	})}
	nccl, err := sys.NCCL()
	libs = append(libs, s.describe("NCCL", nccl, err, func() (string, error) {
		v, r := nccl.GetVersion()
		if r != ncclapi.Success {
			return "", fmt.Errorf("ncclGetVersion: %w", r)
		}
		return ncclapi.VersionText(v), nil
	}))
	if sys.Machine == nil { // virtual devices have no compiler
		rtc, err := sys.NVRTC()
		libs = append(libs, s.describe("NVRTC", rtc, err, func() (string, error) {
			major, minor, r := rtc.Version()
			if r != cudacc.Success {
				return "", fmt.Errorf("nvrtcVersion: %w", r)
			}
			return fmt.Sprintf("%d.%d", major, minor), nil
		}))
	}
	blas, err := sys.CUBLAS()
	libs = append(libs, s.describe("cuBLAS", blas, err, func() (string, error) { return "", nil }))
	lt, err := sys.CUBLASLt()
	libs = append(libs, s.describe("cuBLASLt", lt, err, func() (string, error) {
		v := lt.GetVersion()
		return fmt.Sprintf("%d.%d.%d", v/10000, v/100%100, v%100), nil
	}))
	file, err := sys.CuFile()
	return append(libs, s.describe("cuFile", file, err, func() (string, error) {
		v, r := file.GetVersion()
		if r != cufileapi.Success {
			return "", fmt.Errorf("cuFileGetVersion: %w", r)
		}
		return cufileapi.VersionText(v), nil
	}))
}

func (s *System) describe(name string, lib any, err error, version func() (string, error)) Library {
	l := Library{Name: name, Err: err}
	if err != nil {
		return l
	}
	l.Path = "built in"
	if f, ok := lib.(interface{ Path() string }); ok {
		l.Path = f.Path()
	}
	l.Version, l.Err = version()
	return l
}

// A SyncDebug says how to handle a call that makes the host wait for a stream;
// torch.cuda.set_sync_debug_mode.
type SyncDebug int32

// The modes. Any other value is SyncError.
const (
	SyncOff   = SyncDebug(gpu.SyncOff)   // the call waits; torch's "default"
	SyncWarn  = SyncDebug(gpu.SyncWarn)  // the call is logged through log/slog, and waits
	SyncError = SyncDebug(gpu.SyncError) // the call fails with ErrSynchronizing and does not wait
)

// ErrSynchronizing is the error of calls that would make the host wait under SyncError. It
// is wrapped with the name of the call.
var ErrSynchronizing = gpu.ErrSynchronizing

// SetSyncDebug detects calls that make the host wait although it should run ahead of its
// devices. It applies to all devices of the System and all goroutines until restore is
// called, which restores the previous mode:
//
//	defer sys.SetSyncDebug(device.SyncError)()
//
// As in torch, Stream.Sync and the copies to and from ordinary host memory are detected
// before they enqueue anything. Device.Sync and Event.Sync, whose purpose is to wait, are
// not detected, nor is Query, which does not wait.
func (s *System) SetSyncDebug(mode SyncDebug) (restore func()) {
	before := gpu.SystemOf(s).SetSyncDebug(int32(mode))
	return func() { gpu.SystemOf(s).SetSyncDebug(before) }
}

// SyncDebug returns the mode; torch.cuda.get_sync_debug_mode.
func (s *System) SyncDebug() SyncDebug { return SyncDebug(gpu.SystemOf(s).SyncDebug()) }
