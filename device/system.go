package device

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/backend"
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/cufileapi"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/nvrtcapi"
	"github.com/gochorus/chorus/internal/virtual"
)

// A System is one set of devices: the GPUs of this machine, or a set of virtual
// devices. Objects of two systems cannot be used together.
type System struct {
	sys  *backend.System
	devs []*Device

	closed    atomic.Bool
	syncDebug atomic.Int32 // a SyncDebug
	local     kept.Map     // what other packages keep for all devices; see Local
}

// SystemConfig says which devices NewSystem opens. The zero value means what
// the environment says.
type SystemConfig struct {
	Backend        string // "cuda", "virtual" or "auto"; "" is CHORUS_BACKEND
	VirtualDevices int    // how many; 0 is CHORUS_VIRTUAL_DEVICES
	Seed           uint64 // of the virtual devices' delays; 0 is CHORUS_VIRTUAL_SEED or random
	Faults         string // the virtual devices' fault plan; "" is CHORUS_VIRTUAL_FAULTS

	// VirtualMultiprocessors is how many each virtual device has; 0 is 132, as an
	// H200. Random numbers depend on it.
	VirtualMultiprocessors int
	// VirtualNCCL is the version of the virtual NCCL, such as "2.23.4"; "" is
	// CHORUS_VIRTUAL_NCCL.
	VirtualNCCL string
	// VirtualPCIe are pairs of virtual devices that PCIe joins; NVLink joins all others.
	VirtualPCIe [][2]int
}

var defaultSystem = sync.OnceValues(func() (*System, error) { return NewSystem(nil) })

// Default returns the process's System, opened on the first call as
// CHORUS_BACKEND says. Later calls return the same result or the same error.
func Default() (*System, error) { return defaultSystem() }

// NewSystem opens a set of devices. No context is created on any device before
// it is used. Programs use Default; tests make virtual systems of their own.
func NewSystem(cfg *SystemConfig) (*System, error) {
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
	s := &System{sys: b}
	n, r := b.Driver.DeviceGetCount()
	if r != cudadrv.Success {
		return nil, s.fail("cuDeviceGetCount", -1, r)
	}
	for i := range n {
		h, r := b.Driver.DeviceGet(i)
		if r != cudadrv.Success {
			return nil, s.fail("cuDeviceGet", int(i), r)
		}
		s.devs = append(s.devs, &Device{sys: s, ordinal: int(i), handle: h})
	}
	if len(s.devs) == 0 {
		return nil, s.fail("cuDeviceGetCount", -1, cudadrv.ErrorNoDevice)
	}
	return s, nil
}

// Backend returns "cuda" or "virtual".
func (s *System) Backend() string { return s.sys.Name }

// Devices returns all devices, by ordinal.
func (s *System) Devices() []*Device { return append([]*Device(nil), s.devs...) }

// Open returns the device with the ordinal, which counts from 0 over the
// devices that CUDA_VISIBLE_DEVICES leaves. It costs nothing: the device's
// context is created when it is first used.
func (s *System) Open(ordinal int) (*Device, error) {
	if ordinal < 0 || ordinal >= len(s.devs) {
		return nil, fmt.Errorf("device: open device %d: there are %d (0 to %d): %w",
			ordinal, len(s.devs), len(s.devs)-1, ErrorInvalidDevice)
	}
	return s.devs[ordinal], nil
}

// Reports returns what strict virtual devices found wrong so far: every access of memory
// that is not the stream's to use, with what was freed or used before, and every two
// streams that touched a block of memory without an event between them. The cause of a
// sticky error is always among them, unless a fault plan made it. It is empty on CUDA.
func (s *System) Reports() []string {
	if s.sys.Machine == nil {
		return nil
	}
	return s.sys.Machine.Reports()
}

// Local returns what was stored for the key, making it on first use, as
// Device.Local does for one device. Close closes what has a method Close, before
// the contexts go. For Chorus's own packages.
func (s *System) Local(key *kept.Key, make func() any) any {
	if v, ok := s.local.Load(key); ok {
		return v
	}
	return s.local.LoadOrStore(key, make())
}

// Close releases the primary contexts that were used. Every object on the
// devices must be closed before: what needs a context then returns ErrClosed. Close is
// idempotent. Default's system stays open with the process.
func (s *System) Close() error {
	if s == nil {
		return nil
	}
	var first error
	for _, v := range slices.Backward(s.local.Clear()) {
		if c, ok := v.(io.Closer); ok {
			first = errors.Join(first, c.Close())
		}
	}
	s.closed.Store(true)
	for _, d := range s.devs {
		if err := d.release(); err != nil && first == nil {
			first = err
		}
	}
	return first
}

// Open returns a device of the default System; see System.Open.
func Open(ordinal int) (*Device, error) {
	s, err := Default()
	if err != nil {
		return nil, err
	}
	return s.Open(ordinal)
}

// All returns the devices of the default System. It mirrors
// torch.cuda.device_count, which cannot say why there is none.
func All() ([]*Device, error) {
	s, err := Default()
	if err != nil {
		return nil, err
	}
	return s.Devices(), nil
}

// Count returns how many devices a System that is opened now would have, asking
// anew each time. Where NVML can tell it starts no driver, so that what the
// process sets CUDA_VISIBLE_DEVICES to afterwards still counts; it never creates
// a context. It mirrors torch.cuda.device_count before CUDA is initialised.
// Without any GPU it returns 0 or the error that says what is missing.
func Count() (int, error) {
	n, err := backend.Count()
	if err != nil {
		return 0, fmt.Errorf("device: count: %w", err)
	}
	return n, nil
}

// The accessors below have internal types: they are for Chorus's own packages.

// NCCL opens NCCL on first use. For Chorus's own packages.
func (s *System) NCCL() (ncclapi.API, error) { return s.sys.NCCL() }

// CUBLAS opens cuBLAS on first use. For Chorus's own packages.
func (s *System) CUBLAS() (cublasapi.API, error) { return s.sys.CUBLAS() }

// CuFile opens cuFile on first use, but not its driver. For Chorus's own packages.
func (s *System) CuFile() (cufileapi.API, error) { return s.sys.CuFile() }

// NVRTC opens NVRTC on first use. For Chorus's own packages.
func (s *System) NVRTC() (nvrtcapi.API, error) { return s.sys.NVRTC() }

// Machine is nil on CUDA. For Chorus's own packages.
func (s *System) Machine() *virtual.Machine { return s.sys.Machine }

func (s *System) fail(op string, ordinal int, r cudadrv.Result) error {
	if r == cudadrv.ErrorDeinitialized && s.closed.Load() {
		return fmt.Errorf("device: %s on device %d: the System was closed: open another: %w", op, ordinal, ErrClosed)
	}
	e := &Error{Op: op, Device: ordinal, Err: Status(r)}
	if ordinal < 0 || ordinal >= len(s.devs) {
		return e
	}
	d := s.devs[ordinal]
	e.Detail = s.sys.Explain(d.handle)
	if first := d.lost.Load(); first != nil {
		e.First = first // whatever the driver says now
	} else if e.Sticky() && !d.lost.CompareAndSwap(nil, e) {
		e.First = d.lost.Load()
	}
	return e
}
