package nvml

import (
	"errors"
	"fmt"
	"sync"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// API is the part of NVML that Chorus uses. Its methods may be called by any
// goroutine at any time.
type API interface {
	// UUIDs are those of all GPUs of the machine, such as GPU-8f6d…, in the
	// order of the PCI bus, whatever CUDA_VISIBLE_DEVICES says.
	UUIDs() ([]string, error)
	// MIG reports whether a GPU is partitioned: CUDA then counts other devices
	// than NVML.
	MIG() (bool, error)
	// Device finds a GPU, or an instance of MIG, by its UUID.
	Device(uuid string) (Device, error)
}

// A Device tells about one GPU. A method returns an *UnsupportedError where the
// GPU has no such sensor.
type Device interface {
	Utilization() (gpu, memory int, err error) // percent of the last sample period
	Temperature() (celsius int, err error)
	Power() (milliwatts int, err error)
	SMClock() (mhz int, err error)
	MemoryUsed() (bytes uint64, err error)
	Processes() ([]Process, error) // that compute
	NVLinks() ([]bool, error)      // whether each link is up
}

// A Process has a context on a GPU.
type Process struct {
	PID   int
	Bytes uint64 // of the GPU's memory; 0 where the driver does not tell
}

// Open finds the library and starts NVML, once per process.
func Open() (API, error) { return opened() }

var opened = sync.OnceValues(open)

var spec = &dl.Spec{
	Name:    "NVML",
	Env:     env.LibNVML,
	Sonames: []string{"libnvidia-ml.so.1"},
	Folders: []string{
		"/usr/local/nvidia/lib64", // containers
		"/usr/lib/wsl/lib",
		"/run/opengl-driver/lib", // NixOS
	},
}

// An UnsupportedError says what is missing. It matches errors.ErrUnsupported.
type UnsupportedError struct{ Need, Have string }

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("nvml: needs %s; there is %s", e.Need, e.Have)
}

// Is makes errors.Is(err, errors.ErrUnsupported) true.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// An Error is a call of NVML that failed.
type Error struct {
	Op   string // the C function
	Code int    // nvmlReturn_t
	Text string // as NVML explains it
}

func (e *Error) Error() string { return fmt.Sprintf("nvml: %s: %s (%d)", e.Op, e.Text, e.Code) }
