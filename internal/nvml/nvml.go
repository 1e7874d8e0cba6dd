// Package nvml reads telemetry, the health and the list of GPUs from NVIDIA's management library
// (NVML), without starting CUDA.
//
// Two bindings make the same calls: go-nvml in programs built with cgo, and internal/dl in
// the others and in those with the tag nonvml. The library is opened at its first use.
package nvml

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// API is the part of NVML that Chorus uses. Methods are safe for concurrent use.
type API interface {
	// UUIDs returns the UUIDs of all GPUs of the machine, such as GPU-8f6d…, in
	// PCI bus order. It ignores CUDA_VISIBLE_DEVICES.
	UUIDs() ([]string, error)
	// MIG reports whether a GPU is partitioned. CUDA then counts other devices
	// than NVML.
	MIG() (bool, error)
	// Device returns a GPU, or an instance of MIG, by its UUID.
	Device(uuid string) (Device, error)
}

// A Device reads the sensors of one GPU. If the GPU does not have a sensor, the
// method returns an *UnsupportedError.
type Device interface {
	Utilization() (gpu, memory int, err error) // percent of the last sample period
	Temperature() (celsius int, err error)
	Power() (milliwatts int, err error)
	SMClock() (mhz int, err error)
	MemoryUsed() (bytes uint64, err error)
	Processes() ([]Process, error) // compute processes
	NVLinks() ([]bool, error)      // whether each link is up
}

// A Process is a process with a context on a GPU.
type Process struct {
	PID   int
	Bytes uint64 // of the GPU's memory; 0 if the driver does not report it
}

// Open opens the library and initializes NVML, once in a process.
func Open() (API, error) { return opened() }

var opened = dl.Once(spec, openLib)

// openLib initializes the library by the binding of this build.
func openLib(find dl.Resolver, path string) (API, error) { return start(bind(find, path)) }

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

// An UnsupportedError names a missing requirement. It matches errors.ErrUnsupported.
type UnsupportedError struct{ Need, Have string }

func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("nvml: needs %s; there is %s", e.Need, e.Have)
}

// Is reports whether target is errors.ErrUnsupported.
func (e *UnsupportedError) Is(target error) bool { return target == errors.ErrUnsupported }

// An Error is a failed call of NVML.
type Error struct {
	Op   string // the C function
	Code int    // nvmlReturn_t
	Text string // NVML's description
}

func (e *Error) Error() string { return fmt.Sprintf("nvml: %s: %s (%d)", e.Op, e.Text, e.Code) }
