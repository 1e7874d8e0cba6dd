package device

import (
	"fmt"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/backend"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
)

// A System is one set of devices: the GPUs of this machine, or a set of virtual
// devices. Objects of two systems cannot be used together.
type System struct {
	systemRef
	devs []*Device
}

type systemRef = gpu.SystemRef

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

// Default returns the process's System. The first call opens it according to
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
	var c SystemConfig
	if cfg != nil {
		c = *cfg
	}
	b, err := backend.Open(&backend.Config{Backend: c.Backend, Devices: c.VirtualDevices, Seed: c.Seed, Faults: c.Faults,
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
	sys, ref := gpu.NewSystem(b, errorsOf{s}, callTimeout)
	s.systemRef = ref
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
	if ordinal < 0 || ordinal >= len(s.devs) {
		return nil, fmt.Errorf("device: open device %d: there are %d (0 to %d): %w",
			ordinal, len(s.devs), len(s.devs)-1, ErrorInvalidDevice)
	}
	return s.devs[ordinal], nil
}

// Reports returns the errors that strict virtual devices have detected so far. These are
// accesses to memory that the stream must not use, with the earlier free or use, and accesses
// of two streams to a block of memory without an event between them. The cause of a sticky error
// is always among them, unless a fault plan made it. On CUDA it has the reports of the sanitizer,
// which CHORUS_SANITIZER=1 switches on (torch.cuda._sanitizer). They name both calls, with file
// and line. The sanitizer does not lose the device.
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

// Close releases the primary contexts that were used. Close every object on the devices
// first: later calls that need a context return ErrClosed. Close is idempotent. The System
// of Default stays open until the process ends.
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
	n, err := backend.Count()
	if err != nil {
		return 0, fmt.Errorf("device: count: %w", err)
	}
	return n, nil
}
